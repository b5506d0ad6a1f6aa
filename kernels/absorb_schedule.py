"""The work list of the absorb kernel: which tile of query rows attends to which keys, in which order.

A work item is (up to `tile_rows` query rows, a range of keys that they share): 64, or fewer for a kernel that does not
pad them. The kernel runs a fixed number of programs; program p takes items p, p + programs, p + 2·programs and so on.
There are items of two kinds:

- *Groups*: rows that share a prefix, stacked. Prefixes keep their length, so the host builds these when the plan
  changes.
- *Tails*: the rows of one request and its private keys. They grow by one every step, and the host may not know by how
  much without waiting for the GPU; so the device makes their items anew before every step, from lengths that it has.

Both stand in one int32 array in static device memory, the groups' items first:

| position | what |
|---|---|
| 0 | n_items |
| 1 | items of groups |
| 8 | items `[n_items, 8]`, up to `max_items` |
| `tail_segments` | segments of every row of the batch, row by row; never changes |
| `group_segments` | segments of the rows of every group, group by group |

A tail that is not cut has its partial at the place of its row, counted from the first partial of tails. So if that is
where the output begins, such a row needs no merge.

A *segment* is a run of query rows, of one request, that lie one behind the other: the first of them in the query as
`[T * H, ..]`. An item has up to `tile_rows` / `segment` of them, which is what lets it stack requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .schedule import ITEM_FIELDS, WorkList, WorkListCapacity, balanced_order, choose_splits

TILE_ROWS = 64
BLOCK_KEYS = 64
"""Keys that the kernel takes at once: a page."""

HEADER_FIELDS = 8
"""In front of the items. An item is: first segment (absolute position), rows, kv_begin, kv_end, first entry in the page
table, first partial row times heads, unused, unused. kv_begin is a multiple of 64, and kv_end is greater."""

MIN_SPLIT_BLOCKS = 2
"""A tail is not cut into shorter pieces: starting and finishing an item costs about as much."""


@dataclass(frozen=True)
class SharedKeys:
    """Rows of the batch that attend to the same `length` tokens, from `first_page` of the page table on."""

    rows: tuple[int, ...]
    length: int
    first_page: int


@dataclass(frozen=True)
class AbsorbCapacity:
    """Fixed sizes of a work list and of the partials, which no valid plan and no lengths of tails can exceed.

    Attributes:
        max_rows: query tokens of a batch; heads: of each, a multiple of 8; programs: of the kernel's grid.
        tile_rows: query rows of an item, 64, 32, 16 or 8.
        queries: query tokens of each request. They follow each other, and the last of them sees all keys.
        group_partials: partial rows in front of those of tails; by default as many as groups can need.
    """

    max_rows: int
    heads: int
    programs: int
    tile_rows: int = TILE_ROWS
    queries: int = 1
    group_partials: int | None = None

    @property
    def segment(self) -> int:
        """Rows of a segment: the longest run that divides both a tile and the heads of a request."""
        for segment in (self.tile_rows, 16, 8):
            if self.tile_rows % segment == 0 and self.heads % segment == 0:
                return segment
        raise ValueError(f"heads must be a multiple of 8, not {self.heads}")

    @property
    def row_segments(self) -> int:
        """Segments of one request."""
        return self.heads // self.segment

    @property
    def row_tiles(self) -> int:
        """Tiles of one request that is not stacked."""
        return -(-self.heads // self.tile_rows)

    @property
    def max_group_partials(self) -> int:
        """By default, every row has one, and splitting needs no more than those that give each program a tile of its
        own."""
        if self.group_partials is not None:
            return self.group_partials
        return self.max_rows + -(-self.programs * self.tile_rows // self.heads)

    @property
    def max_partial_rows(self) -> int:
        """Of groups, and behind them of tails: one for every row, and then the pieces of tails that are cut. Those have
        at most two tiles for each program: an even share of all keys, and one more for each cut tail, which is longer
        than a share."""
        return self.max_group_partials + self.max_rows + -(-2 * self.programs // self.row_tiles)

    @property
    def max_items(self) -> int:
        return self.max_partial_rows * self.row_tiles

    @property
    def tail_segments(self) -> int:
        return HEADER_FIELDS + ITEM_FIELDS * self.max_items

    @property
    def group_segments(self) -> int:
        return self.tail_segments + self.max_rows * self.row_segments

    @property
    def size(self) -> int:
        """int32 values in the whole array."""
        return self.group_segments + self.max_rows * self.row_segments

    @property
    def table(self) -> WorkListCapacity:
        """Sizes of the two tables that say which partials a row has, in groups and of its tail; for merge.py."""
        return WorkListCapacity(self.max_rows, self.max_partial_rows, max_items=0, max_chunks=0)

    def uncut_rows(self, partial_out: Tensor, rows: int) -> Tensor:
        """`[rows, heads, ..]`: where the partials of tails that are not cut are, among `[max_partial_rows, heads, ..]`.
        It can be the output of a merge (`out_in_partials`), which then leaves them alone."""
        return partial_out[self.max_group_partials :][:rows]

    def empty_work(self) -> np.ndarray:
        """`[size]` int32: a work list without items."""
        work = np.zeros(self.size, np.int32)
        work[self.tail_segments : self.group_segments] = np.arange(self.max_rows * self.row_segments) * self.segment
        return work


@dataclass(frozen=True)
class GroupWork:
    """What the host says of a plan's groups.

    Attributes:
        head: int32, to go to the front of the work list: the header and the groups' items.
        segments: int32, to go to `group_segments`.
        table: which partial rows each row of the batch has.
    """

    head: np.ndarray
    segments: np.ndarray
    table: WorkList

    @property
    def items(self) -> np.ndarray:
        """`[n_items, 8]`"""
        return self.head[HEADER_FIELDS:].reshape(-1, ITEM_FIELDS)


def build_group_work(groups: Sequence[SharedKeys], capacity: AbsorbCapacity) -> GroupWork:
    """Cut every group into tiles of query rows and its keys into splits, so that all programs end at about the same
    time. Tiles of the same keys stand side by side: they run at the same time, and all but the first read from L2.

    Raises:
        ValueError: a group is empty or has no keys; a row is out of range or in two groups.
    """
    table = WorkList(np.zeros(capacity.table.size, np.int32), capacity.table, n_items=0, used=capacity.table.size)
    if not groups:
        return GroupWork(np.zeros(HEADER_FIELDS, np.int32), np.zeros(0, np.int32), table)
    sizes = np.array([len(group.rows) for group in groups])
    lengths = np.array([group.length for group in groups])
    first_pages = np.array([group.first_page for group in groups])
    rows = np.array([row for group in groups for row in group.rows], np.int64)
    if sizes.min() < 1 or lengths.min() < 1:
        raise ValueError(f"every group needs rows and keys; their rows are {sizes}, their keys {lengths}")
    if rows.min() < 0 or rows.max() >= capacity.max_rows or np.unique(rows).size != rows.size:
        raise ValueError(f"every row must be in [0, {capacity.max_rows}) and in one group only; found {rows}")

    heads, segment, row_segments = capacity.heads, capacity.segment, capacity.row_segments
    tile_rows = capacity.tile_rows
    tile_segments = tile_rows // segment
    blocks = -(-lengths // BLOCK_KEYS)
    tiles = -(-sizes * row_segments // tile_segments)
    splits = choose_splits(sizes, tiles, blocks, heads, BLOCK_KEYS, capacity.max_group_partials, capacity.programs)
    row_start = np.cumsum(sizes) - sizes  # rows of the groups before
    partial_start = np.cumsum(splits * sizes) - splits * sizes
    table.row_partial_start[rows] = np.repeat(partial_start - row_start, sizes) + np.arange(len(rows))
    table.row_partial_stride[rows] = np.repeat(sizes, sizes)
    table.row_splits[rows] = np.repeat(splits, sizes)
    segments = rows[:, None] * heads + np.arange(row_segments) * segment  # [rows, row_segments]

    # Position of an item in its group: split * tiles + tile.
    items_of = tiles * splits
    group = np.repeat(np.arange(len(groups)), items_of)
    position = np.arange(len(group)) - np.repeat(np.cumsum(items_of) - items_of, items_of)
    split, tile = np.divmod(position, tiles[group])
    kv_begin = split * blocks[group] // splits[group] * BLOCK_KEYS
    kv_end = np.minimum((split + 1) * blocks[group] // splits[group] * BLOCK_KEYS, lengths[group])
    items = np.zeros((len(group), ITEM_FIELDS), np.int32)
    items[:, 0] = capacity.group_segments + row_start[group] * row_segments + tile * tile_segments
    items[:, 1] = np.minimum(sizes[group] * heads - tile * tile_rows, tile_rows)
    items[:, 2] = kv_begin
    items[:, 3] = kv_end
    items[:, 4] = first_pages[group]
    items[:, 5] = (partial_start[group] + split * sizes[group]) * heads + tile * tile_rows
    items = items[balanced_order(kv_end - kv_begin, capacity.programs)]
    head = np.concatenate([np.zeros(HEADER_FIELDS, np.int32), items.reshape(-1)])
    head[:2] = len(items)
    return GroupWork(head, segments.reshape(-1).astype(np.int32), table)


@triton.jit
def _longest_piece(blocks, PROGRAMS: tl.constexpr, TILES: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Blocks that a piece of a tail may have at most: an even share of all, or some more if that leaves no program with
    two pieces and ends earlier."""
    share = tl.maximum(tl.cdiv(tl.sum(blocks, 0) * TILES, PROGRAMS), MIN_BLOCKS)
    pieces = tl.cdiv(blocks, share)
    limit = share
    some = blocks > 0
    if (tl.sum(pieces, 0) * TILES > PROGRAMS) & (tl.sum(some.to(tl.int32), 0) * TILES <= PROGRAMS):
        # With two pieces for some programs the last one ends about when a longest and a shortest one are done.
        of_row = tl.cdiv(blocks, tl.maximum(pieces, 1))
        end = tl.max(of_row, 0) + tl.min(tl.where(some, of_row, 1 << 30), 0)
        waiting = end > 0
        for step in tl.static_range(1, 17):
            longer = share + tl.cdiv(share * step, 16)
            fits = tl.sum(tl.cdiv(blocks, longer), 0) * TILES <= PROGRAMS
            limit = tl.where(waiting & fits & (longer <= end), longer, limit)
            waiting = waiting & (fits == 0)
    return limit


