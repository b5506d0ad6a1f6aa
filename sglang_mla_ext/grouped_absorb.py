"""Grouped absorb with FlashMLA: requests that share a prefix read its latent rows together.

FlashMLA computes tiles of 64 query rows, and what one request's heads leave of a tile is padding. MLA has one head of
keys, so it does not matter whose query a row is: with 16 heads, four requests that have the same keys fill a tile. An
*entry* is a tile and its keys. One launch computes those of a step with B requests:

    entry          query rows                                          keys
    0 to B-1       the heads of one request, then padding              its private tail
    B to B+N-1     the heads of up to R = 64 / heads requests          the prefix that they share

`kernels/merge.py` then adds to each tail what the request has in an entry of its group, still in the latent space. N
depends on B alone, so that a captured graph fits every plan; entries that a plan does not need have no keys.

Beside what FlashMLA does, a layer copies B + N·R queries and reads and writes B + N·R outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from torch import Tensor

from sglang_mla_ext.kernels.merge import LOG2E, merge
from sglang_mla_ext.kernels.schedule import WorkListCapacity, row_table
from sglang_mla_ext.limits import PAGE_SIZE
from sglang_mla_ext.prefix.planner import Group, Stacking

TILE_ROWS = 64
"""Query rows of FlashMLA's tile."""


