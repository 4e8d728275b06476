"""The gradient of the position bias: dL/dP_ij[k], summed over heads, and over samples that share their positions.

It would be a number for each pair, hidden unit and head if the backward kernel stored it. This kernel computes it
again instead, two products per tile, and adds it up in registers: dP is stored once for all heads.
"""

from .configs import POSITION_GRADIENT, autotune
from .fragments import fragment_offsets, from_fragments, key_offset
from .gelu import gelu_gate, gelu_slope, tl, triton
from .tile import NOT_SPECIALISED, bias_blocks, moment_gradients, row_offsets, virtual_queries


@autotune(POSITION_GRADIENT)
@triton.jit(**NOT_SPECIALISED)
def itnet_position_gradient_kernel(
    p_queries,  # [H, B, n_q, D], from the chunk's first sample and query on
    p_keys,  # [H, B, padded_keys, D]
    p_measure,  # [B, padded_keys], omega / scale
    p_row,  # [H, B, n_q, W] float32, half of q
    p_bias,  # half of P over its range, in fragments: [samples or 1, blocks of the chunk, W, padded_keys / 64, 1024]
    p_range,  # [samples]
    p_w_key,  # [W, D] float32
    p_w_product,  # [W, D] float32
    p_upstream,  # dL/dout [H, B, n_q, D], from the chunk on
    p_w2,  # [H, W * D, D], rows (k, c)
    p_scale,  # [samples], largest measure of each
    p_dbias,  # out: [samples or 1, num_queries, W, padded_keys]
    num_queries,  # of the chunk
    num_keys,
    padded_keys,
    causal_offset,  # query i of the chunk sees keys j <= i + causal_offset
    samples,  # of the chunk that a program adds up: all of them, or 1 if they have positions of their own
    all_samples,  # B
    all_queries,  # n_q
    bias_blocks_per_sample,  # blocks from one sample's bias to the next one's; 0 if they share it
    heads,
    size,  # configs.size_class of the launch: only autotuning looks at it
    W: tl.constexpr,
    D: tl.constexpr,
    BP: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KC: tl.constexpr = ROWS // BP
    BLOCKS: tl.constexpr = ROWS // 16
    i_tile, i_bias = tl.program_id(0), tl.program_id(2).to(tl.int64)
    i_first, i_unit = i_tile // (W // KC) * BP, i_tile % (W // KC) * KC
    j = tl.program_id(1) * BK
    o_d, o_k = tl.arange(0, D)[None, :], tl.arange(0, BK)
    o_query, o_unit, m_row = row_offsets(i_first, i_unit, num_queries, BP, KC)
    o_block = bias_blocks(i_bias * bias_blocks_per_sample, i_first, i_unit, num_queries, W, BP, KC)
    p_bias += fragment_offsets(o_block * padded_keys * 16, BK) + key_offset(j, BK)
    b_bias = from_fragments(tl.load(p_bias), BLOCKS, BK).to(tl.float32) * tl.load(p_range + i_bias)
    o_position = i_first + tl.arange(0, BP)
    m_position = (o_position < num_queries)[:, None]
    o_w2 = (i_unit * D + tl.arange(0, KC * D))[:, None] * D + o_d  # [KC * D, D]
    steps = heads * samples
    if IS_CAUSAL:  # nobody in this tile sees these keys
        steps = tl.where(j < tl.minimum(i_first + BP, num_queries) + causal_offset, steps, 0)
    b_dp = tl.zeros([ROWS, BK], tl.float32)
    for i_step in tl.range(0, steps):
        i_head = (i_step // samples).to(tl.int64)
        i_batch = i_bias + i_step % samples  # i_bias is 0 where samples are many
        i_sample = i_head * all_samples + i_batch
        b_u = tl.load(p_keys + (i_sample * padded_keys + j + o_k[:, None]) * D + o_d)  # [BK, D]
        b_v = tl.load(p_measure + i_batch * padded_keys + j + o_k) * (0.5 * tl.load(p_scale + i_batch))
        b_w2 = tl.load(p_w2 + i_head * W * D * D + o_w2)
        b_g = tl.load(
            p_upstream + (i_sample * all_queries + o_position)[:, None] * D + o_d, mask=m_position, other=0.0
        )
        b_da = moment_gradients(b_g, b_w2, BP, KC, D, PRECISION)
        o_source = i_sample * all_queries + o_query
        b_qv, b_q = virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W, D)
        b_s = tl.dot(b_qv.to(b_u.dtype), tl.trans(b_u), b_bias + b_q[:, None], input_precision=PRECISION)
        b_dh = tl.dot(b_da, tl.trans(b_u), input_precision=PRECISION)  # [ROWS, BK]
        b_dp += (b_dh * b_v[None, :]) * gelu_slope(b_s, gelu_gate(b_s, GELU), GELU)
    o_out = ((i_bias * num_queries + o_query) * W + o_unit)[:, None] * padded_keys + j + o_k[None, :]
    tl.store(p_dbias + o_out, b_dp.to(p_dbias.dtype.element_ty), mask=m_row[:, None])
