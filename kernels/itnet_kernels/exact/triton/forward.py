"""The forward kernel: moments A_i[k, c] = sum_j omega_j GELU(pre_ij[k]) u_j[c] of a chunk of queries."""

from .configs import FORWARD, autotune
from .fragments import fragment_offsets, from_fragments, key_offset
from .gelu import gelu_gate, tl, triton
from .tile import NOT_SPECIALISED, bias_blocks, program_indices, row_offsets, virtual_queries


@autotune(FORWARD)
@triton.jit(**NOT_SPECIALISED)
def itnet_fwd_kernel(
    p_queries,  # [H, B, n_q, D], from the chunk's first sample and query on
    p_keys,  # [H, B, padded_keys, D]
    p_measure,  # [B, padded_keys], omega / scale
    p_row,  # [H, B, n_q, W] float32, half of q
    p_bias,  # half of P over its range, in fragments: [samples or 1, blocks of the chunk, W, padded_keys / 64, 1024]
    p_range,  # [samples]
    p_w_key,  # [W, D] float32
    p_w_product,  # [W, D] float32
    p_moments,  # [H, samples, num_queries, W, D]
    p_scale,  # [samples], largest measure of each
    num_queries,  # of the chunk
    num_keys,
    padded_keys,
    causal_offset,  # query i of the chunk sees keys j <= i + causal_offset
    samples,  # of the chunk
    all_samples,  # B
    all_queries,  # n_q
    bias_blocks_per_sample,  # blocks from one sample's bias to the next one's; 0 if they share it
    size,  # configs.size_class of the launch: only autotuning looks at it
    W: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KC: tl.constexpr = ROWS // BP
    BLOCKS: tl.constexpr = ROWS // 16
    i_batch, i_head, i_first, i_unit = program_indices(samples, W, BP, KC)
    i_sample = i_head * all_samples + i_batch
    p_keys += i_sample * padded_keys * D
    p_measure += i_batch * padded_keys
    o_d, o_k = tl.arange(0, D)[None, :], tl.arange(0, BK)
    o_query, o_unit, m_row = row_offsets(i_first, i_unit, num_queries, BP, KC)
    o_source = i_sample * all_queries + o_query  # [ROWS]
    b_qv, b_q = virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W, D)
    b_qv = b_qv.to(p_keys.dtype.element_ty)  # [ROWS, D]

    if HAS_BIAS:
        o_block = bias_blocks(i_batch * bias_blocks_per_sample, i_first, i_unit, num_queries, W, BP, KC)
        p_bias += fragment_offsets(o_block * padded_keys * 16, BK)
        b_p = tl.load(p_bias)  # of the next key tile, as it is stored
    b_range = tl.load(p_range + i_batch)
    b_acc = tl.zeros([ROWS, D], tl.float32)
    end = num_keys
    if IS_CAUSAL:  # keys that the tile's last position sees; the bias hides them from earlier ones
        end = tl.minimum(i_first + BP, num_queries) + causal_offset
    o_kd = o_k[:, None] * D + o_d
    for j in tl.range(0, end, BK):
        if GELU == "tanh.approx":
            # Costs no instruction and makes Triton wait for the last product here. If it were in flight while the next
            # accumulator is set, ptxas would serialise every product of the loop (its message C7515).
            b_acc = tl.inline_asm_elementwise("// wait", "=f,0", [b_acc], dtype=tl.float32, is_pure=False, pack=1)
        b_u = tl.load(p_keys + j * D + o_kd)  # [BK, D]
        b_weight = tl.load(p_measure + j + o_k)
        b_s = tl.broadcast_to(b_q[:, None], [ROWS, BK])
        if HAS_BIAS:
            b_s += from_fragments(b_p, BLOCKS, BK).to(tl.float32) * b_range
        b_s = tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)  # [ROWS, BK]
        if HAS_BIAS:  # of the next tile: the load has the rest of this iteration to arrive
            b_p = tl.load(p_bias + key_offset(j + BK, BK))
        b_half = b_s * b_weight[None, :]
        b_h = b_half * gelu_gate(b_s, GELU) + b_half
        b_acc = tl.dot(b_h.to(b_u.dtype), b_u, b_acc, input_precision=PRECISION)
    b_acc *= tl.load(p_scale + i_batch)
    o_out = ((i_head * samples + i_batch) * num_queries + o_query) * W + o_unit  # [ROWS]
    tl.store(p_moments + o_out[:, None] * D + o_d, b_acc.to(p_moments.dtype.element_ty), mask=m_row[:, None])
