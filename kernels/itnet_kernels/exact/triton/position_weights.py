"""The gradients of W_y, W_rel and w_d, summed over heads and samples: what the weights of Fourier positions need.

With dP_ij[k] = dL/dpre_ij[k] recomputed, two products per tile, the sums over keys are products as well,

    T_i[k] = sum_j dP_ij[k] sin(y_j),     B_i[k] = sum_j dP_ij[k] cos(y_j),     D_i[k] = sum_j dP_ij[k] |x_i - y_j|

which stay in registers for all heads and samples of a program. The rest is a sum over positions, with
gamma(x_i) = [s_i; c_i] (first_layer.py has C_i, whose gradient is [T_i; B_i]):

    dW_y   = sum_i [T_i; B_i],     dW_rel = sum_i [B_i s_i - T_i c_i; T_i s_i + B_i c_i],     dw_d = sum_i D_i

dP exists nowhere outside of a program. D is a product with the lengths between the keys and all positions of the tile,
of which each row needs one column.
"""

from .configs import POSITION_WEIGHTS, autotune
from .fragments import fragment_offsets, from_fragments, key_offset
from .gelu import gelu_gate, gelu_slope, tl, triton
from .tile import NOT_SPECIALISED, bias_blocks, moment_gradients, row_offsets, virtual_queries


