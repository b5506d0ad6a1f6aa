"""A GPU's memory: weights, and what is left for latent rows and expanded prefixes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_mla_ext.predict.step import Deployment
from sglang_mla_ext.predict.weights import embedding_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU.

    Attributes:
        weights: its share; budget: of SGLang's static memory what the weights leave, 0 where they leave nothing.
        latent: of the prompt's latent rows, once, and of each request's tail.
        expanded: of the prompt's keys and values; out of the same budget.
        most_requests: that fit beside the expanded prompt, of all data-parallel ranks.
        reach: first tokens of the prompt whose expansion fits beside the latent rows.
    """

    weights: float
    budget: float
    latent: float
    expanded: float
    most_requests: int
    reach: int

    @property
    def fits(self) -> bool:
        return self.latent + self.expanded <= self.budget


def weight_bytes(of: Deployment) -> float:
    """Bytes of the weights on one GPU."""
    stored = sum(product.stored * product.element_bytes / of.ranks_of(product) for product in of.products)
    return stored + embedding_bytes(of.config) / of.tp


def memory(
    of: Deployment, requests: int, prompt: int, tail: int, fraction: float, for_prefixes: float = math.inf
) -> Memory:
    """What requests that share a prompt take.

    Args:
        tail: tokens of each request after the prompt, at the longest.
        fraction: of the GPU's memory that SGLang takes for weights and cache (`--mem-fraction-static`).
        for_prefixes: bytes that expanded prefixes may take of the budget (`--hybrid-mla-prefix-memory-gb`).
    Raises:
        ValueError: the GPU's memory is not known.
    """
    if of.gpu.sheet is None:
        raise ValueError(f"the memory of {of.gpu.key} is not known")
    token = of.cost.latent_row_bytes * of.dims.num_layers
    weights = weight_bytes(of)
    budget = max(of.gpu.sheet.memory_bytes * fraction - weights, 0.0)
    expanded = float(prompt * of.cost.expanded_token_bytes * of.dims.num_layers)
    latent = float((prompt + of.per_rank(requests) * tail) * token)
    left = budget - expanded - prompt * token
    most = int(left // (tail * token)) * of.dp if tail and left > 0 else 0
    room = min(max(budget - latent, 0.0), for_prefixes)
    reach = min(int(room // (of.cost.expanded_token_bytes * of.dims.num_layers)), prompt)
    return Memory(weights, budget, latent, expanded, most, reach)
