"""The backend on a machine without a GPU: SGLang's torch backend, with the reference kernels for what is shared.

Exact and slow. It exists so that the whole server, its tree, its scheduler and its HTTP interface can be tried and
tested anywhere.

Over a pool in FP8, decode rounds as the kernels on a GPU do (reference_fp8.absorb_fp8). Prefill takes the new tokens as
they are computed and the cached ones as they are stored, as SGLang's does on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter import prefill
from sglang_mla_ext.adapter.backend import HybridMLABackend
from sglang_mla_ext.adapter.latent_pool import LatentPool
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Stacking

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TorchHybridBackend(HybridMLABackend, TorchNativeAttnBackend):
    """See the module."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        decode = forward_batch.forward_mode.is_decode()
        self._hybrid = decode and self.write_plan(forward_batch.batch_size) and bool(self._written.groups)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """SGLang's absorb, or with keys per head the new tokens of each request among themselves, and their lse."""
        q, k = _whole(q, q_rope), _whole(k, k_rope)
        if prefill.plan_of(forward_batch) is None:
            if isinstance(self.token_to_kv_pool, LatentPool):
                self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k)
                return self._extend_over_fp8(q, k, layer, forward_batch)
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        lens = forward_batch.extend_seq_lens_cpu
        parts = [
            reference.causal(*tensors, layer.scaling)
            for tensors in zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
        ]
        return torch.cat([out for out, _ in parts]).to(q.dtype), torch.cat([lse for _, lse in parts]).float()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # SGLang's torch backend takes neither query nor key in two parts, and its own pool stores whole rows here.
        q, k = _whole(q, q_rope), _whole(k, k_rope)
        if not self._hybrid and not isinstance(self.token_to_kv_pool, LatentPool):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache:
            self.store(k, v, None, layer, forward_batch)
        rows = q.shape[0]
        q = q.view(rows, layer.tp_q_head_num, layer.qk_head_dim)
        q_absorbed, q_rope = q.split([layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim], dim=-1)
        out, lse = self._absorb_tails(q_absorbed, q_rope, layer, forward_batch)
        if not self._hybrid:
            return out.to(q.dtype).view(rows, -1)
        for group in self._written.of_mode(Mode.GROUPED_ABSORB):
            members = torch.tensor(group.rows)
            # One query with the heads of all members: they have the same keys.
            queries = [part[members].flatten(0, 1)[None] for part in (q_absorbed, q_rope)]
            slots = self._slots(forward_batch, group.rows[0])[: group.end]
            group_out, group_lse = self._absorb(*queries, slots, layer)
            parts = group_out.view_as(out[members]), group_lse.view_as(lse[members])
            out[members], lse[members] = reference.merge(out[members], lse[members], *parts)
        self.attend_shared(q_rope, lse.float(), layer)
        return out.to(q.dtype).view(rows, -1)

    def _can_prefill(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        """Nothing may be left: SGLang has no CPU version of its loop over the rest."""
        return list(prefix_lens) == list(covered)

    def _make_grouped(self, runner: ModelRunner) -> Stacking:
        return Stacking()

    def _slots(self, forward_batch: ForwardBatch, row: int) -> torch.Tensor:
        """The slots `[tokens]` of a request."""
        tokens = int(forward_batch.seq_lens[row])
        return self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[row], :tokens].long()

    def _absorb(
        self, q_absorbed: torch.Tensor, q_rope: torch.Tensor, slots: torch.Tensor, layer: RadixAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one row, `q_absorbed [1, heads, 512]` and `q_rope [1, heads, 64]`, over the latent rows of these
        slots: `out [1, heads, 512]` and `lse [1, heads]`."""
        pool = self.token_to_kv_pool
        if isinstance(pool, LatentPool):
            keys = reference_fp8.keys_of_rows(pool.rows(layer.layer_id)[slots], pool.layout)
            return reference_fp8.absorb_fp8(q_absorbed, q_rope, keys, layer.scaling)
        latent_rows = pool.get_key_buffer(layer.layer_id)[slots].squeeze(1)[None]  # [1, tokens, 576]
        return reference.absorb(q_absorbed, q_rope, latent_rows, torch.tensor([len(slots)]), layer.scaling)

    def _absorb_tails(
        self, q_absorbed: torch.Tensor, q_rope: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of every row over its private tail, or over all its keys in a step without groups:
        `out [rows, heads, 512]` and `lse [rows, heads]`."""
        rows = len(q_absorbed)
        starts = self._prefix_lens[:rows].tolist() if self._hybrid else [0] * rows
        parts = [
            self._absorb(q_absorbed[row, None], q_rope[row, None], self._slots(forward_batch, row)[start:], layer)
            for row, start in enumerate(starts)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def _extend_over_fp8(
        self, q: torch.Tensor, k: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Absorb in prefill: new tokens over what is cached, read by its slots, and over themselves.

        Args:
            q: `[tokens, heads * 576]`; k: `[tokens, 1, 576]`, latent rows of the new tokens.
        """
        pool, lens = self.token_to_kv_pool, forward_batch.extend_seq_lens_cpu
        queries = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim).split(lens)
        new_rows = k.view(len(k), layer.qk_head_dim).split(lens)
        outs = []
        for row, prefix_len in enumerate(forward_batch.extend_prefix_lens_cpu):
            cached = new_rows[row].new_empty(prefix_len, layer.qk_head_dim)
            pool.fetch(layer.layer_id, self._slots(forward_batch, row)[:prefix_len], cached)
            rows = torch.cat([cached, new_rows[row]])[None, None]  # [1, 1, n, 576]
            later = torch.ones(lens[row], rows.shape[2], dtype=torch.bool).triu(prefix_len + 1)
            out = scaled_dot_product_attention(
                queries[row].transpose(0, 1)[None],  # [1, heads, new, 576]
                rows,
                rows[..., : layer.v_head_dim],
                attn_mask=~later,
                scale=layer.scaling,
                enable_gqa=True,
            )
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs).reshape(len(q), -1)


def _whole(part: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
    return part if rope is None else torch.cat([part, rope], dim=-1)


def after_support_triton(result: bool, backend: str, *args: Any) -> bool:
    """Tell SGLang to use its torch code beside our backend too."""
    return False if backend == BACKEND_NAME else result
