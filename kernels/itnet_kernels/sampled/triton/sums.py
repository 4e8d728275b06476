"""Sums of what the backward of listed keys stores, in a fixed order and without atomics."""

from ...exact.triton.gelu import tl, triton
from .tile import NOT_SPECIALISED


@triton.jit(**NOT_SPECIALISED)
def pair_sum_kernel(
    p_parts,  # [samples, pairs, TILES, COLUMNS]: pairs of a chunk are [rows, M], their tiles lie [rows, TILES, M]
    p_order,  # the pairs of every key, one key after the other: [samples or 1, all pairs]
    p_starts,  # where those of a key begin, [samples or 1, chunks, keys + 1]
    p_total,  # out: [B, keys, COLUMNS] float32; what is there is added to
    first_sample,
    chunk,  # its number
    first_pair,  # of the chunk
    pairs,  # of the chunk, per sample
    keys,
    length,  # M
    order_stride,  # all pairs, or 0 if all samples have the same lists
    starts_stride,  # chunks * (keys + 1), or 0
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    AT_ONCE: tl.constexpr = 16,
):
    """Adds up the rows of all pairs of a key."""
    i_key, i_batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    o_column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < COLUMNS
    sample = first_sample + i_batch
    p_starts += sample * starts_stride + chunk * (keys + 1) + i_key
    start, stop = tl.load(p_starts), tl.load(p_starts + 1)
    p_parts += i_batch * pairs * TILES * COLUMNS
    o_total = (sample * keys + i_key) * COLUMNS + o_column
    b_sum = tl.load(p_total + o_total, mask=m_column, other=0.0)
    for entry in range(start, stop, AT_ONCE):
        o_entry = entry + tl.arange(0, AT_ONCE)
        m_entry = o_entry < stop
        b_pair = tl.load(p_order + sample * order_stride + o_entry, mask=m_entry, other=first_pair)
        b_pair = b_pair.to(tl.int64) - first_pair
        b_place = b_pair // length * (TILES * length) + b_pair % length  # [AT_ONCE]
        for tile in tl.static_range(TILES):
            o_part = (b_place + tile * length)[:, None] * COLUMNS + o_column[None, :]
            b_part = tl.load(p_parts + o_part, mask=m_entry[:, None] & m_column[None, :], other=0.0)
            b_sum += tl.sum(b_part.to(tl.float32), 0)
    tl.store(p_total + o_total, b_sum, mask=m_column)


@triton.jit(**NOT_SPECIALISED)
def content_sum_kernel(
    p_dvirtual,  # dQ [H, samples, rows, W, D]
    p_queries,  # [B, R, H, D]
    p_dw_key,  # out: [splits, W, D] float32
    p_dw_product,  # out: [splits, W, D] float32
    first_row,
    first_sample,
    rows,
    samples,
    heads,
    all_rows,
    count,  # H * samples * rows
    W: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr = 16,
):
    """Computes sum_i dQ_i and sum_i dQ_i u_i over heads, samples and rows, in as many parts as there are programs."""
    o_column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < W * D
    b_key, b_product = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(1) * AT_ONCE, count, tl.num_programs(1) * AT_ONCE):
        o_i = first + tl.arange(0, AT_ONCE)
        m_i = (o_i < count)[:, None] & m_column[None, :]
        i_head, i_batch, i_row = o_i // (samples * rows), o_i // rows % samples, o_i % rows
        b_source = ((first_sample + i_batch).to(tl.int64) * all_rows + first_row + i_row) * heads + i_head
        o_dqv = o_i.to(tl.int64)[:, None] * (W * D) + o_column[None, :]
        b_dqv = tl.load(p_dvirtual + o_dqv, mask=m_i, other=0.0).to(tl.float32)
        o_query = b_source[:, None] * D + (o_column % D)[None, :]
        b_query = tl.load(p_queries + o_query, mask=m_i, other=0.0).to(tl.float32)
        b_key += tl.sum(b_dqv, 0)
        b_product += tl.sum(b_dqv * b_query, 0)
    o_out = tl.program_id(1) * (W * D) + o_column
    tl.store(p_dw_key + o_out, b_key, mask=m_column)
    tl.store(p_dw_product + o_out, b_product, mask=m_column)
