"""The work list of the absorb kernels: which tile of query rows attends to which keys, in which order.

A work item is (up to `tile_rows` query rows, a range of keys that they share): 64 rows, or fewer for a kernel that does
not pad them. A kernel runs a fixed number of programs. There are two kinds of items:

- *Segments*: rows of the batch that share a token range, stacked. Segments keep their length between plans, so the host
  builds their items when the plan changes. Program p takes items p, p + programs, p + 2 · programs and so on.
- *Tails*: the rows of one request and its private keys. Tails grow every step, and the host may not know by how much
  without waiting for the GPU; so the device builds their items anew before every step (tail_schedule.py). A program
  takes a contiguous range of them, after its items of segments.

In a list, a row of the batch is a request: the heads of all its query tokens, one after the other, in as many tiles as
they fill. So query tokens share tiles, and their tiles, which run at the same time, the keys. Over a segment all of
them see all keys. Over a tail they see one key after the other, the last one all of them: for that the kernels have a
mask, which concerns an item with the last keys of its request (`ITEM_LAST`) and depends on which of the request's rows
it has (`ITEM_FIRST_ROW`).

Both stand in one int32 array in static device memory, whose fields items.py names:

| position | what |
|---|---|
| `N_ITEMS` | number of items |
| `SEGMENT_ITEMS` | of these, items of segments |
| `PROGRAM_RANGES` | for every program, the item at which its tails begin |
| + `programs` | for every program, the item behind its last tail |
| + 2 · `programs` | for every program, the cost of its items of segments, in blocks |
| `first_item` | items `[n_items, ITEM_FIELDS]`, those of segments first, up to `max_items` |
| `tail_strips` | the strips of every row of the batch, row by row; never change |
| `segment_strips` | the strips of the rows of every segment, segment by segment |

A *strip* is consecutive query rows, heads of one query token, given by its first row, token · heads + head. An
item has up to `tile_rows` / `strip_rows` strips: that is what lets it stack requests, and a strip is what TMA copies at
once.

A tail that is not cut has its partial at the place of its row, counted from the first partial of tails. If the output
begins there, such a row needs no merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sglang_mla_ext.segment import Segment

from ..partials import PartialTable
from ..splits import balanced_order, choose_splits, entries_of_partials
from .items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_PAGE,
    ITEM_PARTIAL,
    ITEM_ROWS,
    ITEM_STRIP,
    N_ITEMS,
    PROGRAM_RANGES,
    SEGMENT_ITEMS,
)
from .stacking import TILE_ROWS

BLOCK_KEYS = 64
"""Keys that a kernel takes at once: one page."""

ITEM_BLOCKS = 4
"""Approximate cost of starting and finishing an item, in blocks (5 to 9 us on an H200, against 1.5 us for a block)."""


@dataclass(frozen=True)
class AbsorbCapacity:
    """Fixed sizes of a work list and of the partials, which no valid plan and no lengths of tails can exceed.

    Attributes:
        max_rows: rows of a batch, which are requests.
        heads: of each row: those of all its query tokens, a multiple of 8 for each.
        programs: of the kernel's grid.
        tile_rows: query rows of an item: 64, 32, 16 or 8.
        query_tokens: of each row.
        segment_rows: rows of all segments together, where a row counts once for each segment that it is in; by default
            `max_rows`, enough where segments are disjoint.
        segment_partials: partial rows in front of those of tails; by default as many as segments can need.
    """

    max_rows: int
    heads: int
    programs: int
    tile_rows: int = TILE_ROWS
    query_tokens: int = 1
    segment_rows: int | None = None
    segment_partials: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a request has more tiles than there are programs, or more query tokens than a block has keys.
        """
        if self.query_tokens > BLOCK_KEYS:  # those that not all of them see would be in more than two blocks
            raise ValueError(f"a request has at most {BLOCK_KEYS} query tokens, not {self.query_tokens}")
        if self.programs < self.row_tiles:
            raise ValueError(f"{self.heads} heads need {self.row_tiles} programs, but there are {self.programs}")

    @property
    def query_heads(self) -> int:
        """Heads of one query token."""
        return self.heads // self.query_tokens

    @property
    def strip_rows(self) -> int:
        """Query rows of a strip: the largest number that divides both a tile and the heads of a query token."""
        for strip in (self.tile_rows, 32, 16, 8):
            if self.tile_rows % strip == 0 and self.query_heads % strip == 0:
                return strip
        raise ValueError(f"heads must be a multiple of 8, not {self.query_heads}")

    @property
    def row_strips(self) -> int:
        """Strips of one row of the batch."""
        return self.heads // self.strip_rows

    @property
    def row_tiles(self) -> int:
        """Tiles of one row of the batch that is not stacked with other rows."""
        return -(-self.heads // self.tile_rows)

    @property
    def max_segment_rows(self) -> int:
        """Rows of all segments together."""
        return self.max_rows if self.segment_rows is None else self.segment_rows

    @property
    def max_segment_partials(self) -> int:
        """Most partial rows of segments. By default every row of a segment has one, and splitting needs no more than
        those that give each program a tile of its own."""
        if self.segment_partials is not None:
            return self.segment_partials
        return self.max_segment_rows + -(-self.programs * self.tile_rows // self.heads)

    @property
    def max_tail_partials(self) -> int:
        """Most partial rows of tails: one for every row, and then the pieces of tails that are cut. Those have at most
        two tiles for each program: it takes one range of the line of tails, and a range has two ends."""
        return self.max_rows + -(-2 * self.programs // self.row_tiles)

    @property
    def max_partial_rows(self) -> int:
        """Partial rows in all, at most: those of segments, and behind them those of tails."""
        return self.max_segment_partials + self.max_tail_partials

    @property
    def max_items(self) -> int:
        return self.max_partial_rows * self.row_tiles

    @property
    def first_item(self) -> int:
        return int(PROGRAM_RANGES) + 3 * self.programs

    @property
    def tail_strips(self) -> int:
        return self.first_item + int(ITEM_FIELDS) * self.max_items

    @property
    def segment_strips(self) -> int:
        return self.tail_strips + self.max_rows * self.row_strips

    @property
    def size(self) -> int:
        """int32 values in the whole array."""
        return self.segment_strips + self.max_segment_rows * self.row_strips

    def uncut_rows(self, partial_out: Tensor, rows: int) -> Tensor:
        """Return `[rows, heads, ..]`: the partials of tails that are not cut, among `[max_partial_rows, heads, ..]`.
        This can be the output of a merge (`out_in_partials`), which then leaves them alone."""
        return partial_out[self.max_segment_partials :][:rows]


def empty_work(capacity: AbsorbCapacity) -> np.ndarray:
    """Return a work list without items, `[size]` int32."""
    work = np.zeros(capacity.size, np.int32)
    work[capacity.tail_strips : capacity.segment_strips] = (
        np.arange(capacity.max_rows * capacity.row_strips) * capacity.strip_rows
    )
    return work


def empty_tail_table(capacity: AbsorbCapacity) -> PartialTable:
    """Return a table in which no row has a tail. The partials of a tail lie side by side, so what the device writes
    before every step is where each row's begin and how many there are; the list itself is that of all partials of
    tails, and stays."""
    table = PartialTable.empty(capacity.max_rows, capacity.max_tail_partials)
    table.partials[:] = capacity.max_segment_partials + np.arange(capacity.max_tail_partials)
    return table


@dataclass(frozen=True)
class SegmentWork:
    """Data that the host writes for a plan's segments.

    Attributes:
        head: int32, for the front of the work list: the header and the segments' items.
        first_item: position in it at which the items begin.
        strips: int32, for `segment_strips`.
        table: partial rows of segments that each row of the batch has.
    """

    head: np.ndarray
    first_item: int
    strips: np.ndarray
    table: PartialTable

    @property
    def items(self) -> np.ndarray:
        """Items of the segments, `[n_items, ITEM_FIELDS]`."""
        return self.head[self.first_item :].reshape(-1, int(ITEM_FIELDS))


def build_segment_work(
    segments: Sequence[Segment], first_pages: Sequence[int], capacity: AbsorbCapacity, tail_tokens: int = 0
) -> SegmentWork:
    """Cut every segment into tiles of query rows and its keys into splits, so that all programs end at about the same
    time. Tiles of the same keys stand side by side: they run at the same time, and all but the first read from L2.

    Args:
        first_pages: `[segments]`, the entry of the page table, as a flat array, that holds the page of each `start`.
        tail_tokens: approximate number of tokens of all tails in the same list.
    Raises:
        ValueError: a segment is empty or has no keys; a row is out of range or twice in one segment; the segments have
            more rows, or need more partials, than there is room for.
    """
    table = PartialTable.empty(capacity.max_rows, capacity.max_segment_partials)
    header = np.zeros(capacity.first_item, np.int32)
    if not segments:
        return SegmentWork(header, capacity.first_item, np.zeros(0, np.int32), table)
    sizes = np.array([len(segment.rows) for segment in segments])
    lengths = np.array([segment.tokens for segment in segments])
    pages = np.array(first_pages)
    rows = np.array([row for segment in segments for row in segment.rows], np.int64)
    of_segment = np.repeat(np.arange(len(segments)), sizes)
    if sizes.min() < 1 or lengths.min() < 1:
        raise ValueError(f"every segment needs rows and keys; their rows are {sizes}, their keys {lengths}")
    if len(rows) > capacity.max_segment_rows:
        raise ValueError(f"segments of {len(rows)} rows, but there is room for {capacity.max_segment_rows}")
    twice = np.unique(of_segment * capacity.max_rows + rows).size != rows.size
    if rows.min() < 0 or rows.max() >= capacity.max_rows or twice:
        raise ValueError(f"every row must be in [0, {capacity.max_rows}) and once in a segment; found {rows}")

    heads, strip_rows, row_strips = capacity.heads, capacity.strip_rows, capacity.row_strips
    tile_rows = capacity.tile_rows
    tile_strips = tile_rows // strip_rows
    blocks = -(-lengths // BLOCK_KEYS)
    tiles = -(-sizes * row_strips // tile_strips)
    most, tail_keys = capacity.max_segment_partials, tail_tokens * capacity.row_tiles
    splits = choose_splits(sizes, tiles, blocks, heads, BLOCK_KEYS, most, capacity.programs, tail_keys)
    row_start = np.cumsum(sizes) - sizes  # rows of the segments before
    partial_start = np.cumsum(splits * sizes) - splits * sizes
    batch_rows = rows[entries_of_partials(sizes, splits)]
    table.write_pairs(batch_rows, np.arange(len(batch_rows)))
    strips = rows[:, None] * heads + np.arange(row_strips) * strip_rows  # [rows, row_strips]

    # Position of an item in its segment: split * tiles + tile.
    items_of = tiles * splits
    owner = np.repeat(np.arange(len(segments)), items_of)
    position = np.arange(len(owner)) - np.repeat(np.cumsum(items_of) - items_of, items_of)
    split, tile = np.divmod(position, tiles[owner])
    kv_begin = split * blocks[owner] // splits[owner] * BLOCK_KEYS
    kv_end = np.minimum((split + 1) * blocks[owner] // splits[owner] * BLOCK_KEYS, lengths[owner])
    items = np.zeros((len(owner), int(ITEM_FIELDS)), np.int32)
    items[:, ITEM_STRIP] = capacity.segment_strips + row_start[owner] * row_strips + tile * tile_strips
    items[:, ITEM_ROWS] = np.minimum(sizes[owner] * heads - tile * tile_rows, tile_rows)
    items[:, ITEM_BEGIN] = kv_begin
    items[:, ITEM_END] = kv_end
    items[:, ITEM_PAGE] = pages[owner]
    items[:, ITEM_PARTIAL] = (partial_start[owner] + split * sizes[owner]) * heads + tile * tile_rows
    items = items[balanced_order(kv_end - kv_begin, capacity.programs)]
    header[N_ITEMS] = header[SEGMENT_ITEMS] = len(items)
    costs = -(-(items[:, ITEM_END] - items[:, ITEM_BEGIN]) // BLOCK_KEYS) + ITEM_BLOCKS
    loads = header[int(PROGRAM_RANGES) + 2 * capacity.programs :]
    np.add.at(loads, np.arange(len(items)) % capacity.programs, costs)
    head = np.concatenate([header, items.reshape(-1)])
    return SegmentWork(head, capacity.first_item, strips.reshape(-1).astype(np.int32), table)
