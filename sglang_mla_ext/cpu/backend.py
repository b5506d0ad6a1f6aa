"""The backend on a machine without a GPU: SGLang's torch backend, with the reference kernels for what is shared.

Exact and slow. It exists so that the whole server, its tree, its scheduler and its HTTP interface can be tried and
tested anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_mla_ext import BACKEND_NAME, prefill
from sglang_mla_ext.backend import HybridMLABackend
from sglang_mla_ext.kernels import reference
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
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """SGLang's absorb, or with keys per head the new tokens of each request among themselves, and their lse."""
        if prefill.plan_of(forward_batch) is None:
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
    ) -> torch.Tensor:
        if not self._hybrid:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        rows = q.shape[0]
        q = q.view(rows, layer.tp_q_head_num, layer.qk_head_dim)
        latent_rows, tail_lens = self._tails(layer, forward_batch)
        q_absorbed, q_rope = q.split([layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim], dim=-1)
        out, lse = reference.absorb(q_absorbed, q_rope, latent_rows, tail_lens, layer.scaling)
        for group in self._written.of_mode(Mode.GROUPED_ABSORB):
            members = torch.tensor(group.rows)
            shared = self._latent_rows(layer, forward_batch, group.rows[0], group.end)
            # One query with the heads of all members: they have the same keys.
            queries = (part[members].flatten(0, 1)[None] for part in (q_absorbed, q_rope))
            group_out, group_lse = reference.absorb(*queries, shared[None], torch.tensor([group.end]), layer.scaling)
            parts = group_out.view_as(out[members]), group_lse.view_as(lse[members])
            out[members], lse[members] = reference.merge(out[members], lse[members], *parts)
        self.attend_shared(q, lse.float(), layer)
        return out.to(q.dtype).view(rows, -1)

    def _can_prefill(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        """Nothing may be left: SGLang has no CPU version of its loop over the rest."""
        return list(prefix_lens) == list(covered)

    def _make_grouped(self, runner: ModelRunner) -> Stacking:
        return Stacking()

    def _latent_rows(self, layer: RadixAttention, forward_batch: ForwardBatch, row: int, tokens: int) -> torch.Tensor:
        """The latent rows `[tokens, 576]` of a request's first tokens."""
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[row], :tokens]
        return self.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots].squeeze(1)

    def _tails(self, layer: RadixAttention, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent rows `[rows, longest tail, 576]` of the private tails, zero padded, and their lengths `[rows]`."""
        start = self._prefix_lens[: forward_batch.batch_size].long()  # [rows]
        tail_lens = forward_batch.seq_lens - start
        offset = torch.arange(int(tail_lens.max()))  # [longest]
        position = (start[:, None] + offset).clamp(max=self.req_to_token_pool.req_to_token.shape[1] - 1)
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices[:, None], position]
        slots = slots.masked_fill(offset >= tail_lens[:, None], 0)
        return self.token_to_kv_pool.get_key_buffer(layer.layer_id)[slots].squeeze(2), tail_lens


def after_support_triton(result: bool, backend: str, *args: Any) -> bool:
    """Tell SGLang to use its torch code beside our backend too."""
    return False if backend == BACKEND_NAME else result
