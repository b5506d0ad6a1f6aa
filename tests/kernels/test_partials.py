"""The table of partials: what is written is what is read, in host memory and as a tensor, and nothing out of range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_mla_ext.kernels.partials import FIRSTS, PartialTable


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 39)), max_size=40))
@example([(3, partial) for partial in range(FIRSTS + 1)])  # one row with more than stand at a fixed place
def test_a_row_has_the_partials_of_its_pairs_in_their_order(pairs) -> None:
    table = PartialTable(np.full(PartialTable.size_for(9, 40), -1, np.int32), 9, 40)  # what stood there is replaced
    table.write_pairs([row for row, _ in pairs], [partial for _, partial in pairs])
    on_device = table.to("cpu")
    for row in range(9):
        expected = [partial for of, partial in pairs if of == row]
        assert table.firsts[row].tolist()[: len(expected)] == expected[:FIRSTS]
        assert table.of_row(row) == on_device.of_row(row) == expected and table.counts[row] == len(expected)
    assert table.counts.sum() == len(pairs)
    assert not isinstance(on_device.buffer, np.ndarray) and on_device.nbytes == table.nbytes == 4 * (
        (2 + FIRSTS) * 9 + 40
    )


def test_an_empty_table_has_no_partials() -> None:
    for table in (PartialTable.from_pairs([], [], max_rows=6, max_partials=8), PartialTable.empty(6, 8, "cpu")):
        assert len(table.begins) == len(table.counts) == 6 and len(table.partials) == 8
        assert not table.counts.any() and table.of_row(5) == []


def test_views_write_to_the_buffer() -> None:
    """A device schedule writes lists in any order, by views of the one array."""
    table = PartialTable.empty(3, 5, "cpu")
    table.begins[:], table.counts[:] = torch.tensor([4, 0, 1]), torch.tensor([1, 0, 3])
    table.partials[:] = torch.arange(10, 15)
    table.firsts[:] = torch.tensor([14, 0, 11])[:, None]
    assert table.buffer.tolist() == [4, 0, 1, 1, 0, 3, *[14] * FIRSTS, *[0] * FIRSTS, *[11] * FIRSTS, *range(10, 15)]
    assert [table.of_row(row) for row in range(3)] == [[14], [], [11, 12, 13]]


def test_what_is_out_of_range_is_refused() -> None:
    for rows, partial_rows, message in (
        ([6], [0], r"^rows must be in \[0, 6\)"),
        ([-1], [0], "^rows must be in"),
        ([0], [8], r"^partial rows must be in \[0, 8\)"),
        ([0], [-1], "^partial rows must be in"),
        ([1] * 9, [0] * 9, "9 partials in all rows, but there is room for 8"),
        ([1, 2], [0], "do not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            PartialTable.from_pairs(rows, partial_rows, max_rows=6, max_partials=8)


def test_a_buffer_of_another_size_or_dtype_is_refused() -> None:
    size = PartialTable.size_for(6, 8)
    for buffer in (
        np.zeros(size + 1, np.int32),
        np.zeros(size, np.int64),
        np.zeros((size, 2), np.int32)[:, 0],
        torch.zeros(size),
        torch.zeros(2 * size, dtype=torch.int32)[::2],
    ):
        with pytest.raises(ValueError, match="contiguous int32"):
            PartialTable(buffer, 6, 8)
