"""How much device memory is taken out of what SGLang has for its KV cache: for expanded prefixes, and in every mode for
all buffers of our own, whose sizes are known before SGLang sizes its pools."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.latent.protocol import LatentAttention, LatentSizes
from sglang_mla_ext.adapter.launch import passing, riding, spread
from sglang_mla_ext.adapter.step.layer import attention_layers
from sglang_mla_ext.adapter.step.passing import Passing
from sglang_mla_ext.adapter.step.prefill_graph import PrefillGraph
from sglang_mla_ext.adapter.step.shadow import ShadowCheck
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.dispatch import multiprocessors
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.options import HybridMLAOptions, OptionError
from sglang_mla_ext.prefix.memory.default import (
    FEWEST_TOKENS,
    SHARE,
    default_bytes,
    default_passing_tokens,
    passing_tokens,
    tokens_held,
)
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

MAX_RANKS = 64
"""A multiple of every number of attention ranks that SGLang pads batches for."""

GIB = 1 << 30

STORAGE_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": FP8}
"""Of expanded prefixes, by the option; otherwise as the cache."""


def with_default(available: int, configurator: KVCacheConfigurator, options: HybridMLAOptions) -> HybridMLAOptions:
    """The options with a size for expanded prefixes, where the user named none and something may be expanded, and with
    tokens that prefill expands for itself.

    Args:
        available: bytes that SGLang has for its KV cache.
    """
    options = with_passing(available, configurator, options)
    if not options.may_expand or options.prefix_memory_gb is not None:
        return options
    token, beside = token_bytes(configurator, options), passing_bytes(configurator, options.passing_tokens)
    buffers = buffer_bytes(configurator, replace(options, prefill_expand_tokens=0))
    default = default_bytes(available, buffers, token, beside, always=options.mode == "naive")
    if not default:
        on_gpu = torch.device(configurator.device).type == "cuda"
        in_the_way = spread.in_the_way(installed.resolved(configurator.server_args), options, on_gpu)
        together = (
            f"hold prefixes together ({spread.FLAG} auto), " if options.spread == "off" and not in_the_way else ""
        )
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
            together,
        )
    return replace(options, prefix_memory_gb=default / GIB)


def with_passing(available: int, configurator: KVCacheConfigurator, options: HybridMLAOptions) -> HybridMLAOptions:
    """The options with what `with_default` says of prefill."""
    device = torch.device(configurator.device)
    if not passing.by_default(installed.resolved(configurator.server_args), options, device.type == "cuda"):
        return options
    tokens = passing_tokens(attention_layers(configurator)[0].num_local_heads)
    taken = passing_bytes(configurator, tokens)
    named = None if options.prefix_memory_gb is None else int(options.prefix_memory_gb * GIB)
    return replace(options, prefill_expand_tokens=default_passing_tokens(tokens, available, taken, named))


def token_bytes(configurator: KVCacheConfigurator, options: HybridMLAOptions) -> int:
    """Of an expanded token on this rank, in all layers."""
    layers = attention_layers(configurator)
    on_gpu = torch.device(configurator.device).type == "cuda"
    ranks = spread.ranks(installed.resolved(configurator.server_args), options, on_gpu)
    cache = FP8 if configurator.kv_cache_dtype == FP8 else configurator.model_dtype
    chunk = ExpandedBuffers.bytes_per_chunk(
        layers=len(layers),
        heads=layers[0].num_local_heads // ranks,
        qk_nope_head_dim=layers[0].qk_nope_head_dim,
        v_head_dim=layers[0].v_head_dim,
        qk_rope_head_dim=layers[0].qk_rope_head_dim,
        dtype=STORAGE_DTYPES.get(options.prefix_dtype, cache),
    )
    return chunk // CHUNK_TOKENS


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
    """What is asked for; 0 where nothing is expanded."""
    return int((options.prefix_memory_gb or 0) * GIB) if options.may_expand else 0


def buffer_bytes(configurator: KVCacheConfigurator, options: HybridMLAOptions) -> int:
    """The most that attention in the latent space allocates, and what prefill expands for itself: nothing may be known
    of the pool of requests, and any of the kernels may turn out not to run."""
    layer, device = attention_layers(configurator)[0], torch.device(configurator.device)
    on_gpu, fp8 = device.type == "cuda", configurator.kv_cache_dtype == FP8
    args = installed.resolved(configurator.server_args)
    rates = rates_for(torch.cuda.get_device_name() if on_gpu else "cpu")
    taken = passing_bytes(configurator, options.passing_tokens)
    taken += prefill_graph_bytes(configurator, prefill_graph_rows(args))
    grouped = tries_grouped(options, rates, spread.ranks(args, options, on_gpu))
    if not on_gpu or not needs_latent(options, grouped=grouped, stock_decodes=not fp8):
        return taken
    requests, query_tokens = installed.most_requests(configurator), installed.draft_tokens(configurator.server_args)
    riding_tokens = riding.tokens(args, options, on_gpu)
    sizes = LatentSizes(
        heads=layer.num_local_heads,
        kv_lora_rank=layer.kv_lora_rank,
        qk_rope_head_dim=layer.qk_rope_head_dim,
        dtype=configurator.model_dtype if fp8 else configurator.kv_cache_dtype,
        grouped=grouped,
        max_rows=max_rows(requests, query_tokens, riding_tokens),
        max_requests=max_requests(requests + riding_tokens),
        max_tokens=max_tokens(configurator.model_config.context_len, query_tokens),
        programs=multiprocessors(device),
        query_tokens=query_tokens,
    )
    taken += latent_kind(fp8).workspace_bytes_for(sizes)
    if options.verify_interval:
        taken += ShadowCheck.workspace_bytes_for(layer, configurator.model_dtype, query_tokens)
    return taken


def passing_bytes(configurator: KVCacheConfigurator, tokens: int) -> int:
    """For as many tokens that prefill expands at a time for itself."""
    if not tokens:
        return 0
    layer, device = attention_layers(configurator)[0], torch.device(configurator.device)
    dtype = configurator.model_dtype
    rates = rates_for(torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    tiles, fetches = naive_tiles(rates, dtype), configurator.kv_cache_dtype == FP8
    return Passing.bytes_for(layer, tokens, dtype=dtype, device=device, tiles=tiles, fetches=fetches)


def prefill_graph_rows(args: ServerArgs) -> int:
    """Rows of our buffers for prefill graphs: SGLang pads passes to a multiple of the attention ranks. 0 where prefill
    is another backend's, or runs without graphs. `args` are resolved."""
    rows = installed.prefill_graph_rows(args) if passing.is_ours(args) else 0
    return -(-rows // MAX_RANKS) * MAX_RANKS


def prefill_graph_bytes(configurator: KVCacheConfigurator, rows: int) -> int:
    """Buffers for prefill graphs of as many rows."""
    if not rows:
        return 0
    layer = attention_layers(configurator)[0]
    heads, v_head_dim = layer.num_local_heads, layer.v_head_dim
    return PrefillGraph.workspace_bytes_for(rows, heads, v_head_dim, configurator.model_dtype)


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


def tries_grouped(options: HybridMLAOptions, rates: GpuRates, ranks: int = 1) -> bool:
    """Whether grouped absorb is used where it runs: `auto` takes it only where it was timed, and where this rank's
    requests share for themselves.

    Args:
        ranks: that hold expanded prefixes together.
    """
    if ranks > 1:
        return False
    return options.mode == "grouped_absorb" or (options.may_group and rates.modes[Mode.GROUPED_ABSORB].measured)


def needs_latent(options: HybridMLAOptions, *, grouped: bool, stock_decodes: bool) -> bool:
    """Whether there are steps that are not the stock backend's."""
    return options.may_expand or grouped or not stock_decodes


def max_rows(requests: int, query_tokens: int, riding_tokens: int = 0) -> int:
    """Rows of a step that shares: those of whole requests, and those that ride.

    Args:
        requests: of SGLang's pool of requests.
        query_tokens: of each, which are its rows.
        riding_tokens: new tokens that ride beside those requests; none do where requests have several query tokens.
    """
    return min(requests + riding_tokens, MAX_ROWS // query_tokens) * query_tokens


def max_tokens(context_len: int, query_tokens: int) -> int:
    """Tokens of a request: drafts may lead beyond the longest context, also in the step after the one that ends it."""
    return context_len if query_tokens == 1 else context_len + 2 * query_tokens


def max_requests(requests: int) -> int:
    """Requests of any step: SGLang pads batches, also beyond its pool of requests, to a multiple of the attention
    ranks."""
    return -(-requests // MAX_RANKS) * MAX_RANKS
