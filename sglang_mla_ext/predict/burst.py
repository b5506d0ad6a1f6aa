"""Predict a burst, requests that all come at once: the time until the last of them has its first token.

Their prompt is cached, and their questions are prefilled in passes of as many new tokens of a rank as a chunk has, one
after the other. Passes attend with keys and values of each head, as in arrivals.py.
"""

from __future__ import annotations

from collections import Counter

from sglang_mla_ext.predict.arrivals import pass_kernels_seconds
from sglang_mla_ext.predict.step import Deployment

CHUNK_TOKENS = 8192
"""SGLang's --chunked-prefill-size on GPUs of 60 to 160 GB."""

KERNELS = 2.0
"""Times what the rates of decode say: fitted to the last first token of whole ranks and of DP attention on two GPUs
(`benchmarks/results/rank.jsonl` and `spread.jsonl`), of which what is predicted is between 0.65 and 1.5."""


def burst_seconds(
    of: Deployment,
    requests: int,
    prefix: int,
    question: int,
    *,
    host_s: float,
    expanded: int = 0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> float:
    """
    Args:
        requests: of all data-parallel ranks; question: new tokens of each after the prefix.
        host_s: host time of an eager prefill pass.
        expanded: first tokens of the prefix whose keys and values are kept.
        chunk_tokens: new tokens of a pass, which ranks of DP attention divide.
    """
    mine, chunk = of.per_rank(requests), max(chunk_tokens // of.dp, 1)
    passes = Counter(min(chunk, mine * question - begun) for begun in range(0, mine * question, chunk))
    return sum(
        count * max(KERNELS * pass_kernels_seconds(of, prefix, tokens, -(-tokens // question), expanded), host_s)
        for tokens, count in passes.items()
    )
