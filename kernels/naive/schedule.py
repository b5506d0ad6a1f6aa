"""The work list of the naive kernels: which row tile of which head attends to which keys, in which order.

A work item is (head, up to `block_rows` rows of one segment, a range of its keys). The kernel runs a fixed number of
programs; program p takes items p, p + programs, p + 2·programs and so on. The list is built on the host when the plan
changes, and all of it is one int32 array, so that one copy brings it to the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sglang_mla_ext.segment import Segment

from ..partials import Array, PartialTable
from ..sizes import CHUNK_TOKENS
from ..splits import balanced_order, choose_splits, entries_of_partials
from . import items as fields
from .items import GROUP_ROWS, ITEM_FIELDS


@dataclass(frozen=True)
class WorkListCapacity:
    """Fixed sizes of a work list, and so of the static buffers that hold it.

    Attributes:
        max_rows: rows of the batch.
        max_partial_rows: rows of the partials' tensor, one for each split of each row of each segment; also the most
            entries that group_rows can have.
        max_items: work items.
        max_chunks: chunks of all segments together.
    """

    max_rows: int
    max_partial_rows: int
    max_items: int
    max_chunks: int

    @classmethod
    def compute(
        cls, *, max_rows: int, heads: int, chunks: int, block_rows: int, target_items: int, segments_per_row: int = 1
    ) -> WorkListCapacity:
        """Return sizes that no plan can exceed whose rows are in `segments_per_row` segments on average, over distinct
        chunks of a pool of `chunks`.

        Partial rows are what costs memory (`heads · v_head_dim` floats each): a row has one for each of its segments,
        and splitting needs no more than those that give each of the `target_items` programs a row tile of its own.
        """
        max_partial_rows = segments_per_row * max_rows + -(-target_items * block_rows // heads)
        return cls(max_rows, max_partial_rows, heads * max_partial_rows, chunks * max_rows)

    @property
    def table_offset(self) -> int:
        """Position of the table of partials, behind group_rows."""
        return GROUP_ROWS.value + self.max_partial_rows

    @property
    def items_offset(self) -> int:
        """Position of the first item; everything before it has a fixed place (see WorkList)."""
        return self.table_offset + PartialTable.size_for(self.max_rows, self.max_partial_rows)

    @property
    def size(self) -> int:
        """int32 values in the whole array."""
        return self.items_offset + ITEM_FIELDS.value * self.max_items + self.max_chunks

    def table_of(self, work: Array) -> PartialTable:
        """The table of partials in a work list, numpy or tensor."""
        return PartialTable(work[self.table_offset : self.items_offset], self.max_rows, self.max_partial_rows)


@dataclass(frozen=True)
class WorkList:
    """One int32 array and where things are in it.

    | position | what |
    |---|---|
    | 0 to 7 | n_items of the kernel's tile that the list is for, at the tile's slot; 0 elsewhere |
    | 8 | group_rows `[max_partial_rows]`: rows of the batch, segment by segment |
    | table_offset | a PartialTable of `max_rows` rows and `max_partial_rows` partials |
    | items_offset | items `[n_items, 8]`, see items.py |
    | right behind the items | chunk_table; an item holds the absolute position of its segment's first entry |

    Only the first `used` values mean anything and need copying.
    """

    buffer: np.ndarray  # [capacity.size] int32
    capacity: WorkListCapacity
    n_items: int
    used: int

    @property
    def group_rows(self) -> np.ndarray:
        return self.buffer[GROUP_ROWS.value : self.capacity.table_offset]

    @property
    def table(self) -> PartialTable:
        """Table of the partials of each row."""
        return self.capacity.table_of(self.buffer)

    @property
    def items(self) -> np.ndarray:
        start, width = self.capacity.items_offset, ITEM_FIELDS.value
        return self.buffer[start : start + self.n_items * width].reshape(self.n_items, width)


def build_work_list(
    segments: Sequence[Segment],
    *,
    heads: int,
    block_rows: int,
    block_keys: int,
    capacity: WorkListCapacity,
    target_items: int,
    slot: int = 0,
    out: np.ndarray | None = None,
) -> WorkList:
    """Cut the attention of all segments into work items of about equal size, one or more for each program.

    Keys of a segment are split evenly, at multiples of `block_keys`; how often is chosen for all segments together (see
    `choose_splits`), so that a long segment is cut more often than a short one. The row tiles of one head and key range
    stand side by side: they run at the same time, and all but the first read their keys from L2.

    Args:
        target_items: programs of the kernel's grid.
        slot: of the tile among those that a graph may launch one after the other; the others find no items.
        out: `[capacity.size]` int32 to build into (a pinned staging buffer); allocated if not given.
    Raises:
        ValueError: a segment is invalid (without rows, a row twice or out of range, tokens < 1, too few chunks), or the
            result does not fit the capacity.
    """
    if block_keys <= 0 or CHUNK_TOKENS % block_keys:
        raise ValueError(f"block_keys must divide {CHUNK_TOKENS}, not {block_keys}")
    if out is None:
        out = np.zeros(capacity.size, np.int32)
    elif out.shape != (capacity.size,) or out.dtype != np.int32:
        raise ValueError(f"out must be int32 [{capacity.size}], not {out.dtype} {list(out.shape)}")
    group_rows = _validated_rows(segments, capacity.max_rows)
    out[: capacity.items_offset] = 0
    if not segments:
        return WorkList(out, capacity, 0, capacity.items_offset)

    sizes = tuple(len(segment.rows) for segment in segments)
    lengths = tuple(segment.tokens for segment in segments)
    division = _divide(sizes, lengths, heads, block_rows, block_keys, capacity, target_items)
    work = WorkList(out, capacity, len(division.items), division.used)
    out[fields.N_ITEMS.value + slot] = work.n_items
    work.group_rows[: len(group_rows)] = group_rows
    work.table.write_pairs(group_rows[division.entries], np.arange(len(division.entries)))
    work.items[:] = division.items
    for start, size, segment in zip(division.table_start, division.table_size, segments, strict=True):
        out[start : start + size] = segment.chunks[:size]
    return work


@dataclass(frozen=True)
class _Division:
    """Parts of a work list that depend on the segments' sizes and lengths alone.

    Attributes:
        items: `[n_items, 8]` int32, in their order.
        entries: `[partials]`, entry of group_rows that each partial is of.
        table_start, table_size: `[segments]`, of each segment's part of the chunk table.
        used: see WorkList.
    """

    items: np.ndarray
    entries: np.ndarray
    table_start: list[int]
    table_size: list[int]
    used: int


# Under continuous batching rows come and go at every step, but a group soon has a size again that it had before. In
# prefill its rows are the new tokens, and some hundred sizes come back.
@lru_cache(maxsize=512)
def _divide(
    sizes: tuple[int, ...],
    lengths: tuple[int, ...],
    heads: int,
    block_rows: int,
    block_keys: int,
    capacity: WorkListCapacity,
    target_items: int,
) -> _Division:
    """Cut segments of so many rows and tokens; arguments and errors are those of `build_work_list`."""
    rows_of, tokens_of = np.array(sizes), np.array(lengths)
    tiles = -(-rows_of // block_rows)  # row tiles of a segment
    blocks = -(-tokens_of // block_keys)  # key blocks of a segment
    splits = choose_splits(rows_of, tiles * heads, blocks, heads, block_keys, capacity.max_partial_rows, target_items)

    row_start = np.cumsum(rows_of) - rows_of  # first entry in group_rows
    partial_start = np.cumsum(splits * rows_of) - splits * rows_of  # first partial row
    items_of = heads * tiles * splits
    n_items = int(items_of.sum())
    table_size = -(-tokens_of // CHUNK_TOKENS)
    table_start = capacity.items_offset + n_items * ITEM_FIELDS.value + np.cumsum(table_size) - table_size
    if n_items > capacity.max_items:
        raise ValueError(f"{n_items} work items, but there is room for {capacity.max_items}")
    if table_size.sum() > capacity.max_chunks:
        raise ValueError(f"{table_size.sum()} chunks in all segments, but there is room for {capacity.max_chunks}")

    # Position of an item in its segment: ((split * heads) + head) * tiles + tile.
    segment = np.repeat(np.arange(len(sizes)), items_of)
    position = np.arange(n_items) - np.repeat(np.cumsum(items_of) - items_of, items_of)
    position, tile = np.divmod(position, tiles[segment])
    split, head = np.divmod(position, heads)
    first_row = tile * block_rows
    begin = split * blocks[segment] // splits[segment] * block_keys
    end = np.minimum((split + 1) * blocks[segment] // splits[segment] * block_keys, tokens_of[segment])
    items = np.zeros((n_items, ITEM_FIELDS.value), np.int32)
    items[:, fields.ITEM_HEAD.value] = head
    items[:, fields.ITEM_FIRST_ROW.value] = row_start[segment] + first_row
    items[:, fields.ITEM_ROWS.value] = np.minimum(rows_of[segment] - first_row, block_rows)
    items[:, fields.ITEM_BEGIN.value] = begin
    items[:, fields.ITEM_END.value] = end
    items[:, fields.ITEM_CHUNKS.value] = table_start[segment]
    items[:, fields.ITEM_PARTIAL.value] = partial_start[segment] + split * rows_of[segment] + first_row
    return _Division(
        items[balanced_order(end - begin, target_items)],
        entries_of_partials(rows_of, splits),
        table_start.tolist(),
        table_size.tolist(),
        used=int(table_start[-1] + table_size[-1]),
    )


def _validated_rows(segments: Sequence[Segment], max_rows: int) -> np.ndarray:
    """All rows, segment by segment, as int64 `[sum of the segments' rows]`."""
    for index, segment in enumerate(segments):
        if not segment.rows:
            raise ValueError(f"segment {index} has no rows")
        if segment.tokens < 1:
            raise ValueError(f"segment {index} has {segment.tokens} tokens; leave out segments without any")
        if len(segment.chunks) * CHUNK_TOKENS < segment.tokens:
            raise ValueError(f"segment {index}: {len(segment.chunks)} chunks cannot hold {segment.tokens} tokens")
    rows = np.concatenate([np.empty(0, np.int64), *(np.asarray(segment.rows, np.int64) for segment in segments)])
    if rows.size and (rows.min() < 0 or rows.max() >= max_rows):
        raise ValueError(f"rows must be in [0, {max_rows}); found {rows.min()} to {rows.max()}")
    segment_of = np.repeat(np.arange(len(segments)), [len(segment.rows) for segment in segments])
    in_order = np.sort(segment_of * max_rows + rows)
    if (in_order[1:] == in_order[:-1]).any():
        raise ValueError("a row is twice in one segment")
    return rows
