"""Prefill over expanded prefixes: new tokens attend to what is already expanded, not to a copy made for them.

SGLang computes the prefill of an MLA model with keys per head, in two parts that it merges by lse: the new tokens
among themselves, and the cached prefix, whose latent rows it gathers and expands again for every request. Here one
launch attends to the expanded part of the prefix for all requests, and SGLang's loop is left with what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner import Plan
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Segment

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
            max_rows: that one call of the attention takes.
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
