"""A GPU's memory: weights, and what is left for latent rows and expanded prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_mla_ext.kernels.sizes import (  # plain Python
    CHUNK_TOKENS,
    MAX_ROWS,
    PREFILL_PARTIAL_BYTES,
    SEGMENTS_PER_ROW,
    prefill_rows,
)
from sglang_mla_ext.predict.linear import STATE_SHARE, STATES_OF_A_REQUEST
from sglang_mla_ext.predict.mixed import allowed
from sglang_mla_ext.predict.sharing import may_group
from sglang_mla_ext.predict.step import Deployment
from sglang_mla_ext.predict.weights import embedding_bytes
from sglang_mla_ext.prefix.memory.default import default_bytes, default_transient_tokens, transient_tokens

PREFILL_TOKENS = 8192
"""New tokens of a full prefill pass of all ranks: SGLang's default on an H100 and an H200."""
SPLIT_ROWS = 2 * 132 * 128
"""Partial rows of one head for keys that are split: two tiles of 128 rows on each multiprocessor."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Attributes:
        weights: its share.
        states: of linear layers, a share of what the weights leave; of_requests: that these are enough for.
        budget: of SGLang's static memory what both leave for the KV cache, 0 where they leave nothing.
        taken: of the budget, by the extension: for expanded prefixes and its own buffers.
        chunks: of expanded tokens that this holds.
        latent_token, expanded_token: of a token in all layers.
    """

    weights: float
    states: float
    of_requests: int | None
    budget: float
    taken: float
    chunks: int
    latent_token: int
    expanded_token: int

    def tokens(self, *, shared: bool) -> int:
        """Tokens that SGLang's KV cache holds, without the extension or, `shared`, beside it."""
        return int((self.budget - self.taken * shared) // self.latent_token)

    def most_requests(self, prompt: int, tail: int, *, shared: bool) -> int:
        """Requests of a rank that fit in the KV cache, with the prompt once and `tail` tokens of each request after it,
        and for which the states of linear layers are enough."""
        most = max((self.tokens(shared=shared) - prompt) // max(tail, 1), 0)
        return most if self.of_requests is None else min(most, self.of_requests)


def weight_bytes(of: Deployment) -> float:
    """Bytes of the weights on one GPU."""
    stored = sum(product.stored * product.element_bytes / of.ranks_of(product) for product in of.products)
    return stored + embedding_bytes(of.config) / of.tp


def state_share(of: Deployment) -> float:
    """Share of the static memory left by the weights that is for states of linear layers, not for the KV cache."""
    return STATE_SHARE if of.has_states else 0.0


def buffer_bytes(of: Deployment, *, expands: bool) -> int:
    """The extension's own buffers on one GPU, but for some MiB: the partials, which are nearly all of them, what ranks
    exchange, queries and results in BF16, sent and received, results of prefill passes in CUDA graphs, and
    `transient_bytes`."""
    dims, heads = of.cost.dims, of.cost.local_heads
    rows = MAX_ROWS + (allowed(of) if of.dp == 1 else 0)
    taken = heads * rows * SEGMENTS_PER_ROW * 4 * dims.kv_lora_rank * may_group(of.cost)
    if expands and of.prefix_sharding:
        taken += heads * rows * 4 * dims.naive_macs + _naive_partial_bytes(of, rows * SEGMENTS_PER_ROW)
    elif expands:
        taken += _naive_partial_bytes(of, max(rows * SEGMENTS_PER_ROW, _prefill_rows(of)))
    return taken + prefill_graph_bytes(of) + transient_bytes(of)


def prefill_graph_bytes(of: Deployment) -> int:
    """Bytes for a part of the results of a prefill pass in a CUDA graph, and for lse of both parts; part of
    `buffer_bytes`."""
    return PREFILL_TOKENS // of.dp * of.cost.local_heads * (2 * of.cost.dims.v_head_dim + 12)


def transient_bytes(of: Deployment) -> int:
    """Bytes for what prefill expands for itself, in BF16, and for its results; part of `buffer_bytes`."""
    dims = of.cost.dims
    if not of.prefill_expand_tokens:
        return 0
    keys_and_values = 2 * of.prefill_expand_tokens * (dims.qk_nope_head_dim + dims.v_head_dim)
    return of.cost.local_heads * keys_and_values + _naive_partial_bytes(of, _prefill_rows(of))


def _naive_partial_bytes(of: Deployment, rows: int) -> int:
    """Return the bytes of partial results of naive attention for so many rows of all heads."""
    return 4 * of.cost.dims.v_head_dim * (of.cost.local_heads * rows + SPLIT_ROWS)


def _prefill_rows(of: Deployment) -> int:
    """Return the rows of one call of attention to expanded prefixes in a prefill pass."""
    tokens = PREFILL_TOKENS // of.dp
    return prefill_rows(of.cost.local_heads, of.cost.dims.v_head_dim, tokens, PREFILL_PARTIAL_BYTES)


def memory(of: Deployment, fraction: float, for_prefixes: float | None = None) -> Memory:
    """Divide a GPU's memory as a server does at start.

    Args:
        fraction: share of the GPU's memory that SGLang uses for weights and cache (`--mem-fraction-static`).
        for_prefixes: bytes of it for expanded prefixes and buffers (`--hybrid-mla-prefix-memory-gb`); by default as
            much as the server reserves.
    Raises:
        ValueError: the GPU's memory is not known.
    """
    if of.gpu.sheet is None:
        raise ValueError(f"the memory of {of.gpu.key} is not known")
    weights = weight_bytes(of)
    left = max(of.gpu.sheet.memory_bytes * fraction - weights, 0.0)
    states = left * state_share(of)
    of_requests = int(states // of.state_bytes) // STATES_OF_A_REQUEST if of.has_states else None
    budget = left - states
    token, latent = (each * of.dims.num_layers for each in (of.cost.expanded_token_bytes, of.cost.latent_row_bytes))
    if for_prefixes is None:
        buffers, beside = buffer_bytes(replace(of, prefill_expand_tokens=0), expands=True), transient_bytes(of)
        for_prefixes = default_bytes(int(budget), buffers, token, beside)
    for_prefixes = min(for_prefixes, budget)
    chunks = max(int((for_prefixes - buffer_bytes(of, expands=True)) // (token * CHUNK_TOKENS)), 0)
    taken = max(for_prefixes, min(buffer_bytes(of, expands=False), budget))
    return Memory(weights, states, of_requests, budget, taken, chunks, latent, token)


def default_transient_tokens_of(of: Deployment, fraction: float, for_prefixes: float | None = None) -> int:
    """Tokens that a prefill pass of a server expands at a time for itself, where nothing is said of that; arguments are
    those of `memory`."""
    tokens = transient_tokens(of.cost.local_heads)
    of = replace(of, prefill_expand_tokens=tokens)
    named = None if for_prefixes is None else int(for_prefixes)
    return default_transient_tokens(tokens, int(memory(of, fraction).budget), transient_bytes(of), named)


def fraction_that_fits(of: Deployment, tokens: int) -> float:
    """The `--mem-fraction` that holds the weights and a cache of so many tokens, in hundredths; above 1 where none
    does."""
    assert of.gpu.sheet is not None
    cache = tokens * of.cost.latent_row_bytes * of.dims.num_layers
    needed = weight_bytes(of) + cache / (1 - state_share(of))
    return math.ceil(100 * needed / of.gpu.sheet.memory_bytes) / 100


def default_fraction(of: Deployment) -> float:
    """SGLang's own `--mem-fraction-static` on GPUs of 60 to 160 GB (0.5.17): what is left beside activations of a chunk
    of 8,192 tokens and its graphs."""
    assert of.gpu.sheet is not None
    graph_rows = 512 if of.tp >= 4 else 256
    reserved_mib = 512 + PREFILL_TOKENS * 1.5 + of.tp / 8 * 1024 + graph_rows * 2 + 1536
    if of.dp > 1:
        reserved_mib += graph_rows * of.dp * (4.5 if graph_rows > 300 else 3)
    return round(1 - max(reserved_mib, 10 * 1024) * (1 << 20) / of.gpu.sheet.memory_bytes, 3)
