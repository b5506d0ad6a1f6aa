"""Prefill over expanded prefixes: new tokens attend to what is already expanded, not to a copy made for them.

SGLang computes the prefill of an MLA model with keys per head, in two parts that it merges by lse: the new tokens
among themselves, and the cached prefix, whose latent rows it gathers and expands again for every request. Here one
launch attends to the expanded part of the prefix for all requests, and SGLang's loop is left with what follows it.

SGLang copies a `ForwardBatch` field by field before it runs it, so a plan cannot travel on one. It waits in the relay
for the step that comes next, and the step is known by its list of prefix lengths, which is not copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.step.relay import relay
from sglang_mla_ext.adapter.step.rerun import our_part
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.shared_prefixes import ExpandedPart

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


@dataclass(frozen=True)
class Pass:
    """Rows `[start, stop)` of the step, as many as the attention's workspace holds, and their prepared plan."""

    start: int
    stop: int
    plan: Any


@dataclass(frozen=True)
class PrefillPlan:
    """What one prefill step attends to in expanded form.

    Attributes:
        covered: `[requests]` how many of its cached tokens are expanded, from the first one on.
        passes: in order; rows that are in none have no expanded prefix.
        layer_index: of the attention's buffers, by SGLang's layer id.
        wait: is called with the id of each layer, see host_cache.py.
    """

    covered: tuple[int, ...]
    passes: tuple[Pass, ...]
    attention: SharedAttention
    layer_index: dict[int, int]
    counters: Counters
    wait: Callable[[int], None] = lambda layer_id: None

    @classmethod
    def make(
        cls,
        parts: Sequence[ExpandedPart],
        new_tokens: Sequence[int],
        attention: SharedAttention,
        layer_index: dict[int, int],
        max_rows: int,
        counters: Counters,
        wait: Callable[[int], None] = lambda layer_id: None,
    ) -> PrefillPlan | None:
        """
        Args:
            parts: of each request's cached prefix, what is expanded.
            new_tokens: `[requests]`, rows of the step that each request has, in this order.
            max_rows: that one run of the attention takes.
        Returns:
            None where nothing is expanded.
        """
        ends = list(itertools.accumulate(new_tokens))
        total = ends[-1] if ends else 0
        passes = []
        # A long prompt, and many requests with one prefix, fill pass after pass with the same rows.
        plans: dict[tuple[tuple[ExpandedSegment, ...], int], Any] = {}
        for start in range(0, total, max_rows):
            stop = min(start + max_rows, total)
            rows_of: dict[ExpandedPart, list[int]] = {}
            for part, end, count in zip(parts, ends, new_tokens, strict=True):
                rows = range(max(end - count, start) - start, min(end, stop) - start)
                if part.tokens and rows:
                    rows_of.setdefault(part, []).extend(rows)
            segments = tuple(ExpandedSegment(tuple(rows), part.tokens, part.chunks) for part, rows in rows_of.items())
            if segments:
                key = segments, stop - start
                if key not in plans:
                    plans[key] = attention.make_plan(*key)
                passes.append(Pass(start, stop, plans[key]))
        if not passes:
            return None
        covered = tuple(part.tokens for part in parts)
        return cls(covered, tuple(passes), attention, layer_index, counters, wait)

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
        for part in self.passes:
            rows = slice(part.start, part.stop)
            some_out, some_lse = out[rows], lse[rows]
            self.attention.run(index, q_nope[rows], q_rope[rows], layer.attn_mha.scaling, part.plan)
            self.attention.merge(some_out, some_lse, some_out, some_lse, part.plan)


def plan_of(forward_batch: Any) -> PrefillPlan | None:
    """The plan of a prefill step, if it has one."""
    if relay.prefill is None or relay.prefill_lens is not forward_batch.extend_prefix_lens_cpu:
        return None
    return relay.prefill


def around_chunk_info(original: Callable[..., None], forward_batch: Any, device: torch.device, **packing: bool) -> None:
    """`ForwardBatch.prepare_chunked_prefix_cache_info`: SGLang's chunks start where the expanded part ends.

    Args:
        packing: how other backends than FlashMLA want the chunks; from 0.5.20 on.
    """
    with our_part("looking for a plan"):
        plan = plan_of(forward_batch)
    if plan is None or forward_batch.prefix_chunk_len is not None:
        original(forward_batch, device, **packing)
        return
    all_lens, all_lens_cpu = forward_batch.extend_prefix_lens, forward_batch.extend_prefix_lens_cpu
    with our_part("leaving expanded prefixes out"):
        # Pinned, and not waited for: the pass before this one may still run.
        covered = torch.tensor(plan.covered, dtype=torch.int32, pin_memory=all_lens.is_cuda)
        starts = covered.to(all_lens.device, non_blocking=True)
        rest_cpu = [total - there for total, there in zip(all_lens_cpu, plan.covered, strict=True)]
        rest = all_lens - starts
    forward_batch.extend_prefix_lens, forward_batch.extend_prefix_lens_cpu = rest, rest_cpu
    try:
        original(forward_batch, device, **packing)
    finally:
        forward_batch.extend_prefix_lens, forward_batch.extend_prefix_lens_cpu = all_lens, all_lens_cpu
    if forward_batch.num_prefix_chunks:
        with our_part("leaving expanded prefixes out"):
            forward_batch.prefix_chunk_starts = forward_batch.prefix_chunk_starts + starts
            forward_batch.prefix_chunk_starts_cpu = forward_batch.prefix_chunk_starts_cpu + covered
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
        if (plan := plan_of(forward_batch)) is not None:
            plan.attend(layer, q, accum_output, accum_lse)
    return original(layer, q=q, accum_output=accum_output, accum_lse=accum_lse, forward_batch=forward_batch)
