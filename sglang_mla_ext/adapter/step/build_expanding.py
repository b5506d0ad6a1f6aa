"""Memory for expanded prefixes, the attention over them, and what fills them: put together within a budget, on this
rank alone or on all that hold prefixes together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.latent.pool import fp8_rows
from sglang_mla_ext.adapter.step.budget import naive_tiles
from sglang_mla_ext.adapter.step.expander import Expander, temporary_bytes
from sglang_mla_ext.adapter.step.passing import Passing
from sglang_mla_ext.adapter.step.ranks import tp_group
from sglang_mla_ext.adapter.step.spreading import exchange_over
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.dispatch import make_shared_attention, workspace_bytes
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.peers import Peers
from sglang_mla_ext.kernels.naive.spread import SpreadAttention
from sglang_mla_ext.kernels.sizes import SEGMENTS_PER_ROW
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.cost_model import CostModel
from sglang_mla_ext.prefix.gpu_rates import GpuRates

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

logger = logging.getLogger(__name__)


def make_expanding(
    runner: ModelRunner,
    layers: Sequence[DeepseekV2AttentionMLA],
    cost: CostModel,
    prefix_dtype: torch.dtype,
    budget_bytes: int,
    taken_bytes: int,
    counters: Counters,
    memory: Memory,
    *,
    max_rows: int,
    by_stores: bool = False,
) -> tuple[ExpandedBuffers, SharedAttention, Expander] | None:
    """Memory for expanded prefixes, the attention over them, and what fills them. Every kernel runs once.

    Args:
        budget_bytes: of which `taken_bytes` are taken already.
        memory: where what is large is allocated.
        max_rows: of a rank in a step.
        by_stores: ranks that hold prefixes together store into each other's memory, in place of NCCL.
    Returns:
        None where the budget holds no chunk, or a kernel does not run here; that is counted.
    """
    dims, heads, device, ranks = cost.dims, cost.expanded_heads, runner.device, cost.ranks
    of_spread = dict(
        heads=cost.local_heads,
        max_rows=max_rows,
        qk_nope_head_dim=dims.qk_nope_head_dim,
        qk_rope_head_dim=dims.qk_rope_head_dim,
        v_head_dim=dims.v_head_dim,
        dtype=runner.dtype,
    )
    if ranks > 1:
        taken_bytes += SpreadAttention.workspace_bytes_for(**of_spread)
    sizes = {
        "layers": dims.num_layers,
        "heads": heads,
        "qk_nope_head_dim": dims.qk_nope_head_dim,
        "v_head_dim": dims.v_head_dim,
        "qk_rope_head_dim": dims.qk_rope_head_dim,
        "dtype": prefix_dtype,
    }
    chunk_bytes = ExpandedBuffers.bytes_per_chunk(**sizes)
    tiles = naive_tiles(cost.rates, prefix_dtype)
    taken_bytes += ExpandedBuffers.scale_bytes(layers=dims.num_layers, heads=heads)
    taken_bytes += workspace_bytes(
        max_rows=ranks * max_rows,
        heads=heads,
        v_head_dim=dims.v_head_dim,
        chunks=budget_bytes // chunk_bytes,
        device=device,
        tiles=tiles,
        segments_per_row=SEGMENTS_PER_ROW,
    )
    fetches = latent_dtype(runner) == FP8
    row_dtype = runner.dtype if fetches else latent_dtype(runner)
    taken_bytes += temporary_bytes(layers[0], row_dtype, fetches=fetches, to_fp8=prefix_dtype == FP8)
    chunks = (budget_bytes - taken_bytes) // chunk_bytes
    if chunks <= 0:
        counters.fall_back(
            f"the memory for expanded prefixes holds none, at least {(taken_bytes + chunk_bytes) / (1 << 30):.3g} GiB "
            "are needed: raise --hybrid-mla-prefix-memory-gb"
        )
        return None
    buffers = ExpandedBuffers.allocate(chunks=chunks, device=device, memory=memory, **sizes)
    try:
        shared = make_shared_attention(
            buffers,
            max_rows=ranks * max_rows,
            heads=heads,
            device=buffers.device,
            tiles=tiles,
            segments_per_row=SEGMENTS_PER_ROW,
            memory=memory,
        )
        first_head = 0
        if ranks > 1:
            group, first_head = tp_group(), heads * tp_group().rank_in_group
            of_spread |= dict(ranks=ranks, device=buffers.device, memory=memory)
            exchange = exchange_over(group)
            if by_stores:
                peers = Peers(group.device_group.group_name)
                exchange, of_spread["receiving"] = peers.exchange, peers.zeros
            shared = SpreadAttention(shared, exchange, **of_spread)
        shared.try_out(runner.dtype)
        expander = Expander(layers, latent_rows(runner), buffers, first_head)
        expander.try_out()
    except Exception as error:
        counters.fall_back(f"the kernels do not run here: {type(error).__name__}", error)
        return None
    return buffers, shared, expander


def make_passing(
    runner: ModelRunner,
    layers: Sequence[DeepseekV2AttentionMLA],
    tokens: int,
    rates: GpuRates,
    counters: Counters,
    memory: Memory,
) -> Passing | None:
    """What prefill expands for itself, so many tokens at a time; None where a kernel does not run here, which is
    counted."""
    table = runner.req_to_token_pool.req_to_token
    of_device = dict(dtype=runner.dtype, device=runner.device, tiles=naive_tiles(rates, runner.dtype))
    try:
        passing = Passing.make(layers[0], latent_rows(runner), table, tokens, memory, **of_device)
        passing.try_out(runner.dtype)
    except Exception as error:
        counters.fall_back(f"prefill expands nothing for itself: {type(error).__name__}", error)
        return None
    return passing


def reach_each_other(group: GroupCoordinator) -> bool:
    """Whether this rank can store into the memory of all others; all of them have to ask at once."""
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        Peers(group.device_group.group_name).zeros(1, dtype=torch.uint8, device=device)
    except Exception as error:
        logger.info("hybrid_mla: ranks exchange by NCCL, because they do not reach each other's memory: %s", error)
        return False
    return True


def all_ranks_agree(group: GroupCoordinator | None = None) -> Callable[[bool], bool]:
    """A function that ranks call with their own answers, and that says whether all said yes. What is expanded may
    differ after a failure on one, and with it what each would rather do.

    Args:
        group: of them; by default those with heads of the same requests.
    """
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = group or get_attn_tp_group()
    if group.world_size == 1:
        return bool

    def agree(answer: bool) -> bool:
        least = torch.tensor(int(answer))
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group.cpu_group)
        return bool(least)

    return agree


def latent_rows(runner: ModelRunner) -> Any:
    """The pool of latent rows: SGLang's, or that with rows in FP8."""
    pool = runner.token_to_kv_pool
    return fp8_rows(pool) or pool


def latent_dtype(runner: ModelRunner) -> torch.dtype:
    """How latent rows are stored."""
    return FP8 if runner.kv_cache_dtype == FP8 else runner.dtype
