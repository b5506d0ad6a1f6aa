"""Copying query rows to shared memory, in every absorb kernel for Hopper.

TMA takes the query as `[T, H, columns]`, with any strides of tokens and heads that are multiples of 16 bytes: in SGLang
a head's stride is larger than a token's. It copies a strip of rows, which lies within a token, 64 columns at a time:
in BF16 that is one swizzle.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..items import NO_ROW

QUERY_COLUMNS = gl.constexpr(64)  # of a tile


def for_tma(query: Tensor) -> Tensor:
    """The query `[T, H, columns]` itself if TMA can read it, or else a contiguous copy in BF16."""
    aligned = all(stride > 0 and 2 * stride % 16 == 0 for stride in query.stride()[:2]) and query.data_ptr() % 16 == 0
    if query.dtype == torch.bfloat16 and query.stride(2) == 1 and aligned:
        return query
    return query.to(torch.bfloat16, memory_format=torch.contiguous_format, copy=True)


@gluon.jit
def copy_query(
    desc, column, tiles, tile, TILES: gl.constexpr, barrier, strips_ptr, n_rows, ROWS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Start copying TILES · 64 columns of an item's rows, from `column` on. They go to `tiles`, where `tile` counts
    those of `[ROWS, 64]`; rows behind the last strip are zeros."""
    STRIP: gl.constexpr = desc.block_type.shape[1]
    STRIPS: gl.constexpr = ROWS // STRIP
    for s in gl.static_range(STRIPS):
        row = gl.load(strips_ptr + s, mask=s * STRIP < n_rows, other=NO_ROW)
        token = row // HEADS
        head = row % HEADS
        for c in gl.static_range(TILES):
            at = [token, head, column + c * QUERY_COLUMNS]
            tma.async_copy_global_to_shared(desc, at, barrier, tiles.index((tile + c) * STRIPS + s))
