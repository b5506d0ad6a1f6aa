"""The work list of the naive kernel: which row tile of which head attends to which keys, in which order.

A work item is (head, up to `block_rows` rows of one group, a range of keys). The kernel runs a fixed number of
programs; program p takes items p, p + programs, p + 2·programs and so on. The list is built on the host once per plan,
and all of it is one int32 array, so that one copy brings it to the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..constants import CHUNK_TOKENS
from ..partials import Array, PartialTable
from ..splits import balanced_order, choose_splits, pairs_of_splits

ITEM_FIELDS = 8
"""head, first entry in group_rows, rows, kv_begin, kv_end, first entry in chunk_table, first partial row, unused."""


@dataclass(frozen=True)
class PrefixGroup:
    """Rows of the batch that share a prefix.

    `chunks` are the ids of the chunks that hold tokens [0, prefix_len) in order; longer than needed is allowed.
    """

    rows: tuple[int, ...]
    prefix_len: int
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class WorkListCapacity:
    """Fixed sizes of a work list, and so of the static buffers that hold it."""

    max_rows: int
    max_partial_rows: int
    max_items: int
    max_chunks: int

    @classmethod
    def compute(cls, *, max_rows: int, heads: int, chunks: int, block_rows: int, target_items: int) -> WorkListCapacity:
        """Sizes that no valid list of groups can exceed, for a pool of `chunks` chunks.

        Partial rows are what costs memory (`heads · v_head_dim` floats each): every row has one, and splitting needs
        no more than those that give each of the `target_items` programs a row tile of its own.
        """
        max_partial_rows = max_rows + -(-target_items * block_rows // heads)
        return cls(max_rows, max_partial_rows, heads * max_partial_rows, chunks * max_rows)

    @property
    def table_offset(self) -> int:
        """Position of the table of partials, behind group_rows."""
        return ITEM_FIELDS + self.max_partial_rows

    @property
    def items_offset(self) -> int:
        """Position of the first item; everything before it has a fixed place (see WorkList)."""
        return self.table_offset + PartialTable.size_for(self.max_rows, self.max_partial_rows)

    @property
    def size(self) -> int:
        """int32 values in the whole array."""
        return self.items_offset + ITEM_FIELDS * self.max_items + self.max_chunks

    def table_of(self, work: Array) -> PartialTable:
        """The table of partials in a work list, numpy or tensor."""
        return PartialTable(work[self.table_offset : self.items_offset], self.max_rows, self.max_partial_rows)


@dataclass(frozen=True)
class WorkList:
    """One int32 array and where things are in it.

    | position | what |
    |---|---|
    | 0 | n_items |
    | 8 | group_rows `[max_partial_rows]`: rows of the batch, group by group |
    | table_offset | a PartialTable of `max_rows` rows and `max_partial_rows` partials |
    | items_offset | items `[n_items, 8]` |
    | right behind the items | chunk_table; an item holds the absolute position of its group's first entry |

    Only the first `used` values mean anything and need copying.
    """

    buffer: np.ndarray  # [capacity.size] int32
    capacity: WorkListCapacity
    n_items: int
    used: int

    @property
    def group_rows(self) -> np.ndarray:
        return self.buffer[ITEM_FIELDS : self.capacity.table_offset]

    @property
    def table(self) -> PartialTable:
        """Which partials each row has."""
        return self.capacity.table_of(self.buffer)

    @property
    def items(self) -> np.ndarray:
        start = self.capacity.items_offset
        return self.buffer[start : start + self.n_items * ITEM_FIELDS].reshape(self.n_items, ITEM_FIELDS)


def build_work_list(
    groups: Sequence[PrefixGroup],
    *,
    heads: int,
    block_rows: int,
    block_keys: int,
    capacity: WorkListCapacity,
    target_items: int,
    out: np.ndarray | None = None,
) -> WorkList:
    """Cut the attention of all groups into work items of about equal size, one or more for each program.

    Keys of a group are split evenly, at multiples of `block_keys`; how often is chosen for all groups together (see
    `choose_splits`), so that a long prefix is cut more often than a short one. The row tiles of one head and key range
    stand side by side: they run at the same time, and all but the first read their keys from L2.

    Args:
        target_items: programs of the kernel's grid.
        out: `[capacity.size]` int32 to build into (a pinned staging buffer); allocated if not given.
    Raises:
        ValueError: a group is invalid (empty, a row twice or out of range, prefix_len < 1, too few chunks), or the
            result does not fit the capacity.
    """
    if block_keys <= 0 or CHUNK_TOKENS % block_keys:
        raise ValueError(f"block_keys must divide {CHUNK_TOKENS}, not {block_keys}")
    if out is None:
        out = np.zeros(capacity.size, np.int32)
    elif out.shape != (capacity.size,) or out.dtype != np.int32:
        raise ValueError(f"out must be int32 [{capacity.size}], not {out.dtype} {list(out.shape)}")
    group_rows = _validated_rows(groups, capacity.max_rows)
    out[: capacity.items_offset] = 0
    if not groups:
        return WorkList(out, capacity, 0, capacity.items_offset)

    sizes = np.array([len(g.rows) for g in groups])
    lengths = np.array([g.prefix_len for g in groups])
    tiles = -(-sizes // block_rows)  # row tiles of a group
    blocks = -(-lengths // block_keys)  # key blocks of a group
    splits = choose_splits(sizes, tiles * heads, blocks, heads, block_keys, capacity.max_partial_rows, target_items)

    row_start = np.cumsum(sizes) - sizes  # first entry in group_rows
    partial_start = np.cumsum(splits * sizes) - splits * sizes  # first partial row
    items_of = heads * tiles * splits
    n_items = int(items_of.sum())
    table_size = -(-lengths // CHUNK_TOKENS)
    table_start = capacity.items_offset + n_items * ITEM_FIELDS + np.cumsum(table_size) - table_size
    used = int(table_start[-1] + table_size[-1])
    if n_items > capacity.max_items:
        raise ValueError(f"{n_items} work items, but there is room for {capacity.max_items}")
    if table_size.sum() > capacity.max_chunks:
        raise ValueError(f"{table_size.sum()} chunks in all groups, but there is room for {capacity.max_chunks}")

    work = WorkList(out, capacity, n_items, used)
    out[0] = n_items
    work.group_rows[: len(group_rows)] = group_rows
    work.table.write_pairs(*pairs_of_splits(group_rows, sizes, splits))
    for start, size, group in zip(table_start.tolist(), table_size.tolist(), groups, strict=True):
        out[start : start + size] = group.chunks[:size]

    # Position of an item in its group: ((split * heads) + head) * tiles + tile.
    group = np.repeat(np.arange(len(groups)), items_of)
    position = np.arange(n_items) - np.repeat(np.cumsum(items_of) - items_of, items_of)
    position, tile = np.divmod(position, tiles[group])
    split, head = np.divmod(position, heads)
    first_row = tile * block_rows
    kv_begin = split * blocks[group] // splits[group] * block_keys
    kv_end = np.minimum((split + 1) * blocks[group] // splits[group] * block_keys, lengths[group])
    items = np.zeros((n_items, ITEM_FIELDS), np.int32)
    items[:, 0] = head
    items[:, 1] = row_start[group] + first_row
    items[:, 2] = np.minimum(sizes[group] - first_row, block_rows)
    items[:, 3] = kv_begin
    items[:, 4] = kv_end
    items[:, 5] = table_start[group]
    items[:, 6] = partial_start[group] + split * sizes[group] + first_row
    work.items[:] = items[balanced_order(kv_end - kv_begin, target_items)]
    return work


def _validated_rows(groups: Sequence[PrefixGroup], max_rows: int) -> np.ndarray:
    """All rows, group by group, as int64 `[sum of group sizes]`."""
    for index, group in enumerate(groups):
        if not group.rows:
            raise ValueError(f"group {index} has no rows")
        if group.prefix_len < 1:
            raise ValueError(f"group {index}: prefix_len is {group.prefix_len}; leave out groups without a prefix")
        if len(group.chunks) * CHUNK_TOKENS < group.prefix_len:
            raise ValueError(f"group {index}: {len(group.chunks)} chunks cannot hold {group.prefix_len} tokens")
    rows = np.array([row for group in groups for row in group.rows], np.int64)
    if rows.size and (rows.min() < 0 or rows.max() >= max_rows):
        raise ValueError(f"rows must be in [0, {max_rows}); found {rows.min()} to {rows.max()}")
    if np.unique(rows).size != rows.size:
        raise ValueError("a row is in two groups, or twice in one")
    return rows
