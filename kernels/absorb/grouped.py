"""Grouped absorb: requests that share a prefix read its latent rows together, in the latent space.

Matrix units of Hopper take 64 query rows at once, and what one request's heads leave of such a tile is padding. MLA has
one head of keys, so it does not matter whose query a row is: with 16 heads, four requests that have the same keys fill
a tile. One launch computes private tails and stacked prefixes; `kernels/merge.py` then puts together what a request has
in both, still in the latent space.

There are two ways. `HopperGroupedAbsorb` has a kernel of its own (kernels/absorb_hopper.py): a list of work items is
cut so that all programs end together, and queries are read where they lie. `FlashMLAGroupedAbsorb`
(grouped_absorb_flashmla.py) takes FlashMLA, for where that kernel does not run. `make_grouped_absorb` picks.

Both keep in static memory what a captured graph reads, and the graph fits every plan of its number of rows. Lengths of
tails are only read on the device: with overlap scheduling the host may not know them yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_mla_ext.adapter.limits import PAGE_SIZE
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Group, Stacking

from ..merge import merge
from ..partials import PartialTable
from . import sm90_bf16_absorb as absorb_hopper
from .schedule import AbsorbCapacity, SharedKeys, build_group_work
from .tail_schedule import schedule_tails

TILE_ROWS = 64
"""Query rows of a tile, of either kernel."""


def stacking_for(heads: int) -> Stacking | None:
    """How requests with this many local heads are stacked; None where that cannot pay or is not written for it."""
    return Stacking(PAGE_SIZE, TILE_ROWS // heads) if heads in (8, 16, 32) else None


class GroupedAbsorb(ABC):
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
        self._stacking, self._max_rows, self._device = stacking, max_rows, torch.device(device)
        self._heads = TILE_ROWS // stacking.rows_per_entry
        self._rank, self._columns, self._dtype = kv_lora_rank, kv_lora_rank + qk_rope_head_dim, dtype
        most = stacking.max_entries(max_rows)
        # Pages of the tails, and behind them those of the prefixes. Rows of a multiple of 16 bytes: Triton compiles
        # other code for other alignments.
        pages = -(-(max_tokens // PAGE_SIZE + 1) // 4) * 4
        self._table = torch.zeros(max_rows + most, pages, dtype=torch.int32, device=device)  # [B + N, pages]
        self._lens = torch.zeros(max_rows + most, dtype=torch.int32, device=device)  # [B + N]
        self._leaders = torch.zeros(most, dtype=torch.int64, device=device)  # [N], rows whose pages are the prefix's
        self._prefix_lens = torch.zeros(most, dtype=torch.int32, device=device)  # [N]
        self._rows = 0

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, (Tensor, PartialTable)))

    @abstractmethod
    def plan(self, groups: Sequence[Group], rows: int) -> None:
        """Set which rows share which prefix, for steps of `rows` rows.

        Raises:
            ValueError: a prefix does not end with a page, the groups are too many, or a row is out of range.
        """

    @abstractmethod
    def prepare(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, prefix_lens: Tensor) -> None:
        """Bring page tables, lengths and the kernel's schedule up to date for the next step.

        Args:
            req_to_token: `[requests, tokens]` int32, slots; whole pages of consecutive slots.
            pool_indices: `[rows]` integers, each row's request in `req_to_token`.
            seq_lens: `[rows]` integers; prefix_lens: `[rows]` int32, the tokens before each row's private tail, a
                multiple of the page size. Rows beyond the plan's are ignored.
        """

    @abstractmethod
    def run(self, q: Tensor, latent_pages: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: `[rows, heads, kv_lora_rank + qk_rope_head_dim]`, absorbed; rows as planned.
            latent_pages: `[pages, PAGE_SIZE, 1, kv_lora_rank + qk_rope_head_dim]`.
        Returns:
            `out [rows, heads, kv_lora_rank]`, valid until the next run, and `lse [rows, heads]` float32, natural log,
            over tail and prefix; 0 and -inf for a row without keys.
        """

    def try_out(self, req_to_token: Tensor, cache: Tensor) -> None:
        """Run all kernels once, for one request with a page of prefix; cache: as `run` takes it."""
        page = torch.full((1,), PAGE_SIZE, dtype=torch.int32, device=self._device)
        self.plan([Group((0,), None, 0, PAGE_SIZE, Mode.GROUPED_ABSORB)], 1)
        self.prepare(req_to_token, page.long() - PAGE_SIZE, page + 1, page)
        self.run(torch.zeros(1, self._heads, self._columns, dtype=self._dtype, device=self._device), cache, 1.0)

    def _fill_tables(
        self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, prefix_lens: Tensor, first: int, shared: int
    ) -> None:
        """Lengths and pages of the tails, and pages of `shared` prefixes from row `first` of the page table on."""
        rows = self._rows
        pool_indices, prefix_lens, tail_lens = pool_indices[:rows], prefix_lens[:rows], self._lens[:rows]
        torch.sub(seq_lens[:rows], prefix_lens, out=tail_lens)
        fill_page_table(self._table[:rows], req_to_token, pool_indices, tail_lens, prefix_lens)
        if shared:
            leaders = pool_indices.index_select(0, self._leaders[:shared])
            table, lens = self._table[first : first + shared], self._prefix_lens[:shared]
            fill_page_table(table, req_to_token, leaders, lens, None)

    def _check_planned(self, q: Tensor) -> None:
        rows, heads = q.shape[:2]
        if rows != self._rows or heads != self._heads:
            raise ValueError(f"planned for {self._rows} rows of {self._heads} heads, run with {rows} of {heads}")

    def _stage(self, target: Tensor, values: np.ndarray) -> None:
        """Copy `values` to the front of `target` without waiting."""
        if not len(values):
            return
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()  # torch keeps it until the copy is done
        target[: len(values)].copy_(host, non_blocking=True)


