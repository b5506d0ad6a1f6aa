"""Decode attention of a batch over FP8 latent rows in pages.

There are two ways. `HopperAbsorbFP8` has kernels of its own (absorb_fp8_hopper.py, and absorb_fp8_few_heads.py for 8
or 16 heads), which round the query themselves; a small kernel cuts the keys of a step so that all programs end
together. `TritonAbsorbFP8` (quantize_query.py and absorb_fp8_kernel.py) is for where those do not run.
`make_absorb_fp8` picks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ..merge import merge
from ..partials import PartialTable
from ..storage.expanded import FP8
from ..storage.latent_rows import LatentRowLayout
from . import sm90_fp8_absorb as absorb_fp8_hopper
from . import sm90_fp8_few_heads as absorb_fp8_few_heads
from .quantize_query import quantize_query
from .schedule import TILE_ROWS, AbsorbCapacity
from .tail_schedule import schedule_tails
from .triton_fp8_absorb import BLOCK_ROWS, Rescale, run_kernel

MAX_SPLITS = 32
CTAS_PER_SM = 2
"""Programs to aim at for each multiprocessor, one after the other: evens out requests of different lengths."""


class AbsorbFP8(ABC):
    """Attention of a batch of requests, each over the FP8 rows of its own pages.

        absorb.prepare(lens, page_table)  # every step
        out = absorb.output(rows, dtype)
        for layer in range(layers):
            absorb.run(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)

    `prepare` writes to static memory on the current stream and does not synchronise. `run` is what a CUDA graph
    captures, after one call outside of it, which compiles; a replay reads the pages and lengths of its own time. All
    memory but the results, and a copy of queries that need one, is allocated here.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        heads: int,
        device: torch.device | str,
        layout: LatentRowLayout | None = None,
        queries: int = 1,
        page_size: int = 64,
        num_sms: int | None = None,
    ) -> None:
        """
        Args:
            max_requests: of a call.
            queries: query tokens of each request.
            layout: DeepSeek-V3's if None.
            page_size: tokens of a page.
            num_sms: multiprocessors to fill; those of the device if None.
        Raises:
            ValueError: a size is not positive, a dimension of the layout is not a power of two, or the GPU does not
                know e4m3.
        """
        device = torch.device(device)
        self._layout = layout or LatentRowLayout()
        rank, dr = self._layout.kv_lora_rank, self._layout.qk_rope_head_dim
        for name, size in dict(max_requests=max_requests, heads=heads, queries=queries, page_size=page_size).items():
            if size <= 0:
                raise ValueError(f"{name} must be positive, not {size}")
        if any(dim < 16 or dim & (dim - 1) for dim in (rank, dr)):
            raise ValueError(f"kv_lora_rank {rank} and qk_rope_head_dim {dr} must be powers of two of at least 16")
        if device.type == "cuda":
            if torch.cuda.get_device_capability(device) < (8, 9):
                raise ValueError("an FP8 cache needs a GPU of compute capability 8.9 or higher")
            num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        self._max_requests, self._heads, self._queries = max_requests, heads, queries
        self._page_size, self._num_sms = page_size, num_sms or 1
        # There is no tail beside the partials: its lse is -inf, and its output is not read.
        self._no_lse = torch.full((max_requests * queries, heads), -torch.inf, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, (Tensor, PartialTable)))

    def output(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """The best place for the `out` of `run`, `[tokens, H, r]`: maybe memory of this object, which the next run
        overwrites."""
        shape = tokens, self._heads, self._layout.kv_lora_rank
        return torch.empty(shape, dtype=dtype, device=self._no_lse.device)

    @abstractmethod
    def prepare(self, lens: Tensor, page_table: Tensor) -> None:
        """Bring the schedule up to date for the calls of `run` that follow, with these arguments."""

    def run(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """
        Args:
            q_absorbed: `[T, H, r]`, `q_nope` times `w_kc`; q_rope: `[T, H, dr]`; BF16 or float32, any strides. The
                kernels for Hopper read BF16: what is not, or does not lie as TMA wants it, is copied first
                (absorb_fp8_query_hopper.for_tma). The query tokens of a request follow each other, and the last of them
                sees all keys.
            pool: uint8 `[slots, row_bytes]`, see latent_rows.LatentRowLayout.
            page_table: int32 `[requests, pages]`, last axis contiguous: page p of it holds tokens p · page_size and up
                at slots page · page_size and up. Entries behind a request's last page are not read.
            lens: int32 `[requests]`, contiguous; 0 allowed.
            out: `[T, H, r]` BF16 or float32, see `output`; lse: `[T, H]` float32, natural log; contiguous, written. 0
                and -inf for a query that sees no key.
        Raises:
            ValueError: a shape, dtype or stride is not as above, or there are too many requests.
        """
        self._check(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)
        if len(lens):
            self._attend(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)

    @abstractmethod
    def _attend(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """`run`, of at least one request."""

    def _check(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Raise the ValueErrors of `run`."""
        requests, tokens = len(lens), len(lens) * self._queries
        rank, dr = self._layout.kv_lora_rank, self._layout.qk_rope_head_dim
        self._layout.check(pool)
        if requests > self._max_requests:
            raise ValueError(f"{requests} requests, but there is room for {self._max_requests}")
        if not softmax_scale > 0:
            raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")
        for name, tensor, shape, dtypes in (
            ("q_absorbed", q_absorbed, (tokens, self._heads, rank), (torch.bfloat16, torch.float32)),
            ("q_rope", q_rope, (tokens, self._heads, dr), (torch.bfloat16, torch.float32)),
            ("page_table", page_table, (requests, page_table.shape[-1]), (torch.int32,)),
            ("lens", lens, (requests,), (torch.int32,)),
            ("out", out, (tokens, self._heads, rank), (torch.bfloat16, torch.float32)),
            ("lse", lse, (tokens, self._heads), (torch.float32,)),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                raise ValueError(f"{name} must be {list(shape)} {dtypes}, not {list(tensor.shape)} {tensor.dtype}")
            if tensor.device != pool.device:
                raise ValueError(f"{name} is on {tensor.device}, but the pool is on {pool.device}")
        if not (lens.is_contiguous() and out.is_contiguous() and lse.is_contiguous()):
            raise ValueError("lens, out and lse must be contiguous")
        if page_table.stride(1) != 1:
            raise ValueError(f"the last axis of page_table must be contiguous; its strides are {page_table.stride()}")


def kernel_for(heads: int) -> tuple[ModuleType, int]:
    """Hopper's kernel for rows of so many heads, as the module that has its `run`, and the query rows of its items."""
    if heads in absorb_fp8_few_heads.ROWS:
        return absorb_fp8_few_heads, heads
    return absorb_fp8_hopper, TILE_ROWS


class HopperAbsorbFP8(AbsorbFP8):
    """One launch over a work list that `prepare` makes on the device (absorb_schedule.py), and a merge of pieces."""

    def __init__(self, **sizes: Any) -> None:
        """
        Args:
            sizes: as of `AbsorbFP8`.
        Raises:
            ValueError: as of `AbsorbFP8`; the kernels do not take these sizes.
        """
        super().__init__(**sizes)
        device, dims = self._no_lse.device, (self._layout.kv_lora_rank, self._layout.qk_rope_head_dim)
        if self._page_size != 64 or dims != (512, 64) or self._heads % 8:
            raise ValueError(
                "the kernels for Hopper take pages of 64, rows of 512 + 64 and a multiple of 8 heads; "
                f"not {self._page_size}, {dims[0]} + {dims[1]} and {self._heads}"
            )
        # A tile takes all query tokens of a request where it has the rows for them.
        stacked = self._queries if self._heads * self._queries <= TILE_ROWS else 1
        heads, queries = self._heads * stacked, self._queries // stacked
        self._kernel, tile_rows = kernel_for(heads)
        self._capacity = AbsorbCapacity(
            self._max_requests * queries,
            heads,
            self._num_sms,
            tile_rows,
            queries=queries,
            stacked=stacked,
            group_partials=0,
        )
        partials = (self._capacity.max_partial_rows, heads)
        self._partial_out = torch.zeros(*partials, dims[0], dtype=torch.bfloat16, device=device)  # [P, H, 512]
        self._partial_lse2 = torch.zeros(partials, device=device)  # [P, H]
        self._work = torch.from_numpy(self._capacity.empty_work()).to(device)
        self._table = self._capacity.empty_tail_table(device)
        self._prepared = 0, 0

    def output(self, tokens: int, dtype: torch.dtype) -> Tensor:
        if dtype != self._partial_out.dtype:
            return super().output(tokens, dtype)
        rows = self._capacity.uncut_rows(self._partial_out, tokens // self._capacity.stacked)
        return rows.view(tokens, self._heads, self._layout.kv_lora_rank)

    def prepare(self, lens: Tensor, page_table: Tensor) -> None:
        schedule_tails(lens, self._work, self._table, self._capacity, page_table)
        self._prepared = len(lens), page_table.stride(0)

    def _attend(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        if self._prepared != (len(lens), page_table.stride(0)):
            raise ValueError(
                f"{len(lens)} requests and rows of {page_table.stride(0)} pages must be what it was prepared for: "
                f"{self._prepared}"
            )
        partials, no_lse = (self._partial_out, self._partial_lse2), self._no_lse[: len(out)]
        stacked = len(out) // self._capacity.stacked, self._capacity.heads  # rows of the batch, and of a row
        in_partials = out.data_ptr() == self._capacity.uncut_rows(self._partial_out, stacked[0]).data_ptr()
        out, lse, no_lse = out.view(*stacked, -1), lse.view(stacked), no_lse.view(stacked)
        work = self._work, page_table, self._capacity
        self._kernel.run(q_absorbed, q_rope, pool, *work, *partials, softmax_scale=softmax_scale)
        merge(out, no_lse, *partials, self._table, out, lse, out_in_partials=in_partials)


class TritonAbsorbFP8(AbsorbFP8):
    """A grid that depends on the number of requests alone: the keys of each are cut into as many runs, then merged."""

    def __init__(self, *, fp8_weights: bool = False, rescale: Rescale = "multiply", **sizes: Any) -> None:
        """
        Args:
            fp8_weights: round the softmax weights to e4m3, and not to BF16: SnapMLA's definition, but less exact. On
                Hopper its sums over thousands of keys shrink, too (naive_consumers_hopper.consume_fp8; to sum blocks
                apart takes more registers than there are), and Triton transposes FP8 values byte by byte.
            rescale: see absorb_fp8_kernel.py. Others as of `AbsorbFP8`.
        """
        super().__init__(**sizes)
        self._fp8_weights = fp8_weights
        self._rescale: Rescale = rescale
        self._tiles = triton.cdiv(self._heads * self._queries, BLOCK_ROWS)
        tokens, heads, rank = self._max_requests * self._queries, self._heads, self._layout.kv_lora_rank
        device = self._no_lse.device
        self._content = torch.zeros(tokens, heads, rank, dtype=FP8, device=device)
        self._scale = torch.zeros(tokens, heads, dtype=torch.float32, device=device)
        self._rope = torch.zeros(tokens, heads, self._layout.qk_rope_head_dim, dtype=torch.bfloat16, device=device)
        counts = {requests: self.splits(requests) for requests in range(1, self._max_requests + 1)}
        partials = max([n * self._queries * splits for n, splits in counts.items() if splits > 1], default=0)
        self._partial_out = torch.zeros(partials, heads, rank, dtype=torch.float32, device=device)
        self._partial_lse2 = torch.zeros(partials, heads, dtype=torch.float32, device=device)
        # By number of splits, because every row has as many. Only as many rows as fit the partials take so many splits.
        self._tables = {
            splits: self._table(min(tokens, partials // splits), splits).to(device)
            for splits in sorted(set(counts.values()))
            if splits > 1
        }

    @property
    def workspace_bytes(self) -> int:
        return super().workspace_bytes + sum(table.nbytes for table in self._tables.values())

    def splits(self, requests: int) -> int:
        """Runs that the keys of each of so many requests are cut into."""
        return max(1, min(MAX_SPLITS, CTAS_PER_SM * self._num_sms // (requests * self._tiles)))

    def prepare(self, lens: Tensor, page_table: Tensor) -> None:
        """Nothing: every program reads its length by itself."""

    @staticmethod
    def _table(rows: int, splits: int) -> PartialTable:
        n = rows * splits
        return PartialTable.from_pairs(np.repeat(np.arange(rows), splits), np.arange(n), max_rows=rows, max_partials=n)

    def _attend(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        splits, tokens = self.splits(len(lens)), len(out)
        query = self._content[:tokens], self._scale[:tokens], self._rope[:tokens]
        quantize_query(q_absorbed, q_rope, *query)
        results = (self._partial_out, self._partial_lse2) if splits > 1 else (out, lse)
        run_kernel(
            *query,
            pool,
            page_table,
            lens,
            *results,
            layout=self._layout,
            page_size=self._page_size,
            splits=splits,
            softmax_scale=softmax_scale,
            fp8_weights=self._fp8_weights,
            rescale=self._rescale,
        )
        if splits > 1:
            no_lse = self._no_lse[:tokens]
            merge(out, no_lse, self._partial_out, self._partial_lse2, self._tables[splits], out, lse)


def make_absorb_fp8(
    pool: Tensor,
    *,
    heads: int,
    dtype: torch.dtype,
    on_failure: Callable[[str, BaseException], None],
    layout: LatentRowLayout | None = None,
    queries: int = 1,
    page_size: int = 64,
    **sizes: Any,
) -> AbsorbFP8:
    """The first of the two ways that runs here, best first. All of its kernels run once: they compile, and show that
    they can.

    Args:
        pool: as for `AbsorbFP8.run`, of any layer; dtype: of queries and results.
        on_failure: is told why a way does not run, if there is another.
        sizes: others of `AbsorbFP8`.
    """
    layout, device = layout or LatentRowLayout(), pool.device

    def tried(kind: type[AbsorbFP8]) -> AbsorbFP8:
        absorb = kind(heads=heads, device=device, layout=layout, queries=queries, page_size=page_size, **sizes)
        q = torch.zeros(queries, heads, layout.kv_lora_rank + layout.qk_rope_head_dim, dtype=dtype, device=device)
        q_absorbed, q_rope = q.split([layout.kv_lora_rank, layout.qk_rope_head_dim], dim=-1)
        lens = torch.full((1,), queries, dtype=torch.int32, device=device)
        page_table = torch.zeros(1, 1, dtype=torch.int32, device=device)  # slot 0 and up are for rows of nobody
        absorb.prepare(lens, page_table)
        lse = torch.empty(queries, heads, device=device)
        absorb.run(q_absorbed, q_rope, pool, page_table, lens, 1.0, absorb.output(queries, dtype), lse)
        return absorb

    if absorb_fp8_hopper.supports(device, layout, heads, page_size):
        try:
            return tried(HopperAbsorbFP8)
        except Exception as error:
            reason = "the FP8 cache's own kernels for Hopper do not run here, Triton's take their place"
            on_failure(f"{reason}: {type(error).__name__}", error)
    return tried(TritonAbsorbFP8)
