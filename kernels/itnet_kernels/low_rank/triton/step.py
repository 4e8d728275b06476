"""One token of a causal low-rank operator: its output and the state after it, from the state before it, in one launch.

vector    Z[r] <- e^(-lambda_r dt) Z[r] + omega Psi[r] . u,       out = (sum_r Z[r] Phi[r] + bias mean) / mass
matrix    S[r] <- e^(-lambda_r dt) S[r] + omega g[r] u,           out = (sum_r f[r] M_r S[r] + bias mean) / mass
"""

from ...exact.triton.gelu import tl, triton


@triton.jit
def factor_row(p_hidden, p_weight, p_bias, r, o_d, o_k, D: tl.constexpr, K: tl.constexpr):
    """Returns Phi[r] of one position: [D_PADDED]."""
    m_d, m_k = o_d < D, o_k < K
    b_h = tl.load(p_hidden + o_k, mask=m_k, other=0.0).to(tl.float32)
    o_w = (r * D + o_d[:, None]) * K + o_k[None, :]
    b_w = tl.load(p_weight + o_w, mask=m_d[:, None] & m_k[None, :], other=0.0).to(tl.float32)
    return tl.sum(b_w * b_h[None, :], 1) + tl.load(p_bias + r * D + o_d, mask=m_d, other=0.0).to(tl.float32)


@triton.jit
def step_kernel(
    p_u,  # [B, H, D]
    p_measure,  # [B]
    p_query,  # f [B, H, R], or the hidden units of Phi [B, H, K]
    p_key,  # g [B, H, R], or the hidden units of Psi [B, H, K]
    p_matrices,  # M [H, R, A, D]
    p_w_phi,  # [H, R, D, K]
    p_b_phi,  # [H, R, D]
    p_w_psi,  # [H, R, D, K]
    p_b_psi,  # [H, R, D]
    p_bias,  # [H, A, D]
    p_rates,  # [H, R]
    p_position,  # x of the token [B]
    p_moments,  # of the state before: [B, H, R], or [B, H, R, D]; as the next three
    p_mean,  # [B, H, D]
    p_mass,  # [B]
    p_time,  # x of the last key [B]
    p_out,  # out: [B, H, A], as the next four
    p_new_moments,
    p_new_mean,
    p_new_mass,
    p_new_time,
    heads,
    R: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    A: tl.constexpr,
    A_PADDED: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    IS_MATRIX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DECAYS: tl.constexpr,
):
    i_group = tl.program_id(0)
    sample, head = i_group // heads, i_group % heads
    o_d, o_a, o_k = tl.arange(0, D_PADDED), tl.arange(0, A_PADDED), tl.arange(0, K_PADDED)
    m_d, m_a = o_d < D, o_a < A
    omega = tl.load(p_measure + sample).to(tl.float32)
    b_u = tl.load(p_u + i_group * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    mass_before = tl.load(p_mass + sample)
    b_mean = tl.load(p_mean + i_group * D + o_d, mask=m_d, other=0.0) + omega * b_u
    mass = mass_before + omega
    span = 0.0
    if DECAYS:  # padding takes the place of the token before it
        position = tl.load(p_position + sample).to(tl.float32)
        start = tl.where(mass_before > 0, tl.load(p_time + sample).to(tl.float32), position)
        time = tl.maximum(tl.where(omega > 0, position, start), start)
        span = time - start
        if head == 0:
            tl.store(p_new_time + sample, time)
    b_out = tl.zeros([A_PADDED], tl.float32)
    for r in range(R):
        shrink = 1.0
        if DECAYS:
            shrink = tl.exp(-tl.load(p_rates + head * R + r).to(tl.float32) * span)
        i_rank = i_group * R + r
        if IS_MATRIX:
            b_s = tl.load(p_moments + i_rank * D + o_d, mask=m_d, other=0.0) * shrink
            b_s += (omega * tl.load(p_key + i_rank).to(tl.float32)) * b_u
            tl.store(p_new_moments + i_rank * D + o_d, b_s, mask=m_d)
            o_m = ((head * R + r) * A + o_a[:, None]) * D + o_d[None, :]
            b_m = tl.load(p_matrices + o_m, mask=m_a[:, None] & m_d[None, :], other=0.0).to(tl.float32)
            b_out += tl.load(p_query + i_rank).to(tl.float32) * tl.sum(b_m * b_s[None, :], 1)
        else:
            o_head = head * R * D
            b_psi = factor_row(p_key + i_group * K, p_w_psi + o_head * K, p_b_psi + o_head, r, o_d, o_k, D, K)
            z = tl.load(p_moments + i_rank) * shrink + omega * tl.sum(b_psi * b_u, 0)
            tl.store(p_new_moments + i_rank, z)
            b_out += z * factor_row(p_query + i_group * K, p_w_phi + o_head * K, p_b_phi + o_head, r, o_a, o_k, D, K)
    if HAS_BIAS:
        o_b = (head * A + o_a[:, None]) * D + o_d[None, :]
        b_b = tl.load(p_bias + o_b, mask=m_a[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_out += tl.sum(b_b * b_mean[None, :], 1)
    b_out = tl.where(mass > 0, b_out / tl.where(mass > 0, mass, 1.0), 0.0)
    tl.store(p_out + i_group * A + o_a, b_out, mask=m_a)
    tl.store(p_new_mean + i_group * D + o_d, b_mean, mask=m_d)
    if head == 0:
        tl.store(p_new_mass + sample, mass)


def launch_step(arguments: dict, new: dict, sizes: dict, flags: dict, groups: int) -> None:
    """Launches the step on ``arguments`` and ``new``, by the names above; absent ones are None."""
    filled = {name: arguments["p_u"] if value is None else value.contiguous() for name, value in arguments.items()}
    step_kernel[(groups,)](**filled, **new, **sizes, **flags, num_warps=4, enable_fp_fusion=True)
