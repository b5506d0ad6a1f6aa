"""Build the memory for expanded prefixes, the attention over them and the expander that fills it: within a budget, with
prefixes of this rank alone or sharded over ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang_mla_ext.adapter.build.budget import call_rows, expanded_sizes, naive_tiles
from sglang_mla_ext.adapter.build.context import Context
from sglang_mla_ext.adapter.latent.pool import latent_rows
from sglang_mla_ext.adapter.latent.protocol import LatentAttention
from sglang_mla_ext.adapter.prefill.expander import Expander, temporary_bytes
from sglang_mla_ext.adapter.prefill.prefill_graph import PrefillGraph
from sglang_mla_ext.adapter.prefill.transient import TransientExpansion
from sglang_mla_ext.adapter.ranks.ranks import tp_group
from sglang_mla_ext.adapter.step.shadow import ShadowCheck
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.dispatch import make_shared_attention, workspace_bytes
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.collectives import Collectives
from sglang_mla_ext.kernels.naive.exchange import Exchange, ExchangeSizes
from sglang_mla_ext.kernels.naive.peers import Peers
from sglang_mla_ext.kernels.naive.sharded import ShardedAttention
from sglang_mla_ext.kernels.sizes import SEGMENTS_PER_ROW
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.reasons import Fallback


class Expanding(NamedTuple):
    """Memory for expanded prefixes, the attention over them, and what fills them."""

    buffers: ExpandedBuffers
    shared: SharedAttention
    expander: Expander


def make_expanding(context: Context, taken_bytes: int, cost: CostModel, *, max_rows: int) -> Expanding | None:
    """Make what is expanded, of this rank's heads. Every kernel runs once.

    Args:
        taken_bytes: that are taken of the budget already.
        max_rows: of a rank in a step.
    Returns:
        None where the budget holds no chunk, or a kernel does not run here; that is counted.
    """
    runner, model, counters, memory = context.runner, context.model, context.counters, context.memory
    budget_bytes, prefix_dtype = context.budget_bytes, model.prefix_dtype(context.server.options)
    by_stores = context.server.ranks.by_stores
    dims, heads, device, ranks = cost.dims, cost.expanded_heads, runner.device, cost.ranks
    exchanged = ExchangeSizes(
        ranks=ranks,
        heads=cost.local_heads,
        max_rows=max_rows,
        nope=dims.qk_nope_head_dim,
        rope=dims.qk_rope_head_dim,
        dv=dims.v_head_dim,
        dtype=model.dtype,
    )
    if ranks > 1:
        taken_bytes += (Peers if by_stores else Collectives).workspace_bytes_for(exchanged)
    sizes = expanded_sizes(context.server, model, heads)
    chunk_bytes = ExpandedBuffers.bytes_per_chunk(**sizes)
    tiles = naive_tiles(cost.rates, prefix_dtype)
    taken_bytes += ExpandedBuffers.scale_bytes(layers=dims.num_layers, heads=heads)
    of_attention: dict[str, Any] = dict(
        max_rows=ranks * max_rows,
        heads=heads,
        plan_rows=call_rows(context.server, model) if ranks == 1 and context.server.prefill.is_ours else 0,
        device=device,
        tiles=tiles,
        segments_per_row=SEGMENTS_PER_ROW,
    )
    chunks_at_most = budget_bytes // chunk_bytes
    taken_bytes += workspace_bytes(**of_attention, v_head_dim=dims.v_head_dim, chunks=chunks_at_most)
    taken_bytes += temporary_bytes(model.first, model.dtype, fetches=model.fp8, to_fp8=prefix_dtype == FP8)
    chunks = (budget_bytes - taken_bytes) // chunk_bytes
    if chunks <= 0:
        counters.fall_back(Fallback.PREFIX_MEMORY_TOO_SMALL, gib=(taken_bytes + chunk_bytes) / (1 << 30))
        return None
    buffers = ExpandedBuffers.allocate(chunks=chunks, device=device, memory=memory, **sizes)
    try:
        shared = make_shared_attention(buffers, **of_attention, memory=memory)
        first_head = 0
        if ranks > 1:
            group, first_head = tp_group(), heads * tp_group().rank_in_group
            exchange: Exchange = (
                Peers.of_group(group.device_group, exchanged, buffers.device)
                if by_stores
                else Collectives(group._all_to_all_single, exchanged, buffers.device, memory)
            )
            shared = ShardedAttention(shared, exchange, exchanged, buffers.device)
        shared.try_out(model.dtype)
        expander = Expander(model.layers, latent_rows(runner.token_to_kv_pool), buffers, first_head)
        expander.try_out()
    except Exception as error:
        counters.fall_back(Fallback.NAIVE_KERNELS, error)
        return None
    return Expanding(buffers, shared, expander)


def taken_beside(
    context: Context, latent: LatentAttention, transient: TransientExpansion | None, prefill_graph: PrefillGraph | None
) -> int:
    """Bytes of the budget that are taken for our own buffers."""
    taken = prefill_graph.workspace_bytes if prefill_graph is not None else 0
    taken += latent.workspace_bytes + (transient.taken_bytes if transient is not None else 0)
    if context.server.options.verify_interval:
        model, query_tokens = context.model, context.server.query_tokens
        taken += ShadowCheck.workspace_bytes_for(model.first, model.dtype, query_tokens)
    return taken
