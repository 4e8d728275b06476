"""One query per sample, as decoding asks for it: pre-activations, moments and the product with W2 in one launch.

A program has KC hidden units of one head and sample, and reads the weights as the model keeps them: W1 by the columns
of each group, W2 [(a, c), k] by tiles of its units. The units' parts of the output are added up by the host.
"""

from ...exact.triton.gelu import gelu_gate, tl, triton
from .tile import NOT_SPECIALISED


@triton.jit
def weight_columns(p_w1, o_unit, o_column, first, m, COLUMNS: tl.constexpr):
    """Returns some columns of W1 for some units: [KC, columns]."""
    return tl.load(p_w1 + o_unit[:, None] * COLUMNS + first + o_column[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit(**NOT_SPECIALISED)
def list_step_kernel(
    p_query,  # u of the query [B, H, D]
    p_keys,  # [B, n, H, D]
    p_gamma_x,  # [S, F] float32; S is B, or 1 for all samples
    p_gamma_y,  # [S, n, F] float32
    p_differences,  # x - y [S, n, DIM] float32
    p_coefficients,  # [B, M] float32
    p_indices,  # [S, M], if there are lists; otherwise M = n
    p_w1,  # [W, COLUMNS]
    p_b1,  # [W]
    p_w2,  # [H or 1, D * D, W]
    p_b2,  # [H or 1, D * D]
    p_out,  # out: [B, H, unit tiles, D] float32
    heads,
    num_keys,
    length,  # M
    x_stride,  # F if every sample has a position of its own, or 0
    y_stride,  # n, or 0
    list_stride,  # M, or 0
    w2_stride,  # D * D if every head has a W2 of its own, or 0
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    F: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    AT_X: tl.constexpr,  # first column of each group of the kernel's inputs, -1 if it has none
    AT_Y: tl.constexpr,
    AT_RELATIVE: tl.constexpr,
    AT_DISTANCE: tl.constexpr,
    AT_UX: tl.constexpr,
    AT_UY: tl.constexpr,
    AT_PRODUCT: tl.constexpr,
    LISTED: tl.constexpr,
    KC: tl.constexpr,
    BK: tl.constexpr,
    GELU: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_group, i_tile = tl.program_id(0), tl.program_id(1)
    sample, head = (i_group // heads).to(tl.int64), i_group % heads
    o_unit, o_bk = i_tile * KC + tl.arange(0, KC), tl.arange(0, BK)
    o_d, o_l = tl.arange(0, D_PADDED), tl.arange(0, L_PADDED)
    m_unit, m_d, m_l = o_unit < W, o_d < D, o_l < L
    m_wd, m_wl = m_unit[:, None] & m_d[None, :], m_unit[:, None] & m_l[None, :]
    b_query = tl.load(p_query + i_group * D + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    p_gamma_x += sample * x_stride
    b_q = tl.load(p_b1 + o_unit, mask=m_unit, other=0.0).to(tl.float32)
    if AT_UX >= 0:
        b_q += tl.sum(weight_columns(p_w1, o_unit, o_d, AT_UX, m_wd, COLUMNS) * b_query, 1)
    b_qv = tl.zeros([KC, D_PADDED], tl.float32)
    if AT_UY >= 0:
        b_qv += weight_columns(p_w1, o_unit, o_d, AT_UY, m_wd, COLUMNS)
    if AT_PRODUCT >= 0:
        b_qv += weight_columns(p_w1, o_unit, o_d, AT_PRODUCT, m_wd, COLUMNS) * b_query
    b_sine = tl.zeros([KC, L_PADDED], tl.float32)
    b_cosine = tl.zeros([KC, L_PADDED], tl.float32)
    if L > 0:
        b_sx = tl.load(p_gamma_x + o_l, mask=m_l, other=0.0)[None, :]
        b_cx = tl.load(p_gamma_x + L + o_l, mask=m_l, other=0.0)[None, :]
        if AT_X >= 0:
            b_q += tl.sum(weight_columns(p_w1, o_unit, o_l, AT_X, m_wl, COLUMNS) * b_sx, 1)
            b_q += tl.sum(weight_columns(p_w1, o_unit, o_l, AT_X + L, m_wl, COLUMNS) * b_cx, 1)
        if AT_Y >= 0:
            b_sine += weight_columns(p_w1, o_unit, o_l, AT_Y, m_wl, COLUMNS)
            b_cosine += weight_columns(p_w1, o_unit, o_l, AT_Y + L, m_wl, COLUMNS)
        if AT_RELATIVE >= 0:
            b_ws = weight_columns(p_w1, o_unit, o_l, AT_RELATIVE, m_wl, COLUMNS)
            b_wc = weight_columns(p_w1, o_unit, o_l, AT_RELATIVE + L, m_wl, COLUMNS)
            b_sine += b_wc * b_sx - b_ws * b_cx
            b_cosine += b_ws * b_sx + b_wc * b_cx
    elif AT_X >= 0:
        for axis in tl.static_range(DIM):
            b_w = tl.load(p_w1 + o_unit * COLUMNS + AT_X + axis, mask=m_unit, other=0.0).to(tl.float32)
            b_q += b_w * tl.load(p_gamma_x + axis)
    b_qv = (0.5 * b_qv).to(DTYPE)
    b_sine, b_cosine, b_q = (0.5 * b_sine).to(DTYPE), (0.5 * b_cosine).to(DTYPE), 0.5 * b_q
    b_acc = tl.zeros([KC, D_PADDED], tl.float32)
    b_mean = tl.zeros([D_PADDED], tl.float32)
    p_coefficients += sample * length
    for j in range(0, length, BK):
        o_k = j + o_bk
        m_k = o_k < length
        b_c = tl.load(p_coefficients + o_k, mask=m_k, other=0.0)
        b_index = tl.where(m_k, o_k, 0).to(tl.int64)
        if LISTED:
            b_index = tl.load(p_indices + sample * list_stride + o_k, mask=m_k, other=0).to(tl.int64)
        o_u = ((sample * num_keys + b_index) * heads + head)[:, None] * D + o_d[None, :]
        b_u = tl.load(p_keys + o_u, mask=m_k[:, None] & m_d[None, :], other=0.0).to(DTYPE)
        b_s = tl.broadcast_to(b_q[:, None], [KC, BK])
        b_s = tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)
        b_place = sample * y_stride + b_index
        if L > 0 and (AT_Y >= 0 or AT_RELATIVE >= 0):
            o_y, m_y = b_place[:, None] * F + o_l[None, :], m_k[:, None] & m_l[None, :]
            b_sy = tl.load(p_gamma_y + o_y, mask=m_y, other=0.0).to(DTYPE)
            b_cy = tl.load(p_gamma_y + o_y + L, mask=m_y, other=0.0).to(DTYPE)
            b_s = tl.dot(b_sine, tl.trans(b_sy), b_s, input_precision=PRECISION)
            b_s = tl.dot(b_cosine, tl.trans(b_cy), b_s, input_precision=PRECISION)
        b_squared = tl.zeros([BK], tl.float32)
        for axis in tl.static_range(DIM):
            b_difference = tl.load(p_differences + b_place * DIM + axis, mask=m_k, other=0.0)
            b_squared += b_difference * b_difference
            if L == 0 and AT_Y >= 0:
                b_w = tl.load(p_w1 + o_unit * COLUMNS + AT_Y + axis, mask=m_unit, other=0.0).to(tl.float32)
                b_y = tl.load(p_gamma_y + b_place * F + axis, mask=m_k, other=0.0)
                b_s += (0.5 * b_w)[:, None] * b_y[None, :]
            if L == 0 and AT_RELATIVE >= 0:
                b_w = tl.load(p_w1 + o_unit * COLUMNS + AT_RELATIVE + axis, mask=m_unit, other=0.0).to(tl.float32)
                b_s += (0.5 * b_w)[:, None] * b_difference[None, :]
        if AT_DISTANCE >= 0:
            b_w = tl.load(p_w1 + o_unit * COLUMNS + AT_DISTANCE, mask=m_unit, other=0.0).to(tl.float32)
            b_s += (0.5 * b_w)[:, None] * tl.sqrt(b_squared)[None, :]
        b_h = b_s * gelu_gate(b_s, GELU) + b_s
        b_v = b_u.to(tl.float32) * b_c[:, None]
        # In float32: coefficients may be below what float16 resolves, and there is time.
        b_acc = tl.dot(b_h, b_v, b_acc, input_precision=PRECISION)
        b_mean += tl.sum(b_v, 0)
    i_out = (i_group * tl.num_programs(1) + i_tile) * D
    p_w2 += (head * w2_stride).to(tl.int64) * W
    p_b2 += head * w2_stride
    b_moments = tl.trans(b_acc)  # [D_PADDED, KC]
    for a in range(D):
        o_w = (a * D + o_d[:, None]) * W + o_unit[None, :]
        b_w = tl.load(p_w2 + o_w, mask=m_d[:, None] & m_unit[None, :], other=0.0).to(tl.float32)
        b_b = tl.load(p_b2 + a * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        constant = tl.where(i_tile == 0, tl.sum(b_b * b_mean, 0), 0.0)
        tl.store(p_out + i_out + a, tl.sum(tl.sum(b_w * b_moments, 1), 0) + constant)
