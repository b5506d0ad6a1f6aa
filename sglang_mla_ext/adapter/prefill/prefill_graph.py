"""Sharing inside SGLang's prefill CUDA graphs.

From 0.5.23 on SGLang captures prefill in segments, breaks the graph at each attention call, and makes that call eagerly
on the pass's real rows. All of it is by absorb: queries and results are in the latent space. So between two segments
rows attend to expanded prefixes per head, to their tails in the latent space, and the two are merged where the layer
hands its result, then per head, to its output projection. That merge lies in a captured segment: it reads static memory
(kernels/kept_part.py), as in decode graphs.

    captured: ... q_nope ── absorb ─┐            ┌─ w_vc ── merge ── o_proj ...
    eager:                          └─ attend() ─┘            │
                                        ├─ tails, latent ── lse
                                        └─ expanded prefixes, per head ── kept part

Where SGLang has no such graphs, on a CPU, the same runs in passes without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.adapter.failure import our_part
from sglang_mla_ext.kernels.kept_part import KeptPart
from sglang_mla_ext.reasons import Fallback

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
    from sglang_mla_ext.adapter.stock.protocol import PrefillTails


class PrefillGraph:
    """Attention of a prefill pass whose other operations a graph replays."""

    def __init__(self, layers: Sequence[DeepseekV2AttentionMLA], tails: PrefillTails, kept: KeptPart) -> None:
        """
        Args:
            layers: the model's attention layers on this rank.
            kept: for the part of attention that is over expanded prefixes.
        """
        self._layers = {layer.attn_mqa.layer_id: layer for layer in layers}
        self._tails, self._kept = tails, kept
        self._tail_lse = torch.full_like(kept.lse, -torch.inf)
        self._plan: PrefillPlan | None = None

    @property
    def workspace_bytes(self) -> int:
        """Device memory for results."""
        return self._kept.workspace_bytes + self._tail_lse.nbytes

    @staticmethod
    def workspace_bytes_for(max_rows: int, heads: int, v_head_dim: int, dtype: torch.dtype) -> int:
        """`workspace_bytes` of an object with these sizes, before it exists."""
        return KeptPart.workspace_bytes_for(max_rows, heads, v_head_dim, dtype) + 4 * max_rows * heads

    def begin(self, batch: ForwardBatch, plan: PrefillPlan | None) -> None:
        """Prepare a pass.

        Args:
            batch: an EXTEND batch; one without requests is of a rank that has nothing to do.
            plan: what it attends to in expanded form; None where it shares nothing.
        """
        new_tokens = list(batch.extend_seq_lens_cpu or ())
        self._plan = plan
        rows = sum(new_tokens) if plan is not None else 0
        self._kept.clear(rows)
        self._kept.select(rows)
        if sum(new_tokens):
            self._tails.plan(batch, plan.covered if plan is not None else (0,) * len(new_tokens))

    def attend(
        self,
        layer: RadixAttention,
        q_nope: torch.Tensor | None,
        q_absorbed: torch.Tensor,
        q_rope: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend in one layer; what is over expanded prefixes is merged later.

        Args:
            q_nope: `[rows, heads, qk_nope_head_dim]`, before absorption; None where nothing is expanded.
            q_absorbed: `[rows, heads, kv_lora_rank]`; q_rope: `[rows, heads, qk_rope_head_dim]`, after rotation; one
                row per new token.
            out: `[rows, heads, kv_lora_rank]`, written: attention to the tails.
        """
        rows = len(q_absorbed)
        self._tails.run(layer, q_absorbed, q_rope, out, self._tail_lse[:rows])
        if self._plan is not None:
            assert q_nope is not None, "something is expanded"
            parts = q_nope[:rows], q_rope
            self._plan.attend(self._layers[layer.layer_id], parts, self._kept.out[:rows], self._kept.lse[:rows])

    def merge(self, tail_out: torch.Tensor) -> torch.Tensor:
        """Merge the part over expanded prefixes into what a layer hands to its output projection, in place.

        Args:
            tail_out: `[rows, heads * v_head_dim]`.
        """
        with our_part(Fallback.MERGE):
            rows, heads = len(tail_out), self._kept.lse.shape[1]
            self._kept.merge(tail_out.view(rows, heads, -1), self._tail_lse[:rows])
        return tail_out
