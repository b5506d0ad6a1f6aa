"""Report how much of a long prompt the budget for expanded prefixes holds, at launch and in `sglang-mla doctor`.

Only with DP attention, where a rank has all heads of its requests, or more of them than with as many ranks of tensor
parallelism.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_mla_ext.adapter.launch import limits, sharded_prefixes
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.predict.memory import state_share, weight_bytes
from sglang_mla_ext.prefix.memory.default import default_bytes

PROMPT_TOKENS = 26_472
"""Tokens of TyphoonMLA's longest system prompt, which docs/performance.md measures with."""


class PrefixMemoryReport(NamedTuple):
    """A budget, and what a token of an expanded prefix takes of it, on one GPU.

    Attributes:
        heads: of expanded prefixes.
        element_bytes: of expanded prefixes, 2 or 1.
        routes: whether requests are sent to ranks by their prefixes.
        ranks: over which expanded prefixes are sharded; turned_off: whether the user turned that off.
    """

    budget_bytes: int
    token_bytes: int
    heads: int
    layers: int
    element_bytes: int
    routes: bool
    ranks: int = 1
    turned_off: bool = False

    @property
    def tokens(self) -> int:
        """Return how many tokens of the prompt fit expanded."""
        return min(self.budget_bytes // self.token_bytes, PROMPT_TOKENS)

    def __str__(self) -> str:
        dtype = "FP8" if self.element_bytes == 1 else "BF16"
        sharded = f", sharded over {self.ranks} ranks" if self.ranks > 1 else ""
        kind = f"{self.heads} heads, {self.layers} layers, {dtype}{sharded}"
        found = (
            f"prefix memory of a rank: {self.budget_bytes / (1 << 30):.1f} GiB hold {self.tokens:,} of a prompt's "
            f"{PROMPT_TOKENS:,} tokens ({self.token_bytes / (1 << 20):.2f} MiB a token: {kind})"
        )
        if self.tokens == PROMPT_TOKENS:
            return f"{found}."
        ways = {
            "--hybrid-mla-prefix-dtype fp8_e4m3 (half the size)": self.element_bytes == 2,
            "--hybrid-mla-dp-routing prefix (one prompt, one rank)": not self.routes and self.ranks == 1,
            f"{sharded_prefixes.FLAG} auto (one copy for all ranks)": self.ranks == 1 and self.turned_off,
            "no --enable-dp-attention (heads divided among ranks)": True,
        }
        more = "; ".join(way for way, helps in ways.items() if helps)
        return f"{found}; all take {PROMPT_TOKENS * self.token_bytes / (1 << 30):.1f} GiB. To hold more: {more}."


def caveat(server: Server) -> str | None:
    """Return that decode gains nothing, as by default with DP attention where a rank has too many heads for grouped
    absorb, and no memory is taken for expanded prefixes; None where it may gain."""
    options = server.options
    if server.ranks.dp == 1 or not options.mode_expands or server.ranks.sharding > 1:
        return None
    if (sizes := server.head_sizes) is not None and sizes.heads in STACKED_HEADS:
        return None
    found = predicted(server)
    if options.prefix_memory_gb is not None or (found is not None and found.budget_bytes):
        return None
    return (
        "decode gains nothing: with DP attention a rank has all heads of its requests, and no memory is taken for "
        "expanded prefixes by default"
    )


def predicted(server: Server) -> PrefixMemoryReport | None:
    """The same before a server starts, from its model's weights; None without DP attention, and where the model or the
    GPU is not known so well, or has no memory left."""
    options, memory_bytes = server.options, server.device.memory_bytes
    if server.ranks.dp == 1 or not options.may_expand or memory_bytes is None:
        return None
    try:
        of = server.deployment()
        weights, token_bytes = weight_bytes(of), of.cost.expanded_token_bytes * of.dims.num_layers
    except (ValueError, KeyError, TypeError):
        return None
    left = memory_bytes * server.args.mem_fraction_static - weights
    kv_bytes = int(left * (1 - state_share(of)))
    if kv_bytes <= 0:
        return None
    routes = options.dp_routing == "prefix" or limits.names_ranks_by_rooms(server.args)
    if options.prefix_memory_gb is not None:
        budget = int(options.prefix_memory_gb * (1 << 30))
    else:
        budget = default_bytes(kv_bytes, 0, token_bytes, always=options.mode == "naive")
    sizes = of.cost.expanded_heads, of.dims.num_layers, of.expanded_element_bytes
    return PrefixMemoryReport(budget, token_bytes, *sizes, routes, of.cost.ranks, server.ranks.sharding_turned_off)
