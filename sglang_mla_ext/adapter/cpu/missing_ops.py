"""Operations that SGLang's models call without a version for the CPU, in plain torch: hooks for machines without a GPU.

LongCat-Flash asks for a CUDA stream, and computes its zero experts in Triton. A grammar's mask of tokens is pinned
memory, and kernels for GPUs apply it. NIXL, which moves a cache from prefill to decode servers, takes it for a GPU's
memory. An FP8 cache of an MLA model is refused, because SGLang has no attention over one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from sglang_mla_ext.adapter.compat import installed

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator


def around_get_stream(original: Callable[..., Any], name: str) -> None:
    """Return no second stream, as DeepSeek's models have it on the CPU."""


def around_zero_experts(
    original: Callable[..., Any],
    expert_indices: Tensor,
    expert_scales: Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: Tensor,
) -> Tensor:
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


def around_allocate_bitmask(original: Callable[..., Any], vocab_size: int, batch_size: int) -> Tensor:
    """A bit for each token of the vocabulary, `[batch_size, words]`, all of them set, in memory that is not pinned."""
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def around_apply_mask(original: Callable[..., Any], grammar: Any, logits: Tensor, vocab_mask: Tensor) -> None:
    """Set the logits `[batch_size, vocabulary]` of tokens whose bit is not set to minus infinity."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


def before_nixl(*args: Any, **kwargs: Any) -> None:
    """Have NIXL find caches and states in the host's memory, and turn off its thread that polls for messages, where
    SGLang polls, too: it takes a core, which computes here."""
    from nixl import _api

    if not isinstance(_api.nixl_agent, functools.partial):
        _api.nixl_agent = functools.partial(_agent_on_host, _api.nixl_agent)
    if installed.polls_nixl and not isinstance(_api.nixl_agent_config, functools.partial):
        _api.nixl_agent_config = functools.partial(_api.nixl_agent_config, enable_prog_thread=False)


def _agent_on_host(make: Callable[..., Any], *args: Any) -> Any:
    """A NIXL agent to which a GPU's memory is the host's."""
    agent = make(*args)
    agent.nixl_mems["VRAM"] = agent.nixl_mems["DRAM"]
    return agent


def around_early_send(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Cached tokens are sent with the others: to send them earlier, SGLang waits for a CUDA event."""


def around_configure(original: Callable[..., Any], configurator: KVCacheConfigurator, **given: Any) -> Any:
    """`KVCacheConfigurator.configure`, which refuses every FP8 cache of an MLA model on a CPU. Ours is read by its own
    attention, which the CPU has: while it is made, its module takes the machine for another."""
    from sglang.srt.mem_cache import kv_cache_configurator

    from sglang_mla_ext.adapter.latent.pool import is_built_for

    platform = getattr(kv_cache_configurator, "current_platform", None)
    if platform is None or not is_built_for(configurator):
        return original(configurator, **given)
    with patch.object(kv_cache_configurator, "current_platform", _NoCPU(platform)):
        return original(configurator, **given)


class _NoCPU:
    """SGLang's platform, but for what it is."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cpu(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)
