"""Copy the query and result of one layer's attention, in a captured graph too, and at no cost where nothing is watched.

A merge (merge.py) is the last kernel that touches a layer's attention, and it has the queries at hand. Which layer is
watched stands in device memory, so a captured graph need not change: where it is this merge's, the programs of the
watched rows copy query and result once more. In all other steps a program reads one number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .memory import Memory, tensor_bytes

NOBODY = 0
"""Number of the watched layer where none is. Layers are numbered from 1 on here: memory of zeros watches nothing."""


class Watch:
    """Static memory for the queries and results of some rows.

    Attributes:
        max_rows: query tokens that are watched at a time.
        target: `[2]` int32: the number of the watched layer, from 1 on, and the first of its rows.
        query: `[max_rows, heads, columns]`, absorbed; out: `[max_rows, heads, dv]`.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        heads: int,
        columns: int,
        dv: int,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
    ) -> None:
        """
        Args:
            columns: kv_lora_rank + qk_rope_head_dim.
            dv: of what is merged: v_head_dim, or kv_lora_rank where that is in the latent space.
            memory: where it is allocated.
        """
        memory = memory or Memory()
        self.max_rows = max_rows
        self.target = memory.zeros(2, dtype=torch.int32, device=device)
        self.query = memory.zeros(max_rows, heads, columns, dtype=dtype, device=device)
        self.out = memory.zeros(max_rows, heads, dv, dtype=dtype, device=device)

    @property
    def workspace_bytes(self) -> int:
        return tensor_bytes(self)

    @classmethod
    def workspace_bytes_for(cls, **sizes: int | torch.dtype) -> int:
        """Bytes that an object of these sizes would allocate; sizes as in the constructor, without `device`."""
        return cls(**sizes, device="meta").workspace_bytes  # type: ignore[arg-type]

    def set_target(self, layer: int, first_row: int) -> None:
        """Watch rows `[first_row, first_row + max_rows)` of this layer in what follows on the current stream."""
        self._set(layer + 1, first_row)

    def clear_target(self) -> None:
        """Watch nothing in what follows on the current stream."""
        self._set(NOBODY, 0)

    def _set(self, number: int, first_row: int) -> None:
        host = torch.tensor([number, first_row], dtype=torch.int32, pin_memory=self.target.is_cuda)
        self.target.copy_(host, non_blocking=True)


@triton.jit
def copy_watched(
    out_ptrs,  # [BLOCK_HEADS, 1, DV], what the program has written
    in_heads,
    watched,  # whether this merge's layer is
    place,  # int32 [BLOCK_HEADS, 1], of each head among all heads of all rows
    target_ptr,
    watch_query_ptr,  # [max_rows, query_heads, RANK + ROPE]
    watch_out_ptr,  # [max_rows, query_heads, DV]
    watch_rows,
    q_ptr,  # [T, query_heads, RANK], strides q_row, q_head, 1
    rope_ptr,  # [T, query_heads, ROPE], strides rope_row, rope_head, 1
    query_heads,
    q_row,
    q_head,
    rope_row,
    rope_head,
    out_heads,  # of a query token in the merge: query_heads, or more, of which the last ones are nobody's
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    DV: tl.constexpr,
):
    """Copy query and result of watched rows, at the end of a merge's program. A row of a merge may have the heads of
    several query tokens."""
    if watched:
        token, head = place // out_heads, place % out_heads
        to_row = token - tl.load(target_ptr + 1)
        there = (in_heads & (head < query_heads) & (to_row >= 0) & (to_row < watch_rows))[:, :, None]
        to = to_row * query_heads + head
        tl.debug_barrier()  # other threads of the program may have written what this one reads
        dim = tl.arange(0, DV)[None, None, :]
        tl.store(watch_out_ptr + to[:, :, None] * DV + dim, tl.load(out_ptrs, mask=there), mask=there)
        query_ptrs = watch_query_ptr + to[:, :, None] * (RANK + ROPE)
        q_ptrs = q_ptr + (token * q_row + head * q_head)[:, :, None]
        for piece in tl.static_range(0, RANK, DV):
            tl.store(query_ptrs + piece + dim, tl.load(q_ptrs + piece + dim, mask=there), mask=there)
        rope_dim = tl.arange(0, ROPE)[None, None, :]
        rope_ptrs = rope_ptr + (token * rope_row + head * rope_head)[:, :, None]
        tl.store(query_ptrs + RANK + rope_dim, tl.load(rope_ptrs + rope_dim, mask=there), mask=there)


WATCH_ARGUMENTS = (
    "number",
    "target_ptr",
    "watch_query_ptr",
    "watch_out_ptr",
    "watch_rows",
    "q_ptr",
    "rope_ptr",
    "query_heads",
    "q_row",
    "q_head",
    "rope_row",
    "rope_head",
    "out_heads",
    "RANK",
    "ROPE",
)
"""Arguments of merge_kernel that only a watched merge has."""


@dataclass(frozen=True)
class Watched:
    """Layer that a merge computes, with its queries, to be copied if the layer is watched.

    Attributes:
        layer: id of the layer, from 0 on.
        q_absorbed: `[T, H, r]`, q_rope: `[T, H, dr]` of all its rows; last axis contiguous.
        merged_heads: of a query token in the merge, where they are more than H; the first H are those of the query.
    """

    watch: Watch
    layer: int
    q_absorbed: Tensor
    q_rope: Tensor
    merged_heads: int | None = None

    def copy(self, out: Tensor) -> None:
        """Copy queries and `out [T, H, dv]` in torch, if this layer is watched. Reads the target on the host."""
        number, first = self.watch.target.tolist()
        if number != self.layer + 1:
            return
        rows = slice(first, first + self.watch.max_rows)
        rank = self.q_absorbed.shape[-1]
        count = len(out[rows])
        self.watch.query[:count, :, :rank] = self.q_absorbed[rows]
        self.watch.query[:count, :, rank:] = self.q_rope[rows]
        self.watch.out[:count] = out[rows]

    def kernel_arguments(self, rows_and_heads: int, dv: int) -> dict[str, Any]:
        """The arguments of `copy_watched` in a merge of so many rows and heads together.

        Raises:
            ValueError: shapes do not fit, or a last axis is not contiguous.
        """
        watch, q, rope = self.watch, self.q_absorbed, self.q_rope
        (tokens, query_heads, rank), rope_dim = q.shape, rope.shape[-1]
        out_heads = self.merged_heads or query_heads
        if tokens * out_heads != rows_and_heads or rope.shape[:2] != q.shape[:2]:
            raise ValueError(f"watched queries {list(q.shape)} and {list(rope.shape)} do not fit")
        if q.stride(2) != 1 or rope.stride(2) != 1:
            raise ValueError("the last axis of watched queries does not fit: it must be contiguous")
        if watch.query.shape[1:] != (query_heads, rank + rope_dim) or watch.out.shape[2] != dv or rank % dv:
            raise ValueError(f"memory for {list(watch.query.shape)} and {list(watch.out.shape)} does not fit")
        values = (
            self.layer + 1, watch.target, watch.query, watch.out, watch.max_rows, q, rope, query_heads,
            q.stride(0), q.stride(1), rope.stride(0), rope.stride(1), out_heads, rank, rope_dim,
        )  # fmt: skip
        return dict(zip(WATCH_ARGUMENTS, values, strict=True))
