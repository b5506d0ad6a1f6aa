"""Puts the backend together from its parts, within the memory that was taken out of SGLang's budget for it."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.latent.host_cache import wait_for_layer
from sglang_mla_ext.adapter.latent.protocol import LatentAttention
from sglang_mla_ext.adapter.launch import passing as launch_passing
from sglang_mla_ext.adapter.launch import reach
from sglang_mla_ext.adapter.launch import riding as launch_riding
from sglang_mla_ext.adapter.launch import spread as launch_spread
from sglang_mla_ext.adapter.launch.reach import Reach
from sglang_mla_ext.adapter.step.backend import HybridMLABackend
from sglang_mla_ext.adapter.step.budget import (
    STORAGE_DTYPES,
    max_requests,
    max_rows,
    max_tokens,
    needs_latent,
    prefill_graph_rows,
    tries_grouped,
)
from sglang_mla_ext.adapter.step.build_expanding import (
    all_ranks_agree,
    latent_dtype,
    make_expanding,
    make_passing,
    reach_each_other,
)
from sglang_mla_ext.adapter.step.layer import (
    attention_layers,
    hand_over_queries,
    merge_before_o_proj,
    take_over,
)
from sglang_mla_ext.adapter.step.mixed import MixedRule
from sglang_mla_ext.adapter.step.prefill import PrefillPlan
from sglang_mla_ext.adapter.step.prefill_graph import make_prefill_graph
from sglang_mla_ext.adapter.step.ranks import check_alike, drawn_key, rules, tp_group
from sglang_mla_ext.adapter.step.reports import Reports
from sglang_mla_ext.adapter.step.shadow import ShadowCheck
from sglang_mla_ext.adapter.step.spreading import Spreading, gather_over
from sglang_mla_ext.adapter.step.steps import PrefillSharing, Steps
from sglang_mla_ext.adapter.step.stock import Stock
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS, MAX_SEGMENTS, SEGMENTS_PER_ROW
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.cost_model import CostModel
from sglang_mla_ext.prefix.expanded_pool import ExpandedPool
from sglang_mla_ext.prefix.gpu_rates import rates_for
from sglang_mla_ext.prefix.model_dims import ModelDims
from sglang_mla_ext.prefix.pass_costs import EAGER_LAYER_S, PassCosts
from sglang_mla_ext.prefix.room import Capacity
from sglang_mla_ext.prefix.shared_prefixes import SharedPrefixes
from sglang_mla_ext.prefix.spread.prefixes import SpreadPrefixes
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

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
    counters = Counters()
    layers = attention_layers(runner)
    memory = memory or Memory()
    requests = runner.req_to_token_pool.size
    query_tokens = installed.draft_tokens(runner.server_args)
    on_gpu = torch.device(runner.device).type == "cuda"
    args = installed.resolved(runner.server_args)
    riding_tokens = launch_riding.tokens(args, options, on_gpu)
    if options.mixed_tokens and not riding_tokens:
        reason = launch_riding.in_the_way(args, on_gpu)
        logger.warning("hybrid_mla: --hybrid-mla-mixed-tokens has no effect here, because of %s", reason)
    heads, step_rows = layers[0].num_local_heads, max_rows(requests, query_tokens, riding_tokens)
    step_requests, context_len = max_rows(requests, query_tokens) // query_tokens, runner.model_config.context_len
    prefix_dtype = STORAGE_DTYPES.get(options.prefix_dtype, latent_dtype(runner))
    ranks = launch_spread.ranks(args, options, on_gpu)
    cost = cost_model(runner, layers, prefix_dtype, query_tokens, ranks)
    check_alike(rules(options, cost.rates, riding_tokens))  # before ranks ask each other anything
    by_stores = ranks > 1 and launch_spread.may_store(args, options)
    if by_stores and options.spread == "auto":
        by_stores = on_gpu and all_ranks_agree(tp_group())(reach_each_other(tp_group()))
    if by_stores:
        cost = replace(cost, rates=cost.rates.by_stores())
    grouped = tries_grouped(options, cost.rates, ranks)
    stock, latent = stock_and_latent(runner, layers, grouped, query_tokens, counters)
    if needs_latent(options, grouped=grouped, stock_decodes=stock.decodes):
        most_requests = max_requests(requests + riding_tokens)
        latent.allocate(step_rows, most_requests, max_tokens(context_len, query_tokens), memory)
    if options.mode == "grouped_absorb" and latent.grouped_page is None and not counters.fallbacks:
        counters.fall_back(f"grouped absorb does not run here with {heads} heads: every step is plain absorb")

    ours = launch_passing.is_ours(args)
    passing = None
    if options.passing_tokens and ours:
        passing = make_passing(runner, layers, options.passing_tokens, cost.rates, counters, memory)
    elif options.passing_tokens:
        logger.warning("hybrid_mla: --hybrid-mla-prefill-expand-tokens has no effect: prefill is not this backend's")
    prefill_graph = make_prefill_graph(runner, stock, layers, prefill_graph_rows(args), counters, memory)
    expanding = None
    if options.may_expand:
        taken_bytes = prefill_graph.workspace_bytes if prefill_graph is not None else 0
        taken_bytes += latent.workspace_bytes + (passing.taken_bytes if passing is not None else 0)
        if options.verify_interval:
            taken_bytes += ShadowCheck.workspace_bytes_for(layers[0], runner.dtype, query_tokens)
        of_rank = runner, layers, cost, prefix_dtype, budget_bytes, taken_bytes, counters, memory
        most_rows = MAX_ROWS if ranks == 1 else step_rows
        expanding = make_expanding(*of_rank, max_rows=most_rows, by_stores=by_stores)
        # Ranks that hold prefixes together capture the same graphs: all expand, or none.
        if ranks > 1 and not all_ranks_agree(tp_group())(expanding is not None) and expanding is not None:
            counters.fall_back("nothing is expanded: another rank expands nothing")
            expanding = None
    buffers, shared, expander = expanding or (None, None, None)
    if buffers is not None and installed.dp_attention_ranks(args) > 1:
        token_bytes, routes = buffers.bytes // (buffers.chunks * CHUNK_TOKENS), options.dp_routing == "prefix"
        sizes = buffers.bytes, token_bytes, buffers.heads, len(layers), buffers.dtype.itemsize
        reach.say(Reach(*sizes, routes, ranks, launch_spread.in_the_way(args, options, on_gpu) is None))
    pool = ExpandedPool(buffers.chunks if buffers else 0, CHUNK_TOKENS)
    capacity = Capacity(MAX_SEGMENTS, SEGMENTS_PER_ROW * ranks * (step_rows // query_tokens))
    spreads = ranks > 1 and shared is not None
    prefixes: SharedPrefixes | SpreadPrefixes
    if spreads:
        prefixes = SpreadPrefixes(options, cost, pool, counters, rank=tp_group().rank_in_group, capacity=capacity)
    else:
        prefixes = SharedPrefixes(
            options,
            cost,
            pool,
            expander,
            counters,
            capacity=capacity,
            naive=shared is not None,
            grouped_page=latent.grouped_page,
            decodes=runner.server_args.disaggregation_mode != "prefill",
        )
    layer_index = {layer.attn_mqa.layer_id: index for index, layer in enumerate(layers)}
    prefill = None
    # A rank has not all heads of what is spread.
    if ours and ((shared is not None and not spreads) or passing is not None):
        make_plan = functools.partial(
            PrefillPlan.make,
            attention=shared,
            layer_index=layer_index,
            max_rows=MAX_ROWS,
            counters=counters,
            wait=functools.partial(wait_for_layer, runner.token_to_kv_pool),
        )
        always = options.mode == "naive"
        absorbs = prefill_graph is not None and not on_gpu
        # Without a GPU passes do not leave a graph that is not there.
        costs = PassCosts(
            replace(cost, query_tokens=1, ranks=1),
            eager_layer_s=EAGER_LAYER_S if on_gpu else math.inf,
            fetches=on_gpu and latent_dtype(runner) == FP8,
        )
        prefill = PrefillSharing(
            make_plan,
            stock.affordable,
            stock.can_finish,
            passing,
            always,
            absorbs,
            costs if prefill_graph is not None else None,
        )
    smallest = smallest_group(cost, options, shared, latent, context_len, step_requests)
    by_prefill = (
        f"; prefill expands {options.passing_tokens} tokens at a time for itself" if passing is not None else ""
    )
    reports = Reports(
        prefixes,
        counters,
        budget_bytes=budget_bytes,
        chunk_bytes=buffers.bytes // buffers.chunks if buffers else 0,
        description=describe(options, budget_bytes, buffers, latent, smallest) + by_prefill,
    )
    steps = Steps(
        prefixes,
        expander,
        counters,
        shares=shared is not None or latent.grouped_page is not None,
        prefill=prefill,
        max_requests=step_requests,
        reports=reports,
        query_tokens=query_tokens,
    )
    if options.verify_interval and (shared is not None or latent.grouped_page is not None):
        fp8 = FP8 in (prefix_dtype, latent_dtype(runner))
        steps.shadow = make_shadow(
            runner, layers, options, latent, prefixes, counters, memory, naive=shared is not None, fp8=fp8
        )
    sharing = range(smallest, step_rows // query_tokens + 1) if smallest is not None else range(0)
    if spreads:
        steps.spreading = Spreading(
            prefixes,
            expander,
            runner.req_to_token_pool.req_to_token,
            counters,
            gather=gather_over(tp_group()),
            key=drawn_key(tp_group()),
            requests=sharing,
            query_tokens=query_tokens,
            can_share=steps.can_share,
            fail=steps.fail,
        )
    of_steps = dict(layer_index=layer_index, heads=heads, requests=sharing, query_tokens=query_tokens)
    # Ranks with requests of their own have agreed on graphs before it is known what one of them shares.
    leave_graph = never if installed.dp_attention_ranks(args) > 1 else all_ranks_agree()
    of_prefill = dict(leave_graph=leave_graph, prefill_graph=prefill_graph)
    backend = HybridMLABackend(stock, latent, shared, steps, **of_steps, **of_prefill)
    take_over(layers)
    if prefill is not None and prefill_graph is not None:
        hand_over_queries(layers)
    if shared is not None or (prefill is not None and prefill_graph is not None):
        merge_before_o_proj(layers, backend.merge)
    rule = MixedRule(
        tokens=riding_tokens,
        most_rows=step_rows,
        prefixes=steps.spreading or prefixes,
        cost=replace(cost, ranks=1),  # each rank has new rows of its own
        counters=counters,
        grouped=latent.grouped_page is not None,
        expands_once=passing is not None,
        # Without a GPU it was asked for, and there is nothing to gain.
        eager_layer_s=EAGER_LAYER_S if on_gpu else math.inf,
        graphs=prefill.costs if prefill is not None and on_gpu else None,
        agree=all_ranks_agree(),
    )
    return backend, steps, rule


def never(answer: bool) -> bool:
    """What ranks say that do not ask each other."""
    return False


def cost_model(
    runner: ModelRunner,
    layers: Sequence[DeepseekV2AttentionMLA],
    prefix_dtype: torch.dtype,
    query_tokens: int,
    ranks: int = 1,
) -> CostModel:
    """What modes cost for this model on this device.

    Args:
        prefix_dtype: of expanded prefixes.
        query_tokens: of a request in a step.
        ranks: that hold expanded prefixes together.
    """
    first = layers[0]
    dims = ModelDims(
        num_layers=len(layers),
        num_heads=first.num_heads,
        kv_lora_rank=first.kv_lora_rank,
        qk_nope_head_dim=first.qk_nope_head_dim,
        qk_rope_head_dim=first.qk_rope_head_dim,
        v_head_dim=first.v_head_dim,
        hidden_size=runner.model_config.hidden_size,
    )
    on_gpu = torch.device(runner.device).type == "cuda"
    rates = rates_for(torch.cuda.get_device_name() if on_gpu else "cpu")
    sizes = prefix_dtype.itemsize, latent_dtype(runner).itemsize
    return CostModel(dims, first.num_local_heads, rates, *sizes, query_tokens, ranks)


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
        from sglang_mla_ext.adapter.step.stock_torch import TorchStock

        return TorchStock(runner), TorchLatent(pool, req_to_token, grouped=grouped, query_tokens=query_tokens)
    from sglang_mla_ext.adapter.step.stock_flashmla import FlashMLAStock

    heads, layer_id = layers[0].num_local_heads, layers[0].attn_mqa.layer_id
    common = dict(heads=heads, layer_id=layer_id, grouped=grouped, query_tokens=query_tokens)
    stock = FlashMLAStock(runner, layers, reads_pool=runner.kv_cache_dtype != FP8)
    if stock.decodes:
        from sglang_mla_ext.adapter.latent.flashmla import FlashMLALatent

        rank = layers[0].kv_lora_rank
        return stock, FlashMLALatent(pool, req_to_token, kv_lora_rank=rank, on_failure=counters.fall_back, **common)
    from sglang_mla_ext.adapter.latent.fp8 import FP8Latent

    return stock, FP8Latent(pool, req_to_token, dtype=runner.dtype, on_failure=counters.fall_back, **common)


def make_shadow(
    runner: ModelRunner,
    layers: Sequence[DeepseekV2AttentionMLA],
    options: HybridMLAOptions,
    latent: LatentAttention,
    prefixes: SharedPrefixes,
    counters: Counters,
    memory: Memory,
    *,
    naive: bool,
    fp8: bool,
) -> ShadowCheck | None:
    """What checks every `verify_interval`th step.

    Args:
        naive: whether anything is expanded, so that results are merged behind `w_vc`.
        fp8: whether expanded prefixes or latent rows are.
    Returns:
        None where it does not run here; that is counted.
    """
    if not ShadowCheck.can_check(layers[0], runner.dtype):
        counters.fall_back("no shadow check: this form of the model's weights is DeepGEMM's alone")
        return None
    shadow = ShadowCheck(
        options.verify_interval,
        layers,
        latent,
        prefixes,
        counters,
        in_latent_space=not naive,
        dtype=runner.dtype,
        device=runner.device,
        fp8=fp8,
        query_tokens=installed.draft_tokens(runner.server_args),
        memory=memory,
    )
    try:
        shadow.try_out()
    except Exception as error:
        counters.fall_back(f"no shadow check, it does not run here: {type(error).__name__}", error)
        return None
    return shadow


def smallest_group(
    cost: CostModel,
    options: HybridMLAOptions,
    shared: SharedAttention | None,
    latent: LatentAttention,
    context_len: int,
    max_requests: int,
) -> int | None:
    """Requests of a rank from which a step can have a group that pays; None where none ever does."""
    ways = {Mode.NAIVE: shared, Mode.GROUPED_ABSORB: latent.grouped_page}
    allowed = [mode for mode, way in ways.items() if way is not None]
    if not allowed:
        return None
    if options.mode != "auto":
        return -(-2 // cost.ranks)
    smallest = cost.smallest_profitable_group(context_len, [Mode.ABSORB, *allowed], limit=max_requests * cost.ranks)
    return smallest and -(-smallest // cost.ranks)


def describe(
    options: HybridMLAOptions,
    budget_bytes: int,
    buffers: ExpandedBuffers | None,
    latent: LatentAttention,
    smallest: int | None,
) -> str:
    """One line for the log."""
    if buffers is None and latent.grouped_page is None:
        return f"nothing is expanded, no grouped absorb, mode {options.mode}: every step is plain absorb"
    groups = f"groups of {smallest} requests and more" if smallest else "no group that pays"
    if buffers is None:
        return f"nothing is expanded, mode {options.mode}, grouped absorb, {groups}"
    tokens, dtype = buffers.chunks * CHUNK_TOKENS, str(buffers.dtype).removeprefix("torch.")
    memory = f"{budget_bytes / (1 << 30):.2f} GiB for expanded prefixes ({tokens} tokens in {dtype})"
    return f"{memory}, mode {options.mode}, {groups}"
