"""Decode graphs with shared attention and without, for steps that share nothing.

SGLang 0.5.23 captures a graph of each size for each of its attention variants, and asks before a step which one to
replay (layers/attention/graph_variants.py). A plain graph is SGLang's own decode attention, or ours over an FP8 cache.

A graph with shared attention takes longer where nothing is shared: a step of 128 requests with 128 heads takes 5 % more
than FlashAttention-3's, and an exchange of sharded prefixes by NCCL 43 to 143 us a layer, on H200s.

SGLang's all-reduce reads other ranks' memory at addresses that each captured graph has of its own, so ranks that
compute together must replay the same variant. They vote on it where they shard prefixes. Where they divide the heads,
what is shared may differ after a failure on one of them, so it follows from the prompts of the step's requests
(adapter/ranks/prompts.py). With DP attention and prefixes of each rank's own there is one graph of each size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_mla_ext.adapter.step.passes import passes

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

PLAIN, SHARED = "plain", "shared"

logger = logging.getLogger(__name__)


class GraphVariants:
    """The graphs of each size; the interface is SGLang's AttentionGraphVariants.

    Attributes:
        capture_labels: in the order of capture. The later one takes more memory, of a pool that both have in common.
    """

    capture_labels: ClassVar[tuple[str, str]] = (PLAIN, SHARED)

    def __init__(self, shares: Callable[[], bool]) -> None:
        """
        Args:
            shares: whether the pass that begins shares anything, or may; the same on all ranks.
        """
        self._shares = shares

    def install(self, runner: Any) -> None:
        """Have a DecodeCudaGraphRunner of SGLang's capture all graphs; called before it does."""
        runner.attention_graph_variants = self
        logger.info(
            "hybrid_mla: each decode graph is captured with shared attention and without, which doubles the time of "
            "capture; steps that share nothing replay the one without"
        )

    def select(self, forward_batch: ForwardBatch) -> str:
        """Return the label of the graph that a step replays, the same whenever SGLang asks."""
        step = passes.now
        if step.graph is None:
            step.graph = SHARED if self._shares() else PLAIN
        return step.graph
