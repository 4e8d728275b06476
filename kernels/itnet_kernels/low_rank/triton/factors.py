"""Factors that are MLPs, Phi_i[r, a] = sum_k W[r, a, k] h_i[k] + b[r, a], without multiplying them out.

    project   z_i[r] = sum_a Phi_i[r, a] u_i[a]             hidden    y_i[k] = sum_r z_i[r] sum_a W[r, a, k] u_i[a]
    expand    out_i[a] = sum_r z_i[r] Phi_i[r, a]

Each is a gradient of the others.
"""

from ...exact.triton.gelu import tl, triton
from ...sampled.triton.tile import NOT_SPECIALISED


@triton.jit(**NOT_SPECIALISED)
def project_kernel(
    p_u,  # [B n, H, D]
    p_other,  # h [B n, H, K], or z [B n, H, R] for the hidden units
    p_weight,  # W [H, R, D, K]
    p_bias,  # b [H, R, D]
    p_out,  # out: z [B n, H, R] float32, or y [B n, H, K] float32
    count,  # B n
    heads,
    R: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BN: tl.constexpr,
    IS_HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_head = tl.program_id(1)
    o_n, o_d, o_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D_PADDED), tl.arange(0, K_PADDED)
    m_n, m_d, m_k = o_n < count, o_d < D, o_k < K
    o_row = o_n.to(tl.int64) * heads + i_head
    b_u = tl.load(p_u + o_row[:, None] * D + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)
    b_half = b_u.to(DTYPE)
    p_weight += i_head * R * D * K
    p_bias += i_head * R * D
    o_nk, m_nk = o_row[:, None] * K + o_k[None, :], m_n[:, None] & m_k[None, :]
    b_sum = tl.zeros([BN, K_PADDED], tl.float32)
    if not IS_HIDDEN:
        b_sum = tl.load(p_other + o_nk, mask=m_nk, other=0.0).to(tl.float32)  # h
    for r in range(R):
        o_w = (r * D + o_d[:, None]) * K + o_k[None, :]
        b_w = tl.load(p_weight + o_w, mask=m_d[:, None] & m_k[None, :], other=0.0)
        b_p = tl.dot(b_half, b_w.to(DTYPE), input_precision=PRECISION)  # [BN, K_PADDED]
        if IS_HIDDEN:
            b_z = tl.load(p_other + o_row * R + r, mask=m_n, other=0.0).to(tl.float32)
            b_sum += b_z[:, None] * b_p
        else:
            b_b = tl.load(p_bias + r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
            b_z = tl.sum(b_p * b_sum, 1) + tl.sum(b_u.to(tl.float32) * b_b[None, :], 1)
            tl.store(p_out + o_row * R + r, b_z, mask=m_n)
    if IS_HIDDEN:
        tl.store(p_out + o_nk, b_sum, mask=m_nk)


@triton.jit(**NOT_SPECIALISED)
def expand_kernel(
    p_z,  # [B n, H, R]
    p_hidden,  # h [B n, H, K]
    p_weight,  # W [H, R, D, K]
    p_bias,  # b [H, R, D]
    p_out,  # out: [B n, H, D] float32
    count,  # B n
    heads,
    R: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    BN: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_head = tl.program_id(1)
    o_n, o_d, o_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, D_PADDED), tl.arange(0, K_PADDED)
    m_n, m_d, m_k = o_n < count, o_d < D, o_k < K
    o_row = o_n.to(tl.int64) * heads + i_head
    b_h = tl.load(p_hidden + o_row[:, None] * K + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
    p_weight += i_head * R * D * K
    p_bias += i_head * R * D
    b_out = tl.zeros([BN, D_PADDED], tl.float32)
    for r in range(R):
        b_z = tl.load(p_z + o_row * R + r, mask=m_n, other=0.0).to(tl.float32)
        o_w = (r * D + o_d[None, :]) * K + o_k[:, None]
        b_w = tl.load(p_weight + o_w, mask=m_k[:, None] & m_d[None, :], other=0.0)  # W_r^T [K_PADDED, D_PADDED]
        b_product = (b_h.to(tl.float32) * b_z[:, None]).to(DTYPE)
        b_out = tl.dot(b_product, b_w.to(DTYPE), b_out, input_precision=PRECISION)
        b_b = tl.load(p_bias + r * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_out += b_z[:, None] * b_b[None, :]
    tl.store(p_out + o_row[:, None] * D + o_d[None, :], b_out, mask=m_n[:, None] & m_d[None, :])
