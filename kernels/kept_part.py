"""One part of a pass's attention, kept for a merge that a CUDA graph has captured.

    kept.select(rows)                       # before the pass: so many rows have such a part, 0 for none
    kept.out[:rows], kept.lse[:rows] = ...  # in each layer, outside the graph; lse is -inf before
    kept.merge(out, lse)                    # captured: out = attention over both parts, in place; lse is -inf again

The graph may hold more rows than a pass has, and most passes of some servers have no such part: rows without one are
not merged, and the merge then reads 8 bytes per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .constants import LOG2E
from .memory import Memory, tensor_bytes
from .merge import merge
from .partials import PartialTable
from .reference import attention as reference


class KeptPart:
    """The part's result in static device memory, and its merge.

    Attributes:
        out: `[max_rows, heads, v_head_dim]`, normalised over the part's own keys.
        lse: `[max_rows, heads]` float32, natural log; -inf for a row without keys in the part.
    """

    def __init__(
        self,
        max_rows: int,
        heads: int,
        v_head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
    ) -> None:
        """
        Args:
            max_rows: rows of the largest graph.
            dtype: of `out`.
            memory: where `out` is allocated.
        """
        self.out = (memory or Memory()).zeros(max_rows, heads, v_head_dim, dtype=dtype, device=device)
        self.lse = torch.full((max_rows, heads), -torch.inf, device=device)
        self._lse2 = torch.full_like(self.lse, -torch.inf)
        self._table = PartialTable.from_pairs(
            range(max_rows), range(max_rows), max_rows=max_rows, max_partials=max_rows
        ).to(device)
        self._selected = max_rows
        self.select(0)

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        return tensor_bytes(self.out, self.lse, self._lse2, self._table.buffer)

    @staticmethod
    def workspace_bytes_for(max_rows: int, heads: int, v_head_dim: int, dtype: torch.dtype) -> int:
        """`workspace_bytes` of an object with these sizes, before it exists."""
        per_row = heads * (v_head_dim * dtype.itemsize + 8)
        return max_rows * per_row + 4 * PartialTable.size_for(max_rows, max_rows)

    def select(self, rows: int) -> None:
        """Set how many rows of the passes to come have this part: the first ones. Does not wait for the device."""
        if rows != self._selected:
            self._table.counts[:rows].fill_(1)
            self._table.counts[rows:].zero_()
            self._selected = rows

    def clear(self, rows: int) -> None:
        """Forget what a pass that did not end has written, and what the first rows were in earlier passes: a row that
        nobody writes is merged with a weight of 0, and 0 times NaN is NaN."""
        self.lse.fill_(-torch.inf)
        self.out[:rows].zero_()

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Merge this part into another one over other keys, in place.

        Args:
            out: `[T, heads, v_head_dim]`, T <= max_rows; lse: `[T, heads]` float32, natural log.
        """
        rows = len(out)
        torch.mul(self.lse[:rows], LOG2E, out=self._lse2[:rows])
        merge(out, lse, self.out, self._lse2, self._table, out)
        self.lse[:rows].fill_(-torch.inf)


class TorchKeptPart(KeptPart):
    """The same in plain torch, on any device; the rows selected are read on the host."""

    def merge(self, out: Tensor, lse: Tensor) -> None:
        rows = min(self._selected, len(out))
        merged, _ = reference.merge(out[:rows], lse[:rows], self.out[:rows], self.lse[:rows])
        out[:rows] = merged
        self.lse[: len(out)].fill_(-torch.inf)
