"""What the programs of the kernels begin with: where they are, and their rows.

A tile has BP positions times KC hidden units as rows, row = unit * BP + position.
"""

from .gelu import tl, triton

_SIZES = "num_queries num_keys causal_offset samples all_samples all_queries bias_blocks_per_sample bias_rows size"
NOT_SPECIALISED = {
    "do_not_specialize": _SIZES.split(),
    "do_not_specialize_on_alignment": ["p_scale", "p_range"],  # slices by sample
}


@triton.jit
def program_indices(samples, W: tl.constexpr, BP: tl.constexpr, KC: tl.constexpr):
    """Returns the sample of the chunk, head, and the tile's first position and hidden unit.

    Neighbouring programs are the heads of a sample, then those of the next one: they read the same bias.
    """
    heads = tl.num_programs(0) // samples
    i_program, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    return i_program // heads, i_program % heads, (i_tile // (W // KC)) * BP, (i_tile % (W // KC)) * KC


@triton.jit
def row_offsets(i_first, i_unit, num_queries, BP: tl.constexpr, KC: tl.constexpr):
    """Returns the query and hidden unit of each row, and which have a query; others get the last one. [ROWS] each."""
    o_row = tl.arange(0, BP * KC)
    o_query = i_first + o_row % BP
    return tl.minimum(o_query, num_queries - 1), i_unit + o_row // BP, o_query < num_queries


@triton.jit
def position_rows(i_first, i_unit, num_queries, ROWS: tl.constexpr, KC: tl.constexpr):
    """Does the same as :func:`row_offsets` for rows in the order position * KC + unit."""
    o_row = tl.arange(0, ROWS)
    o_query = i_first + o_row // KC
    return tl.minimum(o_query, num_queries - 1), i_unit + o_row % KC, o_query < num_queries


@triton.jit
def bias_blocks(i_start, i_first, i_unit, num_queries, W: tl.constexpr, BP: tl.constexpr, KC: tl.constexpr):
    """Returns which row (block of 16 positions, hidden unit) of fragments each 16 rows of a tile need.

    Behind the last position, the last block stands in.
    """
    o_block = tl.arange(0, BP * KC // 16)
    o_position = tl.minimum(i_first // 16 + o_block % (BP // 16), (num_queries - 1) // 16)
    return (i_start + o_position) * W + i_unit + o_block // (BP // 16)


@triton.jit
def virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W: tl.constexpr, D: tl.constexpr):
    """Returns Q/2 [ROWS, D] and q/2 [ROWS], in float32."""
    o_d = tl.arange(0, D)[None, :]
    b_query = tl.load(p_queries + o_source[:, None] * D + o_d).to(tl.float32)
    b_w_key = tl.load(p_w_key + o_unit[:, None] * D + o_d)
    b_w_product = tl.load(p_w_product + o_unit[:, None] * D + o_d)
    return 0.5 * (b_w_key + b_w_product * b_query), tl.load(p_row + o_source * W + o_unit)


@triton.jit
def moment_gradients(b_upstream, b_w2, BP: tl.constexpr, KC: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """Returns dA [ROWS, D] of dL/dout [BP, D] and the rows (k, c) of W2 [KC * D, D] of the tile's hidden units."""
    b_da = tl.dot(b_upstream, tl.trans(b_w2), input_precision=PRECISION).to(b_w2.dtype)  # [BP, KC * D]
    return tl.reshape(tl.permute(tl.reshape(b_da, [BP, KC, D]), (1, 0, 2)), [KC * BP, D])
