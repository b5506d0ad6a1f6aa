"""HybridMLABackend, the attention backend that SGLang calls. It forwards to three parts that it owns:

- a *stock* backend of SGLang's, for prefill, and for decode where nothing can be shared;
- a LatentAttention, for private tails and what is read for several requests at once;
- a SharedAttention, for expanded prefixes.

What a step shares is decided on the host before it (steps.py), and stands in `passes.now`; which of the parts it takes
is decided when it begins (preparation.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_mla_ext.adapter.failure import our_part
from sglang_mla_ext.adapter.step.layer import absorbs_prefill
from sglang_mla_ext.adapter.step.passes import Kind, Pass, Way, passes
from sglang_mla_ext.adapter.step.preparation import Preparation
from sglang_mla_ext.adapter.step.steps import Steps
from sglang_mla_ext.kernels.dispatch import whole_query
from sglang_mla_ext.reasons import Fallback

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_mla_ext.adapter.latent.protocol import LatentAttention
    from sglang_mla_ext.adapter.prefill.prefill_graph import PrefillGraph
    from sglang_mla_ext.adapter.stock.protocol import Stock
    from sglang_mla_ext.kernels.naive.attention import SharedAttention

OF_STOCK = (
    "forward_metadata",
    "token_to_kv_pool",
    "req_to_token_pool",
    "max_context_len",
    "init_mha_chunk_metadata",
    "needs_cpu_seq_lens",
    "get_cuda_graph_seq_len_fill_value",
    "on_after_cuda_graph_warmup",
    "verify_mask",
    "update_verify_buffers_to_fill_after_draft",
    "supports_ragged_verify_graph",
    "supports_full_cuda_graph_chunked_prefix",
    "prepare_full_cuda_graph_chunked_prefix",
    "use_captured_forward_metadata_for_breakable_cuda_graph",
    "init_forward_metadata_for_breakable_cuda_graph_capture",
    "prepare_forward_metadata_for_breakable_cuda_graph_replay",
    "extend_dummy_seqs_capped_by_req_pool",  # from 0.5.23 on
)
"""Attributes and methods that SGLang reads of an MLA backend, and that are the stock backend's. The contract lists who
reads them, and a test compares that with SGLang's source."""


def _of_stock(name: str, *default: Any) -> property:
    """Return an attribute of ours that is the stock backend's, where SGLang sets it, too."""

    def read(self: HybridMLABackend) -> Any:
        return getattr(self._stock.backend, name, *default)

    def write(self: HybridMLABackend, value: Any) -> None:
        setattr(self._stock.backend, name, value)

    return property(read, write)


