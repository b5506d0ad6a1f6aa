"""Decode attention of a batch over FP8 latent rows in pages.

There are two implementations. `HopperAbsorbFP8` launches the Hopper kernels (sm90_fp8_absorb.py, and
sm90_fp8_few_heads.py where a request has 8 or 16 query rows), which round the query themselves; a small kernel cuts the
keys of a step so that all programs end together. `TritonAbsorbFP8` (quantize_query.py and triton_fp8_absorb.py) runs
wherever Triton knows e4m3. dispatch.py picks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from ..constants import FP8, is_block_dim
from ..memory import Memory, tensor_bytes
from ..merge import merge
from ..partials import PartialTable
from ..sizes import LATENT_DIMS, PAGE_TOKENS
from ..storage.latent_rows import LatentRowLayout
from .quantize_query import quantize_query
from .schedule import AbsorbCapacity, empty_tail_table, empty_work
from .tail_schedule import schedule_tails
from .triton_fp8_absorb import BLOCK_ROWS, run_kernel

MAX_SPLITS = 32
CTAS_PER_SM = 2
"""Programs to aim at for each multiprocessor, one after the other: evens out requests of different lengths."""


class Call(NamedTuple):
    """Arguments of `AbsorbFP8.run`."""

    q_absorbed: Tensor
    q_rope: Tensor
    pool: Tensor
    page_table: Tensor
    lens: Tensor
    softmax_scale: float
    out: Tensor
    lse: Tensor


class AbsorbFP8(ABC):
    """Attention of a batch of requests, each over the FP8 rows of its own pages.

        absorb.begin_step(lens, page_table)  # every step
        out = absorb.output(rows, dtype)
        for layer in range(layers):
            absorb.run(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)

    `begin_step` writes to static memory on the current stream and does not synchronise. `run` is what a CUDA graph
    captures, after one call outside of it, which compiles; a replay reads the pages and lengths of its own time. All
    memory is allocated here, except for the results and for the copy that a query of unsuitable layout needs.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        heads: int,
        device: torch.device | str,
        layout: LatentRowLayout | None = None,
        query_tokens: int = 1,
        page_size: int = PAGE_TOKENS,
        num_sms: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        """
        Args:
            max_requests: of a call.
            query_tokens: of each request.
            layout: DeepSeek-V3's if None.
            page_size: tokens of a page.
            num_sms: multiprocessors to fill; those of the device if None.
            memory: where partials and quantised queries are allocated.
        Raises:
            ValueError: a size is not positive, a dimension of the layout is not a power of two, or the GPU does not
                know e4m3.
        """
        device = torch.device(device)
        self._layout = layout or LatentRowLayout()
        rank, dr = self._layout.kv_lora_rank, self._layout.qk_rope_head_dim
        sizes = dict(max_requests=max_requests, heads=heads, query_tokens=query_tokens, page_size=page_size)
        for name, size in sizes.items():
            if size <= 0:
                raise ValueError(f"{name} must be positive, not {size}")
        if not (is_block_dim(rank) and is_block_dim(dr)):
            raise ValueError(f"kv_lora_rank {rank} and qk_rope_head_dim {dr} must be powers of two of at least 16")
        if device.type == "cuda":
            if torch.cuda.get_device_capability(device) < (8, 9):
                raise ValueError("an FP8 cache needs a GPU of compute capability 8.9 or higher")
            num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        self._max_requests, self._heads, self._query_tokens = max_requests, heads, query_tokens
        self._page_size, self._num_sms = page_size, num_sms or 1
        self._memory = memory or Memory()
        # There is no tail beside the partials: its lse is -inf, and its output is not read.
        self._no_lse = torch.full((max_requests * query_tokens, heads), -torch.inf, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        return tensor_bytes(self)

    def output(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """The best place for the `out` of `run`, `[tokens, H, r]`: maybe memory of this object, which the next run
        overwrites."""
        shape = tokens, self._heads, self._layout.kv_lora_rank
        return torch.empty(shape, dtype=dtype, device=self._no_lse.device)

    @abstractmethod
    def begin_step(self, lens: Tensor, page_table: Tensor) -> None:
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
                Hopper kernels read BF16: a query of another dtype, or whose layout TMA cannot read, is copied first
                (sm90_parts/query.for_tma). The query tokens of a request follow each other, and the last of them
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
        call = Call(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)
        self._check(call)
        if len(lens):
            self._attend(call)

    def try_out(self, pool: Tensor, dtype: torch.dtype) -> None:
        """Run every kernel once, so that all are compiled and have shown that they run here. What they compute is not
        used: keys are whatever stands in the pool's first page.

        Args:
            pool: as for `run`, of any layer; dtype: of queries and results.
        """
        for requests in self._requests_to_try():
            tokens, device = requests * self._query_tokens, pool.device
            rank, columns = self._layout.kv_lora_rank, self._layout.kv_lora_rank + self._layout.qk_rope_head_dim
            q = torch.zeros(tokens, self._heads, columns, dtype=dtype, device=device)
            lens = torch.full((requests,), self._query_tokens, dtype=torch.int32, device=device)
            pages = -(-self._query_tokens // self._page_size)
            page_table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
            lse = torch.empty(tokens, self._heads, device=device)
            self.begin_step(lens, page_table)
            query = q[..., :rank], q[..., rank:]
            self.run(*query, pool, page_table, lens, 1.0, self.output(tokens, dtype), lse)

    def _requests_to_try(self) -> list[int]:
        """Numbers of requests that together launch every kernel."""
        return [1]

    @abstractmethod
    def _attend(self, call: Call) -> None:
        """`run`, of at least one request."""

    def _check(self, call: Call) -> None:
        """Raise the ValueErrors of `run`."""
        _, _, pool, page_table, lens, softmax_scale, out, lse = call
        requests, tokens = len(lens), len(lens) * self._query_tokens
        rank, dr = self._layout.kv_lora_rank, self._layout.qk_rope_head_dim
        self._layout.check(pool)
        if requests > self._max_requests:
            raise ValueError(f"{requests} requests, but there is room for {self._max_requests}")
        if not softmax_scale > 0:
            raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")
        floats, rows = (torch.bfloat16, torch.float32), (tokens, self._heads)
        for name, shape, dtypes in (
            ("q_absorbed", (*rows, rank), floats),
            ("q_rope", (*rows, dr), floats),
            ("page_table", (requests, page_table.shape[-1]), (torch.int32,)),
            ("lens", (requests,), (torch.int32,)),
            ("out", (*rows, rank), floats),
            ("lse", rows, (torch.float32,)),
        ):
            tensor = getattr(call, name)
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                raise ValueError(f"{name} must be {list(shape)} {dtypes}, not {list(tensor.shape)} {tensor.dtype}")
            if tensor.device != pool.device:
                raise ValueError(f"{name} is on {tensor.device}, but the pool is on {pool.device}")
        if not (lens.is_contiguous() and out.is_contiguous() and lse.is_contiguous()):
            raise ValueError("lens, out and lse must be contiguous")
        if page_table.stride(1) != 1:
            raise ValueError(f"the last axis of page_table must be contiguous; its strides are {page_table.stride()}")


class HopperKernel(NamedTuple):
    """A Hopper kernel over FP8 rows, as dispatch.py picks it.

    Attributes:
        module: whose `run` launches it.
        tile_rows: query rows of its items.
    """

    module: ModuleType
    tile_rows: int


class HopperAbsorbFP8(AbsorbFP8):
    """One launch over a work list that `begin_step` builds on the device (tail_schedule.py), and a merge of pieces."""

    def __init__(self, *, kernel: HopperKernel, **sizes: Any) -> None:
        """
        Args:
            kernel: from `dispatch.kernel_for`, for the same heads and queries.
            sizes: as of `AbsorbFP8`.
        Raises:
            ValueError: as of `AbsorbFP8`; the kernels do not take these sizes.
        """
        super().__init__(**sizes)
        device, dims = self._no_lse.device, (self._layout.kv_lora_rank, self._layout.qk_rope_head_dim)
        if self._page_size != PAGE_TOKENS or dims != LATENT_DIMS or self._heads % 8:
            raise ValueError(
                "the kernels for Hopper take pages of 64, rows of 512 + 64 and a multiple of 8 heads; "
                f"not {self._page_size}, {dims[0]} + {dims[1]} and {self._heads}"
            )
        self._kernel = kernel.module
        # In the work list and in its partials, a row is a request with all of its query tokens.
        self._capacity = AbsorbCapacity(
            self._max_requests,
            self._heads * self._query_tokens,
            self._num_sms,
            kernel.tile_rows,
            query_tokens=self._query_tokens,
            segment_rows=0,
            segment_partials=0,
        )
        zeros = partial(self._memory.zeros, self._capacity.max_partial_rows, self._capacity.heads, device=device)
        self._partial_out = zeros(dims[0], dtype=torch.bfloat16)  # [P, W * H, 512]
        self._partial_lse2 = zeros(dtype=torch.float32)  # [P, W * H]
        self._work = torch.from_numpy(empty_work(self._capacity)).to(device)
        self._table = empty_tail_table(self._capacity).to(device)
        self._scheduled = 0, 0  # requests, and entries between rows of the page table

    def output(self, tokens: int, dtype: torch.dtype) -> Tensor:
        if dtype != self._partial_out.dtype:
            return super().output(tokens, dtype)
        requests = self._capacity.uncut_rows(self._partial_out, tokens // self._query_tokens)
        return requests.view(tokens, self._heads, self._layout.kv_lora_rank)

    def begin_step(self, lens: Tensor, page_table: Tensor) -> None:
        schedule_tails(lens, self._work, self._table, self._capacity, page_table)
        self._scheduled = len(lens), page_table.stride(0)

    def _attend(self, call: Call) -> None:
        q_absorbed, q_rope, pool, page_table, lens, scale, out, lse = call
        if self._scheduled != (len(lens), page_table.stride(0)):
            given = f"{len(lens)} requests and rows of {page_table.stride(0)} pages"
            raise ValueError(f"{given} must be those of begin_step: {self._scheduled}")
        partials, no_lse = (self._partial_out, self._partial_lse2), self._no_lse[: len(out)]
        by_request = len(lens), self._capacity.heads
        in_partials = out.data_ptr() == self._capacity.uncut_rows(self._partial_out, len(lens)).data_ptr()
        out, lse, no_lse = out.view(*by_request, -1), lse.view(by_request), no_lse.view(by_request)
        work = self._work, page_table, self._capacity
        self._kernel.run(q_absorbed, q_rope, pool, *work, *partials, softmax_scale=scale)
        merge(out, no_lse, *partials, self._table, out, lse, out_in_partials=in_partials)


class TritonAbsorbFP8(AbsorbFP8):
    """A grid that depends on the number of requests alone: the keys of each are cut into equal splits, then merged."""

    def __init__(self, **sizes: Any) -> None:
        """Arguments as of `AbsorbFP8`."""
        super().__init__(**sizes)
        self._tiles = triton.cdiv(self._heads * self._query_tokens, BLOCK_ROWS)
        tokens, heads, rank = self._max_requests * self._query_tokens, self._heads, self._layout.kv_lora_rank
        device = self._no_lse.device
        zeros = partial(self._memory.zeros, device=device)
        self._content = zeros(tokens, heads, rank, dtype=FP8)
        self._scale = zeros(tokens, heads, dtype=torch.float32)
        self._rope = zeros(tokens, heads, self._layout.qk_rope_head_dim, dtype=torch.bfloat16)
        most_tokens = {}  # by number of splits
        for requests in range(1, self._max_requests + 1):
            most_tokens[self.splits(requests)] = requests * self._query_tokens
        partials = max([n * splits for splits, n in most_tokens.items() if splits > 1], default=0)
        self._partial_out = zeros(partials, heads, rank, dtype=torch.float32)
        self._partial_lse2 = zeros(partials, heads, dtype=torch.float32)
        # By number of splits, because every row has as many partials, one behind the other.
        self._tables = {
            splits: PartialTable.from_pairs(
                np.repeat(np.arange(n), splits), np.arange(n * splits), max_rows=n, max_partials=n * splits
            ).to(device)
            for splits, n in sorted(most_tokens.items())
            if splits > 1
        }

    def splits(self, requests: int) -> int:
        """Runs that the keys of each of so many requests are cut into."""
        return max(1, min(MAX_SPLITS, CTAS_PER_SM * self._num_sms // (requests * self._tiles)))

    def begin_step(self, lens: Tensor, page_table: Tensor) -> None:
        """Do nothing: every program reads its length by itself."""

    def _requests_to_try(self) -> list[int]:
        """Return one request, whose keys are cut, and as many as are not cut any more: these are different kernels."""
        uncut = [n for n in range(1, self._max_requests + 1) if self.splits(n) == 1]
        return sorted({1, *uncut[:1]})

    def _attend(self, call: Call) -> None:
        q_absorbed, q_rope, pool, page_table, lens, scale, out, lse = call
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
            softmax_scale=scale,
        )
        if splits > 1:
            no_lse = self._no_lse[:tokens]
            merge(out, no_lse, self._partial_out, self._partial_lse2, self._tables[splits], out, lse)
