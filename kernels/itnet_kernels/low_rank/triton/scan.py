"""Running sums y_i = a_i y_(i-1) + x_i over positions, and their gradient, a running sum from the other end."""

from ...exact.triton.gelu import tl, triton
from ...sampled.triton.tile import NOT_SPECIALISED


@triton.jit
def combine(a_left, x_left, a_right, x_right):
    """Joins two stretches after each other: y -> a y + x of both."""
    return a_left * a_right, a_right * x_left + x_right


@triton.jit(**NOT_SPECIALISED)
def scan_kernel(
    p_x,  # [B, n, C]
    p_factors,  # a [B, n, C]
    p_y,  # out: [B, n, C] float32
    count,  # n
    columns,  # C
    BN: tl.constexpr,
    BC: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Computes, with ``REVERSE``, y_i = a_(i+1) y_(i+1) + x_i from the last position to the first."""
    sample = tl.program_id(0).to(tl.int64)
    o_bn, o_c = tl.arange(0, BN), tl.program_id(1) * BC + tl.arange(0, BC)
    p_x += sample * count * columns
    p_y += sample * count * columns
    p_factors += sample * count * columns
    b_carry = tl.zeros([BC], tl.float32)
    for step in range(0, count, BN):
        o_n = step + o_bn
        o_place = o_n
        if REVERSE:
            o_place = count - 1 - o_n
        m_x = (o_n < count)[:, None] & (o_c < columns)[None, :]
        o_x = o_place[:, None] * columns + o_c[None, :]
        b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_a = tl.full([BN, BC], 1.0, tl.float32)
        if HAS_FACTORS:
            if REVERSE:
                b_a = tl.load(p_factors + o_x + columns, mask=m_x & (o_n > 0)[:, None], other=1.0).to(tl.float32)
            else:
                b_a = tl.load(p_factors + o_x, mask=m_x, other=1.0).to(tl.float32)
        b_a, b_y = tl.associative_scan((b_a, b_x), 0, combine)
        b_y += b_a * b_carry[None, :]
        tl.store(p_y + o_x, b_y, mask=m_x)
        b_carry = tl.sum(tl.where((o_bn == BN - 1)[:, None], b_y, 0.0), 0)
