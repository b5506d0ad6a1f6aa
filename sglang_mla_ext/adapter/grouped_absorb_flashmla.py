"""Grouped absorb by FlashMLA, where the kernel of grouped_absorb.py does not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from sglang_mla_ext.kernels.absorb.grouped import TILE_ROWS, GroupedAbsorb, check_whole_pages
from sglang_mla_ext.kernels.merge import LOG2E, merge
from sglang_mla_ext.kernels.partials import PartialTable
from sglang_mla_ext.prefix.planner import Group, Stacking


class Layout(NamedTuple):
    """Which request stands where in the entries of the groups.

    Attributes:
        row_index: `[entries * R]` int64, the row of the batch whose heads stand there; 0 where none does.
        leaders: `[entries]` int64, a row of the group, whose pages are read.
        lens: `[entries]` int32, tokens of the prefix; 0 for an entry that is not needed.
        place: by row of the batch, its place in `row_index`.
    """

    row_index: np.ndarray
    leaders: np.ndarray
    lens: np.ndarray
    place: dict[int, int]


def lay_out(groups: Sequence[Group], entries: int, stacking: Stacking) -> Layout:
    """Give the groups their entries, in order.

    Raises:
        ValueError: a prefix does not end with a page, or the groups need more entries.
    """
    stacked = stacking.rows_per_entry
    check_whole_pages(groups, stacking.page_size)
    row_index, leaders = np.zeros(entries * stacked, np.int64), np.zeros(entries, np.int64)
    lens, place, entry = np.zeros(entries, np.int32), {}, 0
    for group in groups:
        if entry + stacking.entries(len(group.rows)) > entries:
            raise ValueError(f"the groups need more than the {entries} entries that there are")
        for first in range(0, len(group.rows), stacked):
            rows, start = group.rows[first : first + stacked], entry * stacked
            row_index[start : start + len(rows)] = rows
            place.update(zip(rows, range(start, start + len(rows)), strict=True))
            leaders[entry], lens[entry] = group.rows[0], group.end
            entry += 1
    return Layout(row_index, leaders, lens, place)


class FlashMLAGroupedAbsorb(GroupedAbsorb):
    """FlashMLA over *entries*, each a tile and its keys. One launch computes those of a step with B requests:

        entry          query rows                                          keys
        0 to B-1       the heads of one request, then padding              its private tail
        B to B+N-1     the heads of up to R = 64 / heads requests          the prefix that they share

    The merge adds to each tail what the request has in an entry of its group. N depends on B alone; entries that a plan
    does not need have no keys. Beside what FlashMLA does, a layer copies B + N·R queries and reads and writes B + N·R
    outputs.
    """

    def __init__(self, stacking: Stacking, **sizes: Any) -> None:
        """Args: as of `GroupedAbsorb`."""
        super().__init__(stacking, **sizes)
        max_rows, device = self._max_rows, self._device
        self._stacked = stacking.rows_per_entry
        most = stacking.max_entries(max_rows)
        # Entries of a smaller batch lie where tails of a larger one do: what they leave in the padding is not read.
        tile = (1, TILE_ROWS, self._columns)
        self._q = torch.zeros(max_rows + most, *tile, dtype=self._dtype, device=device)  # [B + N, 1, 64, 576]
        self._lse2 = torch.zeros(most * self._stacked, self._heads, device=device)  # [N * R, heads]
        self._row_index = torch.zeros(most * self._stacked, dtype=torch.int64, device=device)  # [N * R]
        self._partials = PartialTable.empty(max_rows, most * self._stacked, device)
        # Its size depends on the GPU alone.
        self._metadata = torch.zeros_like(get_mla_metadata(self._lens[:1], TILE_ROWS, 1)[0])
        self._num_splits = torch.zeros(max_rows + most + 1, dtype=torch.int32, device=device)
        self._entries = 0

    def plan(self, groups: Sequence[Group], rows: int) -> None:
        entries = self._stacking.max_entries(rows)
        layout = lay_out(groups, entries, self._stacking)
        partials = PartialTable.from_pairs(
            list(layout.place), list(layout.place.values()), max_rows=self._max_rows,
            max_partials=self._partials.max_partials,
        )  # fmt: skip
        self._stage(self._row_index, layout.row_index)
        self._stage(self._leaders, layout.leaders)
        self._stage(self._prefix_lens, layout.lens)
        self._stage(self._partials.buffer, partials.buffer)
        self._lens[rows : rows + entries].copy_(self._prefix_lens[:entries])
        self._table[: rows + entries, 0] = 0  # FlashMLA loads the first page also where there are no keys
        self._rows, self._entries = rows, entries

    def prepare(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, prefix_lens: Tensor) -> None:
        self._fill_tables(req_to_token, pool_indices, seq_lens, prefix_lens, self._rows, self._entries)
        end = self._rows + self._entries
        metadata, num_splits = get_mla_metadata(self._lens[:end], TILE_ROWS, 1)
        self._metadata.copy_(metadata)
        self._num_splits[: end + 1].copy_(num_splits)

    def run(self, q: Tensor, latent_pages: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        self._check_planned(q)
        rows, heads = q.shape[:2]
        places, end = self._entries * self._stacked, rows + self._entries
        tiles = self._q[:end]
        tiles[:rows, 0, :heads].copy_(q)
        torch.index_select(q, 0, self._row_index[:places], out=tiles[rows:].view(places, heads, -1))
        out, lse = flash_mla_with_kvcache(
            q=tiles,
            k_cache=latent_pages,
            block_table=self._table[:end],
            cache_seqlens=self._lens[:end],
            head_dim_v=self._rank,
            tile_scheduler_metadata=self._metadata,
            num_splits=self._num_splits[: end + 1],
            softmax_scale=softmax_scale,
            causal=True,
        )  # out [B + N, 1, 64, kv_lora_rank], lse [B + N, 64, 1] natural log
        partial_lse2 = torch.mul(lse[rows:].view(places, heads), LOG2E, out=self._lse2[:places])
        merged, merged_lse = q.new_empty(rows, heads, self._rank), lse.new_empty(rows, heads)
        merge(
            out[:rows, 0, :heads],
            lse[:rows, :heads, 0],
            out[rows:].view(places, heads, self._rank),
            partial_lse2,
            self._partials,
            merged,
            merged_lse,
        )
        return merged, merged_lse
