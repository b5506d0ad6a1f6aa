"""Whose the rows of a batch are: uniform numbers of rows and any others say the same of the same requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

COUNTS = st.lists(st.integers(0, 5), max_size=12)


def owners(counts: list[int]) -> list[int]:
    """The definition: of each row its request."""
    return [request for request, count in enumerate(counts) for _ in range(count)]


def segment(*rows: int) -> Segment:
    return Segment(rows, 64, 192, Mode.NAIVE, (3,))


@given(COUNTS)
def test_the_map_both_ways(counts: list[int]) -> None:
    rows, owner = Rows.of(counts), owners(counts)
    assert (rows.requests, rows.total) == (len(counts), len(owner))
    assert [rows.request_of(row) for row in range(rows.total)] == owner
    for request in range(len(counts)):
        assert list(rows.of_request(request)) == [row for row, of in enumerate(owner) if of == request]
    assert list(rows.repeat([10 * request for request in range(len(counts))])) == [10 * of for of in owner]


@given(COUNTS, st.sets(st.integers(0, 11)))
def test_a_segment_has_all_rows_of_its_requests(counts: list[int], members: set[int]) -> None:
    members = {request for request in members if request < len(counts)}
    expected = tuple(row for row, of in enumerate(owners(counts)) if of in members)
    found = Rows.of(counts).by_row([segment(*sorted(members))] if members else [])
    assert [each.rows for each in found] == ([expected] if expected else [])
    assert all((each.start, each.end, each.mode, each.chunks) == (64, 192, Mode.NAIVE, (3,)) for each in found)


def test_one_row_each_copies_nothing() -> None:
    segments, values = [segment(0, 2)], (7, 8, 9)
    rows = Rows.of([1, 1, 1])
    assert rows == Rows(3) and rows.by_row(segments) is segments and rows.repeat(values) is values
    assert rows.units(1) is rows and rows.padded(3) is rows


def test_values_of_the_first_requests_alone() -> None:
    assert Rows.of([2, 1, 3]).repeat([5, 6]) == [5, 5, 6]


@given(COUNTS, st.integers(0, 40), st.integers(0, 40))
def test_a_window_has_its_rows(counts: list[int], start: int, length: int) -> None:
    inside = owners(counts)[start : start + length]
    window = Rows.of(counts).window(start, start + length)
    assert window.requests == len(counts) and window.total == len(inside)
    assert [window.request_of(row) for row in range(window.total)] == inside


def test_units_are_rows_that_are_taken_together() -> None:
    assert Rows(5, 4).units(4) == Rows(5) and Rows(5, 8).units(4) == Rows(5, 2)
    assert Rows.of([4, 8, 0]).units(4) == Rows.of([1, 2, 0])
    for rows in (Rows(5, 3), Rows.of([4, 5])):
        with pytest.raises(ValueError, match="do not have 4"):
            rows.units(4)


def test_padding_adds_requests() -> None:
    assert Rows(5, 3).padded(24, 3) == Rows(8, 3) and Rows(0, 3).padded(6, 3) == Rows(2, 3)
    assert Rows(1, 9).padded(11) == Rows.of([9, 1, 1]), "a request whose new tokens are mixed in, and rows of nobody"
    assert Rows.of([2, 5]).padded(9) == Rows.of([2, 5, 1, 1])
    assert Rows.of([0, 0]).padded(2) == Rows.of([0, 0, 1, 1])
    for rows, total, each in ((Rows(5, 3), 16, 3), (Rows(5, 3), 12, 3), (Rows.of([2, 5]), 6, 1)):
        with pytest.raises(ValueError, match="cannot become"):
            rows.padded(total, each)
