"""The order in which the position bias lies in memory: that of the registers which a matrix product accumulates in.

A *fragment* is 16 positions x 64 keys of one hidden unit, 1024 numbers. A warp reads it in four times 512 bytes, and
each lane then holds what its part of a product's accumulator (m16n8, warp group or not) starts from: nothing passes
through shared memory. With the bits of position p and key j inside the fragment, the highest first,

    number = p3 j5 | p2 p1 p0 j2 j1 | j4 j3 j0          (register block | lane | 8 neighbours of a lane)

The bias of a sample is [blocks of 16 positions, w, padded_keys / 64, 1024]. Where accumulators have another layout
(tensor memory, AMD), the compiler moves the numbers: the order is a matter of speed, not of the result.

The fused backward adds to gradients in such an order as well (*gradient fragments*): 16 rows are 16 d_h numbers, with
the bits of row r and feature c (of d_h = 64) in the order r3 c5 c4 | r2 r1 r0 c2 c1 | c3 c0.
"""

from torch import Tensor

from .gelu import tl, triton

FRAGMENT_POSITIONS = 16
FRAGMENT_KEYS = 64
FRAGMENT = FRAGMENT_POSITIONS * FRAGMENT_KEYS

_FRAGMENT = tl.constexpr(FRAGMENT)


@triton.jit
def fragment_offsets(o_block, BK: tl.constexpr):
    """Returns offsets [registers, blocks, 32, neighbours] of the first BK keys of the fragments from o_block on."""
    REGISTERS: tl.constexpr = 2 if BK < 64 else BK // 16
    NEIGHBOURS: tl.constexpr = 4 if BK == 16 else 8
    STEP: tl.constexpr = 512 if BK < 64 else 256
    o_register = (tl.arange(0, REGISTERS) * STEP)[:, None, None, None]
    o_lane = (tl.arange(0, 32) * 8)[None, None, :, None]
    return o_register + o_block[None, :, None, None] + o_lane + tl.arange(0, NEIGHBOURS)[None, None, None, :]


@triton.jit
def key_offset(j, BK: tl.constexpr):
    """Says where the keys from j on are, counted from key 0. j is a multiple of BK."""
    offset = (j // 64) * _FRAGMENT
    if BK <= 32:
        offset += (j // 32 % 2) * 256
    if BK == 16:
        offset += (j // 16 % 2) * 4
    return offset


@triton.jit
def from_fragments(b_bias, BLOCKS: tl.constexpr, BK: tl.constexpr):
    """Turns [registers, BLOCKS, 32, neighbours] into [16 * BLOCKS, BK]."""
    MANY: tl.constexpr = 1 if BK < 64 else BK // 64  # fragments along the keys
    J5: tl.constexpr = 1 if BK < 64 else 2
    J43: tl.constexpr = 2 if BK == 16 else 4
    b_bits = tl.reshape(b_bias, [MANY, 2, J5, BLOCKS, 8, 4, J43, 2])
    return tl.reshape(tl.permute(b_bits, (3, 1, 4, 0, 2, 6, 5, 7)), [16 * BLOCKS, BK])


@triton.jit
def to_fragments(b_tile, BLOCKS: tl.constexpr):
    """Turns [16 * BLOCKS, 64] into [4, BLOCKS, 32, 8]."""
    b_bits = tl.reshape(b_tile, [BLOCKS, 2, 8, 2, 4, 4, 2])  # block, p3, p2-0, j5, j43, j21, j0
    return tl.reshape(tl.permute(b_bits, (1, 3, 0, 2, 5, 4, 6)), [4, BLOCKS, 32, 8])


@triton.jit
def gradient_offsets(BK: tl.constexpr, D: tl.constexpr):
    """Returns the offsets of the numbers of :func:`to_gradient_fragments` in a tile [BK, D] of a gradient."""
    HALVES: tl.constexpr = 2 if D >= 32 else 1
    QUARTERS: tl.constexpr = D // 32 if D >= 32 else 1
    o_register, o_warp = tl.arange(0, 2 * QUARTERS), tl.arange(0, HALVES * (BK // 16))
    o_register = (o_register // QUARTERS * HALVES * QUARTERS + o_register % QUARTERS) * 128
    o_warp = o_warp % (BK // 16) * (16 * D) + o_warp // (BK // 16) * QUARTERS * 128
    o_lane = (tl.arange(0, 32) * 4)[None, None, :, None]
    return (
        o_register[:, None, None, None] + o_warp[None, :, None, None] + o_lane + tl.arange(0, 4)[None, None, None, :]
    )


@triton.jit
def to_gradient_fragments(b_tile, BK: tl.constexpr, D: tl.constexpr):
    """Turns [BK, D] into [registers, warps, 32, 4]: a product's accumulator over eight warps, as they hold it."""
    HALVES: tl.constexpr = 2 if D >= 32 else 1
    QUARTERS: tl.constexpr = D // 32 if D >= 32 else 1
    b_bits = tl.reshape(b_tile, [BK // 16, 2, 8, HALVES, QUARTERS, 2, 4, 2])  # r54, r3, r2-0, c5, c4, c3, c21, c0
    b_bits = tl.permute(b_bits, (1, 4, 3, 0, 2, 6, 5, 7))
    return tl.reshape(b_bits, [2 * QUARTERS, HALVES * (BK // 16), 32, 4])


def from_gradient_fragments(grad: Tensor) -> Tensor:
    """Returns what lies in the order of :func:`gradient_offsets`, as the rows [..., n, D] that it stands for."""
    *others, count, dim = grad.shape
    halves, quarters = (2, dim // 32) if dim >= 32 else (1, 1)
    bits = grad.reshape(-1, 2, halves, quarters, 8, 4, 2, 2)  # r3, c5, c4, r2-0, c21, c3, c0 of 16 keys each
    return bits.permute(0, 1, 4, 2, 3, 6, 5, 7).reshape(*others, count, dim)
