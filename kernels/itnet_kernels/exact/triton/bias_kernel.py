"""The kernel that computes the position bias, in the order of fragments.py: one launch per chunk, whatever its parts.

    P_ij[k] = W_y[k] . gamma(y_j) + W_rel[k] . gamma(x_i - y_j) + w_d[k] |x_i - y_j|

Fourier features are multiplied in the factors C_i[k] of gamma(y_j) (first_layer.py), which a program forms itself.
"""

from .fragments import FRAGMENT_KEYS, FRAGMENT_POSITIONS, fragment_offsets, key_offset, to_fragments
from .gelu import tl, triton

BIAS_UNITS = 4  # hidden units of a program, for one block of positions

_POSITIONS = tl.constexpr(FRAGMENT_POSITIONS)
_KEYS = tl.constexpr(FRAGMENT_KEYS)
_SIZES = (
    "first_query num_queries all_queries padded_keys causal_offset x_samples y_samples key_samples num_frequencies dim"
)


@triton.jit(do_not_specialize=_SIZES.split())
def itnet_bias_kernel(
    p_bias,  # out: [S, blocks, W, padded_keys / 64, 1024], half of P over its range
    p_x,  # [S or 1, n_q, s]
    p_y,  # [S or 1, padded_keys, s]
    p_gamma_x,  # [S or 1, n_q, 2L]
    p_key_side,  # [S or 1, padded_keys, F], gamma(y) or centred y, over twice the range
    p_factor,  # [S], one over twice the range
    p_w_y,  # [W, 2L], or W_y - W_rel [W, s] of raw coordinates
    p_w_relative,  # [W, 2L]
    p_w_distance,  # [W]
    first_query,
    num_queries,  # of the chunk
    all_queries,  # n_q
    padded_keys,
    causal_offset,  # query i of the chunk sees keys j <= i + causal_offset
    x_samples,  # 1 if every sample has queries of its own at positions of their own, otherwise 0
    y_samples,  # the same of the keys
    key_samples,  # the same of p_key_side
    num_frequencies,  # L
    dim,  # s
    W: tl.constexpr,
    KC: tl.constexpr,
    BL: tl.constexpr,  # frequencies at a time
    FEATURES: tl.constexpr,  # "fourier", "raw" or "none"
    HAS_DISTANCE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HIDDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    BLOCKS: tl.constexpr = KC  # one for each hidden unit
    ROWS: tl.constexpr = _POSITIONS * KC
    i_sample, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_unit = tl.program_id(2) * KC
    o_row = tl.arange(0, ROWS)
    o_query = i_block * _POSITIONS + o_row % _POSITIONS  # of the chunk
    o_x = i_sample * x_samples * all_queries + first_query + tl.minimum(o_query, num_queries - 1)
    o_unit = i_unit + o_row // _POSITIONS
    o_k, o_l = tl.arange(0, _KEYS), tl.arange(0, BL)
    b_w_distance, b_factor = tl.load(p_w_distance + o_unit), tl.load(p_factor + i_sample)
    o_fragment = ((i_sample * tl.num_programs(1) + i_block) * W + i_unit + tl.arange(0, BLOCKS)) * padded_keys * 16
    p_bias += fragment_offsets(o_fragment, _KEYS)
    for j in tl.range(0, padded_keys, _KEYS):
        o_y = i_sample * y_samples * padded_keys + j + o_k
        o_side = i_sample * key_samples * padded_keys + j + o_k
        b_p = tl.zeros([ROWS, _KEYS], tl.float32)
        if FEATURES == "fourier":
            for f in tl.range(0, num_frequencies, BL):
                m_l = (f + o_l < num_frequencies)[None, :]
                o_w = o_unit[:, None] * (2 * num_frequencies) + f + o_l[None, :]  # [ROWS, BL]
                o_gamma = o_x[:, None] * (2 * num_frequencies) + f + o_l[None, :]
                o_key = o_side[:, None] * (2 * num_frequencies) + f + o_l[None, :]
                b_sine = tl.load(p_gamma_x + o_gamma, mask=m_l, other=0.0)
                b_cosine = tl.load(p_gamma_x + o_gamma + num_frequencies, mask=m_l, other=0.0)
                b_w_sine = tl.load(p_w_relative + o_w, mask=m_l, other=0.0)
                b_w_cosine = tl.load(p_w_relative + o_w + num_frequencies, mask=m_l, other=0.0)
                b_top = b_w_cosine * b_sine - b_w_sine * b_cosine + tl.load(p_w_y + o_w, mask=m_l, other=0.0)
                b_bottom = b_w_sine * b_sine + b_w_cosine * b_cosine
                b_bottom += tl.load(p_w_y + o_w + num_frequencies, mask=m_l, other=0.0)
                b_key = tl.load(p_key_side + o_key, mask=m_l, other=0.0)  # [64, BL]
                b_p = tl.dot(b_top.to(b_key.dtype), tl.trans(b_key), b_p, input_precision=PRECISION)
                b_key = tl.load(p_key_side + o_key + num_frequencies, mask=m_l, other=0.0)
                b_p = tl.dot(b_bottom.to(b_key.dtype), tl.trans(b_key), b_p, input_precision=PRECISION)
        if FEATURES == "raw":
            for c in tl.range(0, dim):
                b_p += tl.load(p_w_y + o_unit * dim + c)[:, None] * tl.load(p_key_side + o_side * dim + c)[None, :]
        if HAS_DISTANCE:
            b_squared = tl.zeros([ROWS, _KEYS], p_x.dtype.element_ty)
            for c in tl.range(0, dim):
                b_difference = tl.load(p_x + o_x * dim + c)[:, None] - tl.load(p_y + o_y * dim + c)[None, :]
                b_squared += b_difference * b_difference
            b_p += (b_w_distance[:, None] * b_factor) * tl.sqrt(b_squared).to(tl.float32)
        if IS_CAUSAL:
            b_p = tl.where((j + o_k)[None, :] > o_query[:, None] + causal_offset, HIDDEN, b_p)
        tl.store(p_bias + key_offset(j, _KEYS), to_fragments(b_p.to(p_bias.dtype.element_ty), BLOCKS))