@autotune(POSITION_WEIGHTS)
@triton.jit(**NOT_SPECIALISED)
def itnet_position_weights_kernel(
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
    p_scale,  # [samples], largest measure of each over the largest of all
    p_gamma_x,  # [B or 1, n_q, 2, L] float32, from the chunk on
    p_gamma_y,  # [B or 1, padded_keys, 2, L]
    p_lengths,  # |x_i - y_j| over the longest: [samples or 1, num_queries, padded_keys]
    p_dfeatures,  # added to: [programs along the positions, 4, W, L], of W_y and W_rel, sine before cosine
    p_ddistance,  # added to: [programs along the positions, W]
    num_queries,  # of the chunk
    num_keys,
    padded_keys,
    causal_offset,  # query i of the chunk sees keys j <= i + causal_offset
    samples,  # of the chunk
    all_samples,  # B
    all_queries,  # n_q
    bias_blocks_per_sample,  # blocks from one sample's bias to the next one's; 0 if they share it
    group_samples,  # of a program
    x_samples,  # 1 if every sample has queries at positions of its own, otherwise 0
    y_samples,  # the same of the keys
    heads,
    size,  # configs.size_class of the launch: only autotuning looks at it
    W: tl.constexpr,
    D: tl.constexpr,
    BL: tl.constexpr,  # frequencies of a program, the third dimension of the grid
    BP: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    HAS_DISTANCE: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    GELU: tl.constexpr,
    PRECISION: tl.constexpr,
):
    KC: tl.constexpr = ROWS // BP
    BLOCKS: tl.constexpr = ROWS // 16
    i_tile, i_group = tl.program_id(0), tl.program_id(1)
    i_first, i_unit = i_tile // (W // KC) * BP, i_tile % (W // KC) * KC
    all_frequencies = BL * tl.num_programs(2)  # L
    o_2l = tl.arange(0, 2 * BL)[None, :]
    o_2l = tl.program_id(2) * BL + o_2l // BL * all_frequencies + o_2l % BL  # sines, then cosines
    o_d, o_k, o_p = tl.arange(0, D)[None, :], tl.arange(0, BK), tl.arange(0, BP)
    o_kd = o_k[:, None] * D + o_d
    o_kl = o_k[:, None] * (2 * all_frequencies) + o_2l
    o_query, o_unit, _ = row_offsets(i_first, i_unit, num_queries, BP, KC)
    o_position = i_first + o_p
    m_position = o_position < num_queries
    o_w2 = (i_unit * D + tl.arange(0, KC * D))[:, None] * D + o_d  # [KC * D, D]
    end = num_keys
    if IS_CAUSAL:  # keys that the tile's last position sees; the bias hides them from earlier ones
        end = tl.minimum(i_first + BP, num_queries) + causal_offset
    first_sample = i_group * group_samples
    last_sample = tl.minimum(first_sample + group_samples, samples)
    b_acc = tl.zeros([ROWS, 2 * BL], tl.float32)
    b_length = tl.zeros([ROWS, BP], tl.float32)
    for i_head in tl.range(0, heads, num_stages=1):
        b_w2 = tl.load(p_w2 + tl.cast(i_head, tl.int64) * W * D * D + o_w2)
        for i_batch in tl.range(first_sample, last_sample, num_stages=1):
            i_sample = tl.cast(i_head, tl.int64) * all_samples + i_batch
            b_g = tl.load(
                p_upstream + (i_sample * all_queries + o_position)[:, None] * D + o_d,
                mask=m_position[:, None],
                other=0.0,
            )
            b_g = (b_g.to(tl.float32) * tl.load(p_scale + i_batch)).to(b_w2.dtype)
            b_da = moment_gradients(b_g, b_w2, BP, KC, D, PRECISION)
            o_source = i_sample * all_queries + o_query
            b_qv, b_q = virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W, D)
            b_qv = b_qv.to(p_keys.dtype.element_ty)
            i_bias = tl.cast(i_batch, tl.int64)
            o_block = bias_blocks(i_bias * bias_blocks_per_sample, i_first, i_unit, num_queries, W, BP, KC)
            p_p = p_bias + fragment_offsets(o_block * padded_keys * 16, BK)
            b_range = tl.load(p_range + i_batch)
            p_u = p_keys + i_sample * padded_keys * D
            p_v = p_measure + i_bias * padded_keys
            p_y = p_gamma_y + i_bias * y_samples * padded_keys * (2 * all_frequencies)
            # one row of lengths for each position, of the sample or of all
            is_own = tl.where(bias_blocks_per_sample > 0, 1, 0)
            o_length = i_bias * is_own * num_queries + tl.minimum(o_position, num_queries - 1)
            for j in tl.range(0, end, BK):
                b_u = tl.load(p_u + j * D + o_kd)  # [BK, D]
                b_v = tl.load(p_v + j + o_k)
                b_y = tl.load(p_y + j * (2 * all_frequencies) + o_kl)  # [BK, 2 BL]
                b_s = tl.broadcast_to(b_q[:, None], [ROWS, BK])
                b_s += from_fragments(tl.load(p_p + key_offset(j, BK)), BLOCKS, BK).to(tl.float32) * b_range
                b_s = tl.dot(b_qv, tl.trans(b_u), b_s, input_precision=PRECISION)  # [ROWS, BK]
                b_dh = tl.dot(b_da, tl.trans(b_u), input_precision=PRECISION)  # [ROWS, BK]
                b_dp = (b_dh * b_v[None, :]) * gelu_slope(b_s, gelu_gate(b_s, GELU), GELU)
                b_dp = b_dp.to(b_u.dtype)
                b_acc = tl.dot(b_dp, b_y, b_acc, input_precision=PRECISION)
                if HAS_DISTANCE:
                    b_l = tl.load(p_lengths + o_length[:, None] * padded_keys + j + o_k[None, :])  # [BP, BK]
                    b_length = tl.dot(b_dp, tl.trans(b_l), b_length, input_precision=PRECISION)
    # Positions beyond the last query have dL/dout = 0 and so add nothing.
    b_sine, b_cosine = tl.split(tl.permute(tl.reshape(b_acc, [ROWS, 2, BL]), (0, 2, 1)))
    o_l = tl.program_id(2) * BL + tl.arange(0, BL)[None, :]
    o_x = ((first_sample.to(tl.int64) * x_samples * all_queries + o_query) * 2 * all_frequencies)[:, None] + o_l
    b_x_sine = tl.load(p_gamma_x + o_x)
    b_x_cosine = tl.load(p_gamma_x + o_x + all_frequencies)
    i_program = i_group * (tl.num_programs(0) // (W // KC)) + i_tile // (W // KC)
    o_units = (i_unit + tl.arange(0, KC))[:, None] * all_frequencies + o_l  # [KC, BL]
    p_out = p_dfeatures + i_program.to(tl.int64) * 4 * W * all_frequencies + o_units
    part = W * all_frequencies
    tl.store(p_out, tl.load(p_out) + tl.sum(tl.reshape(b_sine, [KC, BP, BL]), 1))
    tl.store(p_out + part, tl.load(p_out + part) + tl.sum(tl.reshape(b_cosine, [KC, BP, BL]), 1))
    b_w = b_cosine * b_x_sine - b_sine * b_x_cosine
    tl.store(p_out + 2 * part, tl.load(p_out + 2 * part) + tl.sum(tl.reshape(b_w, [KC, BP, BL]), 1))
    b_w = b_sine * b_x_sine + b_cosine * b_x_cosine
    tl.store(p_out + 3 * part, tl.load(p_out + 3 * part) + tl.sum(tl.reshape(b_w, [KC, BP, BL]), 1))
    if HAS_DISTANCE:
        is_own_position = (tl.arange(0, ROWS) % BP)[:, None] == o_p[None, :]
        b_own = tl.sum(tl.where(is_own_position, b_length, 0.0), 1)  # [ROWS]
        p_d = p_ddistance + i_program.to(tl.int64) * W + i_unit + tl.arange(0, KC)
        if tl.program_id(2) == 0:  # the first of the programs that share rows and differ in frequencies
            tl.store(p_d, tl.load(p_d) + tl.sum(tl.reshape(b_own, [KC, BP]), 1))
