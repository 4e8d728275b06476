"""The causal sums within blocks of C positions for the kernel sum_r f_i[r] g_j[r] e^(-lambda_r (t_i - t_j)) M_r.

w_r[i, j] = f_i[r] g_j[r] e^(-lambda_r (t_i - t_j)) for j <= i,     X_r = w_r V,     out = sum_r X_r M_r^T
"""

from ...exact.triton.gelu import tl, triton


@triton.jit
def pair_weights(p_f, p_g, p_rates, b_span, o_row, m_row, r, R: tl.constexpr, DECAYS: tl.constexpr):
    """Returns f_i[r] and g_j[r] [C], and what their product is multiplied by [C, C]."""
    b_f = tl.load(p_f + o_row * R + r, mask=m_row, other=0.0).to(tl.float32)
    b_g = tl.load(p_g + o_row * R + r, mask=m_row, other=0.0).to(tl.float32)
    b_e = tl.where(b_span >= 0, 1.0, 0.0)
    if DECAYS:
        b_e *= tl.exp(-tl.load(p_rates + r) * tl.maximum(b_span, 0.0))
    return b_f, b_g, b_e


@triton.jit
def visible_spans(p_times, o_c, BLOCK: tl.constexpr, C: tl.constexpr, DECAYS: tl.constexpr):
    """Returns t_i - t_j [C, C], and -1 where query i does not see key j."""
    b_span = tl.zeros([C, C], tl.float32)
    if DECAYS:
        b_t = tl.load(p_times + o_c, mask=o_c < BLOCK, other=0.0)
        b_span = tl.maximum(b_t[:, None] - b_t[None, :], 0.0)
    return tl.where(o_c[:, None] >= o_c[None, :], b_span, -1.0)


