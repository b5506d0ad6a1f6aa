"""The items of tails in the work list of the absorb kernels (schedule.py), built on the device before every step.

The tails stand in one line, longest first, and the programs cut it so that all of them end together: a program with a
smaller load of segments takes more (FlashMLA's schedule; stream-K). Where dealing out whole tails ends nearly as early,
none is cut, and nothing has to be merged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..partials import FIRSTS, PartialTable
from .items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_FIRST_ROW,
    ITEM_LAST,
    ITEM_PAGE,
    ITEM_PARTIAL,
    ITEM_ROWS,
    ITEM_STRIP,
    N_ITEMS,
    PROGRAM_RANGES,
    SEGMENT_ITEMS,
)
from .schedule import BLOCK_KEYS, ITEM_BLOCKS, AbsorbCapacity

MIN_BLOCKS = 2
"""A tail is not cut into shorter pieces."""


@triton.jit
def _capacities(load, level, MIN_BLOCKS: tl.constexpr):
    """Blocks of tails that the parts take until all of them have `level`; one that is nearly there takes none."""
    return tl.where(level - load >= MIN_BLOCKS, level - load, 0)


@triton.jit
def _find_level(load, valid, total, MIN_BLOCKS: tl.constexpr):
    """The lowest level at which the parts take `total` blocks."""
    low = total * 0
    high = total + tl.max(tl.where(valid, load, 0), 0) + MIN_BLOCKS
    while low < high:
        middle = (low + high) // 2
        enough = tl.sum(tl.where(valid, _capacities(load, middle, MIN_BLOCKS), 0), 0) >= total
        low = tl.where(enough, low, middle + 1)
        high = tl.where(enough, middle, high)
    return high


@triton.jit
def _part_at(ends, position, LOG2_PARTS: tl.constexpr):
    """The first part that ends behind a position; ends: ascending, the last one behind all positions."""
    part = tl.zeros_like(position)
    step = 1 << LOG2_PARTS - 1
    for _ in tl.static_range(LOG2_PARTS):
        part += tl.where(tl.gather(ends, part + step - 1, 0) <= position, step, 0)
        step //= 2
    return part


@triton.jit
def _in_turn(place, turn, PARTS: tl.constexpr):
    """Return the part at a place of a turn, or the place of a part: in snake order, every second turn is reversed."""
    return tl.where(turn % 2 == 0, place, PARTS - 1 - place)


@triton.jit
def _load_lengths(lens_ptr, row, rows):
    """Keys of a row of the batch, 0 behind the last row."""
    return tl.maximum(tl.load(lens_ptr + row, mask=row < rows, other=0), 0)


@triton.jit(do_not_specialize=["rows", "table_row"])
def schedule_tails_kernel(
    lens_ptr,  # int32 [rows]
    work_ptr,  # int32, the work list
    table_ptr,  # int32, a PartialTable whose list is constant; only the entries of these rows are written
    rows,
    table_row,  # entries between two rows of the page table: not a constant, because it may grow while serving
    HEADS: tl.constexpr,
    STRIP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    FIRST_PARTIAL: tl.constexpr,
    FIRST_STRIP: tl.constexpr,
    FIRST_ITEM: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    ITEM_BLOCKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    FIRSTS: tl.constexpr,
    LANES: tl.constexpr,  # a power of two, at least MAX_ROWS
    LOG2_PARTS: tl.constexpr,  # of a power of two that is more than PROGRAMS
):
    # A part is as many programs as a row has tiles, which take the same keys at the same time.
    TILES: tl.constexpr = (HEADS + TILE_ROWS - 1) // TILE_ROWS
    PARTS: tl.constexpr = PROGRAMS // TILES
    PART_LANES: tl.constexpr = 1 << LOG2_PARTS
    NEVER: tl.constexpr = 1 << 30
    lane = tl.arange(0, LANES)
    blocks = tl.cdiv(_load_lengths(lens_ptr, lane, rows), BLOCK_KEYS)
    # Rows by their length, equal ones in their order: the row is in the low digits of what is sorted.
    row = LANES - 1 - tl.sort(blocks * LANES + (LANES - 1 - lane), descending=True) % LANES
    length = _load_lengths(lens_ptr, row, rows)
    blocks = tl.cdiv(length, BLOCK_KEYS)
    some = blocks > 0
    cost = tl.where(some, blocks + ITEM_BLOCKS, 0)
    end = tl.cumsum(cost, 0)

    part = tl.arange(0, PART_LANES)
    valid = part < PARTS
    load = tl.zeros_like(part)
    for tile in tl.static_range(TILES):
        of_program = tl.load(work_ptr + PROGRAM_RANGES + 2 * PROGRAMS + part * TILES + tile, mask=valid, other=0)
        load = tl.maximum(load, of_program)
    level = _find_level(load, valid, tl.sum(cost, 0), MIN_BLOCKS)
    # Whole rows in snake order, longest first, where that ends nearly as early: nothing is to be merged.
    dealt = load
    for turn in range(0, tl.cdiv(rows, PARTS)):
        at = turn * PARTS + _in_turn(part, turn, PARTS)
        there = valid & (at < LANES)
        dealt += tl.where(there, tl.gather(cost, tl.where(there, at, 0), 0), 0)
    longest = tl.max(dealt, 0)
    whole = longest * 16 <= (level + ITEM_BLOCKS) * 17
    room = tl.where(valid, _capacities(load, level, MIN_BLOCKS), 0)
    takes = valid & (whole | (room > 0))
    rank = tl.where(takes, tl.cumsum(takes.to(tl.int32), 0) - 1, 0)  # among those that take tails
    part_ends = tl.sort(tl.where(takes, tl.cumsum(room, 0), NEVER))

    # By rank: the parts of a row's first piece, which has at least MIN_BLOCKS or all of the row, and of its last.
    first = _part_at(part_ends, end - tl.maximum(blocks - MIN_BLOCKS, 0) - 1, LOG2_PARTS)
    last = tl.maximum(_part_at(part_ends, end - MIN_BLOCKS, LOG2_PARTS), first)
    first = tl.where(whole, _in_turn(lane % PARTS, lane // PARTS, PARTS), first)
    last = tl.where(whole, first, last)
    pieces = tl.where(some, last - first + 1, 0)
    n_pieces = tl.sum(pieces, 0)
    begun = tl.histogram(first, PART_LANES, mask=some)
    ended = tl.histogram(last, PART_LANES, mask=some)
    count = begun + tl.cumsum(begun, 0) - begun - (tl.cumsum(ended, 0) - ended)  # and those that go on from before
    first_piece = tl.cumsum(count, 0) - count
    item = tl.where(whole, tl.gather(first_piece, first, 0) + lane // PARTS, tl.cumsum(pieces, 0) - pieces)

    segment_items = tl.load(work_ptr + SEGMENT_ITEMS)
    tl.store(work_ptr + N_ITEMS, segment_items + n_pieces * TILES)
    for tile in tl.static_range(TILES):
        program_ptr = work_ptr + PROGRAM_RANGES + part * TILES + tile
        begin_item = segment_items + tile * n_pieces + tl.gather(first_piece, rank, 0)
        items = tl.where(takes, tl.gather(count, rank, 0), 0)
        tl.store(program_ptr, begin_item, mask=valid)
        tl.store(program_ptr + PROGRAMS, begin_item + items, mask=valid)
    cut = tl.where(pieces > 1, pieces, 0)
    partial = FIRST_PARTIAL + tl.where(pieces > 1, MAX_ROWS + tl.cumsum(cut, 0) - cut, row)
    kv_begin = tl.zeros_like(length)
    for piece in range(0, tl.max(pieces, 0)):
        has = piece < pieces
        cut_at = tl.gather(part_ends, tl.minimum(first + piece, PART_LANES - 1), 0) - (end - blocks)
        kv_end = tl.where(piece < pieces - 1, cut_at * BLOCK_KEYS, length)
        for of_row in range(0, TILES):  # 16 of 128 heads x 8 query tokens, which unrolled take a minute to compile
            item_ptr = work_ptr + FIRST_ITEM + (segment_items + of_row * n_pieces + item + piece) * ITEM_FIELDS
            first_strip = FIRST_STRIP + (row * HEADS + of_row * TILE_ROWS) // STRIP
            tl.store(item_ptr + ITEM_STRIP, first_strip, mask=has)
            tl.store(item_ptr + ITEM_ROWS, tl.minimum(HEADS - of_row * TILE_ROWS, TILE_ROWS), mask=has)
            tl.store(item_ptr + ITEM_BEGIN, kv_begin, mask=has)
            tl.store(item_ptr + ITEM_END, kv_end, mask=has)
            tl.store(item_ptr + ITEM_PAGE, row * table_row, mask=has)
            tl.store(item_ptr + ITEM_PARTIAL, (partial + piece) * HEADS + of_row * TILE_ROWS, mask=has)
            tl.store(item_ptr + ITEM_LAST, (piece == pieces - 1).to(tl.int32), mask=has)
            tl.store(item_ptr + ITEM_FIRST_ROW, of_row * TILE_ROWS, mask=has)
        kv_begin = kv_end
        tl.store(table_ptr + 2 * MAX_ROWS + row * FIRSTS + piece, partial + piece, mask=has & (piece < FIRSTS))
    tl.store(table_ptr + row, partial - FIRST_PARTIAL, mask=row < rows)
    tl.store(table_ptr + MAX_ROWS + row, pieces, mask=row < rows)


def lanes(max_rows: int) -> int:
    """Places in which the kernel sorts the rows of a batch: its work grows with them, not with the rows of a step."""
    return triton.next_power_of_2(max(2, max_rows))


def num_warps(max_rows: int) -> int:
    """Return the warps of the kernel: a thread holds at most eight places in registers."""
    return max(4, lanes(max_rows) // 256)


def schedule_tails(
    lens: Tensor, work: Tensor, table: PartialTable, capacity: AbsorbCapacity, page_table: Tensor
) -> None:
    """Replace the items of the tails, which stand behind those of the segments. A tail without tokens has none.

    Args:
        lens: `[requests]` int32, tokens of each request's private tail, with those of its query tokens.
        work: `[capacity.size]` int32, begun with `empty_work(capacity)` and holding the plan's segments; written.
        table: begun with `empty_tail_table(capacity)`, on the device; written: which partial rows each tail has.
        page_table: `[at least requests, pages]` int32, the pages of each tail. Only its stride is used.
    Raises:
        ValueError: a shape, dtype or size is not as above, or there are too many requests.
    """
    rows = lens.shape[0]
    for name, tensor, shape in (
        ("lens", lens, (rows,)),
        ("work", work, (capacity.size,)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be int32 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    if (table.max_rows, table.max_partials) != (capacity.max_rows, capacity.max_tail_partials):
        raise ValueError(f"a table of {table.max_rows} rows and {table.max_partials} partials is of another capacity")
    if rows > min(capacity.max_rows, page_table.shape[0]):
        have = f"there is room for {capacity.max_rows}, and {page_table.shape[0]} have pages"
        raise ValueError(f"{rows} rows; {have}")
    schedule_tails_kernel[(1,)](
        lens,
        work,
        table.buffer,
        rows,
        page_table.stride(0),
        HEADS=capacity.heads,
        STRIP=capacity.strip_rows,
        PROGRAMS=capacity.programs,
        MAX_ROWS=capacity.max_rows,
        FIRST_PARTIAL=capacity.max_segment_partials,
        FIRST_STRIP=capacity.tail_strips,
        FIRST_ITEM=capacity.first_item,
        MIN_BLOCKS=MIN_BLOCKS,
        ITEM_BLOCKS=ITEM_BLOCKS,
        BLOCK_KEYS=BLOCK_KEYS,
        TILE_ROWS=capacity.tile_rows,
        FIRSTS=FIRSTS,
        LANES=lanes(capacity.max_rows),
        LOG2_PARTS=capacity.programs.bit_length(),
        num_warps=num_warps(capacity.max_rows),
    )
