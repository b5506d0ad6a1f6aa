"""Torch doubles, of the same signature and meaning, of what needs a GPU in a decode step: FlashMLA's two functions, our
kernels over latent rows, and SGLang's FlashMLA backend. Inside a recorded graph each call is one operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from graph_in_torch import opaque
from torch import Tensor

from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout
from sglang_mla_ext.kernels.watch import Watched
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Segment

HEADS, RANK, DR, PAGE = 8, 32, 16, 64
MIB = 1 << 20


class Arguments(SimpleNamespace):
    def get_attention_backends(self) -> tuple[str, str]:
        """A method of older releases; newer ones read the fields."""
        return self.prefill_attention_backend, self.decode_attention_backend


def server_args(**given: Any) -> Arguments:
    """SGLang's arguments, as far as they are looked at when the parts are built."""
    decode, prefill = SimpleNamespace(backend="full"), SimpleNamespace(backend="disabled", bs=None)
    names = ["DeepseekV3ForCausalLM"]
    config = SimpleNamespace(
        to_dict=dict, get_text_config=lambda: config, num_attention_heads=HEADS, architectures=names
    )
    nothing_known = SimpleNamespace(hf_config=config, linear_attn_registry_result=None)
    values = dict(
        prefill_attention_backend="hybrid_mla",
        decode_attention_backend="hybrid_mla",
        speculative_algorithm=None,
        speculative_num_draft_tokens=None,
        speculative_eagle_topk=None,
        disaggregation_mode="null",
        enable_dp_attention=False,
        enable_torch_compile=False,
        moe_a2a_backend="none",
        enable_return_routed_experts=False,
        disable_cuda_graph_padding=False,
        elastic_ep_backend=None,
        moe_dense_tp_size=None,
        nnodes=1,
        tp_size=1,
        dp_size=1,
        attn_dp_size=1,
        enable_mixed_chunk=False,
        chunked_prefill_size=8192,
        max_prefill_tokens=16384,
        device="cpu",
        cuda_graph_config=SimpleNamespace(decode=decode, prefill=prefill),
        get_model_config=lambda: nothing_known,
        _model_config=nothing_known,  # where newer releases keep it
    )
    return Arguments(**{**values, **given})


def get_mla_metadata(cache_seqlens: Tensor, num_heads: int, num_kv_heads: int, **_: Any) -> tuple[Tensor, Tensor]:
    """FlashMLA's schedule; here it says which lengths it is for."""
    assert cache_seqlens.dtype == torch.int32 and num_kv_heads == 1 and num_heads % HEADS == 0
    metadata = torch.zeros(4, 8, dtype=torch.int32)
    metadata[0, 0], metadata[0, 1] = cache_seqlens.sum(), num_heads
    return metadata, torch.arange(len(cache_seqlens) + 1, dtype=torch.int32)


