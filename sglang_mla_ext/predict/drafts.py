"""The time of drafting with a model's own NextN layer, whose attention shares nothing.

With W query tokens in a verify step, that layer runs over the tokens of the last one, which yields the first draft
token, and once for each of the W - 2 others.
"""

from __future__ import annotations

from dataclasses import replace

from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, predict

LAYERS = ("num_hidden_layers", "num_layers", "num_attention_layers")


class Drafting:
    """Time of the layer that drafts for a deployment; none without drafts."""

    def __init__(self, of: Deployment) -> None:
        self._others = max(of.query_tokens - 2, 0)
        self._drafts = of.query_tokens > 1
        if self._drafts:
            config = {**of.config, "first_k_dense_replace": 0} | {name: 1 for name in LAYERS if name in of.config}
            self._verified = replace(of, config=config, prefix_sharding=False)
            self._one = replace(self._verified, query_tokens=1)

    def seconds(self, requests: int, prompt: int, tail: int) -> float:
        """Return the seconds of drafting beside a verify step; arguments are those of `step.predict`."""
        if not self._drafts:
            return 0.0
        each = predict(self._one, PLAIN, requests, prompt, tail).seconds if self._others else 0.0
        return predict(self._verified, PLAIN, requests, prompt, tail).seconds + self._others * each
