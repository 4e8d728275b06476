"""The forward of the sum over listed keys: A_i[k, c] = sum_m c_im GELU(pre_im[k]) u_j[c]; and sum_m c_im u_j."""

from ...exact.triton.gelu import gelu_gate, tl, triton
from .tile import NOT_SPECIALISED, mean_of_keys, pre_activations, program_place, virtual_queries


@triton.jit(**NOT_SPECIALISED)
def list_fwd_kernel(
    p_queries,  # [B, R, H, D]
    p_keys,  # [B, n, H, D], in the dtype of the products
    p_row,  # q [B, R, H, W]
    p_coefficients,  # [B, R, M] float32
    p_scale,  # the largest of them by absolute value: [B, R]
    p_indices,  # [B or 1, lists, M]
    p_bias,  # [samples or 1, rows, W, padded], half of P over its range
    p_range,  # [samples or 1, rows, W, range tiles]
    p_w_key,  # [W, D] float32
    p_w_product,  # [W, D] float32
    p_moments,  # out: [H, samples, rows, W, D]
    p_mean,  # out: [H, samples, rows, D] float32
    first_row,  # of the chunk
    first_sample,
    rows,  # of the chunk
    samples,
    heads,  # H
    all_rows,  # R
    num_keys,  # n
    length,  # M
    padded,  # M, filled up to a multiple of 16
    range_tiles,  # of 64 keys
    per_list,  # queries that share a list
    list_stride,  # from one sample's lists to the next one's, or 0
    bias_stride,  # from one sample's bias to the next one's, in queries: rows, or 0
    W: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    KC: tl.constexpr,
    BK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_head, i_batch, i_row, i_tile = program_place(heads, samples, tl.cdiv(W, KC))
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
    p_indices += sample * list_stride + row // per_list * length
    p_coefficients += i_query * length
    p_keys += (sample * num_keys * heads + i_head) * D
    scale = tl.load(p_scale + i_query)
    i_place = (i_batch * bias_stride + i_row) * W
    p_bias += i_place * padded
    p_range += i_place * range_tiles
    b_acc = tl.zeros([KC, D_PADDED], tl.float32)
    for j in tl.range(0, length, BK):
        if GELU == "tanh.approx":
            # Costs no instruction and makes Triton wait for the last product here. If it were in flight while the next
            # accumulator is set, ptxas would serialise every product of the loop (its message C7515).
            b_acc = tl.inline_asm_elementwise("// wait", "=f,0", [b_acc], dtype=tl.float32, is_pure=False, pack=1)
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
        b_weighted = b_s * b_c[None, :]
        b_h = b_weighted * gelu_gate(b_s, GELU) + b_weighted
        b_acc = tl.dot(b_h.to(b_u.dtype), b_u, b_acc, input_precision=PRECISION)
    i_out = (i_head * samples + i_batch) * rows + i_row
    b_acc *= scale
    o_out = o_unit[:, None] * D + o_d[None, :]
    tl.store(p_moments + i_out * W * D + o_out, b_acc.to(p_moments.dtype.element_ty), mask=m_wd)
    if i_tile == 0:  # a loop of its own, as registers are full in the other one
        b_mean = mean_of_keys(p_keys, p_indices, p_coefficients, heads, length, o_d, o_bk, D, D_PADDED)
        tl.store(p_mean + i_out * D + o_d, b_mean, mask=m_d)
