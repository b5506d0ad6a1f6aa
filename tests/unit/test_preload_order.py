"""The busier unit never waits in the order that preload_order gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preload_order import Order, preload_order

CYCLES = 6


def idle_time(order: Order, matrix: list[int], vector: list[int]) -> tuple[int, int]:
    """How long the units wait in some cycles after the preloaded stages, running every stage as early as possible."""
    n = len(matrix)
    matrix_end, vector_end = {(-1, i): 0 for i in range(n)}, {(-1, i): 0 for i in range(n)}
    matrix_free = vector_free = matrix_idle = vector_idle = 0
    for cycle in range(CYCLES):
        for i in order.matrix:  # C1 starts a pass, and waits for nothing
            start = max(matrix_free, vector_end[cycle - 1, i - 1] if i else 0)
            matrix_idle += start - matrix_free
            matrix_end[cycle, i] = matrix_free = start + matrix[i]
        for i in order.vector:
            start = max(vector_free, matrix_end[cycle - (i == order.vector[0]), i])
            vector_idle += start - vector_free
            vector_end[cycle, i] = vector_free = start + vector[i]
    return matrix_idle, vector_idle


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=9))
def test_the_busier_unit_never_waits(durations: list[tuple[int, int]]) -> None:
    matrix, vector = [c for c, _ in durations], [v for _, v in durations]
    order = preload_order(matrix, vector)
    assert sorted(order.matrix) == sorted(order.vector) == list(range(len(durations)))
    assert order.preload_count == len(durations)
    matrix_idle, vector_idle = idle_time(order, matrix, vector)
    if sum(matrix) >= sum(vector):
        assert matrix_idle == 0
    if sum(matrix) <= sum(vector):
        assert vector_idle == 0


def test_other_orders_would_wait() -> None:
    matrix, vector = [1, 10], [1, 10]
    assert preload_order(matrix, vector) == Order(matrix=(0, 1), vector=(1, 0))
    assert idle_time(Order(matrix=(1, 0), vector=(0, 1)), matrix, vector) == (0, 9)


def test_as_many_vector_stages_as_matrix_stages() -> None:
    with pytest.raises(ValueError, match="as many"):
        preload_order([1, 2], [1])
