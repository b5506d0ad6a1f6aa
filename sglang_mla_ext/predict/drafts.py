"""The time of drafting with a model's own NextN layer, whose attention shares nothing.

With W query tokens in a verify step, that layer runs over the tokens of the last one, which yields the first draft
token, and once for each of the W - 2 others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, predict

LAYERS = ("num_hidden_layers", "num_layers")


def drafting(of: Deployment) -> Callable[[int, int, int], float]:
    """Return a function that returns the seconds of drafting beside a verify step, 0 without drafts; its arguments are
    `requests`, `prompt` and `tail` of `step.predict`."""
    passes: list[Deployment] = []
    if of.query_tokens > 1:
        config = {**of.config, "first_k_dense_replace": 0} | {name: 1 for name in LAYERS if name in of.config}
        verified = replace(of, config=config, prefix_sharding=False)
        passes = [verified, *[replace(verified, query_tokens=1)] * (of.query_tokens - 2)]

    def seconds(requests: int, prompt: int, tail: int) -> float:
        return sum(predict(each, PLAIN, requests, prompt, tail).seconds for each in passes)

    return seconds
