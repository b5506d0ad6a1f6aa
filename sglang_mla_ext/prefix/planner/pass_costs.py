"""Predicted time of a prefill pass, per layer, in each way that it can run: outside of CUDA graphs, or inside of them.

| way      | cached tokens not expanded                      | new tokens among themselves | beside attention    |
|----------|-------------------------------------------------|-----------------------------|---------------------|
| eager    | keys and values made by SGLang, then naive      | naive                       | the host's launches |
| in graph | absorb, whose cost does not fall with more rows | absorb                      | the weights read    |

What is expanded costs naive attention in both, and what a pass expands for itself is made once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.segment import Mode

STOCK_MAKING = 3.0
"""SGLang's gather, product and copies take so many times as long as the fused expansion."""

MOST_FETCHED = 1 << 17
"""Rows of an FP8 cache that a pass in a graph should fetch in each layer, at most: 151 MB in BF16. SGLang makes keys
and values of as many tokens at a time. A pass that cannot leave its graph fetches more, some at a time."""


@dataclass(frozen=True)
class PassCosts:
    """See the module.

    Attributes:
        cost: of attention; each new token is a row of its own. Its rates have the time beside attention.
        graph_layer_s: seconds of a layer of a pass in a graph beside attention.
        fetches: whether the cache is in FP8, whose rows are fetched before they are attended to in a graph.
    """

    cost: CostModel
    graph_layer_s: float
    fetches: bool = False

    def absorb(self, rows: int, tokens: int) -> float:
        """Attention of rows of one request in the latent space, which read their keys together."""
        return self.cost.work_seconds(Mode.GROUPED_ABSORB, rows, tokens)

    def naive(self, rows: int, tokens: int) -> float:
        """Attention of rows to keys per head."""
        return self.cost.work_seconds(Mode.NAIVE, rows, tokens)

    def pays_alone(self, rows: int, tokens: int) -> bool:
        """Return whether it pays, in a graph, to expand a request's own cached tokens for its new tokens."""
        made = self.cost.rates.passes.range_s + self.cost.making_seconds(tokens) + self.naive(rows, tokens)
        return made < self.absorb(rows, tokens)

    def eager(self, prefix_lens: Sequence[int], ends: Sequence[int], new_tokens: Sequence[int], made: int = 0) -> float:
        """A layer of a pass without graphs.

        Args:
            prefix_lens: `[requests]` tokens that are cached; ends: `[requests]` how many of them are expanded.
            new_tokens: `[requests]` rows.
            made: tokens that the pass expands for itself.
        """
        total = self.cost.rates.passes.eager_layer_s + self.cost.making_seconds(made)
        for prefix, end, new in zip(prefix_lens, ends, new_tokens, strict=True):
            total += self.naive(new, prefix) + self.naive(new, (new + 1) // 2)
            total += self.cost.making_seconds(new) + STOCK_MAKING * self.cost.making_seconds(prefix - end)
        return total

    def fetches_many(self, prefix_lens: Sequence[int], ends: Sequence[int], new_tokens: Sequence[int]) -> bool:
        """Return whether a pass in a graph would fetch more rows of an FP8 cache than it should; arguments are those of
        `eager`."""
        return self.fetches and sum(prefix_lens) - sum(ends) + sum(new_tokens) > MOST_FETCHED

    def in_graph(
        self, prefix_lens: Sequence[int], ends: Sequence[int], new_tokens: Sequence[int], made: int = 0
    ) -> float:
        """A layer of a pass in a prefill graph; arguments are those of `eager`."""
        if self.fetches_many(prefix_lens, ends, new_tokens):
            return math.inf
        total = self.graph_layer_s + self.cost.making_seconds(made)
        for prefix, end, new in zip(prefix_lens, ends, new_tokens, strict=True):
            total += self.naive(new, end) + self.absorb(new, prefix - end + (new + 1) // 2)
        return total