def stacking_for(heads: int) -> Stacking | None:
    """How requests with this many local heads are stacked; None where that cannot pay or is not written for it."""
    return Stacking(PAGE_SIZE, TILE_ROWS // heads) if heads in (8, 16, 32) else None


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
    row_index, leaders = np.zeros(entries * stacked, np.int64), np.zeros(entries, np.int64)
    lens, place, entry = np.zeros(entries, np.int32), {}, 0
    for group in groups:
        if group.end % stacking.page_size:
            raise ValueError(f"a prefix of {group.end} tokens does not end with a page of {stacking.page_size}")
        if entry + stacking.entries(len(group.rows)) > entries:
            raise ValueError(f"the groups need more than the {entries} entries that there are")
        for first in range(0, len(group.rows), stacked):
            rows, start = group.rows[first : first + stacked], entry * stacked
            row_index[start : start + len(rows)] = rows
            place.update(zip(rows, range(start, start + len(rows)), strict=True))
            leaders[entry], lens[entry] = group.rows[0], group.end
            entry += 1
    return Layout(row_index, leaders, lens, place)


class GroupedAbsorb:
    """Attention of a batch to its private tails and to the prefixes of its groups.

        grouped.plan(groups, rows)                                              # when plan or rows change
        grouped.prepare(req_to_token, req_pool_indices, seq_lens, prefix_lens)  # every step
        for layer in range(layers):
            out, lse = grouped.run(q, latent_pages, softmax_scale)

    `plan` and `prepare` write to static memory on the current stream and do not synchronise. `run` is what a CUDA graph
    captures, after one call outside of it, which compiles; the graph follows later calls of the other two.
    """

    def __init__(
        self,
        stacking: Stacking,
        *,
        max_rows: int,
        max_tokens: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """
        Args:
            stacking: from `stacking_for`.
            max_rows: requests of a step.
            max_tokens: of a request.
            dtype: of queries and latent rows.
        """
        self._stacking, self._rank, self._device = stacking, kv_lora_rank, torch.device(device)
        self._stacked = stacking.rows_per_entry
        self._heads = TILE_ROWS // self._stacked
        most = stacking.max_entries(max_rows)
        self._capacity = WorkListCapacity(max_rows, most * self._stacked, max_items=0, max_chunks=0)
        # Entries of a smaller batch lie where tails of a larger one do: what they leave in the padding is not read.
        tile = (1, TILE_ROWS, kv_lora_rank + qk_rope_head_dim)
        self._q = torch.zeros(max_rows + most, *tile, dtype=dtype, device=device)  # [B + N, 1, 64, 576]
        # Rows of a multiple of 16 bytes: Triton compiles other code for other alignments.
        pages = -(-(max_tokens // PAGE_SIZE + 1) // 4) * 4
        self._table = torch.zeros(max_rows + most, pages, dtype=torch.int32, device=device)  # [B + N, pages]
        self._lens = torch.zeros(max_rows + most, dtype=torch.int32, device=device)  # [B + N]
        self._lse2 = torch.zeros(most * self._stacked, self._heads, device=device)  # [N * R, heads]
        self._row_index = torch.zeros(most * self._stacked, dtype=torch.int64, device=device)  # [N * R]
        self._leaders = torch.zeros(most, dtype=torch.int64, device=device)  # [N]
        self._entry_lens = torch.zeros(most, dtype=torch.int32, device=device)  # [N]
        self._work = torch.zeros(self._capacity.size, dtype=torch.int32, device=device)
        # Its size depends on the GPU alone.
        self._metadata = torch.zeros_like(get_mla_metadata(self._lens[:1], TILE_ROWS, 1)[0])
        self._num_splits = torch.zeros(max_rows + most + 1, dtype=torch.int32, device=device)
        self._rows = self._entries = 0

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        return sum(value.numel() * value.element_size() for value in vars(self).values() if isinstance(value, Tensor))

    def plan(self, groups: Sequence[Group], rows: int) -> None:
        """Set which rows share which prefix, for steps of `rows` rows.

        Raises:
            ValueError: see `lay_out`; or a row is out of range.
        """
        entries = self._stacking.max_entries(rows)
        layout = lay_out(groups, entries, self._stacking)
        work = row_table(self._capacity.max_rows, layout.place, self._capacity.max_partial_rows)
        self._stage(self._row_index, layout.row_index)
        self._stage(self._leaders, layout.leaders)
        self._stage(self._entry_lens, layout.lens)
        self._stage(self._work, work.buffer)
        self._lens[rows : rows + entries].copy_(self._entry_lens[:entries])
        self._table[: rows + entries, 0] = 0  # FlashMLA loads the first page also where there are no keys
        self._rows, self._entries = rows, entries

    def prepare(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, prefix_lens: Tensor) -> None:
        """Bring page tables, lengths and FlashMLA's schedule up to date for the next step.

        Args:
            req_to_token: `[requests, tokens]` int32, slots; whole pages of consecutive slots.
            pool_indices: `[rows]` integers, each row's request in `req_to_token`.
            seq_lens: `[rows]` integers; prefix_lens: `[rows]` int32, the tokens before each row's private tail, a
                multiple of the page size. Rows beyond the plan's are ignored.
        """
        rows, entries = self._rows, self._entries
        end = rows + entries
        pool_indices, prefix_lens, tail_lens = pool_indices[:rows], prefix_lens[:rows], self._lens[:rows]
        torch.sub(seq_lens[:rows], prefix_lens, out=tail_lens)
        fill_page_table(self._table[:rows], req_to_token, pool_indices, tail_lens, prefix_lens)
        leaders = pool_indices.index_select(0, self._leaders[:entries])
        fill_page_table(self._table[rows:end], req_to_token, leaders, self._entry_lens[:entries], None)
        metadata, num_splits = get_mla_metadata(self._lens[:end], TILE_ROWS, 1)
        self._metadata.copy_(metadata)
        self._num_splits[: end + 1].copy_(num_splits)

    def run(self, q: Tensor, latent_pages: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: `[rows, heads, kv_lora_rank + qk_rope_head_dim]`, absorbed; rows as planned.
            latent_pages: `[pages, PAGE_SIZE, 1, kv_lora_rank + qk_rope_head_dim]`.
        Returns:
            `out [rows, heads, kv_lora_rank]` and `lse [rows, heads]` float32, natural log, over tail and prefix; 0 and
            -inf for a row without keys.
        """
        rows, heads = q.shape[:2]
        if rows != self._rows or heads != self._heads:
            raise ValueError(f"planned for {self._rows} rows of {self._heads} heads, run with {rows} of {heads}")
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
            self._work,
            self._capacity,
            merged,
            merged_lse,
        )
        return merged, merged_lse

    def _stage(self, target: Tensor, values: np.ndarray) -> None:
        """Copy `values` to the front of `target` without waiting."""
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()  # torch keeps it until the copy is done
        target[: len(values)].copy_(host, non_blocking=True)


def fill_page_table(
    table: Tensor, req_to_token: Tensor, pool_indices: Tensor, lens: Tensor, starts: Tensor | None
) -> None:
    """Write the pages of tokens `[start, start + len)` of each request into its row of the table, from the left.

    Args:
        table: `[rows, pages]` int32, written; req_to_token: `[requests, tokens]` int32, slots.
        pool_indices, lens, starts: `[rows]` integers; starts are multiples of the page size, None for 0.
    """
    from sglang.kernels.ops.attention.utils import create_flashmla_kv_indices_triton, get_num_kv_index_blocks_flashmla

    grid = (table.shape[0], get_num_kv_index_blocks_flashmla(table.shape[1], PAGE_SIZE))
    create_flashmla_kv_indices_triton[grid](
        req_to_token, pool_indices, lens, starts, table, req_to_token.stride(0), table.stride(0)
    )
