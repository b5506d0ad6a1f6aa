"""Prefill over expanded prefixes: new tokens attend to what is already expanded, not to a copy made for them.

SGLang computes the prefill of an MLA model with keys per head, in two parts that it merges by lse: the new tokens
among themselves, and the cached prefix, whose latent rows it gathers and expands again for every request. Here one
launch attends to the expanded part of the prefix for all requests, then the pass may expand what else they share for
itself (transient.py), and SGLang's loop is left with what follows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.adapter.prefill.transient import TransientPlan
from sglang_mla_ext.adapter.prefill.windows import Window, attend, windows
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.rows import Rows

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


@dataclass(frozen=True)
class PrefillPlan:
    """Plan of what one prefill step attends to in expanded form.

    Attributes:
        covered: `[requests]` how many of its cached tokens are attended to in expanded form, from the first one on.
        windows: in order; rows that are in none have no expanded prefix.
        attention: attention to prefixes that are kept expanded; None where none ever is.
        layer_index: of the attention's buffers, by SGLang's layer id.
        wait: is called with the id of each layer, see host_cache.py.
        transient: what is expanded for the pass alone; None where nothing is.
    """

    covered: tuple[int, ...]
    windows: tuple[Window, ...]
    attention: SharedAttention | None
    layer_index: dict[int, int]
    counters: Counters
    wait: Callable[[int], None] = lambda layer_id: None
    transient: TransientPlan | None = None

    @classmethod
    def make(
        cls,
        plan: Plan,
        rows: Rows,
        transient: TransientPlan | None = None,
        *,
        attention: SharedAttention | None,
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
        found: tuple[Window, ...] = ()
        if plan.segments:
            assert attention is not None, "something is expanded"
            found = tuple(windows(attention, rows, plan.segments, max_rows, {}))
        if not found and transient is None:
            return None
        covered = plan.prefix_lens if transient is None else transient.ends
        return cls(covered, found, attention, layer_index, counters, wait, transient)

    def attend(
        self,
        layer: DeepseekV2AttentionMLA,
        q: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Add the attention to the expanded prefixes to that over other keys, in place.

        Args:
            q: `[rows, heads, qk_nope_head_dim]` and `[rows, heads, qk_rope_head_dim]`, after rotation.
            out: `[rows, heads, v_head_dim]`; lse: `[rows, heads]` float32, natural log.
        """
        self.wait(layer.attn_mha.layer_id)
        index = self.layer_index[layer.attn_mha.layer_id]
        if index == 0:  # not when it is planned: what is counted has happened
            self.counters.count_prefill(self.covered, self.transient.expanded_tokens if self.transient else 0)
        if self.windows:
            assert self.attention is not None, "something is expanded"
            attend(self.attention, self.windows, index, layer, q, out, lse)
        if self.transient is not None:
            self.transient.attend(layer, q, out, lse)
