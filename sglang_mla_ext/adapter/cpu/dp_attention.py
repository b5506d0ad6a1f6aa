"""DP attention without a GPU: what its ranks tell and give each other, where SGLang has it for GPUs alone.

Batches are padded to a length that backends for CUDA graphs name, their sizes go through pinned memory, and tokens are
gathered and scattered by a Triton kernel and by operators registered for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch


def install() -> None:
    """Register the hooks; SGLang applies them before it builds anything."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    group = "sglang.srt.distributed.parallel_state.GroupCoordinator"
    around = {
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch": around_sync,
        "sglang.srt.layers.dp_attention.memcpy_triton": around_copy,
        f"{group}.all_gather_into_tensor": around_all_gather,
        f"{group}.reduce_scatter_tensor": around_reduce_scatter,
    }
    for target, hook in around.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    # Newer releases ask by the second name where there is no GPU; of SGLang's backends Intel's alone has it.
    AttentionBackend.get_cuda_graph_seq_len_fill_value = padding
    AttentionBackend.get_cpu_graph_seq_len_fill_value = padding


def padding(backend: object) -> int:
    """Tokens of a request that only fills a batch."""
    return 1


def around_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The sizes of all ranks' batches, in memory that is not pinned."""

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return of_torch(*args, **kwargs)

    of_torch = torch.tensor
    with patch.object(torch, "tensor", tensor):
        original(*args, **kwargs)


def around_copy(
    original: Callable[..., Any],
    target: torch.Tensor,
    source: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    count: torch.Tensor,
    of_source: bool,
) -> None:
    """A rank's tokens to their place among all ranks', and back.

    Args:
        offset: `[]` where they are among all; count: `[]` how many.
        of_source: all are in `source`.
    """
    begin, tokens = int(offset), int(count)
    if of_source:
        target[:tokens] = source[begin : begin + tokens]
    else:
        target[begin : begin + tokens] = source[:tokens]


def around_all_gather(original: Callable[..., Any], group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """What SGLang's operator calls."""
    group._all_gather_into_tensor(output, input)


def around_reduce_scatter(original: Callable[..., Any], group: Any, output: torch.Tensor, input: torch.Tensor) -> None:
    """What SGLang's operator calls."""
    group._reduce_scatter_tensor(output, input)
