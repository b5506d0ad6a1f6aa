"""The backend on a Hopper GPU: FlashMLA for private tails and for prefill as SGLang has it, Triton for what is shared.

FlashMLA reads a row's keys through a table of pages. In a step with groups the table starts at the row's first
private page, so a tail costs what its own length costs. All of it is SGLang's `flashmla` backend where a step's graph
has no shared attention. Where heads are few, grouped absorb takes the tails along (grouped_absorb.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend, FlashMLADecodeMetadata

from sglang_mla_ext.adapter.backend import HybridMLABackend
from sglang_mla_ext.adapter.limits import PAGE_SIZE
from sglang_mla_ext.kernels.absorb.grouped import GroupedAbsorb
from sglang_mla_ext.kernels.absorb.schedule import LatentSegment
from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
from sglang_mla_ext.kernels.constants import LN2
from sglang_mla_ext.kernels.dispatch import make_grouped_absorb, whole_query
from sglang_mla_ext.kernels.storage.page_table import fill_page_table
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Plan, Stacking

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mla_ext.options import HybridMLAOptions


class FlashMLAHybridBackend(HybridMLABackend, FlashMLABackend):
    """See the module."""

    _grouped: GroupedAbsorb | None = None
    _stacked = False
    """Whether the step's tails go through `_grouped`."""

    def __init__(self, runner: ModelRunner, options: HybridMLAOptions, budget_bytes: int) -> None:
        super().__init__(runner, options, budget_bytes)
        self._tail_lens = torch.zeros(self.max_rows, dtype=torch.int32, device=runner.device)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """A step without a CUDA graph."""
        decode = forward_batch.forward_mode.is_decode()
        self._hybrid = decode and self.write_plan(forward_batch.batch_size) and bool(self._written.groups)
        self._stacked = self._hybrid and bool(self._written.of_mode(Mode.GROUPED_ABSORB))
        if not self._hybrid:
            super().init_forward_metadata(forward_batch)
            return
        if self._stacked:
            self._prepare_grouped(forward_batch)
            return
        pages = -(-self.max_context_len // PAGE_SIZE)
        table = self._eager_block_kv_indices(forward_batch.batch_size, pages)
        metadata, num_splits = self._plan_tails(forward_batch, table)
        self.forward_metadata = FlashMLADecodeMetadata(metadata, num_splits, table)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Before a CUDA graph is captured or replayed."""
        rows = forward_batch.batch_size
        self._hybrid = forward_batch.forward_mode.is_decode() and self.write_plan(rows, empty=in_capture)
        self._stacked = self._hybrid and self._grouped is not None
        if not self._hybrid:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
            return
        if self._stacked:
            self._prepare_grouped(forward_batch)
            return
        table = self.cuda_graph_kv_indices[:rows]
        metadata, num_splits = self._plan_tails(forward_batch, table)
        parts = metadata.shape[0]
        self.cuda_graph_mla_metadata[:parts].copy_(metadata)
        self.cuda_graph_num_splits[: rows + 1].copy_(num_splits)
        self.forward_metadata = FlashMLADecodeMetadata(
            self.cuda_graph_mla_metadata[:parts], self.cuda_graph_num_splits[: rows + 1], table
        )

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
        """SGLang's, with its lse as a natural logarithm: FlashInfer's is base 2, and SGLang 0.5.17 merges the parts of
        a long prefix as if it were not (sgl-project/sglang#40903). Absorb comes with query and key in two parts, which
        SGLang's FlashMLA backend does not take."""
        if q_rope is not None:
            q, k = whole_query(q, q_rope), torch.cat([k, k_rope], dim=-1)
        result = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if isinstance(result, tuple):
            out, lse2 = result
            return out, lse2.mul_(LN2)
        return result

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
        """
        Args:
            q: `[rows, heads, kv_lora_rank]`, absorbed, beside `q_rope [rows, heads, qk_rope_head_dim]`, or whole
                queries.
            k, v, k_rope: see `store`.
        """
        if save_kv_cache:
            self.store(k, v, k_rope, layer, forward_batch)
        # After the rows are written: SGLang's kernel for that lets the next launch begin early (kernels/join_parts.py).
        if q_rope is not None:
            q = whole_query(q, q_rope)
        if not self._hybrid:
            return super().forward_decode(q, None, None, layer, forward_batch, save_kv_cache=False)
        rows = forward_batch.batch_size
        q = q.view(rows, 1, layer.tp_q_head_num, layer.head_dim)
        q_rope = q[:, 0, :, self.kv_lora_rank :]
        latent_pages = self.token_to_kv_pool.get_key_buffer(layer.layer_id).view(-1, PAGE_SIZE, 1, self.kv_cache_dim)
        if self._stacked:
            out, lse = self._grouped.run(q[:, 0, :, : self.kv_lora_rank], q_rope, latent_pages, layer.scaling)
            self.attend_shared(q_rope, lse, layer)
            return out.view(rows, -1)
        out, lse = flash_mla_with_kvcache(
            q=q,
            k_cache=latent_pages,
            block_table=self.forward_metadata.block_kv_indices,
            cache_seqlens=self._tail_lens[:rows],
            head_dim_v=self.kv_lora_rank,
            tile_scheduler_metadata=self.forward_metadata.flashmla_metadata,
            num_splits=self.forward_metadata.num_splits,
            softmax_scale=layer.scaling,
            causal=True,
        )  # out [rows, 1, heads, kv_lora_rank], lse [rows, heads, 1] natural log
        self.attend_shared(q_rope, lse.squeeze(-1), layer)
        return out.view(rows, -1)

    def _expanded_by_sglang(self, prefix_lens: Sequence[int]) -> int:
        total = sum(prefix_lens)
        chunked = self.enable_chunk_kv and total >= self._layers[0].chunked_prefix_cache_threshold
        return total if chunked else 0

    def _can_prefill(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        return self.enable_chunk_kv

    def _make_grouped(self, runner: ModelRunner) -> Stacking | None:
        if rows_per_tile(self._heads) is None:
            return None
        latent = runner.token_to_kv_pool.get_key_buffer(self._layers[0].attn_mqa.layer_id)
        grouped = make_grouped_absorb(
            self.req_to_token,
            latent.view(-1, PAGE_SIZE, 1, self.kv_cache_dim),
            heads=self._heads,
            max_rows=self.max_rows,
            max_tokens=self.max_context_len,
            kv_lora_rank=self.kv_lora_rank,
            on_failure=self.counters.fall_back,
        )
        if grouped is None:
            return None
        self._grouped, self._grouped_bytes = grouped, grouped.workspace_bytes
        return Stacking(PAGE_SIZE, rows_per_tile(self._heads))

    def _write_grouped(self, plan: Plan, rows: int) -> None:
        if self._grouped is not None:
            groups = plan.of_mode(Mode.GROUPED_ABSORB)
            self._grouped.plan([LatentSegment(group.rows, 0, group.end) for group in groups], rows)

    def _prepare_grouped(self, forward_batch: ForwardBatch) -> None:
        batch = forward_batch.req_pool_indices, forward_batch.seq_lens
        self._grouped.begin_step(self.req_to_token, *batch, self._prefix_lens)

    def _plan_tails(self, forward_batch: ForwardBatch, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the page table `[rows, pages]` and `_tail_lens` from the plan; FlashMLA's schedule for them."""
        rows = forward_batch.batch_size
        starts, tail_lens = self._prefix_lens[:rows], self._tail_lens[:rows]
        torch.sub(forward_batch.seq_lens[:rows], starts, out=tail_lens)
        fill_page_table(table, self.req_to_token, forward_batch.req_pool_indices[:rows], tail_lens, starts)
        return get_mla_metadata(tail_lens, self.num_q_heads, 1)
