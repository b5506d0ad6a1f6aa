"""DP attention without a GPU: communication between its ranks, which SGLang has for GPUs alone.

Batches are padded to a length that backends for CUDA graphs name, their sizes go through pinned memory, and tokens are
gathered and scattered by a Triton kernel and by operators registered for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor


def padding(backend: object) -> int:
    """Tokens of a request that only fills a batch."""
    return 1


def around_sync(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """The sizes of all ranks' batches, in memory that is not pinned."""

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return of_torch(*args, **kwargs)

    of_torch = torch.tensor
    with patch.object(torch, "tensor", tensor):
        original(*args, **kwargs)


def around_copy(
    original: Callable[..., Any],
    target: Tensor,
    source: Tensor,
    dim: int,
    offset: Tensor,
    count: Tensor,
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


def without_operator(method: str) -> Callable[..., None]:
    """Return a hook around a call of SGLang's operator, which calls this method of the group."""

    def around(original: Callable[..., Any], group: Any, output: Tensor, input: Tensor) -> None:
        getattr(group, method)(output, input)

    return around
