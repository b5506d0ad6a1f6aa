"""Device memory taken out of SGLang's budget for its KV cache: for expanded prefixes, and in every mode for all buffers
of our own, whose sizes are known before SGLang sizes its pools."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.build.model import STORAGE_DTYPES, Model, described
from sglang_mla_ext.adapter.latent.protocol import LatentAttention, LatentSizes
from sglang_mla_ext.adapter.launch import sharded_prefixes
from sglang_mla_ext.adapter.prefill.expander import buffer_sizes
from sglang_mla_ext.adapter.prefill.prefill_graph import PrefillGraph
from sglang_mla_ext.adapter.prefill.transient import TransientExpansion
from sglang_mla_ext.adapter.server import MAX_RANKS, Server
from sglang_mla_ext.adapter.step.shadow import ShadowCheck
from sglang_mla_ext.kernels.dispatch import multiprocessors
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS, PREFILL_PARTIAL_BYTES, prefill_rows
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.options import HybridMLAOptions, OptionError
from sglang_mla_ext.prefix.memory.default import (
    FEWEST_TOKENS,
    SHARE,
    default_bytes,
    default_transient_tokens,
    tokens_held,
    transient_tokens,
)
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)

GIB = 1 << 30


def with_default(available: int, configurator: KVCacheConfigurator, options: HybridMLAOptions) -> HybridMLAOptions:
    """Return the options with a size for expanded prefixes, where the user named none and something may be expanded,
    and with tokens that prefill expands for itself.

    Args:
        available: bytes that SGLang has for its KV cache.
    """
    server, model = described(configurator, options)
    server = with_transient_expansion(available, server, model)
    options = server.options
    if not options.may_expand or options.prefix_memory_gb is not None:
        return options
    token, beside = token_bytes(server, model), transient_bytes(server, model, options.transient_tokens)
    buffers = buffer_bytes(configurator, replace(options, prefill_expand_tokens=0))
    default = default_bytes(available, buffers, token, beside, always=options.mode == "naive")
    if not default:
        shard = f"shard prefixes over ranks ({sharded_prefixes.FLAG} auto), "
        logger.warning(
            "hybrid_mla: no prefix stays expanded by default here: %.0f %% of the %.1f GiB for the KV cache hold %d "
            "tokens of %.2f MiB, fewer than %d. Set --hybrid-mla-prefix-memory-gb, halve a token's size with "
            "--hybrid-mla-prefix-dtype fp8_e4m3, %sor divide the heads among ranks (--tp without "
            "--enable-dp-attention)",
            SHARE * 100,
            available / GIB,
            tokens_held(available, buffers, token),
            token / (1 << 20),
            FEWEST_TOKENS,
            shard if server.ranks.sharding_turned_off else "",
        )
    return replace(options, prefix_memory_gb=default / GIB)


def with_transient_expansion(available: int, server: Server, model: Model) -> Server:
    """Return the server with the tokens that its prefill passes expand for themselves, as `with_default` sets them."""
    if not server.expands_transiently:
        return server
    options, tokens = server.options, transient_tokens(model.heads)
    taken = transient_bytes(server, model, tokens)
    named = None if options.prefix_memory_gb is None else int(options.prefix_memory_gb * GIB)
    expanding = default_transient_tokens(tokens, available, taken, named)
    return Server.of(server.args, replace(options, prefill_expand_tokens=expanding))


def token_bytes(server: Server, model: Model) -> int:
    """Bytes of an expanded token on this rank, in all layers."""
    sizes = expanded_sizes(server, model, model.heads // server.ranks.sharding)
    return ExpandedBuffers.bytes_per_chunk(**sizes) // CHUNK_TOKENS


def expanded_sizes(server: Server, model: Model, heads: int) -> dict[str, Any]:
    """Return the sizes of the memory for expanded prefixes, with so many heads."""
    return buffer_sizes(model.first, model.prefix_dtype(server.options), layers=len(model.layers), heads=heads)


def reserve(available: int, configurator: KVCacheConfigurator, options: HybridMLAOptions) -> int:
    """
    Args:
        available: bytes that SGLang has for its KV cache.
        options: as `with_default` returns them.
    Returns:
        how many of them are ours, for expanded prefixes and buffers together: what was asked for, or what the buffers
        alone take, if that is more.
    Raises:
        OptionError: nothing is left.
    """
    buffers, asked = buffer_bytes(configurator, options), prefix_bytes(options)
    if 0 < asked < buffers:
        logger.warning(
            "hybrid_mla: --hybrid-mla-prefix-memory-gb %g does not cover its own buffers: %.3f GiB are taken for them, "
            "and nothing will be expanded",
            options.prefix_memory_gb,
            buffers / GIB,
        )
    budget = max(asked, buffers)
    if budget >= available:
        what = "hybrid_mla's own buffers" if buffers > asked else f"--hybrid-mla-prefix-memory-gb {asked / GIB:g}"
        advice = "raise --mem-fraction-static" if buffers > asked else "lower it, or raise --mem-fraction-static"
        size = f" ({buffers / GIB:.2f} GiB)" if buffers > asked else ""
        raise OptionError(
            f"{what}{size} leaves nothing of the {available / GIB:.2f} GiB that SGLang has for its KV cache: {advice}."
        )
    logger.info(
        "hybrid_mla: %.3f of %.3f GiB for the KV cache are reserved, at most %.3f for buffers of latent attention",
        budget / GIB,
        available / GIB,
        buffers / GIB,
    )
    return budget


def prefix_bytes(options: HybridMLAOptions) -> int:
    """Bytes asked for expanded prefixes; 0 where nothing is expanded."""
    return int((options.prefix_memory_gb or 0) * GIB) if options.may_expand else 0


def buffer_bytes(configurator: KVCacheConfigurator, options: HybridMLAOptions) -> int:
    """The most that attention in the latent space allocates, and what prefill expands for itself: nothing may be known
    of the pool of requests, and any of the kernels may turn out not to run."""
    server, model = described(configurator, options)
    taken = transient_bytes(server, model, options.transient_tokens)
    if rows := server.prefill.graph_rows:
        taken += PrefillGraph.workspace_bytes_for(rows, model.heads, model.first.v_head_dim, model.dtype)
    if not server.device.on_gpu or not needs_latent(server, stock_decodes=not model.fp8):
        return taken
    any_tokens = 1 << 40  # the most requests there can be, however many tokens there is room for
    sizes = latent_sizes(server, model, int(configurator.resolve_max_num_reqs(any_tokens)))
    taken += latent_kind(model.fp8).workspace_bytes_for(sizes, multiprocessors(model.device))
    if options.verify_interval:
        taken += ShadowCheck.workspace_bytes_for(model.first, model.dtype, server.query_tokens)
    return taken


def latent_sizes(server: Server, model: Model, requests: int) -> LatentSizes:
    """Return what attention in the latent space is made for.

    Args:
        requests: of SGLang's pool of requests.
    """
    return LatentSizes(
        heads=model.heads,
        kv_lora_rank=model.first.kv_lora_rank,
        qk_rope_head_dim=model.first.qk_rope_head_dim,
        dtype=model.dtype if model.fp8 else model.cache_dtype,
        grouped=server.uses_grouped,
        max_rows=step_rows(requests, server),
        max_requests=max_requests(requests + server.mixing.tokens),
        # Drafts may lead beyond the longest context, also in the step after the one that ends it.
        max_tokens=model.context_len + (2 * server.query_tokens if server.query_tokens > 1 else 0),
        query_tokens=server.query_tokens,
    )


def transient_bytes(server: Server, model: Model, tokens: int) -> int:
    """Return the most bytes that prefill takes to expand this many tokens at a time for itself."""
    if not tokens:
        return 0
    tiles, rows = naive_tiles(server.device.rates, model.dtype), call_rows(server, model)
    of_model: dict[str, Any] = dict(dtype=model.dtype, device=model.device, fetches=model.fp8)
    return TransientExpansion.bytes_for(model.first, tokens, tiles=tiles, rows=rows, **of_model)


def call_rows(server: Server, model: Model) -> int:
    """Return the rows of one call of naive attention in a prefill pass. Their partial results take no more than a
    sixteenth of a memory for expanded prefixes that is named: a small one has to hold prefixes, too."""
    most = prefix_bytes(server.options) // 16 or PREFILL_PARTIAL_BYTES
    return prefill_rows(model.heads, model.first.v_head_dim, server.prefill.tokens, most)


def latent_kind(fp8: bool) -> type[LatentAttention]:
    """Attention in the latent space on a GPU, over a pool in FP8 or SGLang's own."""
    if fp8:
        from sglang_mla_ext.adapter.latent.fp8 import FP8Latent

        return FP8Latent
    from sglang_mla_ext.adapter.latent.flashmla import FlashMLALatent

    return FlashMLALatent