class HybridMLABackend(AttentionBackend):  # type: ignore[misc] # SGLang is not typed
    """See the module.

    Attributes:
        preparation: of its steps.
    """

    def __init__(
        self,
        stock: Stock,
        latent: LatentAttention,
        shared: SharedAttention | None,
        steps: Steps,
        *,
        layer_index: dict[int, int],
        heads: int,
        requests: range,
        query_tokens: int = 1,
        leave_graph: Callable[[bool], bool] = bool,
        prefill_graph: PrefillGraph | None = None,
    ) -> None:
        """
        Args:
            latent: made for as many query tokens.
            shared: None where nothing is expanded.
            layer_index: of the expanded buffers' layers, by SGLang's layer id.
            heads: of this rank.
            requests: numbers of requests of a step that can share; empty where no group ever pays.
            query_tokens: of a request in a verify step; 1 without speculative decoding.
            leave_graph: from whether this rank would run a prefill pass without its CUDA graph, whether all ranks do.
            prefill_graph: attention of passes in prefill graphs; None where the stock backend's is taken, and passes
                that share leave the graph.
        """
        super().__init__()
        self._stock, self._latent, self._shared, self._steps = stock, latent, shared, steps
        self._layer_index, self._heads, self._query_tokens = layer_index, heads, query_tokens
        self._leave_graph, self._prefill_graph = leave_graph, prefill_graph
        self.preparation = Preparation(stock, latent, shared, steps, requests=requests, query_tokens=query_tokens)

    # ---- what SGLang reads

    # From 0.5.23 on. SGLang gives its own to a backend that has none, which is the stock backend's then.
    kv_index_translator = _of_stock("kv_index_translator", None)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if self._stock.decodes or self._query_tokens > 1:  # it has the mask that SGLang writes before a verify step
            self._stock.backend.init_cuda_graph_state(max_bs, max_num_tokens)
        if self._stock.plain is not None:
            self._stock.plain.init_cuda_graph_state(max_bs, max_num_tokens)

    # ---- before a step

    def can_run_prefill_cuda_graph(self, forward_batch: ForwardBatch) -> bool:
        """Return whether a prefill pass replays a CUDA graph, if one was captured; SGLang asks from 0.5.23 on."""
        of_stock = getattr(self._stock.backend, "can_run_prefill_cuda_graph", None)
        now = passes.now
        leaves = now.prefill is not None if self._prefill_graph is None else now.leaves_graph
        if self._leave_graph(leaves):
            return False
        return of_stock is None or bool(of_stock(forward_batch))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare a step without a CUDA graph: one without segments needs nothing of what is shared."""
        with our_part(Fallback.PREPARE_STEP):
            step = self.preparation.begin(forward_batch, in_graph=False)
            if step.way is Way.STOCK:
                self.preparation.count_rows_as_prefill(forward_batch)
        if self._prefill_graph is not None and absorbs_prefill():
            with our_part(Fallback.PREPARE_PREFILL_GRAPH):
                self._prefill_graph.begin(forward_batch, step.prefill)
        elif step.way is Way.STOCK:
            self._stock.backend.init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """Prepare a step before its CUDA graph is captured or replayed."""
        self.preparation.begin(forward_batch, in_graph=True, in_capture=in_capture)
        if (stock := self._of_step) is not None:
            stock.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        if (stock := self._of_step) is not None:
            stock.init_forward_metadata_in_graph(forward_batch)

    @property
    def _of_step(self) -> AttentionBackend | None:
        """SGLang's backend that the step takes; None where it takes ours."""
        return {Way.STOCK: self._stock.backend, Way.PLAIN: self._stock.plain}.get(passes.now.way)

    # ---- in a layer

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in a decode or verify step.

        Args:
            q: `[rows, heads, kv_lora_rank]`, absorbed, beside `q_rope [rows, heads, qk_rope_head_dim]`, or whole
                queries.
            k: `[rows, 1, kv_lora_rank]` beside `k_rope [rows, 1, qk_rope_head_dim]`, or whole latent rows, of the
                step's new tokens; None where they are stored already. v is a part of it.
        Returns:
            `[rows, heads * kv_lora_rank]`.
        """
        if save_kv_cache and k is not None:
            self._store(k, v, k_rope, layer, forward_batch)
        # The query is joined after the rows are written: SGLang's kernel for that lets the next launch begin before it
        # ends (see kernels/storage/join_parts.py).
        if (stock := self._of_step) is not None:
            parts = {}
            if passes.now.way is Way.PLAIN:
                parts = dict(q_rope=q_rope)
            elif q_rope is not None:
                with our_part(Fallback.JOIN_QUERY):
                    q = whole_query(q, q_rope)
            forward = stock.forward_extend if passes.now.kind is Kind.VERIFY else stock.forward_decode
            out: torch.Tensor = forward(q, None, None, layer, forward_batch, save_kv_cache=False, **parts)
            return out
        with our_part(Fallback.ATTENTION):
            return self._attend(q, q_rope, layer)

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
        q_nope: torch.Tensor | None = None,
    ) -> Any:
        """Attend in prefill, and in verify steps, whose arguments are those of a decode step. In prefill absorb comes
        with query and key in two parts, which SGLang's backends do not support.

        Args:
            q_nope: `[rows, heads, qk_nope_head_dim]`, the query before absorption; of passes in prefill graphs.
        """
        if passes.now.kind is Kind.VERIFY:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope)
        if self._prefill_graph is not None and absorbs_prefill():
            if save_kv_cache and k is not None:
                self._store(k, v, k_rope, layer, forward_batch)
            with our_part(Fallback.PREFILL_IN_GRAPH):
                return self._absorb_prefill(q, q_rope, q_nope, layer, forward_batch)
        if q_rope is not None:
            with our_part(Fallback.JOIN_QUERY):
                assert k_rope is not None, "query and key come in parts together"
                q, k = whole_query(q, q_rope), torch.cat([k, k_rope], dim=-1)
        return self._stock.extend(q, k, v, layer, forward_batch, save_kv_cache)

    def _in_parts(
        self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: RadixAttention
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a query in two parts, which it may have come in."""
        if q_rope is not None:
            return q, q_rope
        q = q.view(len(q), self._heads, -1)
        content, rope = q.split([layer.v_head_dim, q.shape[-1] - layer.v_head_dim], dim=-1)
        return content, rope

    def _absorb_prefill(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        q_nope: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Attend in a layer of a pass in a prefill graph, see `forward_extend`."""
        q, q_rope = self._in_parts(q, q_rope, layer)
        # SGLang's own buffer, where it has one: otherwise it copies the result.
        out = getattr(forward_batch, "_attn_output", None)
        out = q.new_empty(len(q), self._heads * layer.v_head_dim) if out is None else out.view(len(q), -1)
        assert self._prefill_graph is not None, "the pass absorbs in prefill"
        self._prefill_graph.attend(layer, q_nope, q, q_rope, out.view(len(q), self._heads, -1))
        return out

    def _attend(self, q: torch.Tensor, q_rope: torch.Tensor | None, layer: RadixAttention) -> torch.Tensor:
        """Attend in a decode or verify step that is not the stock backend's, see `forward_decode`."""
        step = passes.now
        q, q_rope = self._in_parts(q, q_rope, layer)
        shadow = self._steps.shadow if step.way is Way.SHARED else None
        watched = shadow.watched(layer.layer_id, q, q_rope) if shadow is not None else None
        before_tails = step.takes_query and self._shared is not None and self._shared.runs_beside_tails
        if before_tails:
            self._attend_shared(step, q_rope, layer)
        out, lse = self._latent.run(layer.layer_id, q, q_rope, layer.scaling, watched if self._shared is None else None)
        if step.takes_query:
            step.watched = watched
            if not before_tails:
                self._attend_shared(step, q_rope, layer)
            step.tail_lse = lse
        return out.reshape(len(q), -1)

    def _store(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        pool, slots = self.token_to_kv_pool, forward_batch.out_cache_loc
        if k_rope is not None and k.is_cuda:
            pool.set_mla_kv_buffer(layer, slots, k, k_rope)
        else:  # SGLang's pool takes parts on a GPU only
            pool.set_kv_buffer(layer, slots, k if k_rope is None else torch.cat([k, k_rope], dim=-1), v)

    def _attend_shared(self, step: Pass, q_rope: torch.Tensor, layer: RadixAttention) -> None:
        """Attend to the expanded prefixes; the merge follows when the layer calls its output projection.

        Args:
            q_rope: `[rows, heads, qk_rope_head_dim]`.
        """
        if step.tail_lse is not None:
            raise RuntimeError("the layer before did not call its output projection: its shared part is lost")
        assert self._shared is not None and step.q_nope is not None, "a step that takes the query before absorption"
        self._shared.run(self._layer_index[layer.layer_id], step.q_nope, q_rope, layer.scaling)
        step.q_nope = None

    def merge(self, tail_out: torch.Tensor) -> torch.Tensor:
        """Merge the shared part of the layer that runs now into the rest, in place.

        Args:
            tail_out: `[rows, heads * v_head_dim]`, what the layer is about to hand to its output projection.
        """
        if absorbs_prefill():
            return tail_out if self._prefill_graph is None else self._prefill_graph.merge(tail_out)
        with our_part(Fallback.MERGE):
            step, per_head = passes.now, tail_out.view(tail_out.shape[0], self._heads, -1)
            tail_lse, step.tail_lse = step.tail_lse, None
            assert self._shared is not None and tail_lse is not None, "the layer has attended"
            self._shared.merge(per_head, tail_lse, per_head, watched=step.watched)
            return tail_out


for _name in OF_STOCK:
    setattr(HybridMLABackend, _name, _of_stock(_name))
