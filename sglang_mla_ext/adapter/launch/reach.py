"""How far a budget for expanded prefixes reaches: said at launch and by `sglang-mla doctor` with DP attention, where a
rank has all heads of its requests, or more of them than with as many ranks of tensor parallelism."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.launch import models, spread
from sglang_mla_ext.configs import gpu_config_of
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.prefix.memory.default import default_bytes

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_mla_ext.options import HybridMLAOptions

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 26_472
"""Of the longest of TyphoonMLA's system prompts, which docs/performance.md measures with."""


class Reach(NamedTuple):
    """A budget, and what a token of an expanded prefix takes of it, on one GPU.

    Attributes:
        heads: of expanded prefixes.
        element_bytes: of expanded prefixes, 2 or 1.
        routes: whether requests are sent to ranks by their prefixes.
        ranks: that hold expanded prefixes together; may_spread: whether all could, if they do not.
    """

    budget_bytes: int
    token_bytes: int
    heads: int
    layers: int
    element_bytes: int
    routes: bool
    ranks: int = 1
    may_spread: bool = False

    @property
    def tokens(self) -> int:
        """Of the prompt, expanded."""
        return min(self.budget_bytes // self.token_bytes, PROMPT_TOKENS)

    def __str__(self) -> str:
        dtype = "FP8" if self.element_bytes == 1 else "BF16"
        whose = f"{self.ranks} ranks hold prefixes together, each" if self.ranks > 1 else "a rank has"
        of = "of every prefix" if self.ranks > 1 else "of its requests"
        found = (
            f"with DP attention {whose} {self.heads} heads {of}, and a token of an expanded prefix takes "
            f"{self.token_bytes / (1 << 20):.2f} MiB ({self.layers} layers, {dtype}): of a prompt of {PROMPT_TOKENS:,} "
            f"tokens {self.tokens:,} are expanded in {self.budget_bytes / (1 << 30):.1f} GiB"
        )
        if self.tokens == PROMPT_TOKENS:
            return f"{found}."
        return f"{found}, all of them in {PROMPT_TOKENS * self.token_bytes / (1 << 30):.1f}. {self._advice()}"

    def _advice(self) -> str:
        ways = {
            "--hybrid-mla-prefix-dtype fp8_e4m3 halves a token": self.element_bytes == 2,
            "--hybrid-mla-dp-routing prefix keeps prompts that begin alike on one rank": not self.routes
            and self.ranks == 1,
            f"{spread.FLAG} auto holds every prefix once for all ranks": self.ranks == 1 and self.may_spread,
            "tensor parallelism without --enable-dp-attention divides heads among ranks": True,
        }
        return f"What helps: {'; '.join(way for way, helps in ways.items() if helps)}."


def say(found: Reach) -> None:
    """Log it: a warning where the prompt does not fit."""
    logger.log(logging.INFO if found.tokens == PROMPT_TOKENS else logging.WARNING, "hybrid_mla: %s", found)


def predicted(args: ServerArgs, options: HybridMLAOptions) -> str | None:
    """The same before a server starts, from its model's weights; None without DP attention, and where the model or the
    GPU is not known so well, or has no memory left.

    Args:
        args: resolved.
    """
    found = _predicted(args, options)
    return None if found is None else f"about: {found}"


def caveat(args: ServerArgs, options: HybridMLAOptions) -> str | None:
    """That decode gains nothing, as it is by default with DP attention where a rank has too many heads for grouped
    absorb, and no memory is taken for expanded prefixes; None where it may gain.

    Args:
        args: resolved.
    """
    if installed.dp_attention_ranks(args) == 1 or not options.mode_expands or spread.ranks(args, options, True) > 1:
        return None
    sizes = models.head_sizes(args, installed.model_config(args))
    if sizes is not None and sizes.heads in STACKED_HEADS:
        return None
    found = _predicted(args, options)
    if options.prefix_memory_gb is not None or (found is not None and found.budget_bytes):
        return None
    return (
        "decode gains nothing: with DP attention a rank has all heads of its requests, and no memory is taken for "
        "expanded prefixes by default"
    )


def _predicted(args: ServerArgs, options: HybridMLAOptions) -> Reach | None:
    from sglang_mla_ext.predict.memory import state_share, weight_bytes
    from sglang_mla_ext.predict.rates import Gpu
    from sglang_mla_ext.predict.step import Deployment

    name = gpu_config_of(torch.cuda.get_device_name())
    dp = installed.dp_attention_ranks(args)
    if dp == 1 or not options.may_expand or name is None:
        return None
    config = installed.model_config(args).to_dict()
    fp8 = options.prefix_dtype == "fp8_e4m3" or (options.prefix_dtype, args.kv_cache_dtype) == ("auto", "fp8_e4m3")
    element_bytes = 1 if fp8 else 2
    try:
        of = Deployment(
            config,
            Gpu.from_json(name),
            args.tp_size,
            dp,
            expanded_element_bytes=element_bytes,
            spread=spread.ranks(args, options, on_gpu=True) > 1,
        )
        weights, token_bytes = weight_bytes(of), of.cost.expanded_token_bytes * of.dims.num_layers
    except (ValueError, KeyError, TypeError):
        return None
    left = torch.cuda.get_device_properties(0).total_memory * args.mem_fraction_static - weights
    kv_bytes = int(left * (1 - state_share(of)))
    if kv_bytes <= 0:
        return None
    routes = options.dp_routing == "prefix"
    if options.prefix_memory_gb is not None:
        budget = int(options.prefix_memory_gb * (1 << 30))
    else:
        budget = default_bytes(kv_bytes, 0, token_bytes, always=options.mode == "naive")
    sizes = of.cost.expanded_heads, of.dims.num_layers, element_bytes
    may_spread = spread.in_the_way(args, options, on_gpu=True) is None
    return Reach(budget, token_bytes, *sizes, routes, of.cost.ranks, may_spread)
