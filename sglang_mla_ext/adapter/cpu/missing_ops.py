"""Operations that SGLang's models call without a version for the CPU, in plain torch: hooks for machines without a GPU.

LongCat-Flash asks for a CUDA stream, and computes its zero experts in Triton. A grammar's mask of tokens is pinned
memory, and kernels for GPUs apply it. A cache on the host (HiCache) is pinned memory, and compiled functions copy to
it. NIXL, which moves a cache from prefill to decode servers, takes it for a GPU's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_mla_ext.adapter.compat import installed


def install() -> None:
    """Register the hooks; SGLang applies them before it builds anything."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    grammar = "sglang.srt.constrained.xgrammar_backend"
    prefill = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
    around = {
        "sglang.srt.runtime_context.get_stream": around_get_stream,
        "sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton": around_zero_experts,
        f"{grammar}._allocate_token_bitmask": around_allocate_bitmask,
        f"{grammar}.XGrammarGrammar.apply_vocab_mask": around_apply_mask,
        "sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds": around_memory_kinds,
        f"{prefill}.maybe_send_cached_prefix_chunk": around_early_send,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.register("sglang.srt.disaggregation.nixl.conn.NixlKVManager.__init__", before_nixl, HookType.BEFORE)
    # A function that hooks.py leaves alone: SGLang applies hooks to a function once, and these come first.
    host_pool = "sglang.srt.mem_cache.pool_host.base.HostKVCache.__init__"
    HookRegistry.register(host_pool, before_host_pool, HookType.BEFORE)
    HookRegistry.register(host_pool, after_host_pool, HookType.AFTER)


def around_get_stream(original: Callable[..., Any], name: str) -> None:
    """No second stream, as DeepSeek's models have it on the CPU."""


def around_zero_experts(
    original: Callable[..., Any],
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """The part of experts whose result is their input, and none of theirs in the others' lists.

    Args:
        expert_indices: `[tokens, k]`, those from `num_experts` on compute nothing. They are set to experts that a token
            does not have yet: SGLang's experts on the CPU count each once.
        expert_scales: `[tokens, k]`, theirs set to 0 here.
        hidden_states: `[tokens, hidden]`.
    Returns:
        `[tokens, hidden]`.
    """
    if zero_expert_type != "identity":
        raise ValueError(f"zero experts of type {zero_expert_type!r}")
    zero = expert_indices >= num_experts
    scales = expert_scales.where(zero, 0.0).sum(dim=1, keepdim=True)
    used = torch.zeros(len(expert_indices), num_experts + 1, dtype=torch.bool)
    used.scatter_(1, expert_indices.clamp(max=num_experts).long(), True)
    unused = used[:, :num_experts].int().argsort(dim=1, stable=True)  # [tokens, num_experts], those first
    others = unused.gather(1, (zero.cumsum(dim=1) - 1).clamp(min=0)).to(expert_indices.dtype)
    expert_indices.copy_(others.where(zero, expert_indices))
    expert_scales[zero] = 0.0
    return (hidden_states * scales).to(hidden_states.dtype)


def around_allocate_bitmask(original: Callable[..., Any], vocab_size: int, batch_size: int) -> torch.Tensor:
    """A bit for each token of the vocabulary, `[batch_size, words]`, all of them set, in memory that is not pinned."""
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def around_apply_mask(
    original: Callable[..., Any], grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """Set the logits `[batch_size, vocabulary]` of tokens whose bit is not set to minus infinity."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def around_memory_kinds(original: Callable[..., Any], kinds: Sequence[str] | None, expected_len: int) -> list[str]:
    """In which memory NIXL finds the buffers of a KV cache: in the host's."""
    return ["DRAM"] * expected_len


def before_nixl(*args: Any, **kwargs: Any) -> None:
    """Turn off NIXL's thread that polls for messages, where SGLang polls, too: it takes a core, which computes here."""
    if not installed.polls_nixl():
        return
    from nixl import _api

    if not isinstance(_api.nixl_agent_config, functools.partial):
        _api.nixl_agent_config = functools.partial(_api.nixl_agent_config, enable_prog_thread=False)


def around_early_send(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Cached tokens are sent with the others: to send them earlier, SGLang waits for a CUDA event."""


def before_host_pool(*args: Any, **kwargs: Any) -> None:
    """Plain memory for latent rows on the host, and copies of their indices for `--hicache-io-backend direct`."""
    from sglang.srt.mem_cache.pool_host import mla

    mla.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    mla.transfer_kv_direct = _transfer


def after_host_pool(result: None, host_pool: Any, *args: Any, **kwargs: Any) -> None:
    """Nor is memory pinned that pages from storage are read into."""
    host_pool.pin_memory = False


def _allocate(dims: Sequence[int], dtype: torch.dtype, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(*dims, dtype=dtype)


def _transfer(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
