"""Attention in the latent space and SGLang's own, and what the modes of attention cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.build.budget import max_requests, max_tokens, needs_latent
from sglang_mla_ext.adapter.build.context import Context
from sglang_mla_ext.adapter.latent.pool import latent_rows
from sglang_mla_ext.adapter.latent.protocol import LatentAttention
from sglang_mla_ext.adapter.stock.protocol import Stock
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


def cost_model(context: Context) -> CostModel:
    """Return the cost of each mode for this model on this device."""
    server, model = context.server, context.model
    sizes = model.prefix_dtype(context.options).itemsize, model.latent_dtype.itemsize
    return CostModel(model.dims, model.heads, server.rates, *sizes, server.query_tokens, server.prefix_ranks)


def stock_and_latent(
    runner: ModelRunner,
    layers: Sequence[DeepseekV2AttentionMLA],
    grouped: bool,
    query_tokens: int,
    counters: Counters,
) -> tuple[Stock, LatentAttention]:
    """SGLang's own backend and the attention in the latent space for this device and this pool.

    Args:
        grouped: whether to use grouped absorb where it runs.
        query_tokens: of a request in a step.
    """
    pool, req_to_token = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    if torch.device(runner.device).type != "cuda":
        from sglang_mla_ext.adapter.cpu.latent_torch import TorchLatent
        from sglang_mla_ext.adapter.stock.torch_native import TorchStock

        return TorchStock(runner), TorchLatent(pool, req_to_token, grouped=grouped, query_tokens=query_tokens)
    from sglang_mla_ext.adapter.stock.flashmla import FlashMLAStock

    heads, layer_id = layers[0].num_local_heads, layers[0].attn_mqa.layer_id
    common = dict(heads=heads, layer_id=layer_id, grouped=grouped, query_tokens=query_tokens)
    stock = FlashMLAStock(runner, layers, reads_pool=runner.kv_cache_dtype != FP8)
    if stock.decodes:
        from sglang_mla_ext.adapter.latent.flashmla import FlashMLALatent

        rank = layers[0].kv_lora_rank
        return stock, FlashMLALatent(pool, req_to_token, kv_lora_rank=rank, on_failure=counters.fall_back, **common)
    from sglang_mla_ext.adapter.latent.fp8 import FP8Latent

    rows: Any = latent_rows(pool)  # in FP8, because the stock backend cannot decode over it
    return stock, FP8Latent(rows, req_to_token, dtype=runner.dtype, on_failure=counters.fall_back, **common)


def allocate_latent(context: Context, stock: Stock, latent: LatentAttention) -> None:
    """Allocate the buffers of attention in the latent space, where there are steps that are not the stock backend's."""
    server, heads = context.server, context.model.heads
    if needs_latent(server, stock_decodes=stock.decodes):
        most_tokens = max_tokens(context.model.context_len, server.query_tokens)
        most_requests = max_requests(context.requests + server.mixed_tokens)
        latent.allocate(context.step_rows, most_requests, most_tokens, context.memory)
    if context.options.mode == "grouped_absorb" and latent.grouped_page is None and not context.counters.fallbacks:
        context.counters.fall_back(Fallback.GROUPED_ABSORB_HEADS, heads=heads)


def smallest_group(
    context: Context, cost: CostModel, shared: SharedAttention | None, latent: LatentAttention
) -> int | None:
    """Requests of a rank from which a step can have a group that pays; None where none ever does."""
    ways = {Mode.NAIVE: shared, Mode.GROUPED_ABSORB: latent.grouped_page}
    allowed = [mode for mode, way in ways.items() if way is not None]
    if not allowed:
        return None
    if context.options.mode != "auto":
        return -(-2 // cost.ranks)
    limit = context.step_requests * cost.ranks
    smallest = break_even.smallest_profitable_group(
        cost, context.model.context_len, [Mode.ABSORB, *allowed], limit=limit
    )
    return smallest and -(-smallest // cost.ranks)
