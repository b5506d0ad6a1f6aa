"""The query of sm90_fp8_absorb.py and sm90_fp8_few_heads.py: it is copied to shared memory in BF16, and the roles that
need it round it, bit by bit as latent_rows.divide does.

    content[r] = q_absorbed[r] / scale[r] in e4m3        rope[r] = q_rope[r] / scale[r] in BF16

A launch of its own for that (quantize_query.py) would take a tenth of the time of attention to a few hundred keys.
Scales are powers of two, so they are computed as integers, from the bits of the largest magnitudes: nothing is divided,
and only the results are rounded.
"""

from __future__ import annotations

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...gluon_names import thread_barrier
from ...storage.latent_rows import SCALE_FLOOR, SCALE_LIMIT
from .fp8_tiles import inverse_of_power
from .query import QUERY_COLUMNS
from .work_items import ROWS

QUERY_TILES = gl.constexpr(8)  # of the content

# Bits of float32. Adding UP_FROM_448 carries into the exponent for numbers above 1.75 · 2^n (448 is 1.75 · 2^8), adding
# UP_FROM_1 for those above 2^n.
ONE = gl.constexpr(127 << 23)
EXPONENT = gl.constexpr(0x7F800000)
UP_FROM_448 = gl.constexpr(0x1FFFFF)
UP_FROM_1 = gl.constexpr(0x7FFFFF)
FLOOR = gl.constexpr(int(math.log2(SCALE_FLOOR)) * (1 << 23))
LIMIT = gl.constexpr((127 + int(math.log2(SCALE_LIMIT))) << 23)


@gluon.jit
def magnitudes(values):
    """Magnitudes of BF16 numbers, as integers in the same order; all that are not finite come behind those that are."""
    return values.to(gl.int16, bitcast=True) & 0x7FFF


@gluon.jit
def number(bits):
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def to_e4m3(values):
    """To e4m3, saturating."""
    return values.to(gl.float8e4nv)


@gluon.jit
def largest_of_rows(bits):
    return gl.max(bits.to(gl.int32), 1)


@gluon.jit
def scales_of_rows(largest, largest_rope):
    """latent_rows.row_scale from the largest magnitudes of content and rotary part, bits of BF16 in int32: the scale, a
    power of two, and whether the row is finite. If it is not, the scale means nothing."""
    finite = gl.maximum(largest, largest_rope) < (EXPONENT >> 16)
    # 448 is 1.75 · 2^8: a quotient's power is 2^-8 or 2^-7 times that of the magnitude. No other quotient of a BF16
    # number by 448 is so near to a power of two that float32 would round it there.
    of_content = (((largest << 16) + UP_FROM_448) & EXPONENT) - (8 << 23)
    of_rope = ((gl.maximum(largest_rope << 16, ONE) + UP_FROM_1) & EXPONENT) + FLOOR
    return number(gl.minimum(gl.maximum(of_content, of_rope), LIMIT)), finite


@gluon.jit
def divided(values, factor, finite):
    """BF16 rows times their factors, in float32; zeros for rows that are not finite."""
    return gl.where(finite[:, None], values.to(gl.float32) * factor[:, None], 0.0)


@gluon.jit
def round_tiles(content_s, rope_s, slot, q_content_s, q_rope_s, LAYOUT: gl.constexpr):
    """Round the query of 64 rows that is in `slot` and the next slot of the ring, its rotary part in the first of them.
    Tiles are read twice, because not all of them fit into registers. The scales are returned in LAYOUT."""
    SLOTS: gl.constexpr = content_s.shape[0]
    PANELS: gl.constexpr = q_content_s.shape[0]
    ALL: gl.constexpr = SLOTS * QUERY_TILES // 2  # a power of two
    TILE: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    tiles_s = content_s._reinterpret(gl.bfloat16, [ALL, ROWS, QUERY_COLUMNS], gl.NVMMASharedLayout(128, 16))
    first = slot * (QUERY_TILES // 2)
    largest = magnitudes(tiles_s.index(first).load(TILE))
    for c in range(1, QUERY_TILES):
        largest = gl.maximum(largest, magnitudes(tiles_s.index((first + c) & (ALL - 1)).load(TILE)))
    rope = rope_s.index(slot).load(TILE)
    scale, finite = scales_of_rows(largest_of_rows(largest), largest_of_rows(magnitudes(rope)))
    factor = inverse_of_power(scale)
    q_rope_s.store(divided(rope, factor, finite).to(gl.bfloat16))
    for p in range(PANELS):
        for half in gl.static_range(2):
            values = tiles_s.index((first + 2 * p + half) & (ALL - 1)).load(TILE)
            place = q_content_s.index(p).slice(half * QUERY_COLUMNS, QUERY_COLUMNS, 1)
            place.store(to_e4m3(divided(values, factor, finite)))
    return gl.convert_layout(gl.where(finite, scale, float("nan")), LAYOUT)


@gluon.jit
def round_rows(q_s, q_rope_s, q_empty, q_content_s, rounded_rope_s, LAYOUT: gl.constexpr):
    """Round the query of 8 or 16 rows. All of it is in registers at once, so that `q_empty` is signalled before the
    rounding starts. The scales are returned in LAYOUT."""
    N: gl.constexpr = q_s.shape[0]
    ROW: gl.constexpr = gl.BlockedLayout([1, 8], [N // 4, 128 // N], [4, 1], [1, 0])
    content, rope = q_s.load(ROW), q_rope_s.load(ROW)
    thread_barrier()
    mbarrier.arrive(q_empty)
    scale, finite = scales_of_rows(largest_of_rows(magnitudes(content)), largest_of_rows(magnitudes(rope)))
    factor = inverse_of_power(scale)
    q_content_s.store(to_e4m3(divided(content, factor, finite)))
    rounded_rope_s.store(divided(rope, factor, finite).to(gl.bfloat16))
    return gl.convert_layout(gl.where(finite, scale, float("nan")), LAYOUT)