def naive_tiles(rates: GpuRates, dtype: torch.dtype) -> Sequence[Mapping[str, int]]:
    """Calibrated tiles of naive attention over prefixes in this dtype; none where there are no others than shipped."""
    return next((found for name, found in rates.naive_tiles.items() if STORAGE_DTYPES[name] == dtype), ())


def needs_latent(server: Server, *, stock_decodes: bool) -> bool:
    """Return whether some steps are not the stock backend's."""
    return server.options.may_expand or server.uses_grouped or not stock_decodes


def step_rows(requests: int, server: Server) -> int:
    """Return `max_rows` of a server whose pool has so many requests."""
    return max_rows(requests, server.query_tokens, server.mixing.tokens, alone=server.ranks.dp > 1)


def max_rows(requests: int, query_tokens: int, mixed_tokens: int = 0, *, alone: bool = False) -> int:
    """Return the rows of a step that shares: those of whole requests, and new tokens that are mixed in.

    Args:
        requests: of SGLang's pool of requests.
        query_tokens: of each, which are its rows.
        mixed_tokens: new tokens mixed in, in units of as many.
        alone: these have steps without running requests, or the rows that these leave, as with DP attention.
    """
    running, mixed = (min(count, MAX_ROWS // query_tokens) for count in (requests, mixed_tokens // query_tokens))
    return (max(running, mixed) if alone else running + mixed) * query_tokens


def max_requests(requests: int) -> int:
    """Requests of any step: SGLang pads batches, also beyond its pool of requests, to a multiple of the attention
    ranks."""
    return -(-requests // MAX_RANKS) * MAX_RANKS
