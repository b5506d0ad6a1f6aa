"""Parts of prefill passes: transient expansion, CUDA graphs, and shared prefixes."""

from __future__ import annotations

import functools
from dataclasses import replace

from sglang_mla_ext.adapter.build.budget import call_rows, naive_tiles
from sglang_mla_ext.adapter.build.context import Context
from sglang_mla_ext.adapter.latent.host_cache import wait_for_layer
from sglang_mla_ext.adapter.latent.pool import latent_rows
from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
from sglang_mla_ext.adapter.prefill.prefill_graph import PrefillGraph
from sglang_mla_ext.adapter.prefill.transient import TransientExpansion
from sglang_mla_ext.adapter.step.steps import PrefillSharing
from sglang_mla_ext.adapter.stock.protocol import Stock
from sglang_mla_ext.kernels.dispatch import make_kept_part
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.pass_costs import PassCosts
from sglang_mla_ext.reasons import Fallback


def make_transient_expansion(context: Context, rates: GpuRates) -> TransientExpansion | None:
    """Make transient expansion for prefill, so many tokens at a time; None where it is not asked for, or where a kernel
    does not run here, which is counted."""
    runner, model, tokens = context.runner, context.model, context.server.options.transient_tokens
    if not tokens or not context.server.prefill.is_ours:
        return None
    table = runner.req_to_token_pool.req_to_token
    try:
        transient = TransientExpansion(
            *(model.first, latent_rows(runner.token_to_kv_pool), table, tokens, context.memory),
            dtype=model.dtype,
            device=runner.device,
            tiles=naive_tiles(rates, model.dtype),
            rows=call_rows(context.server, model),
        )
        transient.try_out(model.dtype)
    except Exception as error:
        context.counters.fall_back(Fallback.TRANSIENT_EXPANSION, error)
        return None
    return transient


def make_prefill_graph(context: Context, stock: Stock) -> PrefillGraph | None:
    """Make attention of prefill passes in CUDA graphs; None without such graphs, or where it does not run here, which
    is counted."""
    runner, layers, first = context.runner, context.model.layers, context.model.first
    rows = context.server.prefill.graph_rows
    if not rows:
        return None
    sizes = rows, first.num_local_heads, first.v_head_dim
    try:
        kept = make_kept_part(*sizes, dtype=runner.dtype, device=runner.device, memory=context.memory)
        return PrefillGraph(layers, stock.prefill_tails(), kept)
    except Exception as error:
        if not stock.decodes:  # nothing else reads the pool there
            raise
        context.counters.fall_back(Fallback.PREFILL_GRAPH, error)
        return None


def make_prefill_sharing(
    context: Context,
    cost: CostModel,
    stock: Stock,
    shared: SharedAttention | None,
    transient: TransientExpansion | None,
    prefill_graph: PrefillGraph | None,
    layer_index: dict[int, int],
) -> PrefillSharing | None:
    """Make what prefill passes attend to prefixes with; None where they share none.

    Args:
        shared: None, too, where this rank has not all heads of what is expanded.
    """
    on_gpu = context.server.device.on_gpu
    if not context.server.prefill.is_ours or (shared is None and transient is None):
        return None
    make_plan = functools.partial(
        PrefillPlan.make,
        attention=shared,
        layer_index=layer_index,
        max_rows=call_rows(context.server, context.model),
        counters=context.counters,
        wait=functools.partial(wait_for_layer, context.runner.token_to_kv_pool),
    )
    costs = None
    if prefill_graph is not None:
        costs = PassCosts(
            replace(cost, query_tokens=1, ranks=1),
            graph_layer_s=context.server.graph_layer_s,
            fetches=on_gpu and context.model.fp8,
        )
    always, absorbs = context.server.options.mode == "naive", prefill_graph is not None and not on_gpu
    return PrefillSharing(make_plan, stock.affordable, stock.can_finish, transient, always, absorbs, costs)
