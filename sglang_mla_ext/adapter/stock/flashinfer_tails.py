"""Prefill attention in the latent space by FlashInfer's paged MLA kernels, over any part of each request's tokens.

SGLang's FlashMLA and FlashInfer backends run the same kernels over all tokens of a request, and planning there waits
for the device: lengths are copied back from it. Here they are taken from the host's copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from flashinfer import BatchMLAPagedAttentionWrapper
from torch import Tensor

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.latent.pool import fp8_rows

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


FETCHED_AT_ONCE = 1 << 19
"""Rows of an FP8 pool that are fetched at once, 0.6 GB in BF16; those of one request, if it has more. Where a rank of
DP attention prefills, running requests of the others come here, each with its whole context: 128 that share 26,432
tokens have 3.4 million rows."""


class _Group(NamedTuple):
    """Requests whose rows are fetched together: rows of the query, places in the list of slots, and requests."""

    rows: slice
    slots: slice
    requests: slice


def groups(lens: Sequence[int], new: Sequence[int], most: int) -> Iterator[_Group]:
    """Yield neighbouring requests whose tails have at most so many tokens together, or one request that has more.

    Args:
        lens: `[requests]` tokens of tails; new: `[requests]` rows of the query.
    """
    ends, rows = [0, *accumulate(lens)], [0, *accumulate(new)]
    first = 0
    for last in range(1, len(lens) + 1):
        if last == len(lens) or ends[last + 1] - ends[first] > most:
            yield _Group(slice(rows[first], rows[last]), slice(ends[first], ends[last]), slice(first, last))
            first = last


class FlashInferTails:
    """The interface is adapter.stock.protocol.PrefillTails.

    An FP8 pool's rows are fetched in BF16 first, in each layer.
    """

    def __init__(self, backend: FlashMLABackend, layer: DeepseekV2AttentionMLA, dtype: torch.dtype) -> None:
        """
        Args:
            backend: SGLang's, whose workspace, table of slots and pool are used.
            layer: any of the model's attention layers on this rank.
            dtype: of queries.
        """
        self._backend, self._dtype = backend, dtype
        self._scale, self._rank, self._rope = layer.attn_mqa.scaling, layer.kv_lora_rank, layer.qk_rope_head_dim
        self._heads, self._fetches = layer.num_local_heads, fp8_rows(backend.token_to_kv_pool) is not None
        # Two sets, because a plan's numbers lie in the wrapper's pinned memory until the copy from there is done: with
        # overlap scheduling a pass is planned while the one before runs. A set has one wrapper for each group.
        self._wrappers: list[list[Any]] = [[self._wrapper()] for _ in range(2)]
        self._slots: Tensor | None = None
        self._groups: list[_Group] = []

    def _wrapper(self) -> Any:
        return BatchMLAPagedAttentionWrapper(self._backend.workspace_buffer, backend="auto")

    def plan(self, batch: ForwardBatch, starts: Sequence[int]) -> None:
        new = list(batch.extend_seq_lens_cpu)
        cached = batch.extend_prefix_lens_cpu
        lens = [before + more - start for before, more, start in zip(cached, new, starts, strict=True)]
        requests, total = len(lens), sum(lens)
        self._groups = list(groups(lens, new, FETCHED_AT_ONCE if self._fetches else total))
        values = [*starts, *lens, 0, *accumulate(lens)]
        for of in self._groups:
            values += [*lens[of.requests], 0, *accumulate(lens[of.requests]), 0, *accumulate(new[of.requests])]
        device = batch.seq_lens.device
        host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
        parts = [requests, requests, requests + 1]
        of_pass, of_groups = host.split([sum(parts), len(values) - sum(parts)])
        start_on_device, lens_on_device, indptr_on_device = of_pass.to(device, non_blocking=True).split(parts)
        slots = torch.empty(total, dtype=torch.int32, device=device)
        translator = self._backend.kv_index_translator
        ranges = dict(kv_start_idx=start_on_device, seq_lens=lens_on_device, indptr=indptr_on_device)
        installed.write_slots(batch, translator, slots, **ranges)
        self._slots = slots
        self._wrappers.reverse()
        wrappers = self._wrappers[0]
        while len(wrappers) < len(self._groups):
            wrappers.append(self._wrapper())
        indices = torch.arange(total, dtype=torch.int32, device=device) if self._fetches else slots
        sizes: tuple[Any, ...] = (self._heads, self._rank, self._rope, 1, True, self._scale, self._dtype, self._dtype)
        for wrapper, of in zip(wrappers, self._groups, strict=False):
            count = of.requests.stop - of.requests.start
            rest = len(of_groups) - 3 * count - 2
            host_lens, kv_indptr, qo_indptr, of_groups = of_groups.split([count, count + 1, count + 1, rest])
            wrapper.plan(qo_indptr, kv_indptr, indices[: of.slots.stop - of.slots.start], host_lens, *sizes)

    def run(self, layer: RadixAttention, q_absorbed: Tensor, q_rope: Tensor, out: Tensor, lse: Tensor) -> None:
        for wrapper, (rows, places, _) in zip(self._wrappers[0], self._groups, strict=False):
            content, rope = self._rows(layer.layer_id, places).split([self._rank, self._rope], dim=-1)
            query, results = (q_absorbed[rows], q_rope[rows]), dict(out=out[rows], lse=lse[rows])
            wrapper.run(*query, content, rope, **results, return_lse=True, return_lse_base_on_e=True)

    def _rows(self, layer_id: int, places: slice) -> Tensor:
        """`[slots, 1, kv_lora_rank + qk_rope_head_dim]`: the pool, or the rows that the plan names there, fetched."""
        pool = self._backend.token_to_kv_pool
        if not self._fetches:
            pages: Tensor = pool.get_key_buffer(layer_id)
            return pages
        fp8 = fp8_rows(pool)
        assert self._slots is not None and fp8 is not None, "planned, over an FP8 cache"
        slots = self._slots[places]
        rows = torch.empty(len(slots), self._rank + self._rope, dtype=self._dtype, device=slots.device)
        fp8.fetch(layer_id, slots, rows)
        return rows[:, None]