@opaque
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: Tensor,
    num_splits: Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """FlashMLA: `out [requests, queries, heads, RANK]`, `lse [requests, heads, queries]` natural log."""
    requests, queries = q.shape[:2]
    assert q.shape[2:] == (HEADS, RANK + DR) and q.is_contiguous() and k_cache.shape[1:] == (PAGE, 1, RANK + DR)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert len(block_table) == len(cache_seqlens) == requests
    scheduled = [cache_seqlens.sum(), queries * HEADS]
    assert tile_scheduler_metadata[0, :2].tolist() == scheduled, "the schedule is another step's"
    assert num_splits.tolist() == list(range(requests + 1)) and head_dim_v == RANK and causal
    out, lse = q.new_empty(requests, queries, HEADS, RANK), q.new_empty(requests, HEADS, queries)
    for request, length in enumerate(cache_seqlens.tolist()):
        assert length >= 0
        keys = k_cache[block_table[request, : -(-length // PAGE)].long()].flatten(0, 2)[:length]
        for token in range(queries):
            seen = max(length - (queries - 1 - token), 0)
            query = q[request, token, None].split([RANK, DR], dim=-1)
            part, part_lse = reference.absorb(*query, keys[None, :seen], torch.tensor([seen]), softmax_scale)
            out[request, token], lse[request, :, token] = part[0], part_lse[0]
    return out, lse


class TorchAbsorbFP8:
    """kernels.absorb.paged_fp8.AbsorbFP8."""

    workspace_bytes = MIB

    def __init__(
        self, pool: Tensor, *, heads: int, layout: LatentRowLayout, max_requests: int, query_tokens: int, **_: Any
    ) -> None:
        assert heads == HEADS and pool.shape[1] == layout.row_bytes
        self.layout, self.max_requests, self.queries, self._begun = layout, max_requests, query_tokens, None

    @opaque
    def begin_step(self, lens: Tensor, page_table: Tensor) -> None:
        assert len(lens) <= self.max_requests and lens.dtype == page_table.dtype == torch.int32
        self._begun = len(lens), lens.sum()

    def output(self, tokens: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(tokens, HEADS, RANK, dtype=dtype)

    @opaque
    def run(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        assert (len(lens), lens.sum()) == self._begun, "the schedule is another step's"
        assert len(q_absorbed) == len(lens) * self.queries == len(out) == len(lse)
        for row in range(len(out)):
            request, earlier = divmod(row, self.queries)
            token = torch.arange(max(int(lens[request]) - (self.queries - 1 - earlier), 0))
            slots = page_table[request, token // PAGE].long() * PAGE + token % PAGE
            keys = reference_fp8.keys_of_rows(pool[slots], self.layout)
            query = q_absorbed[row, None], q_rope[row, None]
            out[row], lse[row] = (part[0] for part in reference_fp8.absorb_fp8(*query, keys, softmax_scale))


class TorchGrouped:
    """kernels.absorb.grouped.GroupedAbsorb, over either pool: what its device memory says is kept on the host."""

    workspace_bytes = 2 * MIB

    def __init__(self, layout: LatentRowLayout | None, queries: int = 1) -> None:
        self._layout, self._queries = layout, queries

    def plan(self, segments: Sequence[Segment], requests: int, tail_tokens: int) -> None:
        assert all(request < requests for segment in segments for request in segment.rows)
        self._segments = Rows(requests, self._queries).by_row(segments)
        self._rows, self._tail_tokens = requests * self._queries, tail_tokens

    def begin_step(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, tail_starts: Tensor) -> None:
        requests, queries = self._rows // self._queries, self._queries
        assert (tail_starts[:requests] % PAGE == 0).all()
        self._slots = [
            req_to_token[request, : max(length - later, 0)].long()
            for request, length in zip(pool_indices[:requests].tolist(), seq_lens[:requests].tolist(), strict=True)
            for later in reversed(range(queries))
        ]
        self._starts = [start for start in tail_starts[:requests].tolist() for _ in range(queries)]
        if self._segments:  # requests may have grown since, and so may have padding
            tails = seq_lens[:requests] - tail_starts[:requests]
            assert abs(int(tails.sum()) - self._tail_tokens) <= PAGE * requests

    @opaque
    def run(
        self, q_absorbed: Tensor, q_rope: Tensor, cache: Tensor, softmax_scale: float, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        assert len(q_absorbed) == self._rows
        parts = [
            self._attend(q_absorbed[row, None], q_rope[row, None], cache, self._slots[row][start:], softmax_scale)
            for row, start in enumerate(self._starts)
        ]
        out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        for segment in self._segments:
            for row in segment.rows:
                slots = self._slots[segment.rows[0]][segment.start : segment.end]
                part = self._attend(q_absorbed[row, None], q_rope[row, None], cache, slots, softmax_scale)
                out[row, None], lse[row, None] = reference.merge(out[row, None], lse[row, None], *part)
        if watched is not None:
            watched.copy(out)
        return out, lse

    def _attend(
        self, q_absorbed: Tensor, q_rope: Tensor, cache: Tensor, slots: Tensor, scale: float
    ) -> tuple[Tensor, ...]:
        if self._layout is not None:
            keys = reference_fp8.keys_of_rows(cache[slots], self._layout)
            return reference_fp8.absorb_fp8(q_absorbed, q_rope, keys, scale)
        keys = cache.flatten(0, 2)[slots][None]
        return reference.absorb(q_absorbed, q_rope, keys, torch.tensor([len(slots)]), scale)


class StockBackend:
    """SGLang's FlashMLA backend: decode over all keys, by its own static metadata; everything else is noted down."""

    needs_cpu_seq_lens = supports_ragged_verify_graph = False
    use_captured_forward_metadata_for_breakable_cuda_graph = supports_full_cuda_graph_chunked_prefix = False
    verify_mask = None

    def __init__(self, pool: Any, req_to_token: Tensor, queries: int = 1) -> None:
        self._queries = queries
        self.token_to_kv_pool, self.req_to_token_pool = pool, SimpleNamespace(req_to_token=req_to_token)
        self.forward_metadata: Any = None
        self.begun: list[str] = []
        self._lens = torch.zeros(64, dtype=torch.int64)
        self._requests = torch.zeros(64, dtype=torch.int64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.begun.append(forward_batch.forward_mode.name)
        requests, uncounted = forward_batch.batch_size, self._queries * forward_batch.forward_mode.is_target_verify()
        self._lens[:requests] = forward_batch.seq_lens + uncounted
        self._requests[:requests] = forward_batch.req_pool_indices

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        self.init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        pass

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.begun.append("graph state")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    @opaque
    def forward_decode(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        return self._attend(q, k, layer, save_kv_cache, 1)

    @opaque
    def forward_extend(self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool) -> Tensor:
        """Attend in a verify step."""
        return self._attend(q, k, layer, save_kv_cache, self._queries)

    def _attend(self, q: Tensor, k: Any, layer: Any, save_kv_cache: bool, queries: int) -> Tensor:
        assert k is None and not save_kv_cache, "its rows are written already"
        q = q.view(len(q), HEADS, RANK + DR)
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id).squeeze(1)
        outs = []
        for row, query in enumerate(q):
            request, token = divmod(row, queries)
            length = self._lens[request] - (queries - 1 - token)
            slots = self.req_to_token_pool.req_to_token[self._requests[request], :length].long()
            parts = query[None, :, :RANK], query[None, :, RANK:]
            outs.append(reference.absorb(*parts, rows[slots][None], length[None], layer.scaling)[0])
        return torch.cat(outs).to(q.dtype).flatten(1)


class PlainBackend(StockBackend):
    """SGLang's FlashAttention-3 backend in decode graphs without sharing: it takes queries in two parts."""

    @opaque
    def forward_decode(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, q_rope: Tensor
    ) -> Tensor:
        return self._attend(torch.cat([q, q_rope], dim=-1), k, layer, save_kv_cache, 1)

    @opaque
    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool, q_rope: Tensor
    ) -> Tensor:
        """Attend in a verify step."""
        return self._attend(torch.cat([q, q_rope], dim=-1), k, layer, save_kv_cache, self._queries)


class Request(SimpleNamespace):
    """SGLang's request, equal by identity."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def request(prompt: list[int], **changes: Any) -> Any:
    """Make a request of a prompt, with what keeps it apart from others."""
    keys = {"extra_key": None, "cache_salt": None}
    embeds = {"input_embeds": None, "positional_embed_overrides": None}
    return Request(**{"origin_input_ids": prompt, **keys, **embeds, **changes})
