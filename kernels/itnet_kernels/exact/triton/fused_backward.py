"""The fused backward kernel: one pass over the pairs of a chunk, six matrix products per tile.

Per tile of positions and keys of one hidden unit, with s = pre/2 recomputed as in the forward and v = omega / scale,

    dA  = W2 dL/dout                                                    of the tile's positions
    dS2 = v_j (dA . u_j) 2 gelu'(pre)
    query side, kept in registers:      A += v_j h u_j,   dQ += dS2 u_j,   dq += sum_j dS2
    key side, added up in memory:       scale (sum_rows dS2 Q/2 + v_j sum_rows h dA)
    weights, added up in memory:        dW2 += A^T dL/dout,   dW_uy += sum_i dQ,   dW_had += sum_i dQ u_i

A program owns a head, a group of hidden units and a group of samples, and goes through all positions of the chunk. It
has a place of its own for each sum, which it alone adds to, in a fixed order; the host adds up the places. Large ones
lie in the order in which warps hold them (fragments.py).
So neither A nor dA nor dL/dpre exists outside of a program, and two runs agree in every bit.
"""

from .configs import FUSED_BACKWARD, autotune
from .fragments import fragment_offsets, from_fragments, gradient_offsets, key_offset, to_gradient_fragments
from .gelu import gelu_gate, gelu_slope, tl, triton
from .tile import NOT_SPECIALISED, bias_blocks


