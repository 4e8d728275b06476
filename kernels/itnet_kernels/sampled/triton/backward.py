"""The backward kernel of the sum over listed keys: one pass over the pairs, six matrix products per tile, no atomics.

Per query, head and tile of keys, with s = pre/2 recomputed and c the coefficients over their scale,

    dS2 = c (dA . u_j) 2 gelu'(pre)
    query side, kept in registers:      A += c h u_j,   dQ += dS2 u_j,   dq += sum_m dS2
    key side, stored for each pair:     scale (sum_k dS2 Q/2 + c (sum_k h dA + dmean))

The host adds up what is stored for each pair by the list of the pairs of every key, in a fixed order.
"""

from ...exact.triton.gelu import gelu_gate, gelu_slope, tl, triton
from .tile import NOT_SPECIALISED, mean_of_keys, pre_activations, program_place, virtual_queries


@triton.jit(**NOT_SPECIALISED)
def list_bwd_kernel(
    p_queries,  # as in the forward, down to p_w_product
    p_keys,
    p_row,
    p_coefficients,
    p_scale,
    p_indices,
    p_bias,
    p_range,
    p_w_key,
    p_w_product,
    p_dmoments,  # dA [H, samples, rows, W, D]
    p_dmean,  # [H, samples, rows, D] float32
    p_moments,  # out: [H, samples, rows, W, D]
    p_mean,  # out: [H, samples, rows, D] float32
    p_dvirtual,  # out: dQ [H, samples, rows, W, D]
    p_dbias,  # out: dS2 [samples, rows, H, W, padded], over the scale of the query
    p_drow,  # out: dq [B, R, H, W] float32
    p_dqueries,  # out: [unit tiles, B, R, H, D] float32
    p_dkeys,  # out: [samples, rows, unit tiles, M, H, D]
    p_dcoefficients,  # out: [samples, rows, unit tiles, M, H] float32
    first_row,
    first_sample,
    rows,
    samples,
    heads,
    all_rows,
    all_samples,  # B
    num_keys,
    length,
    padded,
    range_tiles,
    per_list,
    list_stride,
    bias_stride,
    W: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    KC: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEEDS_COEFFICIENTS: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILES: tl.constexpr = (W + KC - 1) // KC
    i_head, i_batch, i_row, i_tile = program_place(heads, samples, TILES)
    row, sample = first_row + i_row, first_sample + i_batch
    o_unit, o_d, o_bk = i_tile * KC + tl.arange(0, KC), tl.arange(0, D_PADDED), tl.arange(0, BK)
    m_unit, m_d = o_unit < W, o_d < D
    m_wd = m_unit[:, None] & m_d[None, :]
    i_query = sample * all_rows + row
    source = i_query * heads + i_head
    p_queries += source * D
    p_row += source * W
    b_qv, b_q = virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_unit, o_d, m_unit, m_wd, D)
    b_qv = b_qv.to(p_keys.dtype.element_ty)  # [KC, D_PADDED]
    i_out = (i_head * samples + i_batch) * rows + i_row
    p_dmoments += i_out * W * D
    p_moments += i_out * W * D
    p_dvirtual += i_out * W * D
    o_moments = o_unit[:, None] * D + o_d[None, :]
    b_da = tl.load(p_dmoments + o_moments, mask=m_wd, other=0.0)  # [KC, D_PADDED]
    # Only one of the tiles of a query adds the gradient of the mean.
    b_dmean = tl.load(p_dmean + i_out * D + o_d, mask=m_d, other=0.0)
    b_dmean = tl.where(i_tile == 0, b_dmean, 0.0)
    p_indices += sample * list_stride + row // per_list * length
    p_coefficients += i_query * length
    p_keys += (sample * num_keys * heads + i_head) * D
    i_chunk = i_batch * rows + i_row
    i_pairs = (i_chunk * TILES + i_tile) * length  # of the first pair
    p_dkeys += (i_pairs * heads + i_head) * D
    p_dcoefficients += i_pairs * heads + i_head
    p_dbias += (i_chunk * heads + i_head) * W * padded
    scale = tl.load(p_scale + i_query)
    i_place = (i_batch * bias_stride + i_row) * W
    p_bias += i_place * padded
    p_range += i_place * range_tiles
    b_acc = tl.zeros([KC, D_PADDED], tl.float32)
    b_dqv = tl.zeros([KC, D_PADDED], tl.float32)
    b_dq = tl.zeros([KC], tl.float32)
    for j in tl.range(0, length, BK):
        o_k = j + o_bk
        m_k = o_k < length
        b_key = tl.load(p_indices + o_k, mask=m_k, other=0).to(tl.int64)
        b_c = tl.load(p_coefficients + o_k, mask=m_k, other=0.0) / scale  # [BK]
        b_u = tl.load(p_keys + b_key[:, None] * (heads * D) + o_d[None, :], mask=m_d[None, :], other=0.0)
        o_bias, m_bias = o_unit[:, None] * padded + o_k[None, :], m_unit[:, None] & (o_k < padded)[None, :]
        b_s = pre_activations(
            b_qv, b_q, b_u, p_bias, p_range, o_bias, o_unit * range_tiles + j // 64, m_bias, m_unit,
            HAS_BIAS, PRECISION, KC, BK,
        )  # fmt: skip
        b_dh = tl.dot(b_da, tl.trans(b_u), input_precision=PRECISION)  # [KC, BK]
        b_t = gelu_gate(b_s, GELU)
        b_h = b_s * b_t + b_s
        b_ds = b_dh * gelu_slope(b_s, b_t, GELU) * b_c[None, :]
        b_dq += tl.sum(b_ds, 1)
        b_hc, b_ds = (b_h * b_c[None, :]).to(b_u.dtype), b_ds.to(b_u.dtype)
        b_acc = tl.dot(b_hc, b_u, b_acc, input_precision=PRECISION)
        b_dqv = tl.dot(b_ds, b_u, b_dqv, input_precision=PRECISION)
        m_pairs = m_k[:, None] & m_d[None, :]
        if NEEDS_COEFFICIENTS:
            b_du = tl.dot(tl.trans(b_h.to(b_u.dtype)), b_da, input_precision=PRECISION) + b_dmean[None, :]
            b_dc = tl.sum(b_du * b_u.to(tl.float32), 1)
            tl.store(p_dcoefficients + o_k * heads, b_dc, mask=m_k)
            b_du = (scale * b_c)[:, None] * b_du
        else:
            b_du = scale * tl.dot(tl.trans(b_hc), b_da, input_precision=PRECISION)
            b_du += (scale * b_c)[:, None] * b_dmean[None, :]
        # Scaled here: a plain sum would make the first product the accumulator of the second, and Triton has both
        # warp groups compute such a product whole.
        b_du += scale * tl.dot(tl.trans(b_ds), b_qv, input_precision=PRECISION)
        o_pairs = o_k[:, None] * (heads * D) + o_d[None, :]
        tl.store(p_dkeys + o_pairs, b_du.to(p_dkeys.dtype.element_ty), mask=m_pairs)
        if HAS_BIAS:
            tl.store(p_dbias + o_bias, b_ds, mask=m_bias)
    tl.store(p_moments + o_moments, (b_acc * scale).to(p_moments.dtype.element_ty), mask=m_wd)
    if i_tile == 0:  # a loop of its own, as registers are full in the other one
        b_mean = mean_of_keys(p_keys, p_indices, p_coefficients, heads, length, o_d, o_bk, D, D_PADDED)
        tl.store(p_mean + i_out * D + o_d, b_mean, mask=m_d)
    tl.store(p_drow + source * W + o_unit, b_dq * (0.5 * scale), mask=m_unit)
    b_dqv *= 0.5 * scale  # dQ
    tl.store(p_dvirtual + o_moments, b_dqv.to(p_dvirtual.dtype.element_ty), mask=m_wd)
    b_w_product = tl.load(p_w_product + o_moments, mask=m_wd, other=0.0, cache_modifier=".cg")
    o_target = (i_tile * all_samples * all_rows * heads + source) * D + o_d
    tl.store(p_dqueries + o_target, tl.sum(b_dqv * b_w_product, 0), mask=m_d)
