"""SGLang's own FlashMLA backend, owned by ours: it prefills, and decodes where nothing can be shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
from torch import Tensor

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.step.layer import absorbs_prefill
from sglang_mla_ext.kernels.constants import LN2

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from sglang_mla_ext.adapter.stock.protocol import PrefillTails


class PlannedAtRun:
    """FlashInfer's attention to latent rows in prefill, planned when it is first run and not before: planning waits
    for the GPU, and prefill with keys per head never runs it.

    The arguments of `plan` are kept as they are, SGLang's own buffers among them, as FlashInfer itself would keep them:
    they are written again only for the next pass, whose plan replaces one that was not needed.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._plan: Callable[[], None] | None = None  # still to be called

    def plan(self, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments of the plan. A pass that has graphs in it is planned at once, as SGLang means it: it is by
        absorb."""
        self._plan = partial(self._wrapper.plan, *args, **kwargs)
        if absorbs_prefill():
            self._make_plan()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run in every layer; the first one pays for the plan."""
        self._make_plan()
        return self._wrapper.run(*args, **kwargs)

    def _make_plan(self) -> None:
        if self._plan is not None:
            self._plan()
            self._plan = None


def with_rows(x: Tensor, rows: int) -> Tensor:
    """`x`, with zeros as its last rows if it has less than `rows`."""
    return x if len(x) == rows else torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


class FlashMLAStock:
    """See the module; the interface is adapter.stock.protocol.Stock."""

    def __init__(self, runner: ModelRunner, layers: Sequence[DeepseekV2AttentionMLA], *, reads_pool: bool) -> None:
        """
        Args:
            reads_pool: whether the pool is SGLang's. If not, prefill asks for rows by their slots and computes with
                keys per head whatever the length of a prefix: by absorb, SGLang would read the pool itself.
        """
        self.backend = FlashMLABackend(runner)
        self.backend.prefill_wrapper_paged = PlannedAtRun(self.backend.prefill_wrapper_paged)
        self.decodes, self._layer = reads_pool, layers[0]
        self.plain: AttentionBackend | None = None
        self._threshold = self._layer.chunked_prefix_cache_threshold if reads_pool else 0
        if not reads_pool:
            self.backend.is_fp8_kvcache = False  # for the schedule that SGLang makes for idle ranks, and nobody reads
            for layer in layers:
                layer.chunked_prefix_cache_threshold = 0  # shorter cached prefixes than this take absorb

    def make_plain(self, runner: ModelRunner) -> bool:
        """Make SGLang's fa3; it cannot read our FP8 pool."""
        self.plain = installed.plain_backend(runner) if self.decodes else None
        return self.plain is not None

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool
    ) -> Any:
        """FlashInfer's lse is base 2, and SGLang 0.5.17 merges the parts of a long prefix as if it were not
        (sgl-project/sglang#40903). Nor does FlashInfer take the rows that SGLang adds where ranks divide heads and
        requests, so that their number is a multiple of the ranks that divide the heads (sgl-project/sglang#35876)."""
        rows, tokens = len(q), sum(forward_batch.extend_seq_lens_cpu)
        if tokens < rows:
            if save_kv_cache and k is not None:
                self.backend.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
                save_kv_cache = False
            q, k, v = (each[:tokens] if each is not None and len(each) == rows else each for each in (q, k, v))
        result = self.backend.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if not isinstance(result, tuple):
            return with_rows(result, rows)
        out, lse2 = result
        return with_rows(out, rows), with_rows(lse2.mul_(LN2), rows)

    def affordable(self, prefix_lens: Sequence[int]) -> int:
        total = sum(prefix_lens)
        return total if self.backend.enable_chunk_kv and total >= self._threshold else 0

    def prefill_tails(self) -> PrefillTails:
        from sglang_mla_ext.adapter.stock.flashinfer_tails import FlashInferTails

        return FlashInferTails(self.backend, self._layer, self.backend.q_data_type)

    def can_finish(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        return bool(self.backend.enable_chunk_kv)
