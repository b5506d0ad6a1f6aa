"""Stores into other ranks' memory: part r of what a rank sends goes to rank r, to this rank's place in its buffer.

Every byte is read once and written once, over NVLink but for the rank's own part. Nobody is told that it has arrived:
that takes a barrier behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = torch.int64
BLOCK = 1024  # words of a program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["me"])
def push_to_ranks_kernel(
    sent_ptr,  # int64 [R, part_words], contiguous
    buffers_ptr,  # int64 [R]: where each rank's buffer begins, int64 [R, part_words] like `sent`
    part_words,
    me,
    BLOCK: tl.constexpr,
):
    rank = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < part_words
    # Buffers begin on pages, which the compiler cannot know.
    buffer = tl.multiple_of(tl.load(buffers_ptr + rank), 16).to(tl.pointer_type(tl.int64))
    words = tl.load(sent_ptr + rank.to(tl.int64) * part_words + at, mask=inside)
    tl.store(buffer + me.to(tl.int64) * part_words + at, words, mask=inside)


def push_to_ranks(sent: Tensor, buffers: Tensor, me: int) -> None:
    """Store each part of `sent` into another rank's buffer.

    Args:
        sent: `[n]` contiguous, of any dtype, in R parts of a multiple of eight bytes.
        buffers: `[R]` int64, on the same device: the addresses of the ranks' buffers, multiples of 16, in each of which
            part `me` is written.
        me: this rank's number.
    Raises:
        ValueError: a shape or a dtype is not as above.
    """
    ranks, size = len(buffers), sent.numel() * sent.element_size()
    if sent.dim() != 1 or not sent.is_contiguous() or size % (ranks * WORD.itemsize):
        raise ValueError(f"{list(sent.shape)} of {sent.dtype} are not {ranks} parts of whole words")
    if buffers.dtype != WORD or not 0 <= me < ranks:
        raise ValueError(f"rank {me} of {ranks} buffers, whose addresses are {buffers.dtype}")
    words = size // (ranks * WORD.itemsize)
    push_to_ranks_kernel[(triton.cdiv(words, BLOCK), ranks)](
        sent.view(WORD), buffers, words, me, BLOCK=BLOCK, num_warps=NUM_WARPS
    )


def push_to_ranks_torch(sent: Tensor, buffers: Sequence[Tensor], me: int) -> None:
    """The same in torch, into `buffers` that this process holds, each like `sent`."""
    for part, buffer in zip(sent.chunk(len(buffers)), buffers, strict=True):
        buffer.chunk(len(buffers))[me].copy_(part)
