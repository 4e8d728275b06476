"""The position term of listed pairs: P_im[k] for the keys j = indices[i, m] of every query, shared by all heads.

A tile is stored in half precision over its range, a power of two that is 1 unless |P| exceeds 2^15, found per hidden
unit and tile of keys: neither far coordinates nor batch mates cost digits.
"""

from ...exact.triton.gelu import tl, triton
from .tile import NOT_SPECIALISED

_LARGEST = tl.constexpr(2.0**14)


@triton.jit(**NOT_SPECIALISED)
def list_bias_kernel(
    p_x,  # [S, R, DIM] float32, relative to the centre of the keys; S is the number of samples, or 1 for all
    p_y,  # [S, n, DIM] float32, the same
    p_gamma_x,  # [S, R, 2 L] float32
    p_gamma_y,  # [S, n, 2 L], in the dtype of the products
    p_w_y,  # [W, 2 L or DIM] float32
    p_w_relative,  # [W, 2 L or DIM] float32
    p_w_distance,  # [W] float32
    p_indices,  # [S, lists, M]
    p_bias,  # out: [samples, rows, W, padded], half of P over its range
    p_range,  # out: [samples, rows, W, key tiles] float32
    first_row,  # of the chunk
    first_sample,
    rows,  # of the chunk
    length,  # M
    padded,  # M, filled up to a multiple of 16
    per_list,  # queries that share a list
    list_stride,  # from one sample's lists to the next one's, or 0
    x_stride,  # from one sample's queries to the next one's: R, or 0
    y_stride,  # n, or 0
    W: tl.constexpr,
    DIM: tl.constexpr,
    L: tl.constexpr,
    L_PADDED: tl.constexpr,
    KC: tl.constexpr,
    BK: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_RELATIVE: tl.constexpr,
    HAS_DISTANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_row, i_unit = tl.program_id(0) // tl.cdiv(W, KC), (tl.program_id(0) % tl.cdiv(W, KC)) * KC
    i_tile, i_batch = tl.program_id(1), tl.program_id(2)
    row, sample = (first_row + i_row).to(tl.int64), (first_sample + i_batch).to(tl.int64)
    o_unit, o_k = i_unit + tl.arange(0, KC), i_tile * BK + tl.arange(0, BK)
    m_unit, m_k = o_unit < W, o_k < length
    p_indices += sample * list_stride + row // per_list * length
    b_key = sample * y_stride + tl.load(p_indices + o_k, mask=m_k, other=0)  # [BK]
    i_x = sample * x_stride + row
    b_p = tl.zeros([KC, BK], tl.float32)
    if L > 0:
        o_l = tl.arange(0, L_PADDED)
        m_l = o_l < L
        m_w = m_unit[:, None] & m_l[None, :]
        o_w = o_unit[:, None] * (2 * L) + o_l[None, :]
        b_sine = tl.zeros([KC, L_PADDED], tl.float32)  # the factors of sin and cos of the keys
        b_cosine = tl.zeros([KC, L_PADDED], tl.float32)
        if HAS_Y:
            b_sine += tl.load(p_w_y + o_w, mask=m_w, other=0.0)
            b_cosine += tl.load(p_w_y + o_w + L, mask=m_w, other=0.0)
        if HAS_RELATIVE:
            b_sx = tl.load(p_gamma_x + i_x * (2 * L) + o_l, mask=m_l, other=0.0)[None, :]
            b_cx = tl.load(p_gamma_x + i_x * (2 * L) + L + o_l, mask=m_l, other=0.0)[None, :]
            b_ws = tl.load(p_w_relative + o_w, mask=m_w, other=0.0)
            b_wc = tl.load(p_w_relative + o_w + L, mask=m_w, other=0.0)
            b_sine += b_wc * b_sx - b_ws * b_cx
            b_cosine += b_ws * b_sx + b_wc * b_cx
        o_y = b_key[:, None] * (2 * L) + o_l[None, :]
        m_y = m_k[:, None] & m_l[None, :]
        b_sy = tl.load(p_gamma_y + o_y, mask=m_y, other=0.0)  # [BK, L_PADDED]
        b_cy = tl.load(p_gamma_y + o_y + L, mask=m_y, other=0.0)
        dtype = p_gamma_y.dtype.element_ty
        b_p = tl.dot(b_sine.to(dtype), tl.trans(b_sy), b_p, input_precision=PRECISION)
        b_p = tl.dot(b_cosine.to(dtype), tl.trans(b_cy), b_p, input_precision=PRECISION)
    b_squared = tl.zeros([BK], tl.float32)
    for axis in tl.static_range(DIM):
        if HAS_DISTANCE or L == 0:
            b_y = tl.load(p_y + b_key * DIM + axis, mask=m_k, other=0.0)
            b_difference = tl.load(p_x + i_x * DIM + axis) - b_y
            b_squared += b_difference * b_difference
            if L == 0 and HAS_Y:
                b_p += tl.load(p_w_y + o_unit * DIM + axis, mask=m_unit, other=0.0)[:, None] * b_y[None, :]
            if L == 0 and HAS_RELATIVE:
                b_w = tl.load(p_w_relative + o_unit * DIM + axis, mask=m_unit, other=0.0)
                b_p += b_w[:, None] * b_difference[None, :]
    if HAS_DISTANCE:
        b_w = tl.load(p_w_distance + o_unit, mask=m_unit, other=0.0)
        b_p += b_w[:, None] * tl.sqrt(b_squared)[None, :]
    b_p *= 0.5
    b_most = tl.max(tl.abs(b_p), 1)
    b_range = tl.exp2(tl.maximum(tl.ceil(tl.log2(tl.maximum(b_most / _LARGEST, 1.0))), 0.0))  # [KC]
    o_out = ((i_batch * rows + i_row).to(tl.int64) * W + o_unit) * padded  # [KC]
    b_p = (b_p / b_range[:, None]).to(p_bias.dtype.element_ty)
    tl.store(p_bias + o_out[:, None] + o_k[None, :], b_p, mask=m_unit[:, None] & (o_k < padded)[None, :])
    o_range = ((i_batch * rows + i_row).to(tl.int64) * W + o_unit) * tl.num_programs(1) + i_tile
    tl.store(p_range + o_range, b_range, mask=m_unit)