@triton.jit
def _load_lengths(lens_ptr, row, rows, QUERIES: tl.constexpr):
    """Keys that a row of the batch sees, 0 behind the last row. Query tokens before a request's last see fewer."""
    length = tl.load(lens_ptr + row // QUERIES, mask=row < rows, other=0)
    return tl.maximum(length - (QUERIES - 1 - row % QUERIES), 0)


@triton.jit(do_not_specialize=["rows", "table_row"])
def schedule_tails_kernel(
    lens_ptr,  # int32 [rows / QUERIES]
    work_ptr,  # int32, the work list
    table_ptr,  # int32, see schedule.WorkList; only the entries of rows
    rows,
    table_row,  # entries between two rows of the page table: SGLang's grows while it runs
    HEADS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    FIRST_PARTIAL: tl.constexpr,
    FIRST_SEGMENT: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADER: tl.constexpr,
    ITEM: tl.constexpr,
    LANES: tl.constexpr,  # a power of two, at least MAX_ROWS
):
    TILES: tl.constexpr = (HEADS + TILE_ROWS - 1) // TILE_ROWS
    lane = tl.arange(0, LANES)
    blocks = tl.cdiv(_load_lengths(lens_ptr, lane, rows, QUERIES), BLOCK_KEYS)
    limit = _longest_piece(blocks, PROGRAMS, TILES, MIN_BLOCKS)
    longest = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, limit), 1))  # of the row's items
    # Rows by their longest item, equal ones in their order: the row is in the low digits of what is sorted.
    row = LANES - 1 - tl.sort(longest * LANES + (LANES - 1 - lane), descending=True) % LANES
    length = _load_lengths(lens_ptr, row, rows, QUERIES)
    blocks = tl.cdiv(length, BLOCK_KEYS)
    splits = tl.cdiv(blocks, limit)
    before = tl.cumsum(splits, 0) - splits  # splits of the rows before, in this order
    pieces = tl.where(splits > 1, splits, 0)
    partial = FIRST_PARTIAL + tl.where(splits > 1, MAX_ROWS + tl.cumsum(pieces, 0) - pieces, row)
    group_items = tl.load(work_ptr + 1)
    tl.store(work_ptr, group_items + tl.sum(splits, 0) * TILES)
    for split in range(0, tl.max(splits, 0)):
        has = split < splits
        kv_begin = split * blocks // tl.maximum(splits, 1) * BLOCK_KEYS
        kv_end = tl.minimum((split + 1) * blocks // tl.maximum(splits, 1) * BLOCK_KEYS, length)
        for tile in tl.static_range(TILES):
            item_ptr = work_ptr + HEADER + (group_items + (before + split) * TILES + tile) * ITEM
            first_segment = FIRST_SEGMENT + (row * HEADS + tile * TILE_ROWS) // SEGMENT
            tl.store(item_ptr, first_segment, mask=has)
            tl.store(item_ptr + 1, tl.minimum(HEADS - tile * TILE_ROWS, TILE_ROWS), mask=has)
            tl.store(item_ptr + 2, kv_begin, mask=has)
            tl.store(item_ptr + 3, kv_end, mask=has)
            tl.store(item_ptr + 4, row // QUERIES * table_row, mask=has)
            tl.store(item_ptr + 5, (partial + split) * HEADS + tile * TILE_ROWS, mask=has)
    row_ptr = table_ptr + ITEM + MAX_ROWS + row
    tl.store(row_ptr, partial, mask=row < rows)
    tl.store(row_ptr + MAX_ROWS, 1, mask=row < rows)
    tl.store(row_ptr + 2 * MAX_ROWS, splits, mask=row < rows)


def schedule_tails(lens: Tensor, work: Tensor, table: Tensor, capacity: AbsorbCapacity, page_table: Tensor) -> None:
    """Put the items of the tails behind those of the groups, in place of the ones that were there.

    Pieces of a tail are as long as a program's even share of all of them, or up to twice as long, so that there are at
    most `programs` pieces beside one for each row. Longest pieces first. A tail without tokens has none.

    Args:
        lens: `[requests]` int32, tokens of each request's private tail. A batch has `capacity.queries` rows for each.
        work: `[capacity.size]` int32, begun with `capacity.empty_work()` and holding the plan's groups; written.
        table: `[capacity.table.size]` int32, written: which partial rows each row's tail has.
        page_table: `[at least requests, pages]` int32, the pages of each tail. Only its stride is used.
    Raises:
        ValueError: a shape or dtype is not as above.
    """
    requests = lens.shape[0]
    rows = requests * capacity.queries
    for name, tensor, shape in (
        ("lens", lens, (requests,)),
        ("work", work, (capacity.size,)),
        ("table", table, (capacity.table.size,)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be int32 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    if rows > capacity.max_rows or requests > page_table.shape[0]:
        have = f"there is room for {capacity.max_rows} rows, and {page_table.shape[0]} requests have pages"
        raise ValueError(f"{requests} requests, {rows} rows; {have}")
    schedule_tails_kernel[(1,)](
        lens,
        work,
        table,
        rows,
        page_table.stride(0),
        HEADS=capacity.heads,
        SEGMENT=capacity.segment,
        PROGRAMS=capacity.programs,
        MAX_ROWS=capacity.max_rows,
        FIRST_PARTIAL=capacity.max_group_partials,
        FIRST_SEGMENT=capacity.tail_segments,
        MIN_BLOCKS=MIN_SPLIT_BLOCKS,
        BLOCK_KEYS=BLOCK_KEYS,
        TILE_ROWS=capacity.tile_rows,
        QUERIES=capacity.queries,
        HEADER=HEADER_FIELDS,
        ITEM=ITEM_FIELDS,
        LANES=triton.next_power_of_2(capacity.max_rows),
        num_warps=4,
    )
