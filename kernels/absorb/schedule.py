"""The work list of the absorb kernel: which tile of query rows attends to which keys, in which order.

A work item is (up to `tile_rows` query rows, a range of keys that they share): 64, or fewer for a kernel that does not
pad them. The kernel runs a fixed number of programs. There are items of two kinds:

- *Groups*: rows that share a prefix, stacked. Prefixes keep their length, so the host builds these when the plan
  changes. Program p takes items p, p + programs, p + 2·programs and so on.
- *Tails*: the rows of one request and its private keys. They grow by one every step, and the host may not know by how
  much without waiting for the GPU; so the device makes their items anew before every step (tail_schedule.py). A
  program takes a range of them, after its items of groups.

Both stand in one int32 array in static device memory, the groups' items first:

| position | what |
|---|---|
| 0 | n_items |
| 1 | items of groups |
| 8 | of every program: where its tails begin, among the items |
| 8 + `programs` | and end |
| 8 + 2·`programs` | blocks of its items of groups, with what it costs to start them |
| `first_item` | items `[n_items, 8]`, up to `max_items` |
| `tail_segments` | segments of every row of the batch, row by row; never changes |
| `group_segments` | segments of the rows of every group, group by group |

A tail that is not cut has its partial at the place of its row, counted from the first partial of tails. So if that is
where the output begins, such a row needs no merge.

A *segment* is a run of query rows, heads of one query token: the number of the first of them, token · H + head. An item
has up to `tile_rows` / `segment` of them, which is what lets it stack requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..naive.schedule import ITEM_FIELDS
from ..partials import PartialTable
from ..splits import balanced_order, choose_splits, pairs_of_splits

TILE_ROWS = 64
BLOCK_KEYS = 64
"""Keys that the kernel takes at once: a page."""

HEADER_FIELDS = 8
"""In front of the items. An item is: first segment (absolute position), rows, kv_begin, kv_end, first entry in the page
table, first partial row times heads, 1 if these are a request's last keys (of tails only), unused. kv_begin is a
multiple of 64, and kv_end is greater."""

ITEM_BLOCKS = 4
"""What starting and finishing an item costs, about, in blocks (5 to 9 us on an H200, against 1.5 us)."""


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
        max_rows: rows of a batch: query tokens; heads: of each, a multiple of 8; programs: of the kernel's grid.
        tile_rows: query rows of an item, 64, 32, 16 or 8.
        queries: query tokens of each request, each for itself: a row of the batch. They follow each other, and the last
            of them sees all keys.
        stacked: query tokens of each row of the batch, which `heads` counts: their rows share a tile.
        group_partials: partial rows in front of those of tails; by default as many as groups can need.
    """

    max_rows: int
    heads: int
    programs: int
    tile_rows: int = TILE_ROWS
    queries: int = 1
    stacked: int = 1
    group_partials: int | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a request has more tiles than there are programs.
        """
        if self.programs < self.row_tiles:
            raise ValueError(f"{self.heads} heads need {self.row_tiles} programs, but there are {self.programs}")

    @property
    def query_heads(self) -> int:
        """Heads of one query token."""
        return self.heads // self.stacked

    @property
    def segment(self) -> int:
        """Rows of a segment: the longest run that divides both a tile and the heads of a query token."""
        for segment in (self.tile_rows, 32, 16, 8):
            if self.tile_rows % segment == 0 and self.query_heads % segment == 0:
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
        at most two tiles for each program: it takes one range of the line of tails, which has two ends."""
        return self.max_group_partials + self.max_rows + -(-2 * self.programs // self.row_tiles)

    @property
    def max_items(self) -> int:
        return self.max_partial_rows * self.row_tiles

    @property
    def first_item(self) -> int:
        return HEADER_FIELDS + 3 * self.programs

    @property
    def tail_segments(self) -> int:
        return self.first_item + ITEM_FIELDS * self.max_items

    @property
    def group_segments(self) -> int:
        return self.tail_segments + self.max_rows * self.row_segments

    @property
    def size(self) -> int:
        """int32 values in the whole array."""
        return self.group_segments + self.max_rows * self.row_segments

    def empty_group_table(self, device: torch.device | str | None = None) -> PartialTable:
        """A table for the partials of groups, numpy unless a device is given."""
        return PartialTable.empty(self.max_rows, self.max_group_partials, device)

    def empty_tail_table(self, device: torch.device | str) -> PartialTable:
        """A table for the partials of tails. Its list is all of them in order and never changes: those of a row follow
        each other, so the schedule only writes where they begin and how many they are."""
        table = PartialTable.empty(self.max_rows, self.max_partial_rows - self.max_group_partials, device)
        torch.arange(self.max_group_partials, self.max_partial_rows, dtype=torch.int32, out=table.partials)
        return table

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
        head: int32, to go to the front of the work list: what is before the items, and the groups' items.
        first_item: where these begin.
        segments: int32, to go to `group_segments`.
        table: which partial rows each row of the batch has.
    """

    head: np.ndarray
    first_item: int
    segments: np.ndarray
    table: PartialTable

    @property
    def items(self) -> np.ndarray:
        """`[n_items, 8]`"""
        return self.head[self.first_item :].reshape(-1, ITEM_FIELDS)


def build_group_work(groups: Sequence[SharedKeys], capacity: AbsorbCapacity) -> GroupWork:
    """Cut every group into tiles of query rows and its keys into splits, so that all programs end at about the same
    time. Tiles of the same keys stand side by side: they run at the same time, and all but the first read from L2.

    Raises:
        ValueError: a group is empty or has no keys; a row is out of range or in two groups.
    """
    table = capacity.empty_group_table()
    header = np.zeros(capacity.first_item, np.int32)
    if not groups:
        return GroupWork(header, capacity.first_item, np.zeros(0, np.int32), table)
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
    table.write_pairs(*pairs_of_splits(rows, sizes, splits))
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
    header[:2] = len(items)
    costs = -(-(items[:, 3] - items[:, 2]) // BLOCK_KEYS) + ITEM_BLOCKS
    np.add.at(header[HEADER_FIELDS + 2 * capacity.programs :], np.arange(len(items)) % capacity.programs, costs)
    head = np.concatenate([header, items.reshape(-1)])
    return GroupWork(head, capacity.first_item, segments.reshape(-1).astype(np.int32), table)
