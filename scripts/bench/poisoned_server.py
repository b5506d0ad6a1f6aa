"""SGLang's launcher on a server whose unwritten memory is NaN: `python -m bench.poisoned_server ARGUMENTS`.

What `torch.empty` returns is NaN, and so are rows of the KV cache from the moment in which they are free. A kernel that
reads what it should not gives NaN, and a wrong answer, on every run and not on some. Spawned processes import this file
again. It is slower: not for timings.
"""

from __future__ import annotations

import functools
from typing import Any

from sglang_mla_ext import launch_server  # on a CPU puts stand-ins in place, before the first import of SGLang

POISON = 0xFF
"""Bytes that are NaN in float32, bfloat16, float16 and e4m3."""


def poison_new_memory() -> None:
    """Fill every floating-point tensor that is made without a value with NaN."""
    import torch

    with torch.device("cpu"):
        torch.empty(0)  # such a context learns torch's functions when first used, which must be before ours stand there

    def poisoned(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = function(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

        return call

    for name in ("empty", "empty_like", "empty_strided"):
        setattr(torch, name, poisoned(getattr(torch, name)))
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)  # type: ignore[method-assign]


def poison_free_rows() -> None:
    """Fill rows of the KV cache with NaN in the moment in which they become free."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    def poison(allocator: Any, rows: torch.Tensor) -> None:
        if rows.is_cuda:
            torch.cuda.synchronize()  # a step in flight still reads rows of requests that ended, or were retracted
        for buffer in getattr(allocator._kvcache, "kv_buffer", ()):
            buffer.flatten(1).view(torch.uint8)[rows] = POISON

    def free(self: Any, free_index: torch.Tensor) -> None:
        # Inside a group rows are freed at its end. Before SGLang 0.5.23 the group is a list at any time.
        if free_index.numel() and getattr(self, "is_not_in_free_group", self.free_group is None):
            poison(self, free_index)
        free_tokens(self, free_index)

    def release_pages(self: Any, *page_ids: torch.Tensor) -> None:
        for ids in page_ids:
            poison(self, (ids[:, None] * self.page_size + torch.arange(self.page_size, device=ids.device)).flatten())
        release_page_ids(self, *page_ids)

    free_tokens, TokenToKVPoolAllocator.free = TokenToKVPoolAllocator.free, free
    release_page_ids = PagedTokenToKVPoolAllocator._release_page_ids
    PagedTokenToKVPoolAllocator._release_page_ids = release_pages


poison_new_memory()
poison_free_rows()

if __name__ == "__main__":
    launch_server.main()
