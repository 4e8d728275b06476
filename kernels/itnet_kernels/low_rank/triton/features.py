"""Two kernels that are each other's gradient: sum_j omega_j g_j v_j^T over positions, and f_i T at every position."""

from ...exact.triton.gelu import tl, triton
from ...sampled.triton.tile import NOT_SPECIALISED


@triton.jit(**NOT_SPECIALISED)
def feature_sum_kernel(
    p_g,  # [B, n, H, R]
    p_v,  # [B, n, H, C]
    p_measure,  # [B, n] float32, over the scale of its sample
    p_scale,  # [B]
    p_sums,  # out: [splits, B, H, R + 1, C] float32; the last row is sum_j omega_j v_j
    count,  # n
    heads,
    span,  # positions of a program
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    C: tl.constexpr,
    C_PADDED: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_group, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sample, head = i_group // heads, i_group % heads
    o_r, o_c, o_bn = tl.arange(0, R_PADDED), tl.arange(0, C_PADDED), tl.arange(0, BN)
    p_g += (sample * count * heads + head) * R
    p_v += (sample * count * heads + head) * C
    p_measure += sample * count
    b_acc = tl.zeros([R_PADDED, C_PADDED], tl.float32)
    first = i_split * span
    for j in range(first, tl.minimum(first + span, count), BN):
        o_n = j + o_bn
        m_n = o_n < tl.minimum(first + span, count)
        b_g = tl.load(
            p_g + o_n[:, None] * (heads * R) + o_r[None, :], mask=m_n[:, None] & (o_r < R)[None, :], other=0.0
        )
        b_g = tl.where((o_r == R)[None, :], 1.0, b_g.to(tl.float32))
        b_v = tl.load(
            p_v + o_n[:, None] * (heads * C) + o_c[None, :], mask=m_n[:, None] & (o_c < C)[None, :], other=0.0
        )
        b_w = tl.load(p_measure + o_n, mask=m_n, other=0.0)
        b_v = b_v.to(tl.float32) * b_w[:, None]
        b_acc = tl.dot(tl.trans(b_g.to(DTYPE)), b_v.to(DTYPE), b_acc, input_precision=PRECISION)
    b_acc *= tl.load(p_scale + sample)
    o_out = (i_split * tl.num_programs(0) + i_group) * ((R + 1) * C) + o_r[:, None] * C + o_c[None, :]
    tl.store(p_sums + o_out, b_acc, mask=(o_r <= R)[:, None] & (o_c < C)[None, :])


@triton.jit(**NOT_SPECIALISED)
def feature_apply_kernel(
    p_f,  # [B, n, H, R]
    p_t,  # [B, H, R + ONE, A] float32; a last row, if there is one, is added everywhere
    p_out,  # out: [B, n, H, A]
    count,  # n
    heads,
    R: tl.constexpr,
    R_PADDED: tl.constexpr,
    A: tl.constexpr,
    A_PADDED: tl.constexpr,
    ONE: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_group = tl.program_id(0).to(tl.int64)
    sample, head = i_group // heads, i_group % heads
    o_r, o_a, o_n = tl.arange(0, R_PADDED), tl.arange(0, A_PADDED), tl.program_id(1) * BN + tl.arange(0, BN)
    m_n, m_a = o_n < count, o_a < A
    p_f += (sample * count * heads + head) * R
    b_f = tl.load(p_f + o_n[:, None] * (heads * R) + o_r[None, :], mask=m_n[:, None] & (o_r < R)[None, :], other=0.0)
    p_t += i_group * ((R + ONE) * A)
    b_t = tl.load(p_t + o_r[:, None] * A + o_a[None, :], mask=(o_r < R)[:, None] & m_a[None, :], other=0.0)
    b_out = tl.dot(b_f.to(DTYPE), b_t.to(DTYPE), input_precision=PRECISION)
    if ONE:
        b_out += tl.load(p_t + R * A + o_a, mask=m_a, other=0.0)[None, :]
    p_out += (sample * count * heads + head) * A
    tl.store(p_out + o_n[:, None] * (heads * A) + o_a[None, :], b_out, mask=m_n[:, None] & m_a[None, :])
