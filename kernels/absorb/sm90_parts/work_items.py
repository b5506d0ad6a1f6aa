"""Iteration over the work list in every Hopper absorb kernel, and the sizes that all of them share."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_FIRST_ROW,
    ITEM_LAST,
    PROGRAM_RANGES,
    SEGMENT_ITEMS,
)
from ..schedule import BLOCK_KEYS
from ..stacking import TILE_ROWS

ROWS = gl.constexpr(TILE_ROWS)
BLOCK = gl.constexpr(BLOCK_KEYS)
LATENT = gl.constexpr(512)  # content columns, of keys and of the output
ROPE = gl.constexpr(64)
NO_SCORE = gl.constexpr(-1e30)  # of a masked key: below every score, and still a number


@gluon.jit
def _segments_and_tails(work_ptr):
    """Return the number of this program's segment items, and where its tails begin and end in the list."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    of_segments = (gl.load(work_ptr + SEGMENT_ITEMS) + programs - 1 - program) // programs
    tails_ptr = work_ptr + PROGRAM_RANGES + program
    return of_segments, gl.load(tails_ptr), gl.load(tails_ptr + programs)


@gluon.jit
def count_items(work_ptr):
    """Items of this program."""
    of_segments, first_tail, end = _segments_and_tails(work_ptr)
    return of_segments + end - first_tail


@gluon.jit
def item_at(work_ptr, index):
    """Item number `index` of this program. The ranges are read again for every item: no registers are left to keep
    them."""
    programs = gl.num_programs(0)
    of_segments, first_tail, _ = _segments_and_tails(work_ptr)
    of_tails = first_tail + index - of_segments
    place = gl.where(index < of_segments, gl.program_id(0) + index * programs, of_tails)
    return work_ptr + PROGRAM_RANGES + 3 * programs + place * ITEM_FIELDS


@gluon.jit
def blocks_of(item_ptr):
    """First and last key block of an item, and how many."""
    first = gl.load(item_ptr + ITEM_BEGIN) // BLOCK
    last = (gl.load(item_ptr + ITEM_END) - 1) // BLOCK
    return first, last, last - first + 1


@gluon.jit
def unseen_keys(item_ptr, rows, HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr):
    """Return how many of an item's last keys each of its rows does not see: of a request's query tokens the last one
    sees all of its keys, the one before it one less. This concerns the last keys of a request only, and those are
    always in one item."""
    query = (gl.load(item_ptr + ITEM_FIRST_ROW) + rows) // HEADS
    return gl.load(item_ptr + ITEM_LAST) * gl.maximum(QUERY_TOKENS - 1 - query, 0)  # rows behind the last have no query


@gluon.jit
def seen_by_all(item_ptr, QUERY_TOKENS: gl.constexpr):
    """The key behind the last one that every row of an item sees."""
    return gl.load(item_ptr + ITEM_END) - gl.load(item_ptr + ITEM_LAST) * (QUERY_TOKENS - 1)
