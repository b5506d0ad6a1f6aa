"""Table of the partial results of each row of the batch, as the merge reads it.

    partials of row r = partials[begins[r] : begins[r] + counts[r]]

The table is written by whatever plans the work: on the host with a plan, or on the device before every step. It is one
int32 array, so that it can be a part of a work list and travel in the same copy:

| position | what |
|---|---|
| 0 | begins `[max_rows]`: where a row's list starts in `partials`; any value where the row has none |
| max_rows | counts `[max_rows]`: how long it is; 0 for a row without partials |
| 2 · max_rows | firsts `[max_rows, FIRSTS]`: how a row's list begins, once more; any value where it is shorter |
| (2 + FIRSTS) · max_rows | partials `[max_partials]`: rows of the partials' tensor |

From `firsts`, addresses of partials are known one load earlier than from the list: 1 of 10 us in a merge of 16 heads.
Lists may lie in any order, and may overlap. A row may have partials of several segments, and of several splits of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray | Tensor

FIRSTS = 8
"""Partials of a row that stand at a fixed place, too."""


@dataclass(frozen=True)
class PartialTable:
    """Views of a table in host memory (numpy) or of a tensor.

    Attributes:
        buffer: int32 `[size_for(max_rows, max_partials)]`, contiguous.
        max_rows: rows of the batch that it can describe.
        max_partials: entries that the lists of all rows can have together.
    Raises:
        ValueError: the buffer is not as above.
    """

    buffer: Array
    max_rows: int
    max_partials: int

    def __post_init__(self) -> None:
        size = self.size_for(self.max_rows, self.max_partials)
        dtype = torch.int32 if isinstance(self.buffer, Tensor) else np.int32
        contiguous = self.buffer.is_contiguous() if isinstance(self.buffer, Tensor) else self.buffer.flags.c_contiguous
        if tuple(self.buffer.shape) != (size,) or self.buffer.dtype != dtype or not contiguous:
            raise ValueError(
                f"a table of {self.max_rows} rows and {self.max_partials} partials must be contiguous int32 [{size}], "
                f"not {self.buffer.dtype} {list(self.buffer.shape)}"
            )

    @staticmethod
    def size_for(max_rows: int, max_partials: int) -> int:
        """int32 values of a table."""
        return (2 + FIRSTS) * max_rows + max_partials

    @classmethod
    def empty(cls, max_rows: int, max_partials: int, device: torch.device | str | None = None) -> PartialTable:
        """A table in which no row has partials: a tensor on `device`, or numpy if that is None."""
        size = cls.size_for(max_rows, max_partials)
        buffer = np.zeros(size, np.int32) if device is None else torch.zeros(size, dtype=torch.int32, device=device)
        return cls(buffer, max_rows, max_partials)

    @classmethod
    def from_pairs(
        cls,
        rows: Sequence[int] | np.ndarray,
        partial_rows: Sequence[int] | np.ndarray,
        *,
        max_rows: int,
        max_partials: int,
    ) -> PartialTable:
        """A numpy table of pairs; arguments and errors are those of `write_pairs`."""
        table = cls.empty(max_rows, max_partials)
        table.write_pairs(rows, partial_rows)
        return table

    @property
    def nbytes(self) -> int:
        """Memory of the table."""
        return self.buffer.nbytes

    @property
    def begins(self) -> Array:
        """`[max_rows]`, a view."""
        return self.buffer[: self.max_rows]

    @property
    def counts(self) -> Array:
        """`[max_rows]`, a view."""
        return self.buffer[self.max_rows : 2 * self.max_rows]

    @property
    def firsts(self) -> Array:
        """`[max_rows, FIRSTS]`, a view."""
        return self.buffer[2 * self.max_rows : (2 + FIRSTS) * self.max_rows].reshape(self.max_rows, FIRSTS)

    @property
    def partials(self) -> Array:
        """`[max_partials]`, a view."""
        return self.buffer[(2 + FIRSTS) * self.max_rows :]

    def of_row(self, row: int) -> list[int]:
        """The partial rows of a row of the batch, read on the host."""
        begin, count = int(self.begins[row]), int(self.counts[row])
        return self.partials[begin : begin + count].tolist()

    def write_pairs(self, rows: Sequence[int] | np.ndarray, partial_rows: Sequence[int] | np.ndarray) -> None:
        """Replace the contents of a numpy table: row `rows[i]` of the batch has partial row `partial_rows[i]`, and
        those of one row keep their order. Entries behind the last list are left as they are.

        Args:
            rows, partial_rows: `[n]` integers each, the second below `max_partials`.
        Raises:
            ValueError: a row or a partial row is out of range, or there are more than `max_partials` pairs.
        """
        rows, partial_rows = np.asarray(rows, np.int64), np.asarray(partial_rows, np.int64)
        if rows.shape != partial_rows.shape or rows.ndim != 1:
            raise ValueError(f"{rows.shape} rows do not fit {partial_rows.shape} partial rows")
        if rows.size > self.max_partials:
            raise ValueError(f"{rows.size} partials in all rows, but there is room for {self.max_partials}")
        for name, values, end in (("rows", rows, self.max_rows), ("partial rows", partial_rows, self.max_partials)):
            if values.size and (values.min() < 0 or values.max() >= end):
                raise ValueError(f"{name} must be in [0, {end}); found {values.min()} to {values.max()}")
        counts = np.bincount(rows, minlength=self.max_rows)
        self.counts[:] = counts
        self.begins[:] = np.cumsum(counts) - counts
        order = np.argsort(rows, kind="stable")
        self.partials[: rows.size] = partial_rows[order]
        rows, in_list = rows[order], np.arange(rows.size) - self.begins[rows[order]]
        early = in_list < FIRSTS
        self.firsts[rows[early], in_list[early]] = self.partials[: rows.size][early]

    def to(self, device: torch.device | str) -> PartialTable:
        """A copy as a tensor on a device."""
        buffer = self.buffer if isinstance(self.buffer, Tensor) else torch.from_numpy(self.buffer)
        return PartialTable(buffer.to(device, copy=True), self.max_rows, self.max_partials)
