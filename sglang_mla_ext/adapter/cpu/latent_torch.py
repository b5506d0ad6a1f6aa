"""Attention in the latent space on a machine without a GPU: the reference, request by request.

Over a pool in FP8 it rounds as the kernels on a GPU do (reference/fp8.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_mla_ext.adapter.latent.pool import fp8_rows
from sglang_mla_ext.adapter.latent.protocol import LatentSizes
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.watch import Watched
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Segment

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool


class TorchLatent:
    """See the module; the interface is adapter.latent.protocol.LatentAttention."""

    workspace_bytes = 0

    def __init__(self, pool: MLATokenToKVPool, req_to_token: Tensor, *, grouped: bool, query_tokens: int = 1) -> None:
        """
        Args:
            grouped: whether shared prefixes may be read once for all their requests.
            query_tokens: of each request.
        """
        self._pool, self._req_to_token, self._query_tokens = pool, req_to_token, query_tokens
        self._fp8 = fp8_rows(pool)
        self.grouped_page = 1 if grouped else None
        self._segments: Sequence[Segment] = ()  # by units, as the next
        self._planned_starts: Sequence[int] = ()
        self._batch: Any = None
        self._sharing, self._uncounted = False, 0

    @staticmethod
    def workspace_bytes_for(sizes: LatentSizes, programs: int) -> int:
        return 0

    def allocate(self, memory: Memory | None = None) -> None:
        """Allocate nothing."""

    def plan(self, segments: Sequence[Segment], tail_starts: Sequence[int], units: int, tail_tokens: int = 0) -> None:
        self._segments, self._planned_starts = segments, tail_starts

    def begin_step(self, batch: Any, *, sharing: bool, uncounted: int = 0) -> None:
        self._batch, self._sharing, self._uncounted = batch, sharing, uncounted

    def run(
        self, layer_id: int, q_absorbed: Tensor, q_rope: Tensor, softmax_scale: float, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        starts = [0] * (len(q_absorbed) // self._query_tokens)
        if self._sharing:
            starts[: len(self._planned_starts)] = self._planned_starts
        parts = []
        for row, (absorbed, rope) in enumerate(zip(q_absorbed, q_rope, strict=True)):
            slots = self._slots(row)
            later = self._query_tokens - 1 - row % self._query_tokens  # tokens that it does not see
            tail = slots[starts[row // self._query_tokens] : max(len(slots) - later, 0)]
            parts.append(self._absorb(layer_id, absorbed[None], rope[None], tail, softmax_scale))
        out, lse = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])
        for segment in self._segments if self._sharing else ():
            members = torch.tensor(Rows(len(starts), self._query_tokens).by_row([segment])[0].rows)
            # One query with the heads of all members: they have the same keys.
            absorbed, rope = (part[members].flatten(0, 1)[None] for part in (q_absorbed, q_rope))
            slots = self._slots(segment.rows[0] * self._query_tokens)[segment.start : segment.end]
            of_segment = self._absorb(layer_id, absorbed, rope, slots, softmax_scale)
            of_segment = of_segment[0].view_as(out[members]), of_segment[1].view_as(lse[members])
            out[members], lse[members] = reference.merge(out[members], lse[members], *of_segment)
        if watched is not None:
            watched.copy(out)
        return out.to(q_absorbed.dtype), lse.float()

    def _slots(self, row: int) -> Tensor:
        """The slots `[tokens]` of a row's request."""
        request = row // self._query_tokens
        tokens = int(self._batch.seq_lens[request]) + self._uncounted
        return self._req_to_token[self._batch.req_pool_indices[request], :tokens].long()

    def _absorb(
        self, layer_id: int, q_absorbed: Tensor, q_rope: Tensor, slots: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention of one row, `q_absorbed [1, heads, 512]` and `q_rope [1, heads, 64]`, over the latent rows of these
        slots: `out [1, heads, 512]` and `lse [1, heads]`."""
        if self._fp8 is not None:
            keys = reference_fp8.keys_of_rows(self._fp8.rows(layer_id)[slots], self._fp8.layout)
            return reference_fp8.absorb_fp8(q_absorbed, q_rope, keys, softmax_scale)
        latent_rows = self._pool.get_key_buffer(layer_id)[slots].squeeze(1)[None]  # [1, tokens, 576]
        return reference.absorb(q_absorbed, q_rope, latent_rows, torch.tensor([len(slots)]), softmax_scale)
