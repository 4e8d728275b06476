"""What the programs of both kernels begin with: where they are, and their rows.

A tile has BP positions times KC hidden units as rows, row = position * KC + unit.
"""

from .gelu import tl, triton

_SIZES = "num_queries num_keys causal_offset samples all_samples all_queries bias_rows size"
NOT_SPECIALISED = {
    "do_not_specialize": _SIZES.split(),
    "do_not_specialize_on_alignment": ["p_scale", "p_range"],  # slices by sample
}


@triton.jit
def program_indices(samples, W: tl.constexpr, BP: tl.constexpr, KC: tl.constexpr):
    """Sample of the chunk, head, tile, and the tile's first position and hidden unit.

    Neighbouring programs are the heads of a sample, then those of the next one: they read the same bias.
    """
    heads = tl.num_programs(0) // samples
    i_program, i_tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    return i_program // heads, i_program % heads, i_tile, (i_tile // (W // KC)) * BP, (i_tile % (W // KC)) * KC


@triton.jit
def row_offsets(i_first, i_unit, num_queries, ROWS: tl.constexpr, KC: tl.constexpr):
    """Query and hidden unit of each row, and which rows have a query; the others get the last one. [ROWS] each."""
    o_row = tl.arange(0, ROWS)
    o_query = i_first + o_row // KC
    return tl.minimum(o_query, num_queries - 1), i_unit + o_row % KC, o_query < num_queries


@triton.jit
def virtual_queries(p_queries, p_row, p_w_key, p_w_product, o_source, o_unit, W: tl.constexpr, D: tl.constexpr):
    """Q/2 [ROWS, D] and q/2 [ROWS], in float32."""
    o_d = tl.arange(0, D)[None, :]
    b_query = tl.load(p_queries + o_source[:, None] * D + o_d)
    b_w_key = tl.load(p_w_key + o_unit[:, None] * D + o_d)
    b_w_product = tl.load(p_w_product + o_unit[:, None] * D + o_d)
    return 0.5 * (b_w_key + b_w_product * b_query), tl.load(p_row + o_source * W + o_unit)
