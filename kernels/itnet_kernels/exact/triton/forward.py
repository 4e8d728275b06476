"""The forward kernel: moments A_i[k, c] = scale * sum_j GELU(pre_ij[k]) v_j[c] of a chunk of queries."""

from .configs import FORWARD, autotune
from .gelu import gelu_gate, tl, triton
from .tile import NOT_SPECIALISED, program_indices, row_offsets, virtual_queries


@autotune(FORWARD)
@triton.jit(**NOT_SPECIALISED)
def itnet_fwd_kernel(
    p_queries,  # [H, B, n_q, D] float32, from the chunk's first sample and query on
    p_keys,  # [H, B, padded_keys, D]
    p_values,  # [H, B, padded_keys, D], u_j times its measure
    p_row,  # [H, B, n_q, W] float32, half of q
    p_bias,  # [samples or 1, num_queries, W, padded_keys], half of P over its range
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
    bias_rows,  # from one sample's bias to the next one's: num_queries * W, or 0 if they share it
    size,  # configs.size_class of the launch: only autotuning looks at it
    W: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KC: tl.constexpr = W if W < ROWS else ROWS
    BP: tl.constexpr = ROWS // KC
    i_batch, i_head, _, i_first, i_unit = program_indices(samples, W, BP, KC)
    i_sample = i_head * all_samples + i_batch
    p_keys += i_sample * padded_keys * D
    p_values += i_sample * padded_keys * D
    o_row, o_d = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    o_query, o_unit, m_row = row_offsets(i_first, i_unit, num_queries, ROWS, KC)
    o_source = i_sample * all_queries + o_query  # [ROWS]
    b_qv, b_q = virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W, D)
    b_qv = b_qv.to(p_keys.dtype.element_ty)  # [ROWS, D]

    p_bias += (i_batch * bias_rows + i_first * W + i_unit) * padded_keys
    o_bias = o_row * padded_keys  # of a tile with one position; otherwise its positions are W units apart
    if BP > 1:
        o_bias = ((o_query - i_first) * W + o_row % KC) * padded_keys
    o_bias = o_bias[:, None] + tl.arange(0, BK)[None, :]  # [ROWS, BK]
    b_p = tl.load(p_bias + o_bias) if HAS_BIAS else 0.0  # of the next key tile, as it is stored
    b_range = tl.load(p_range + i_batch)
    b_acc = tl.zeros([ROWS, D], tl.float32)
    end = num_keys
    if IS_CAUSAL:  # keys that the tile's last position sees; the bias hides them from earlier ones
        end = tl.minimum(i_first + BP, num_queries) + causal_offset
    o_kd = tl.arange(0, BK)[:, None] * D + o_d
    for j in tl.range(0, end, BK):
        if GELU == "tanh.approx":
            # Costs no instruction and makes Triton wait for the last product here. If it were in flight while the next
            # accumulator is set, ptxas would serialise every product of the loop (its message C7515).
            b_acc = tl.inline_asm_elementwise("// wait", "=f,0", [b_acc], dtype=tl.float32, is_pure=False, pack=1)
        b_u = tl.load(p_keys + j * D + o_kd)  # [BK, D]
        b_s = tl.broadcast_to(b_q[:, None], [ROWS, BK])
        if HAS_BIAS:
            b_s += b_p.to(tl.float32) * b_range
        b_s = tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)  # [ROWS, BK]
        if HAS_BIAS:  # of the next tile: the load has the rest of this iteration to arrive
            b_p = tl.load(p_bias + (j + BK) + o_bias)
        b_h = b_s * gelu_gate(b_s, GELU) + b_s
        b_v = tl.load(p_values + j * D + o_kd)
        b_acc = tl.dot(b_h.to(b_u.dtype), b_v, b_acc, input_precision=PRECISION)
    b_acc *= tl.load(p_scale + i_batch)
    o_out = ((i_head * samples + i_batch) * num_queries + o_query) * W + o_unit  # [ROWS]
    tl.store(p_moments + o_out[:, None] * D + o_d, b_acc.to(p_moments.dtype.element_ty), mask=m_row[:, None])
