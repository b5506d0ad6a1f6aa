"""Prefill over expanded prefixes: new tokens attend to what is already expanded, not to a copy made for them.

SGLang computes the prefill of an MLA model with keys per head, in two parts that it merges by lse: the new tokens
among themselves, and the cached prefix, whose latent rows it gathers and expands again for every request. Here one
launch attends to the expanded part of the prefix for all requests, and SGLang's loop is left with what follows it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.step.failure import our_part
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.rows import Rows
from sglang_mla_ext.kernels.segment import Segment
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner import Plan

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


@dataclass(frozen=True)
class Window:
    """Rows `[start, stop)` of the step, as many as the attention's workspace holds, and their prepared plan."""

    start: int
    stop: int
    plan: Any


@dataclass(frozen=True)
class PrefillPlan:
    """What one prefill step attends to in expanded form.

    Attributes:
        covered: `[requests]` how many of its cached tokens are expanded, from the first one on.
        windows: in order; rows that are in none have no expanded prefix.
        layer_index: of the attention's buffers, by SGLang's layer id.
        wait: is called with the id of each layer, see host_cache.py.
    """

    covered: tuple[int, ...]
    windows: tuple[Window, ...]
    attention: SharedAttention
    layer_index: dict[int, int]
    counters: Counters
    wait: Callable[[int], None] = lambda layer_id: None

    @classmethod
    def make(
        cls,
        plan: Plan,
        rows: Rows,
        attention: SharedAttention,
        layer_index: dict[int, int],
        max_rows: int,
        counters: Counters,
        wait: Callable[[int], None] = lambda layer_id: None,
    ) -> PrefillPlan | None:
        """
        Args:
            plan: of the step's requests, each of which has one expanded segment at most.
            rows: of each request, one for each of its new tokens.
            max_rows: that one run of the attention takes.
        Returns:
            None where nothing is expanded.
        """
        windows = []
        # A long prompt, and many requests with one prefix, fill window after window with the same rows.
        plans: dict[tuple[tuple[Segment, ...], int], Any] = {}
        for start in range(0, rows.total, max_rows):
            stop = min(start + max_rows, rows.total)
            segments = tuple(rows.window(start, stop).spread(plan.segments))
            if segments:
                key = segments, stop - start
                if key not in plans:
                    plans[key] = attention.make_plan(*key)
                windows.append(Window(start, stop, plans[key]))
        return cls(plan.prefix_lens, tuple(windows), attention, layer_index, counters, wait) if windows else None

    def attend(self, layer: DeepseekV2AttentionMLA, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the attention to the expanded prefixes to that over other keys, in place.

        Args:
            q: `[rows, heads, qk_nope_head_dim + qk_rope_head_dim]`, after rotation.
            out: `[rows, heads, v_head_dim]`; lse: `[rows, heads]` float32, natural log.
        """
        self.wait(layer.attn_mha.layer_id)
        index = self.layer_index[layer.attn_mha.layer_id]
        if index == 0:  # not when it is planned: what is counted has happened
            self.counters.count_prefill(self.covered)
        q_nope, q_rope = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        for window in self.windows:
            rows = slice(window.start, window.stop)
            some_out, some_lse = out[rows], lse[rows]
            self.attention.run(index, q_nope[rows], q_rope[rows], layer.attn_mha.scaling, window.plan)
            self.attention.merge(some_out, some_lse, some_out, some_lse, window.plan)


def around_chunk_info(original: Callable[..., None], forward_batch: Any, device: torch.device, **packing: bool) -> None:
    """`ForwardBatch.prepare_chunked_prefix_cache_info`: SGLang's chunks start where the expanded part ends.

    Args:
        packing: how other backends than FlashMLA want the chunks; from 0.5.20 on.
    """
    plan = passes.now.prefill
    if plan is None or forward_batch.prefix_chunk_len is not None:
        original(forward_batch, device, **packing)
        return
    with our_part("leaving expanded prefixes out"):
        # Pinned, and not waited for: the pass before this one may still run.
        covered = torch.tensor(plan.covered, dtype=torch.int32, pin_memory=forward_batch.extend_prefix_lens.is_cuda)
        starts = covered.to(forward_batch.extend_prefix_lens.device, non_blocking=True)
        rest = copy.copy(forward_batch)  # as if the cached prefixes were what is left of them
        lens = zip(forward_batch.extend_prefix_lens_cpu, plan.covered, strict=True)
        rest.extend_prefix_lens_cpu = [total - there for total, there in lens]
        rest.extend_prefix_lens = forward_batch.extend_prefix_lens - starts
    original(rest, device, **packing)
    with our_part("leaving expanded prefixes out"):
        for name, value in vars(rest).items():
            if name not in ("extend_prefix_lens", "extend_prefix_lens_cpu"):
                setattr(forward_batch, name, value)
        if forward_batch.num_prefix_chunks:
            forward_batch.prefix_chunk_starts = forward_batch.prefix_chunk_starts + starts
            forward_batch.prefix_chunk_starts_cpu = forward_batch.prefix_chunk_starts_cpu + covered
    if forward_batch.num_prefix_chunks:
        forward_batch.prepare_chunked_kv_indices(device)


def around_prefix_attention(
    original: Callable[..., torch.Tensor],
    layer: DeepseekV2AttentionMLA,
    q: torch.Tensor,
    accum_output: torch.Tensor,
    accum_lse: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """`_chunked_prefix_attn_mha`: first the expanded part, in one go, then SGLang's chunks.

    Args:
        q: `[rows, heads, qk_nope_head_dim + qk_rope_head_dim]`.
        accum_output: `[rows, heads, v_head_dim]`, accum_lse: `[rows, heads]` of the new tokens among themselves.
    """
    with our_part("prefill over expanded prefixes"):
        if (plan := passes.now.prefill) is not None:
            plan.attend(layer, q, accum_output, accum_lse)
    return original(layer, q=q, accum_output=accum_output, accum_lse=accum_lse, forward_batch=forward_batch)