class HopperGroupedAbsorb(GroupedAbsorb):
    """One launch over a work list: the groups' items from the host, the tails' from the device (absorb_schedule.py).

    A tail may be cut, and so may a prefix: one merge puts together the pieces of both.
    """

    def __init__(self, stacking: Stacking, *, programs: int | None = None, **sizes: Any) -> None:
        """
        Args:
            programs: of the kernel's grid, by default one for each multiprocessor; others as of `GroupedAbsorb`.
        """
        super().__init__(stacking, **sizes)
        max_rows, device = self._max_rows, self._device
        if programs is None:
            programs = torch.cuda.get_device_properties(device).multi_processor_count
        self._capacity = AbsorbCapacity(max_rows, self._heads, programs)
        partials = (self._capacity.max_partial_rows, self._heads)
        self._partial_out = torch.empty(*partials, self._rank, dtype=self._dtype, device=device)  # [P, H, rank]
        self._partial_lse2 = torch.empty(*partials, device=device)  # [P, H]
        self._no_lse = torch.full((max_rows, self._heads), -torch.inf, device=device)  # [B, H]
        self._work = torch.from_numpy(self._capacity.empty_work()).to(device)
        self._tail_partials = self._capacity.empty_tail_table(device)
        self._group_partials = self._capacity.empty_group_table(device)
        self._first_group = max_rows  # row of the page table
        self._groups = 0

    def plan(self, groups: Sequence[Group], rows: int) -> None:
        check_whole_pages(groups, self._stacking.page_size)
        if len(groups) > len(self._leaders):
            raise ValueError(f"{len(groups)} groups; there is room for {len(self._leaders)}")
        if any(group.rows[-1] >= rows for group in groups):
            raise ValueError(f"a group has rows beyond the {rows} rows of the step")
        shared = [
            SharedKeys(group.rows, group.end, (self._first_group + index) * self._table.stride(0))
            for index, group in enumerate(groups)
        ]
        work = build_group_work(shared, self._capacity)
        self._stage(self._work, work.head)
        self._stage(self._work[self._capacity.group_segments :], work.segments)
        self._stage(self._group_partials.buffer, work.table.buffer)
        self._stage(self._leaders, np.array([group.rows[0] for group in groups], np.int64))
        self._stage(self._prefix_lens, np.array([group.end for group in groups], np.int32))
        self._rows, self._groups = rows, len(groups)

    def prepare(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, prefix_lens: Tensor) -> None:
        self._fill_tables(req_to_token, pool_indices, seq_lens, prefix_lens, self._first_group, self._groups)
        schedule_tails(self._lens[: self._rows], self._work, self._tail_partials, self._capacity, self._table)

    def run(self, q: Tensor, latent_pages: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
        self._check_planned(q)
        absorb_hopper.run(
            q.contiguous(),
            latent_pages,
            self._work,
            self._table,
            self._capacity,
            self._partial_out,
            self._partial_lse2,
            softmax_scale=softmax_scale,
        )
        return self._merge(q)

    def _merge(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What `run` returns, from the partials of tails and groups."""
        rows, heads = q.shape[:2]
        out, lse = self._capacity.uncut_rows(self._partial_out, rows), self._no_lse.new_empty(rows, heads)
        partials, tables = (self._partial_out, self._partial_lse2), (self._tail_partials, self._group_partials)
        merge(
            out, self._no_lse[:rows], *partials, tables[0], out, lse, tables[1],
            out_in_partials=True,
        )  # fmt: skip
        return out, lse


def check_whole_pages(groups: Sequence[Group], page_size: int) -> None:
    """
    Raises:
        ValueError: a prefix does not end with a page.
    """
    for group in groups:
        if group.end % page_size:
            raise ValueError(f"a prefix of {group.end} tokens does not end with a page of {page_size}")


def make_grouped_absorb(
    req_to_token: Tensor,
    latent_pages: Tensor,
    stacking: Stacking,
    *,
    kv_lora_rank: int,
    on_failure: Callable[[str, BaseException], None],
    **sizes: Any,
) -> GroupedAbsorb:
    """The first of the two ways that runs here, best first. All of its kernels run once: they compile, and show that
    they can.

    Args:
        req_to_token: as for `prepare`; latent_pages: as for `run`, of any layer.
        on_failure: is told why a way does not run, if there is another.
        sizes: `max_rows` and `max_tokens` of GroupedAbsorb.
    """
    device, dtype, columns = latent_pages.device, latent_pages.dtype, latent_pages.shape[-1]
    dims = dict(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=columns - kv_lora_rank)
    heads = TILE_ROWS // stacking.rows_per_entry

    def tried(kind: type[GroupedAbsorb]) -> GroupedAbsorb:
        grouped = kind(stacking, dtype=dtype, device=device, **dims, **sizes)
        grouped.try_out(req_to_token, latent_pages)
        return grouped

    if absorb_hopper.supports(device, dtype, **dims, heads=heads):
        try:
            return tried(HopperGroupedAbsorb)
        except Exception as error:
            reason = "grouped absorb's own kernel does not run here, FlashMLA takes its place"
            on_failure(f"{reason}: {type(error).__name__}", error)
    from sglang_mla_ext.adapter.grouped_absorb_flashmla import FlashMLAGroupedAbsorb  # which is built on this module

    return tried(FlashMLAGroupedAbsorb)


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
