"""The backend on a Hopper GPU over the FP8 pool (latent_pool.py): private tails by kernels/absorb_fp8.py.

FlashMLA does not know rows with a scale for each token, so every decode step's tails go through our kernel, whose
schedule is made once a step; plans, page tables and what is shared are as in backend_flashmla.py. Where heads are few,
grouped absorb takes the tails along (grouped_absorb_fp8.py). Prefill asks the pool for rows by their slots and computes
with keys per head, whatever the length of a prefix: SGLang's absorb in prefill would read the pool itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.adapter.backend import MAX_ROWS
from sglang_mla_ext.adapter.backend_flashmla import FlashMLAHybridBackend
from sglang_mla_ext.adapter.limits import PAGE_SIZE
from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
from sglang_mla_ext.kernels.dispatch import make_absorb_fp8, make_grouped_absorb_fp8
from sglang_mla_ext.prefix.planner import Stacking

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mla_ext.options import HybridMLAOptions


class FP8HybridBackend(FlashMLAHybridBackend):
    """See the module."""

    def __init__(self, runner: ModelRunner, options: HybridMLAOptions, budget_bytes: int) -> None:
        super().__init__(runner, options, budget_bytes)
        self.is_fp8_kvcache = False  # of FlashMLA's schedule, which SGLang's code makes and nothing here reads
        for layer in self._layers:
            layer.chunked_prefix_cache_threshold = 0  # shorter cached prefixes than this take absorb

    def _prepare_decode(self, runner: ModelRunner) -> int:
        self._max_requests = min(runner.req_to_token_pool.size, MAX_ROWS)
        self._absorb = make_absorb_fp8(
            runner.token_to_kv_pool.rows(self._layers[0].attn_mqa.layer_id),
            heads=self._heads,
            dtype=runner.dtype,
            layout=runner.token_to_kv_pool.layout,
            page_size=PAGE_SIZE,
            max_requests=self._max_requests,
            on_failure=self.counters.fall_back,
        )
        return self._absorb.workspace_bytes

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._prepare_tails(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self._prepare_tails(forward_batch)

    def _prepare_tails(self, forward_batch: ForwardBatch) -> None:
        """Before the layers of a decode step: lengths of the tails, and the kernel's schedule for them. Grouped absorb
        has its own, and there is no page table of this step then."""
        rows = forward_batch.batch_size
        if self._stacked or not forward_batch.forward_mode.is_decode() or rows > self._max_requests:
            return
        lens = self._tail_lens[:rows]
        if not self._hybrid:
            lens.copy_(forward_batch.seq_lens[:rows])
        self._absorb.begin_step(lens, self.forward_metadata.block_kv_indices[:rows])

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
        """Args: as of FlashMLAHybridBackend. What comes in two parts is rounded from two, and never joined."""
        if save_kv_cache:
            self.store(k, v, k_rope, layer, forward_batch)
        rows = forward_batch.batch_size
        if q_rope is None:
            q = q.view(rows, layer.tp_q_head_num, layer.head_dim)
            q, q_rope = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        if self._stacked:
            out, lse = self._grouped.run(q, q_rope, self.token_to_kv_pool.rows(layer.layer_id), layer.scaling)
            self.attend_shared(q_rope, lse, layer)
            return out.view(rows, -1)
        table = self.forward_metadata.block_kv_indices[:rows]
        counted = self._hybrid or rows <= self._max_requests
        lens = self._tail_lens[:rows] if counted else forward_batch.seq_lens[:rows].to(torch.int32)
        out, lse = self._attend_tails(q, q_rope, layer, table, lens)
        if self._hybrid:
            self.attend_shared(q_rope, lse, layer)
        return out.view(rows, -1)

    def _attend_tails(
        self,
        q_absorbed: torch.Tensor,
        q_rope: torch.Tensor,
        layer: RadixAttention,
        table: torch.Tensor,
        lens: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of `q_absorbed [rows, heads, 512]` and `q_rope [rows, heads, 64]`, strided, to the `lens [rows]`
        tokens of the pages in `table [rows, pages]`: `out [rows, heads, 512]` and `lse [rows, heads]`."""
        rows = self.token_to_kv_pool.rows(layer.layer_id)
        count, dtype, device = len(q_absorbed), q_absorbed.dtype, q_absorbed.device
        fits = count <= self._max_requests
        out = self._absorb.output(count, dtype) if fits else torch.empty(q_absorbed.shape, dtype=dtype, device=device)
        lse = torch.empty(q_absorbed.shape[:2], dtype=torch.float32, device=device)
        for start in range(0, count, self._max_requests):
            part = slice(start, start + self._max_requests)
            if not fits:  # too many for one schedule: a new one for each part
                self._absorb.begin_step(lens[part], table[part])
            self._absorb.run(
                q_absorbed[part], q_rope[part], rows, table[part], lens[part], layer.scaling, out[part], lse[part]
            )
        return out, lse

    def _make_grouped(self, runner: ModelRunner) -> Stacking | None:
        """
        Raises:
            NotImplementedError: it is asked for, and its kernels do not take this number of heads or run on this GPU.
        """
        grouped = None
        if rows_per_tile(self._heads) is not None:
            pool = runner.token_to_kv_pool
            grouped = make_grouped_absorb_fp8(
                self.req_to_token,
                pool.rows(self._layers[0].attn_mqa.layer_id),
                heads=self._heads,
                layout=pool.layout,
                dtype=runner.dtype,
                max_rows=self.max_rows,
                max_tokens=self.max_context_len,
                on_failure=self.counters.fall_back,
            )
        if grouped is None:
            if self.options.mode == "grouped_absorb":
                raise NotImplementedError(
                    f"grouped absorb does not read an FP8 cache with {self._heads} heads on this device: every step is "
                    "plain absorb"
                )
            return None
        self._grouped, self._grouped_bytes = grouped, grouped.workspace_bytes
        return Stacking(PAGE_SIZE, rows_per_tile(self._heads))