@autotune(FUSED_BACKWARD)
@triton.jit(**NOT_SPECIALISED)
def itnet_fused_bwd_kernel(
    p_queries,  # [H, B, n_q, D], from the chunk's first sample and query on
    p_keys,  # [H, B, padded_keys, D]
    p_measure,  # [B, padded_keys], omega / scale
    p_row,  # [H, B, n_q, W] float32, half of q
    p_bias,  # half of P over its range, in fragments: [samples or 1, blocks of the chunk, W, padded_keys / 64, 1024]
    p_range,  # [samples]
    p_w_key,  # [W, D] float32
    p_w_product,  # [W, D] float32
    p_upstream,  # dL/dout [H, B, n_q, D], from the chunk on
    p_w2,  # [H, W * D, D], rows (k, c)
    p_scale,  # [samples], largest measure of each
    p_drow,  # out: [H, B, n_q, W], from the chunk on, as p_row
    p_dqueries,  # added to: [unit groups, H, B, n_q up to 16, D] in gradient fragments, from the chunk on
    p_dkeys,  # added to: [unit groups, H, B, padded_keys, D] in gradient fragments, from the chunk's first sample on
    p_dmeasure,  # added to: [unit groups, H, B, padded_keys], from the chunk's first sample on
    p_dcontent,  # added to: [sample groups, H, 2, W, D], of W_uy and W_had
    p_dw2,  # added to: [sample groups, H, W * D, D] in gradient fragments
    num_queries,  # of the chunk
    num_keys,
    padded_keys,
    causal_offset,  # query i of the chunk sees keys j <= i + causal_offset
    samples,  # of the chunk
    all_samples,  # B
    all_queries,  # n_q
    bias_blocks_per_sample,  # blocks from one sample's bias to the next one's; 0 if they share it
    group_samples,  # of a program
    group_units,  # of a program
    size,  # configs.size_class of the launch: only autotuning looks at it
    W: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEEDS_MEASURE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tl.static_assert(BP == ROWS, "a tile has one hidden unit")
    BLOCKS: tl.constexpr = ROWS // 16
    heads, i_head = tl.num_programs(0).to(tl.int64), tl.program_id(0).to(tl.int64)
    i_units, i_samples = tl.program_id(1), tl.program_id(2)
    i_first_sample = i_samples * group_samples
    tiles = tl.cdiv(num_queries, ROWS)
    per_unit = tiles * tl.minimum(group_samples, samples - i_first_sample)  # tiles of positions, of all samples
    i_group = i_units * heads + i_head
    p_dcontent += (i_samples * heads + i_head) * 2 * W * D
    p_dw2 += (i_samples * heads + i_head) * W * D * D
    p_w2 += i_head * W * D * D
    o_d, o_k = tl.arange(0, D)[None, :], tl.arange(0, BK)
    o_kd = o_k[:, None] * D + o_d
    o_dd = tl.arange(0, D)[:, None] * D + o_d
    padded_queries = tl.cdiv(all_queries, 16) * 16
    for i_work in tl.range(0, per_unit * group_units, num_stages=1):
        i_unit = i_units * group_units + i_work // per_unit
        i_batch = (i_first_sample + i_work % per_unit // tiles).to(tl.int64)
        i_first = i_work % tiles * ROWS
        i_sample = i_head * all_samples + i_batch
        p_u = p_keys + i_sample * padded_keys * D
        p_v = p_measure + i_batch * padded_keys
        p_du = p_dkeys + (i_group * all_samples + i_batch) * padded_keys * D
        p_dv = p_dmeasure + (i_group * all_samples + i_batch) * padded_keys
        o_position = i_first + tl.arange(0, ROWS)
        m_row = o_position < num_queries
        o_source = i_sample * all_queries + tl.minimum(o_position, num_queries - 1)  # [ROWS]
        o_row = o_source[:, None] * D + o_d  # [ROWS, D]
        b_query = tl.load(p_queries + o_row).to(tl.float32)
        b_w_product = tl.load(p_w_product + i_unit * D + o_d)  # [1, D]
        b_qv = 0.5 * (tl.load(p_w_key + i_unit * D + o_d) + b_w_product * b_query)
        b_qv = b_qv.to(p_keys.dtype.element_ty)  # [ROWS, D]
        b_q = tl.load(p_row + o_source * W + i_unit)
        # Positions beyond the last query have dL/dout = 0 and so add nothing to any sum.
        b_g = tl.load(p_upstream + o_row, mask=m_row[:, None], other=0.0)
        b_w2 = tl.load(p_w2 + i_unit * D * D + o_dd)  # [D, D], rows c
        b_da = tl.dot(b_g, tl.trans(b_w2), input_precision=PRECISION).to(b_g.dtype)  # [ROWS, D]

        if HAS_BIAS:
            o_block = bias_blocks(i_batch * bias_blocks_per_sample, i_first, i_unit, num_queries, W, ROWS, 1)
            p_p = p_bias + fragment_offsets(o_block * padded_keys * 16, BK)
        b_acc = tl.zeros([ROWS, D], tl.float32)
        b_dqv = tl.zeros([ROWS, D], tl.float32)
        b_dq = tl.zeros([ROWS], tl.float32)
        end = num_keys
        if IS_CAUSAL:  # keys that the tile's last position sees; the bias hides them from earlier ones
            end = tl.minimum(i_first + ROWS, num_queries) + causal_offset
        b_range, scale = tl.load(p_range + i_batch), tl.load(p_scale + i_batch)
        for j in tl.range(0, end, BK):
            b_u = tl.load(p_u + j * D + o_kd)  # [BK, D]
            b_v = tl.load(p_v + j + o_k)
            b_s = tl.broadcast_to(b_q[:, None], [ROWS, BK])
            if HAS_BIAS:
                b_s += from_fragments(tl.load(p_p + key_offset(j, BK)), BLOCKS, BK).to(tl.float32) * b_range
            b_s = tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)  # [ROWS, BK]
            b_dh = tl.dot(b_da, tl.trans(b_u), input_precision=PRECISION)  # [ROWS, BK]
            b_t = gelu_gate(b_s, GELU)
            b_h = b_s * b_t + b_s
            if NEEDS_MEASURE:
                tl.store(p_dv + j + o_k, tl.load(p_dv + j + o_k) + tl.sum(b_h * b_dh, 0))
            b_ds = (b_dh * b_v[None, :]) * gelu_slope(b_s, b_t, GELU)
            b_dq += tl.sum(b_ds, 1)
            b_h, b_ds = (b_h * b_v[None, :]).to(b_u.dtype), b_ds.to(b_u.dtype)
            b_acc = tl.dot(b_h, b_u, b_acc, input_precision=PRECISION)
            b_dqv = tl.dot(b_ds, b_u, b_dqv, input_precision=PRECISION)
            b_du = tl.dot(tl.trans(b_h), b_da, input_precision=PRECISION)  # [BK, D]
            # A plain sum would make the first product the accumulator of the second, and Triton has both warp groups
            # compute such a product whole.
            b_du = b_du * scale + tl.dot(tl.trans(b_ds), b_qv, input_precision=PRECISION) * scale
            # Nobody else adds to this place: the order of the sum is fixed.
            tl.atomic_add(p_du + j * D + gradient_offsets(BK, D), to_gradient_fragments(b_du, BK, D), sem="relaxed")

        tl.store(p_drow + o_source * W + i_unit, b_dq * (0.5 * scale), mask=m_row)
        # dL/dout waits in shared memory. What was in registers is loaded again: kept across the loop, it would spill.
        b_dw2 = tl.dot(tl.trans((b_acc * scale).to(b_g.dtype)), b_g, input_precision=PRECISION)  # [D, D]
        o_dw2 = i_unit * D * D + gradient_offsets(D, D)
        tl.atomic_add(p_dw2 + o_dw2, to_gradient_fragments(b_dw2, D, D), sem="relaxed")
        b_dqv *= 0.5 * scale  # dQ
        b_query = tl.load(p_queries + o_row, cache_modifier=".cg").to(tl.float32)
        o_w = i_unit * D + tl.arange(0, D)
        b_key, b_product = tl.split(tl.sum(tl.join(b_dqv, b_dqv * b_query), 0))  # [D] each
        tl.store(p_dcontent + o_w, tl.load(p_dcontent + o_w) + b_key)
        tl.store(p_dcontent + W * D + o_w, tl.load(p_dcontent + W * D + o_w) + b_product)
        b_w_product = tl.load(p_w_product + i_unit * D + o_d, cache_modifier=".cg")
        p_dquery = p_dqueries + ((i_group * all_samples + i_batch) * padded_queries + i_first) * D
        # Rows behind the last query add exactly 0 to whatever lies there.
        b_dquery = to_gradient_fragments(b_dqv * b_w_product, ROWS, D)
        tl.atomic_add(p_dquery + gradient_offsets(ROWS, D), b_dquery, sem="relaxed")
