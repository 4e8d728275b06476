"""What the programs of both list kernels have in common: a program has KC hidden units of one query and one head."""

from ...exact.triton.gelu import tl, triton

# Integers that change from call to call: code for their special values would be compiled again and again.
_SIZES = "first_row first_sample rows samples all_rows num_keys length range_tiles per_list list_stride bias_stride"
_SIZES += " x_stride y_stride all_samples chunk first_pair pairs keys order_stride starts_stride count span columns"
NOT_SPECIALISED = {"do_not_specialize": _SIZES.split()}


@triton.jit
def program_place(heads, samples, TILES: tl.constexpr):
    """Returns head, sample and query of the chunk, and hidden units. Heads of a query are neighbours: they read the
    same bias, and rows of keys that lie side by side."""
    i = tl.program_id(0).to(tl.int64)
    i_rest = i // heads
    i_batch, i_rest = i_rest % samples, i_rest // samples
    return i % heads, i_batch, i_rest // TILES, (i_rest % TILES).to(tl.int32)


@triton.jit
def virtual_queries(
    p_queries, p_row, p_w_key, p_w_product, o_unit, o_d, m_unit, m_wd,
    D: tl.constexpr,
):  # fmt: skip
    """Returns Q/2 [KC, D_PADDED] and q/2 [KC] of one query, in float32."""
    b_query = tl.load(p_queries + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    o_w = o_unit[:, None] * D + o_d[None, :]
    b_w_key = tl.load(p_w_key + o_w, mask=m_wd, other=0.0)
    b_w_product = tl.load(p_w_product + o_w, mask=m_wd, other=0.0)
    b_row = tl.load(p_row + o_unit, mask=m_unit, other=0.0).to(tl.float32)
    return 0.5 * (b_w_key + b_w_product * b_query[None, :]), 0.5 * b_row


@triton.jit
def pre_activations(
    b_qv, b_q, b_u, p_bias, p_range, o_bias, o_range, m_bias, m_unit,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, KC: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns s = pre/2: [KC, BK]."""
    b_s = tl.broadcast_to(b_q[:, None], [KC, BK])
    if HAS_BIAS:
        b_range = tl.load(p_range + o_range, mask=m_unit, other=1.0)
        b_s += tl.load(p_bias + o_bias, mask=m_bias, other=0.0).to(tl.float32) * b_range[:, None]
    return tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)


@triton.jit
def mean_of_keys(
    p_keys, p_indices, p_coefficients, heads, length, o_d, o_bk,
    D: tl.constexpr, D_PADDED: tl.constexpr,
):  # fmt: skip
    """Returns sum_m c_im u_j of one query and head: [D_PADDED]."""
    b_mean = tl.zeros([D_PADDED], tl.float32)
    for j in range(0, length, o_bk.shape[0]):
        o_k = j + o_bk
        m_k = o_k < length
        b_key = tl.load(p_indices + o_k, mask=m_k, other=0).to(tl.int64)
        b_c = tl.load(p_coefficients + o_k, mask=m_k, other=0.0)
        o_u = b_key[:, None] * (heads * D) + o_d[None, :]
        b_u = tl.load(p_keys + o_u, mask=(o_d < D)[None, :], other=0.0)
        b_mean += tl.sum(b_u.to(tl.float32) * b_c[:, None], 0)
    return b_mean
