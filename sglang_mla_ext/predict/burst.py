"""Predict a burst, requests that all come at once: the time until the last of them has its first token.

Their prompt is cached, and their questions are prefilled in passes of as many new tokens of a rank as a chunk has, one
after the other. Passes attend with keys and values of each head, as in arrivals.py.
"""

from __future__ import annotations

from collections import Counter

from sglang_mla_ext.predict.arrivals import expanded_in_pass, pass_kernels_seconds
from sglang_mla_ext.predict.step import Deployment
from sglang_mla_ext.predict.weights import BF16_BYTES

CHUNK_TOKENS = 8192
"""SGLang's --chunked-prefill-size on GPUs of 60 to 160 GB."""

KERNELS = 1.3
"""Times what the rates of decode say: fitted to the last first token of whole ranks and of DP attention on two GPUs
(`benchmarks/results/rank.jsonl` and `spread.jsonl`), of which what is predicted is between 0.5 and 1.45."""


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

    def seconds(tokens: int) -> float:
        at_once = -(-tokens // question)
        kernels = pass_kernels_seconds(of, prefix, tokens, at_once, expanded)
        kernels += _joining_seconds(of, expanded_in_pass(of, prefix, at_once, expanded))
        return max(KERNELS * kernels, host_s)

    return sum(count * seconds(tokens) for tokens, count in passes.items())


def _joining_seconds(of: Deployment, tokens: int) -> float:
    """Seconds of the copies of keys and values that a pass expands: both are written, and keys read and written once
    more to join them with their rotary part."""
    assert of.gpu.step is not None
    dims = of.dims
    elements = 3 * dims.qk_nope_head_dim + dims.qk_rope_head_dim + dims.v_head_dim
    copied = BF16_BYTES * elements * of.cost.local_heads * dims.num_layers * tokens
    return copied / of.gpu.step.bytes_per_s
