"""The protocol of attention in the latent space: over private tails, and over prefixes that are read for several
requests at once (grouped absorb). What is expanded is another protocol, kernels.naive.attention.SharedAttention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
from sglang_mla_ext.kernels.dispatch import fill_page_table, grouped_absorb_bytes
from sglang_mla_ext.kernels.memory import Memory, tensor_bytes
from sglang_mla_ext.kernels.sizes import MAX_SEGMENTS, PAGE_TOKENS, SEGMENTS_PER_ROW
from sglang_mla_ext.kernels.watch import Watched
from sglang_mla_ext.segment import Segment

META = torch.device("meta")


@dataclass(frozen=True)
class LatentSizes:
    """Sizes that attention in the latent space is made for.

    Attributes:
        heads: of this rank.
        dtype: of queries and results.
        grouped: whether grouped absorb is tried.
        max_rows: query rows of a step that shares; max_requests: of any step; max_tokens: of a request.
        query_tokens: of each request.
    """

    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    dtype: torch.dtype
    grouped: bool
    max_rows: int
    max_requests: int
    max_tokens: int
    query_tokens: int = 1

    @property
    def sharing_requests(self) -> int:
        """Requests of a step that shares."""
        return self.max_rows // self.query_tokens

    @property
    def stacks(self) -> bool:
        """Return whether grouped absorb is tried and takes so many heads."""
        return self.grouped and rows_per_tile(self.heads) is not None

    @property
    def of_grouped(self) -> dict[str, int]:
        """The arguments of grouped absorb that say how much a plan can hold."""
        return dict(
            query_tokens=self.query_tokens,
            max_rows=self.max_rows,
            max_tokens=self.max_tokens,
            max_segments=MAX_SEGMENTS,
            max_segment_rows=SEGMENTS_PER_ROW * self.max_rows,
        )

    def grouped_bytes(self, *, fp8: bool, programs: int) -> int:
        """The most that grouped absorb allocates over a pool in FP8 or not; 0 where it is not tried."""
        if not self.stacks:
            return 0
        dims = dict(kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim)
        how = dict(dtype=self.dtype, programs=programs)
        return grouped_absorb_bytes(heads=self.heads, fp8=fp8, **how, **dims, **self.of_grouped)


class LatentAttention(Protocol):
    """Attention of a decode or verify step's rows to what is not expanded.

        latent.allocate()                                       # once; then grouped_page, workspace_bytes
        latent.plan(segments, tail_starts, units, tail_tokens)  # when one of the first three changes
        latent.begin_step(batch, sharing=True, uncounted=0)     # before every step
        for layer in layers:
            out, lse = latent.run(layer_id, q_absorbed, q_rope, softmax_scale)

    `plan` and `begin_step` write to static memory on the current stream and do not wait for the device. `run` is what a
    CUDA graph captures; the graph follows later calls of the other two. It owns its page tables and metadata.

    It is made for `query_tokens` tokens that it takes together as one unit of a batch. They are rows that follow each
    other, and causal among themselves: the last one sees all keys of its unit. A batch's lengths and places in the
    table of slots are those of its units: of requests, or, where each token is one, of rows.

    Attributes:
        grouped_page: grouped absorb takes whole pages of so many tokens; None where there is no grouped absorb.
        workspace_bytes: device memory that `allocate` took.
    """

    grouped_page: int | None

    @property
    def workspace_bytes(self) -> int: ...

    @staticmethod
    def workspace_bytes_for(sizes: LatentSizes, programs: int) -> int:
        """The most that `allocate` takes, whichever kernels run, before there is a pool.

        Args:
            programs: multiprocessors of the GPU.
        """
        ...

    def allocate(self, memory: Memory | None = None) -> None:
        """Allocate all static memory, and run our kernels once: they compile, and show that they run here.

        Args:
            memory: where what is large is allocated.
        """
        ...

    def plan(self, segments: Sequence[Segment], tail_starts: Sequence[int], units: int, tail_tokens: int = 0) -> None:
        """Set which units share what, for steps of so many.

        Args:
            segments: of grouped absorb; their rows are units.
            tail_starts: `[<= units]` tokens before each unit's private tail, whole pages; units behind the last one
                have none. They cover what is attended to elsewhere, too.
            tail_tokens: approximate number of tokens of all tails; 0 if it is not known.
        """
        ...

    def begin_step(self, batch: Any, *, sharing: bool, uncounted: int = 0) -> None:
        """Bring lengths, page tables and schedules up to date.

        Args:
            batch: SGLang's ForwardBatch, or its view of one for a graph: batch_size, req_pool_indices, seq_lens.
            sharing: whether what was planned is part of the step; otherwise a request's tail is all of its keys.
            uncounted: new tokens of each request that `seq_lens` leaves out: all of them in a verify step.
        """
        ...

    def run(
        self, layer_id: int, q_absorbed: Tensor, q_rope: Tensor, softmax_scale: float, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            q_absorbed: `[rows, heads, kv_lora_rank]`; q_rope: `[rows, heads, qk_rope_head_dim]`; any strides of rows
                and heads.
            watched: what to copy, see kernels/watch.py; where there is no grouped absorb, nothing is.
        Returns:
            `out [rows, heads, kv_lora_rank]`, valid until the next run, and `lse [rows, heads]` float32, natural log;
            0 and -inf for a row without keys.
        """
        ...


