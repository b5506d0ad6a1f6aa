"""Attention in the latent space and SGLang's own, and what the modes of attention cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.build.budget import latent_kind, needs_latent
from sglang_mla_ext.adapter.build.context import Context
from sglang_mla_ext.adapter.latent.pool import latent_rows
from sglang_mla_ext.adapter.latent.protocol import LatentAttention, LatentSizes
from sglang_mla_ext.adapter.launch.resolved import on_gpu
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
    sizes = model.prefix_dtype(context.server.options).itemsize, model.latent_dtype.itemsize
    return CostModel(model.dims, model.heads, server.device.rates, *sizes, server.query_tokens, server.ranks.sharding)


def stock_and_latent(
    runner: ModelRunner, layers: Sequence[DeepseekV2AttentionMLA], sizes: LatentSizes, counters: Counters
) -> tuple[Stock, LatentAttention]:
    """SGLang's own backend and the attention in the latent space for this device and this pool."""
    pool, req_to_token = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    if not on_gpu(runner.server_args):
        from sglang_mla_ext.adapter.cpu.latent_torch import TorchLatent
        from sglang_mla_ext.adapter.stock.torch_native import TorchStock

        latent = TorchLatent(pool, req_to_token, grouped=sizes.grouped, query_tokens=sizes.query_tokens)
        return TorchStock(runner), latent
    from sglang_mla_ext.adapter.stock.flashmla import FlashMLAStock

    stock = FlashMLAStock(runner, layers, reads_pool=runner.kv_cache_dtype != FP8)
    kind: Any = latent_kind(fp8=not stock.decodes)
    layer_id, rows = layers[0].attn_mqa.layer_id, latent_rows(pool)
    return stock, kind(rows, req_to_token, sizes, layer_id=layer_id, on_failure=counters.fall_back)


def allocate_latent(context: Context, stock: Stock, latent: LatentAttention) -> None:
    """Allocate the buffers of attention in the latent space, where there are steps that are not the stock backend's."""
    server, counters = context.server, context.counters
    if needs_latent(server, stock_decodes=stock.decodes):
        latent.allocate(context.memory)
    if server.options.mode == "grouped_absorb" and latent.grouped_page is None and not counters.fallbacks:
        counters.fall_back(Fallback.GROUPED_ABSORB_HEADS, heads=context.model.heads)


def smallest_group(
    context: Context, cost: CostModel, shared: SharedAttention | None, latent: LatentAttention
) -> int | None:
    """Requests of a rank from which a step can have a group that pays; None where none ever does."""
    ways = {Mode.NAIVE: shared, Mode.GROUPED_ABSORB: latent.grouped_page}
    allowed = [mode for mode, way in ways.items() if way is not None]
    if not allowed:
        return None
    if context.server.options.mode != "auto":
        return -(-2 // cost.ranks)
    limit = context.step_requests * cost.ranks
    smallest = break_even.smallest_profitable_group(
        cost, context.model.context_len, [Mode.ABSORB, *allowed], limit=limit
    )
    return smallest and -(-smallest // cost.ranks)
