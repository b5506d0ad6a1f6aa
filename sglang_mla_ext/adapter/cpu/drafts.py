"""Speculative decoding on a machine without a GPU, for one chain of drafts, in plain torch: the functions of
`sgl_kernel` that SGLang calls for it there, and attention of verify steps and of the draft model. As SGLang's own on an
Intel CPU with AMX; it has none for `torch_native`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

NAME = "torch_native"
"""Name of the draft model's attention backend."""


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write each request's new slots into its row of the request table.

    Args:
        req_pool_indices: `[requests]` rows of the table.
        req_to_token: `[rows, pool_len]` int32, written.
        start_offset, end_offset: `[requests]` the token positions to write, `[start, end)`.
        out_cache_loc: `[sum(end - start)]` the slots, one request after the other.
        pool_len: the table's row length (unused: the table knows it).
    """
    for in_table, slots in by_request(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc):
        in_table.copy_(slots)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read the slots of each request's tokens `[start, end)`; arguments are those of
    assign_req_to_token_pool_cpu, of which `out_cache_loc` is written."""
    for in_table, slots in by_request(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc):
        slots.copy_(in_table)


def by_request(
    req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor, end_offset: Tensor, slots: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each request's tokens `[start, end)` in the request table, and its part of `slots`: two views of one length."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        yield req_to_token[row, start:end], slots[taken : taken + end - start]
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the slots of each request's drafts, as many for each, which follow its `seq_lens`."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len)


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    top_scores_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """The tree of drafts, which is a chain: each of W tokens is followed by the next, and has no sibling.

    Args:
        seq_lens: `[requests]` tokens before the chain.
        tree_mask: `[requests * W * W]`, written: whether a row attends to a token of the chain.
        positions: `[requests * W]`; retrieve_index, retrieve_next_token: `[requests, W]`, written.
    Raises:
        NotImplementedError: a tree with branches.
    """
    if topk != 1:
        raise NotImplementedError("on the CPU drafts are one chain: --speculative-eagle-topk 1")
    requests, tokens = len(seq_lens), torch.arange(num_verify_tokens)
    positions.copy_((seq_lens[:, None] + tokens).flatten())
    retrieve_index.copy_(torch.arange(requests * num_verify_tokens).view(requests, num_verify_tokens))
    retrieve_next_token[:, :-1] = tokens[1:]
    tree_mask.copy_((tokens[:, None] >= tokens).flatten().repeat(requests))


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Accept drafts of each chain as far as they are the tokens that the model would have yielded.

    Args:
        predicts: `[requests * W]`, written where a token is accepted: the model's token behind it.
        accept_index: `[requests, W]`, written: rows of accepted tokens; accept_token_num: `[requests]` of drafts.
        candidates: `[requests, W]` the last accepted token and the drafts; target_predict: the model's behind each.
    """
    right = candidates[:, 1:] == target_predict.view_as(candidates)[:, :-1]
    accept_token_num.copy_(right.long().cumprod(1).sum(1))
    for request, accepted in enumerate(accept_token_num.tolist()):
        rows = retrive_index[request, : accepted + 1]
        accept_index[request, : accepted + 1] = rows
        predicts[rows] = target_predict.view(-1)[rows].to(predicts.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """The last accepted token of each request.

    Args:
        accept_tokens: `[requests * accept_stride]`; accept_lens: `[requests]`, at least 1.
        bonus_tokens: `[requests]`, written.
    """
    last = accept_lens.long() - 1 + accept_stride * torch.arange(len(accept_lens))
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Slots of accepted rows, one behind the other: `accept_index` is -1 where there is none."""
    rows = accept_index[accept_index >= 0].long()
    accept_out_cache_loc[: len(rows)] = out_cache_loc[rows]


KERNELS: Sequence[Callable[..., None]] = (
    assign_req_to_token_pool_cpu,
    assign_extend_cache_locs_cpu,
    assign_draft_cache_locs_contiguous_cpu,
    build_tree_kernel_efficient_cpu,
    verify_tree_greedy_cpu,
    fill_bonus_tokens_cpu,
    fill_accept_out_cache_loc_cpu,
)
"""Functions of `sgl_kernel` that its stand-in has."""


def around_set_embed_and_head(original: Callable[..., Any], model: Any, embed: Any, head: Any) -> None:
    """Give the draft model the model's own embedding and head; SGLang then waits for a GPU."""
    model.model.embed_tokens.weight, model.lm_head.weight = embed, head


def around_extend(
    original: Callable[..., Any],
    backend: Any,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    layer: Any,
    forward_batch: ForwardBatch,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Verify steps as prefill of the drafts, which SGLang's lengths do not count. With DP attention the draft model's
    batch is padded to that of the rank with the most requests, by such whose lengths do not agree."""
    if forward_batch.forward_mode.is_target_verify():
        forward_batch = copy.copy(forward_batch)
        tokens = forward_batch.spec_info.draft_token_num
        forward_batch.extend_prefix_lens = forward_batch.seq_lens
        forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, tokens)
        forward_batch.seq_lens = forward_batch.seq_lens + tokens
    lens = [getattr(forward_batch, name) for name in ("extend_prefix_lens", "extend_seq_lens", "seq_lens")]
    shortest = min(map(len, lens))
    before, new, total = (each[:shortest] for each in lens)
    requests = int((before + new == total).long().cumprod(0).sum())
    padded = requests < len(forward_batch.seq_lens)
    if padded:
        forward_batch = copy.copy(forward_batch)
        for name in ("extend_prefix_lens", "extend_seq_lens", "seq_lens", "req_pool_indices"):
            setattr(forward_batch, name, getattr(forward_batch, name)[:requests])
    out: Tensor = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    if padded:
        out[int(forward_batch.extend_seq_lens.sum()) :] = 0
    return out


def around_create_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The draft model's backend: one for each step, or one for the tokens that were accepted."""
    if factory.draft_attn_backend != NAME:
        return original(factory, backend_name, backend_map, *args, **kwargs)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def make() -> Any:
        backend = TorchNativeAttnBackend(factory.draft_model_runner)
        # By which a layer takes its forward method.
        backend.prefill_attention_backend_str = backend.decode_attention_backend_str = NAME
        return backend

    if "decode" in backend_map["triton"].__name__:
        return DraftSteps([make() for _ in range(factory.speculative_num_steps)])
    return make()


class DraftSteps:
    """A backend for each draft step, as SGLang takes them."""

    def __init__(self, attn_backends: list[Any]) -> None:
        self.attn_backends = attn_backends
        for step, backend in enumerate(attn_backends):
            backend.forward_decode = _of_step(backend.forward_decode, step)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _of_step(forward_decode: Callable[..., Any], step: int) -> Callable[..., Any]:
    def run(q: Any, k: Any, v: Any, layer: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any) -> Any:
        forward_batch = copy.copy(forward_batch)
        forward_batch.seq_lens = forward_batch.seq_lens + step + 1  # SGLang's do not count the drafts
        return forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)

    return run