class TailStarts:
    """Tokens before the private tail of each of a step's requests.

    Attributes:
        on_device: `[max_requests]` int32, static.
    """

    def __init__(self, max_requests: int, device: torch.device) -> None:
        self.on_device = torch.zeros(max_requests, dtype=torch.int32, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of all starts."""
        return tensor_bytes(self)

    @classmethod
    def workspace_bytes_for(cls, max_requests: int) -> int:
        """Bytes that an object would allocate, before it exists."""
        return cls(max_requests, META).workspace_bytes

    def plan(self, starts: Sequence[int]) -> None:
        """Copy the starts to the device without waiting; requests behind the last one start at 0."""
        host = torch.zeros(len(self.on_device), dtype=torch.int32, pin_memory=self.on_device.is_cuda)
        host[: len(starts)] = torch.tensor(starts, dtype=torch.int32)
        self.on_device.copy_(host, non_blocking=True)


class Tails:
    """Lengths and pages of the private tails, in static memory.

    Attributes:
        lens: `[max_requests]` int32, tokens of each tail in this step.
        table: `[max_requests, pages]` int32, the pages of each tail, from the left.
    """

    def __init__(
        self, req_to_token: Tensor, starts: TailStarts, max_requests: int, max_tokens: int, memory: Memory | None = None
    ) -> None:
        """
        Args:
            req_to_token: `[requests, tokens]` int32, slots; whole pages of consecutive slots.
            starts: of as many requests as share something.
            max_requests: of any step; max_tokens: of a request.
            memory: where the table is allocated.
        """
        device = req_to_token.device
        self._req_to_token, self._starts = req_to_token, starts
        self.lens = torch.zeros(max_requests, dtype=torch.int32, device=device)
        # Zeros, because FlashMLA loads the first page even where there are no keys. Rows of a multiple of 16 bytes:
        # Triton compiles other code for other alignments.
        pages = -(-(max_tokens // PAGE_TOKENS + 1) // 4) * 4
        self.table = (memory or Memory()).zeros(max_requests, pages, dtype=torch.int32, device=device)

    @property
    def workspace_bytes(self) -> int:
        """Device memory of lengths and table."""
        return tensor_bytes(self.lens, self.table)

    @classmethod
    def workspace_bytes_for(cls, max_requests: int, max_tokens: int) -> int:
        """Bytes that an object would allocate, before it exists."""
        nobody = torch.empty(0, 0, dtype=torch.int32, device=META)
        return cls(nobody, TailStarts(0, META), max_requests, max_tokens).workspace_bytes

    def begin_step(self, batch: Any, *, sharing: bool, uncounted: int = 0) -> None:
        """See LatentAttention."""
        requests = batch.batch_size
        lens, starts = self.lens[:requests], self._starts.on_device[:requests] if sharing else None
        if starts is None:
            lens.copy_(batch.seq_lens[:requests])
        else:
            torch.sub(batch.seq_lens[:requests], starts, out=lens)
        if uncounted:
            lens.add_(uncounted)
        fill_page_table(self.table[:requests], self._req_to_token, batch.req_pool_indices[:requests], lens, starts)
