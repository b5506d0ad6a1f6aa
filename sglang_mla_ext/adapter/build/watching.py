"""Make the shadow check, and describe a backend and its prefix memory for the log."""

from __future__ import annotations

import logging

from sglang_mla_ext.adapter.build.context import Context
from sglang_mla_ext.adapter.latent.protocol import LatentAttention
from sglang_mla_ext.adapter.launch.prefix_memory_report import PROMPT_TOKENS, PrefixMemoryReport
from sglang_mla_ext.adapter.prefill.expander import weights_of
from sglang_mla_ext.adapter.step.shadow import BOUND, WIDE_BOUND, ShadowCheck
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.reasons import Fallback

logger = logging.getLogger(__name__)


def make_shadow(context: Context, latent: LatentAttention, prefixes: Sharing, *, naive: bool) -> ShadowCheck | None:
    """Make the shadow check of every `verify_interval`th step.

    Args:
        naive: whether anything is expanded, so that results are merged behind `w_vc`.
    Returns:
        None where it does not run here; that is counted.
    """
    server, model, counters = context.server, context.model, context.counters
    options = server.options
    if weights_of(model.first, model.dtype) is None:
        counters.fall_back(Fallback.SHADOW_CHECK_WEIGHTS)
        return None
    coarse = FP8 in (model.prefix_dtype(options), model.latent_dtype) or server.ranks.sharding > 1
    shadow = ShadowCheck(
        options.verify_interval,
        model.layers,
        latent,
        prefixes,
        counters,
        in_latent_space=not naive,
        dtype=model.dtype,
        device=context.runner.device,
        bound=WIDE_BOUND if coarse else BOUND,
        query_tokens=server.query_tokens,
        memory=context.memory,
    )
    try:
        shadow.try_out()
    except Exception as error:
        counters.fall_back(Fallback.SHADOW_CHECK_KERNELS, error)
        return None
    return shadow


def log_memory_report(context: Context, buffers: ExpandedBuffers) -> None:
    """Log how much of a long prompt these buffers hold, where each rank has requests of its own."""
    server, layers = context.server, len(context.model.layers)
    if server.ranks.dp == 1:
        return
    token_bytes, routes = buffers.bytes // (buffers.chunks * CHUNK_TOKENS), server.options.dp_routing == "prefix"
    sizes = buffers.bytes, token_bytes, buffers.heads, layers, buffers.dtype.itemsize
    found = PrefixMemoryReport(*sizes, routes, server.ranks.sharding, server.ranks.sharding_turned_off)
    logger.log(logging.INFO if found.tokens == PROMPT_TOKENS else logging.WARNING, "hybrid_mla: %s", found)


def describe(
    context: Context, buffers: ExpandedBuffers | None, latent: LatentAttention, smallest: int | None, *, transient: bool
) -> str:
    """Describe what can be shared in one line, for the log.

    Args:
        smallest: requests from which a group can pay.
        transient: whether prefill passes expand for themselves.
    """
    options = context.server.options
    passes = f"; prefill expands {options.transient_tokens} tokens at a time for itself" if transient else ""
    groups = f"groups of {smallest} requests and more" if smallest else "no group that pays"
    if buffers is None and latent.grouped_page is None:
        said = f"nothing is expanded, no grouped absorb, mode {options.mode}: every step is plain absorb"
    elif buffers is None:
        said = f"nothing is expanded, mode {options.mode}, grouped absorb, {groups}"
    else:
        tokens, dtype = buffers.chunks * CHUNK_TOKENS, str(buffers.dtype).removeprefix("torch.")
        budget = f"{context.budget_bytes / (1 << 30):.2f} GiB for expanded prefixes ({tokens} tokens in {dtype})"
        said = f"{budget}, mode {options.mode}, {groups}"
    return said + passes