@triton.jit
def within_fwd_kernel(
    p_f,  # [N, BLOCK, H, R]: N blocks
    p_g,  # [N, BLOCK, H, R]
    p_v,  # [N, BLOCK, H, D] float32
    p_matrices,  # M [H, R, A, D]
    p_rates,  # lambda [H, R] float32
    p_times,  # t [N, BLOCK] float32, from the start of the block on
    p_out,  # out: [N, BLOCK, H, A] float32
    heads,
    BLOCK: tl.constexpr,
    C: tl.constexpr,  # BLOCK, or 16 if that is more
    R: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    A: tl.constexpr,
    A_PADDED: tl.constexpr,
    DECAYS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_block, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c, o_d, o_a = tl.arange(0, C), tl.arange(0, D_PADDED), tl.arange(0, A_PADDED)
    m_c, m_d, m_a = o_c < BLOCK, o_d < D, o_a < A
    o_row = o_c * heads + i_head  # of the block
    i_first = i_block * BLOCK * heads
    p_f += i_first * R
    p_g += i_first * R
    p_rates += i_head * R
    p_matrices += i_head * R * A * D
    b_span = visible_spans(p_times + i_block * BLOCK, o_c, BLOCK, C, DECAYS)
    o_v = o_row[:, None] * D + o_d[None, :]
    b_v = tl.load(p_v + i_first * D + o_v, mask=m_c[:, None] & m_d[None, :], other=0.0).to(DTYPE)
    b_out = tl.zeros([C, A_PADDED], tl.float32)
    for r in range(R):
        b_f, b_g, b_e = pair_weights(p_f, p_g, p_rates, b_span, o_row, m_c, r, R, DECAYS)
        b_w = b_f[:, None] * b_g[None, :] * b_e
        b_x = tl.dot(b_w.to(DTYPE), b_v, input_precision=PRECISION)  # [C, D_PADDED]
        o_m = (r * A + o_a[None, :]) * D + o_d[:, None]
        b_m = tl.load(p_matrices + o_m, mask=m_d[:, None] & m_a[None, :], other=0.0)  # M_r^T [D_PADDED, A_PADDED]
        b_out = tl.dot(b_x.to(DTYPE), b_m.to(DTYPE), b_out, input_precision=PRECISION)
    o_out = o_row[:, None] * A + o_a[None, :]
    tl.store(p_out + i_first * A + o_out, b_out, mask=m_c[:, None] & m_a[None, :])


@triton.jit
def within_bwd_kernel(
    p_f,  # as in the forward, down to p_times
    p_g,
    p_v,
    p_matrices,
    p_rates,
    p_times,
    p_dout,  # [N, BLOCK, H, A] float32
    p_df,  # out: [N, BLOCK, H, R] float32
    p_dg,  # out: [N, BLOCK, H, R] float32
    p_dv,  # out: [N, BLOCK, H, D] float32
    p_x,  # out: X_r [H, N, BLOCK, R, D], for the gradient of M
    p_drates,  # out: [N, H, R] float32
    p_dtimes,  # out: [N, H, BLOCK] float32
    heads,
    BLOCK: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    A: tl.constexpr,
    A_PADDED: tl.constexpr,
    DECAYS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_block, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_c, o_d, o_a = tl.arange(0, C), tl.arange(0, D_PADDED), tl.arange(0, A_PADDED)
    m_c, m_d, m_a = o_c < BLOCK, o_d < D, o_a < A
    o_row = o_c * heads + i_head
    i_first = i_block * BLOCK * heads
    p_f += i_first * R
    p_g += i_first * R
    p_df += i_first * R
    p_dg += i_first * R
    p_rates += i_head * R
    p_matrices += i_head * R * A * D
    p_x += (i_head * tl.num_programs(0) + i_block) * (BLOCK * R * D)
    b_span = visible_spans(p_times + i_block * BLOCK, o_c, BLOCK, C, DECAYS)
    o_v, m_v = o_row[:, None] * D + o_d[None, :], m_c[:, None] & m_d[None, :]
    b_v = tl.load(p_v + i_first * D + o_v, mask=m_v, other=0.0).to(DTYPE)
    o_out = o_row[:, None] * A + o_a[None, :]
    b_dout = tl.load(p_dout + i_first * A + o_out, mask=m_c[:, None] & m_a[None, :], other=0.0).to(DTYPE)
    b_dv = tl.zeros([C, D_PADDED], tl.float32)
    b_dt = tl.zeros([C], tl.float32)
    for r in range(R):
        b_f, b_g, b_e = pair_weights(p_f, p_g, p_rates, b_span, o_row, m_c, r, R, DECAYS)
        b_w = b_f[:, None] * b_g[None, :] * b_e
        b_half = b_w.to(DTYPE)
        b_x = tl.dot(b_half, b_v, input_precision=PRECISION)
        tl.store(p_x + (o_c[:, None] * R + r) * D + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_v)
        o_m = (r * A + o_a[:, None]) * D + o_d[None, :]
        b_m = tl.load(p_matrices + o_m, mask=m_a[:, None] & m_d[None, :], other=0.0)  # M_r [A_PADDED, D_PADDED]
        b_dx = tl.dot(b_dout, b_m.to(DTYPE), input_precision=PRECISION).to(DTYPE)  # [C, D_PADDED]
        b_dw = tl.dot(b_dx, tl.trans(b_v), input_precision=PRECISION)  # [C, C]
        b_dv = tl.dot(tl.trans(b_half), b_dx, b_dv, input_precision=PRECISION)
        b_de = b_dw * b_e
        tl.store(p_df + o_row * R + r, tl.sum(b_de * b_g[None, :], 1), mask=m_c)
        tl.store(p_dg + o_row * R + r, tl.sum(b_de * b_f[:, None], 0), mask=m_c)
        if DECAYS:
            b_q = b_dw * b_w
            tl.store(
                p_drates + (i_block * heads + i_head) * R + r, -tl.sum(tl.sum(b_q * tl.maximum(b_span, 0.0), 1), 0)
            )
            b_q *= tl.load(p_rates + r)
            b_dt += tl.sum(b_q, 0) - tl.sum(b_q, 1)
    tl.store(p_dv + i_first * D + o_v, b_dv, mask=m_v)
    if DECAYS:
        tl.store(p_dtimes + (i_block * heads + i_head) * BLOCK + o_c, b_dt, mask=m_c)
