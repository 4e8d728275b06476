"""The backward kernel where the fused one does not fit: six matrix products per tile of a chunk's pairs, no atomics.

Per tile of rows (position, hidden unit) and keys, with s = pre/2 recomputed as in the forward and v = u omega / scale,

    dS2 = (dA . v_j) 2 gelu'(pre)
    query side, kept in registers:      A += h v_j,   dQ += dS2 u_j,   dq += sum_j dS2
    key side, stored as partial sums:   scale sum_rows dS2 Q/2 + omega_j sum_rows h dA

Sums over tiles (keys, W_uy, W_had, queries) are stored per tile and added up by the host in a fixed order.
"""

from .configs import BACKWARD, autotune
from .gelu import gelu_gate, gelu_slope, tl, triton
from .tile import NOT_SPECIALISED, position_rows, program_indices, virtual_queries


@autotune(BACKWARD)
@triton.jit(**NOT_SPECIALISED)
def itnet_bwd_kernel(
    p_queries,  # [H, B, n_q, D] float32, from the chunk's first sample and query on
    p_keys,  # [H, B, padded_keys, D]
    p_values,  # [H, B, padded_keys, D], u_j times its measure
    p_measure,  # [B, padded_keys], omega / scale
    p_row,  # [H, B, n_q, W] float32, half of q
    p_bias,  # [samples or 1, num_queries, W, padded_keys], half of P over its range
    p_range,  # [samples]
    p_w_key,  # [W, D] float32
    p_w_product,  # [W, D] float32
    p_dmoments,  # dA [H, samples, num_queries, W, D]
    p_scale,  # [samples], largest measure of each
    p_moments,  # out: [H, samples, num_queries, W, D]
    p_dbias,  # out: dS2 [H, samples, num_queries, W, padded_keys]
    p_drow,  # out: [H, B, n_q, W], from the chunk on, as p_row
    p_dqueries,  # out: [W / KC, H, samples, num_queries, D]
    p_dw_key,  # out: [H, samples, position tiles, W, D]
    p_dw_product,  # out: [H, samples, position tiles, W, D]
    p_dkeys,  # out: [H, samples, tiles, padded_keys, D]
    p_dmeasure,  # out: [H, samples, tiles, padded_keys]
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
    BP: tl.constexpr,
    KC: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEEDS_MEASURE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROWS: tl.constexpr = BP * KC
    i_batch, i_head, i_first, i_unit = program_indices(samples, W, BP, KC)
    i_sample, i_group = i_head * all_samples + i_batch, i_head * samples + i_batch
    i_partial = i_group * tl.num_programs(1) + tl.program_id(1)
    p_keys += i_sample * padded_keys * D
    p_values += i_sample * padded_keys * D
    p_measure += i_batch * padded_keys
    p_dkeys += i_partial * padded_keys * D
    p_dmeasure += i_partial * padded_keys
    o_row, o_d = tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    o_query, o_unit, m_row = position_rows(i_first, i_unit, num_queries, ROWS, KC)
    o_source = i_sample * all_queries + o_query  # [ROWS]
    o_target = (i_group * num_queries + o_query) * W + o_unit  # [ROWS]
    b_qv, b_q = virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W, D)
    b_qv = b_qv.to(p_keys.dtype.element_ty)  # [ROWS, D]
    # Rows beyond the last query have dA = 0 and so add nothing to any sum.
    b_da = tl.load(p_dmoments + o_target[:, None] * D + o_d, mask=m_row[:, None], other=0.0)

    p_bias += (i_batch * bias_rows + i_first * W + i_unit) * padded_keys
    p_dbias += (i_group * num_queries * W + i_first * W + i_unit) * padded_keys
    o_bias = ((o_query - i_first) * W + o_row % KC)[:, None] * padded_keys + tl.arange(0, BK)[None, :]  # [ROWS, BK]
    b_acc = tl.zeros([ROWS, D], tl.float32)
    b_dqv = tl.zeros([ROWS, D], tl.float32)
    b_dq = tl.zeros([ROWS], tl.float32)
    end = num_keys
    if IS_CAUSAL:  # keys that the tile's last position sees; the bias hides them from earlier ones
        end = tl.minimum(i_first + BP, num_queries) + causal_offset
    b_range, scale = tl.load(p_range + i_batch), tl.load(p_scale + i_batch)
    o_k = tl.arange(0, BK)
    o_kd = o_k[:, None] * D + o_d
    b_p = tl.load(p_bias + o_bias) if HAS_BIAS else 0.0  # of the next key tile
    for j in tl.range(0, end, BK):
        b_u = tl.load(p_keys + j * D + o_kd)  # [BK, D]
        b_v = tl.load(p_values + j * D + o_kd)
        b_s = tl.broadcast_to(b_q[:, None], [ROWS, BK])
        if HAS_BIAS:
            b_s += b_p.to(tl.float32) * b_range
        b_s = tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)  # [ROWS, BK]
        b_dh = tl.dot(b_da, tl.trans(b_v), input_precision=PRECISION)  # [ROWS, BK]
        b_t = gelu_gate(b_s, GELU)
        b_h = b_s * b_t + b_s
        b_ds = b_dh * gelu_slope(b_s, b_t, GELU)
        b_dq += tl.sum(b_ds, 1)
        b_h, b_ds = b_h.to(b_u.dtype), b_ds.to(b_u.dtype)
        b_acc = tl.dot(b_h, b_v, b_acc, input_precision=PRECISION)
        b_dqv = tl.dot(b_ds, b_u, b_dqv, input_precision=PRECISION)
        b_du = tl.dot(tl.trans(b_h), b_da, input_precision=PRECISION)  # [BK, D]
        if NEEDS_MEASURE:
            tl.store(p_dmeasure + j + o_k, tl.sum(b_du * b_u, 1))
        b_weight = tl.load(p_measure + j + o_k)
        # Scaled here: a plain sum would make the first product the accumulator of the second, and Triton has both
        # warp groups compute such a product whole.
        b_du = scale * tl.dot(tl.trans(b_ds), b_qv, input_precision=PRECISION) + (scale * b_weight)[:, None] * b_du
        tl.store(p_dkeys + j * D + o_kd, b_du)
        if HAS_BIAS:
            tl.store(p_dbias + j + o_bias, b_ds, mask=m_row[:, None])
            b_p = tl.load(p_bias + (j + BK) + o_bias)

    tl.store(
        p_moments + o_target[:, None] * D + o_d, (b_acc * scale).to(p_moments.dtype.element_ty), mask=m_row[:, None]
    )
    tl.store(p_drow + o_source * W + o_unit, b_dq * (0.5 * scale), mask=m_row)
    b_dqv *= 0.5 * scale  # dQ
    # Loaded again: kept across the loop, these two would spill.
    b_query = tl.load(p_queries + o_source[:, None] * D + o_d, cache_modifier=".cg")
    b_w_product = tl.load(p_w_product + o_unit[:, None] * D + o_d, cache_modifier=".cg")
    o_w = ((i_group * tl.cdiv(num_queries, BP) + i_first // BP) * W + i_unit + tl.arange(0, KC))[:, None] * D + o_d
    tl.store(p_dw_key + o_w, tl.sum(tl.reshape(b_dqv, [BP, KC, D]), 0))
    tl.store(p_dw_product + o_w, tl.sum(tl.reshape(b_dqv * b_query, [BP, KC, D]), 0))
    o_position = i_first + tl.arange(0, BP)
    i_units = (i_unit // KC).to(tl.int64) * tl.num_programs(0) + i_group
    tl.store(
        p_dqueries + (i_units * num_queries + o_position)[:, None] * D + o_d,
        tl.sum(tl.reshape(b_dqv * b_w_product, [BP, KC, D]), 1),
        mask=(o_position < num_queries)[:, None],
    )
