"""Puts the backend together from its parts, within the memory that was taken out of SGLang's budget for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.build.attention import allocate_latent, cost_model, smallest_group, stock_and_latent
from sglang_mla_ext.adapter.build.budget import latent_sizes
from sglang_mla_ext.adapter.build.context import Context
from sglang_mla_ext.adapter.build.expanding import Expanding, make_expanding, taken_beside
from sglang_mla_ext.adapter.build.prefill import make_prefill_graph, make_prefill_sharing, make_transient_expansion
from sglang_mla_ext.adapter.build.watching import describe, log_memory_report, make_shadow
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.failure import several_ranks
from sglang_mla_ext.adapter.latent.protocol import LatentAttention
from sglang_mla_ext.adapter.ranks.prompts import Beginnings, PromptNames
from sglang_mla_ext.adapter.ranks.ranks import all_ranks_agree, check_alike, drawn_key, is_alike, rules, tp_group
from sglang_mla_ext.adapter.ranks.sharded import ShardedSteps, SlotsOfPass, gather_over
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.adapter.step.backend import HybridMLABackend
from sglang_mla_ext.adapter.step.layer import hand_over_queries, merge_before_o_proj, take_over
from sglang_mla_ext.adapter.step.mixed import MixedRule
from sglang_mla_ext.adapter.step.reports import Reports
from sglang_mla_ext.adapter.step.steps import PrefillSharing, Steps
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS, MAX_SEGMENTS, SEGMENTS_PER_ROW
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.planner import Planner
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.radix import RadixSource
from sglang_mla_ext.prefix.sharded.member import Member
from sglang_mla_ext.prefix.sharded.reports import Reports as ReportsOfRanks
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.reasons import Fallback

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mla_ext.adapter.stock.protocol import Stock
    from sglang_mla_ext.options import HybridMLAOptions

logger = logging.getLogger(__name__)


def build(
    runner: ModelRunner, options: HybridMLAOptions, budget_bytes: int, memory: Memory | None = None
) -> tuple[HybridMLABackend, Steps, MixedRule]:
    """
    Args:
        runner: with its model loaded and its pools allocated.
        budget_bytes: device memory for expanded prefixes and for our own buffers, see budget.reserve.
        memory: where what is large is allocated.
    Returns:
        the backend for SGLang, what plans its passes, and when new tokens are rows of the decode graph.
    """
    context = Context.of(runner, options, budget_bytes, memory)
    server, model, counters = context.server, context.model, context.counters
    warn_of_vain_options(server)
    cost = cost_model(context)
    check_alike(rules(options, cost.rates, server.mixing.tokens))  # before ranks ask each other anything
    if server.ranks.sharding > 1 and server.ranks.by_stores:
        cost = replace(cost, rates=cost.rates.by_stores())
    stock, latent = stock_and_latent(runner, model.layers, latent_sizes(server, model, context.requests), counters)
    allocate_latent(context, stock, latent)
    transient = make_transient_expansion(context, cost.rates)
    prefill_graph = make_prefill_graph(context, stock)
    expanding = None
    if options.may_expand:
        taken = taken_beside(context, latent, transient, prefill_graph)
        expanding = expand_alike(context, taken, cost)
    buffers, shared, _ = expanding or (None, None, None)
    if buffers is not None:
        log_memory_report(context, buffers)
    pool = ExpandedPool(buffers.chunks if buffers else 0, CHUNK_TOKENS)
    prefixes, make_sharded = make_sharing(context, cost, pool, expanding, latent)
    layer_index = {layer.attn_mqa.layer_id: index for index, layer in enumerate(model.layers)}
    whole = None if make_sharded is not None else shared  # a rank has not all heads of what is sharded
    prefill = make_prefill_sharing(context, cost, stock, whole, transient, prefill_graph, layer_index)
    smallest = smallest_group(context, cost, shared, latent)
    sharing = range(smallest, context.step_rows // server.query_tokens + 1) if smallest is not None else range(0)
    description = describe(context, buffers, latent, smallest, transient=transient is not None)
    steps = make_steps(context, prefixes, expanding, latent, prefill, description)
    if make_sharded is not None:
        steps.sharded = make_sharded(requests=sharing, can_share=steps.can_share, fail=steps.fail)
    steps.plain_graphs = captures_plain_graphs(context, stock, sharing, sharded=make_sharded is not None)
    if steps.plain_graphs and make_sharded is None and several_ranks():
        steps.beginnings = Beginnings(options.min_prefix_len, sharing.start)
    backend = HybridMLABackend(
        stock,
        latent,
        shared,
        steps,
        layer_index=layer_index,
        heads=model.heads,
        requests=sharing,
        query_tokens=server.query_tokens,
        # Ranks with requests of their own have agreed on graphs before it is known what one of them shares.
        leave_graph=(lambda answer: False) if server.ranks.dp > 1 else all_ranks_agree(),
        prefill_graph=prefill_graph,
    )
    take_over(model.layers)
    if prefill is not None and prefill_graph is not None:
        hand_over_queries(model.layers)
    if shared is not None or (prefill is not None and prefill_graph is not None):
        merge_before_o_proj(model.layers, backend.merge)
    absorbs = all_ranks_agree()(prefill_graph is not None)
    rule = make_rule(context, cost, prefixes, latent, prefill, prefill_rows=server.prefill.graph_rows if absorbs else 0)
    return backend, steps, rule


def warn_of_vain_options(server: Server) -> None:
    """Say which options have no effect on this server."""
    options = server.options
    if options.mixed_tokens and not server.mixing.tokens:
        reason = server.mixing.obstacle
        logger.warning("hybrid_mla: --hybrid-mla-mixed-tokens has no effect here, because of %s", reason)
    if options.transient_tokens and not server.prefill.is_ours:
        logger.warning("hybrid_mla: --hybrid-mla-prefill-expand-tokens has no effect: prefill is not this backend's")


def expand_alike(context: Context, taken_bytes: int, cost: CostModel) -> Expanding | None:
    """Make what is expanded. Ranks that shard prefixes capture the same graphs: all expand, or none."""
    most_rows = max(context.step_rows, MAX_ROWS) if cost.ranks == 1 else context.step_rows
    expanding = make_expanding(context, taken_bytes, cost, max_rows=most_rows)
    if cost.ranks > 1 and not all_ranks_agree(tp_group())(expanding is not None) and expanding is not None:
        context.counters.fall_back(Fallback.RANK_EXPANDS_NOTHING)
        return None
    return expanding


def captures_plain_graphs(context: Context, stock: Stock, sharing: range, *, sharded: bool) -> bool:
    """Return whether decode graphs are also captured without shared attention; the same on all ranks. See
    graph_variants.py for the ranks that can.

    Args:
        sharing: numbers of requests of a step that can share.
    """
    server = context.server
    # Dynamo's trace of one variant may not hold for the other.
    possible = installed.has_graph_variants and not server.args.enable_torch_compile
    if not possible or (server.ranks.dp > 1 and not sharded):
        return False
    wanted = len(sharing) > 0 and (stock.make_plain(context.runner) or (sharded and not server.ranks.by_stores))
    return is_alike((wanted, sharing)) and wanted


def make_sharing(
    context: Context, cost: CostModel, pool: ExpandedPool, expanding: Expanding | None, latent: LatentAttention
) -> tuple[Sharing, Callable[..., ShardedSteps] | None]:
    """Make what plans shared prefixes: those of this rank's requests, or those that ranks shard, and then a maker of
    this rank's part in such steps. All ranks call this at the same time."""
    counters, expander = context.counters, None if expanding is None else expanding.expander
    requests = context.step_rows // context.server.query_tokens
    capacity = Capacity(MAX_SEGMENTS, SEGMENTS_PER_ROW * cost.ranks * requests)
    sharded = cost.ranks > 1 and expander is not None
    planner = Planner(
        context.server.options,
        cost,
        capacity,
        CHUNK_TOKENS,
        counters,
        naive=expander is not None,
        grouped_page=None if sharded else latent.grouped_page,
    )
    if not sharded or expander is None:
        decodes = context.runner.server_args.disaggregation_mode != "prefill"
        return Sharing(RadixSource(pool, counters), pool, planner, expander, counters, decodes=decodes), None
    names = PromptNames(drawn_key(tp_group()), CHUNK_TOKENS)
    reports = ReportsOfRanks(pool, names, planner.options.expand_tokens_per_step // CHUNK_TOKENS)
    slots = SlotsOfPass(reports, context.runner.req_to_token_pool.req_to_token)
    expander.attach(slots)
    sharing = Sharing(reports, pool, planner, expander, counters, shortest=1)
    make_sharded = partial(
        ShardedSteps,
        Member(sharing, reports, tp_group().rank_in_group),
        names,
        slots,
        counters,
        chunk_tokens=CHUNK_TOKENS,
        gather=gather_over(tp_group()),
        query_tokens=context.server.query_tokens,
    )
    return sharing, make_sharded


def make_steps(
    context: Context,
    prefixes: Sharing,
    expanding: Expanding | None,
    latent: LatentAttention,
    prefill: PrefillSharing | None,
    description: str,
) -> Steps:
    """Make what plans the passes, with its reports and its shadow check."""
    expander = None if expanding is None else expanding.expander
    shares = expanding is not None or latent.grouped_page is not None
    chunk_bytes = 0 if expanding is None else expanding.buffers.bytes // expanding.buffers.chunks
    steps = Steps(
        prefixes,
        expander,
        context.counters,
        shares=shares,
        prefill=prefill,
        max_requests=context.step_requests,
        reports=Reports(
            prefixes,
            context.counters,
            budget_bytes=context.budget_bytes,
            chunk_bytes=chunk_bytes,
            description=description,
        ),
        query_tokens=context.server.query_tokens,
    )
    if context.server.options.verify_interval and shares:
        steps.shadow = make_shadow(context, latent, prefixes, naive=expanding is not None)
    return steps


def make_rule(
    context: Context,
    cost: CostModel,
    prefixes: Sharing,
    latent: LatentAttention,
    prefill: PrefillSharing | None,
    *,
    prefill_rows: int,
) -> MixedRule:
    """Make the rule of when new tokens are rows of the decode graph; never where the server mixes none.

    Args:
        prefill_rows: of the largest pass as in a prefill graph, on all ranks with heads of the same requests.
    """
    server = context.server
    return MixedRule(
        tokens=server.mixing.tokens,
        most_rows=context.step_rows,
        prefixes=prefixes,
        cost=replace(cost, ranks=1, query_tokens=1),  # each rank has new rows of its own
        counters=context.counters,
        grouped=latent.grouped_page is not None,
        expands_once=prefill is not None and prefill.transient is not None,
        graphs=prefill.costs if prefill is not None and server.device.on_gpu else None,
        prefill_rows=prefill_rows,
        agree=all_ranks_agree(),
        query_tokens=server.query_tokens,
    )
