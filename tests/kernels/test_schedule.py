"""The work list: every row, head and key exactly once, within its capacity, balanced, the same every time."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mla_ext.kernels.naive.items import ITEM_BEGIN, ITEM_END, ITEM_HEAD
from sglang_mla_ext.kernels.naive.schedule import WorkList, WorkListCapacity, build_work_list
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.segment import Mode, Segment

CHUNKS = 64


def groups_of(*sizes_and_lengths: tuple[int, int]) -> list[Segment]:
    """Segments of (rows, tokens), rows numbered in order."""
    groups, row = [], 0
    for size, length in sizes_and_lengths:
        chunks = tuple(range(-(-length // CHUNK_TOKENS)))
        groups.append(Segment(tuple(range(row, row + size)), 0, length, Mode.NAIVE, chunks))
        row += size
    return groups


def build(
    groups, heads=4, block_rows=64, block_keys=64, max_rows=256, target_items=264, chunks=CHUNKS, segments_per_row=1
) -> WorkList:
    sizes = dict(heads=heads, block_rows=block_rows, target_items=target_items, segments_per_row=segments_per_row)
    capacity = WorkListCapacity.compute(max_rows=max_rows, chunks=chunks, **sizes)
    return build_work_list(
        groups, heads=heads, block_rows=block_rows, block_keys=block_keys, capacity=capacity, target_items=target_items
    )


def loads(work: WorkList, programs: int) -> np.ndarray:
    """Keys that each program of the grid goes through."""
    keys = work.items[:, ITEM_END.value] - work.items[:, ITEM_BEGIN.value]
    return np.bincount(np.arange(work.n_items) % programs, keys, minlength=programs)


@st.composite
def problems(draw):
    sizes = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    lengths = [draw(st.integers(1, 3000)) for _ in sizes]
    max_rows = sum(sizes) + draw(st.integers(0, 5))
    rows = draw(st.permutations(range(max_rows)))
    nested = draw(st.booleans())  # a row may be in all groups, or in one
    groups, at = [], 0
    for size, length in zip(sizes, lengths, strict=True):
        needed = -(-length // CHUNK_TOKENS)
        chunks = draw(st.lists(st.integers(0, CHUNKS - 1), min_size=needed, max_size=needed + 2))
        groups.append(Segment(tuple(rows[at : at + size]), 0, length, Mode.NAIVE, tuple(chunks)))
        at += 0 if nested else size
    shape = dict(
        heads=draw(st.sampled_from([1, 3, 16])),
        block_rows=draw(st.sampled_from([16, 64])),
        block_keys=draw(st.sampled_from([32, 64, 256])),
        target_items=draw(st.sampled_from([1, 7, 40, 264])),
        max_rows=max_rows,
        segments_per_row=len(groups) if nested else 1,
    )
    return groups, shape


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_row_head_and_key_is_covered_once(problem) -> None:
    groups, shape = problem
    work = build(groups, **shape)
    heads, block_rows, block_keys = shape["heads"], shape["block_rows"], shape["block_keys"]
    assert work.buffer[0] == work.n_items <= work.capacity.max_items
    assert work.used <= work.capacity.size and work.buffer.dtype == np.int32

    keys_of = {(i, row, head): [] for i, group in enumerate(groups) for row in group.rows for head in range(heads)}
    first_rows = np.cumsum([0] + [len(group.rows) for group in groups])
    partial_rows = Counter()
    for head, first, n_rows, begin, end, table, partial, _ in work.items.tolist():
        rows = work.group_rows[first : first + n_rows].tolist()
        index = int(np.searchsorted(first_rows, first, side="right")) - 1
        group = groups[index]
        assert 0 < n_rows <= block_rows and begin % block_keys == 0 and begin < end
        assert end % block_keys == 0 or end == group.tokens
        n_chunks = -(-group.tokens // CHUNK_TOKENS)
        assert tuple(work.buffer[table : table + n_chunks]) == group.chunks[:n_chunks]
        for i, row in enumerate(rows):
            assert row == group.rows[first - first_rows[index] + i]
            keys_of[index, row, head].append((begin, end, partial + i))
            partial_rows[partial + i, head] += 1
    partials_of = defaultdict(list)  # of row and head
    for (index, row, head), ranges in keys_of.items():
        ranges.sort()
        assert ranges[0][0] == 0 and ranges[-1][1] == groups[index].tokens, (row, head)
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        partials_of[row, head] += [partial_row for _, _, partial_row in ranges]
    assert all(partials == work.table.of_row(row) for (row, _), partials in partials_of.items())
    assert set(partial_rows.values()) == {1}, "two items write the same partial row"
    assert max(row for row, _ in partial_rows) < work.capacity.max_partial_rows
    assert sum(g.tokens > 0 for g in groups) == len(groups)
    assert all(work.table.counts[row] == 0 for row in range(shape["max_rows"]) if (row, 0) not in partials_of)


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_list_depends_on_nothing_but_its_arguments(problem) -> None:
    groups, shape = problem
    first = build(groups, **shape)
    dirty = np.full(first.capacity.size, -1, np.int32)
    shape = {k: v for k, v in shape.items() if k not in ("max_rows", "segments_per_row")}
    second = build_work_list(groups, capacity=first.capacity, out=dirty, **shape)
    assert second.used == first.used
    assert np.array_equal(first.buffer[: first.used], second.buffer[: first.used])


@pytest.mark.parametrize(
    ("heads", "groups", "splits"),
    [
        (128, [(64, 26472)], [2]),  # 128 row tiles for 264 programs
        (128, [(128, 26472)], [1]),  # 256
        (128, [(192, 26472)], [2]),  # 384: two splits make 2.9 rounds, none would make 1.5
        (128, [(256, 26472)], [1]),  # 512: nearly two full rounds
        (16, [(64, 26472)], [16]),
        (16, [(128, 7069)], [8]),
        (128, [(32, 4759)] * 8, [1] * 8),
    ],
    ids=str,
)
def test_splits_fill_the_grid(heads: int, groups, splits) -> None:
    groups = groups_of(*groups)
    work = build(groups, heads=heads, chunks=104)
    assert [work.table.counts[g.rows[0]] for g in groups] == splits
    load = loads(work, 264)
    assert load.mean() / load.max() > 0.94


def test_a_long_prefix_gets_more_splits() -> None:
    groups = groups_of((20, 26472), (30, 7069), (100, 4759), *[(2, 300)] * 5)
    for heads, least in ((128, 0.95), (16, 0.85)):
        work = build(groups, heads=heads, chunks=104)
        splits = [work.table.counts[g.rows[0]] for g in groups]
        assert splits[0] > splits[1] > splits[2] >= splits[3] == 1
        load = loads(work, 264)
        assert load.mean() / load.max() > least


def test_row_tiles_of_the_same_keys_are_neighbours() -> None:
    work = build(groups_of((200, 5000)), heads=16)
    keys = work.items[:, [ITEM_HEAD.value, ITEM_BEGIN.value]].reshape(-1, 4, 2)  # head and kv_begin of every four items
    assert (keys == keys[:, :1]).all()


def test_empty_list() -> None:
    work = build([])
    assert work.n_items == 0 and not work.buffer[: work.used].any()


def test_capacity_is_respected_and_overflow_is_an_error() -> None:
    work = build(groups_of((64, 26472)), heads=16, chunks=104, max_rows=64)
    assert work.table.counts.sum() <= work.capacity.max_partial_rows == 64 + 264 * 64 // 16
    groups, shape = groups_of((8, 3000)), dict(heads=4, block_rows=16, block_keys=64, target_items=16)
    tight = dict(max_rows=8, max_partial_rows=8, max_items=4, max_chunks=12)
    assert build_work_list(groups, capacity=WorkListCapacity(**tight), **shape).table.counts[0] == 1
    for change, message in (
        (dict(max_rows=7), "rows must be in"),
        (dict(max_partial_rows=7), "partial rows"),
        (dict(max_items=3), "work items"),
        (dict(max_chunks=11), "chunks"),
    ):
        with pytest.raises(ValueError, match=message):
            build_work_list(groups, capacity=WorkListCapacity(**(tight | change)), **shape)
    with pytest.raises(ValueError, match="block_keys"):
        build(groups, block_keys=48)


def test_a_row_may_be_in_several_segments_but_once_in_each() -> None:
    nested = [
        Segment((4, 1, 7), 0, 600, Mode.NAIVE, (0, 1, 2)),
        Segment((7, 4), 0, 70, Mode.NAIVE, (3,)),
        Segment((7,), 0, 1, Mode.NAIVE, (5,)),
    ]
    work = build(nested, max_rows=8, segments_per_row=3, target_items=4)
    assert [int(count) for count in work.table.counts[[1, 4, 7, 0]]] == [1, 2, 3, 0]
    assert len({partial for row in (1, 4, 7) for partial in work.table.of_row(row)}) == 6
    assert work.group_rows[:6].tolist() == [4, 1, 7, 7, 4, 7]
    for bad, message in (
        ([nested[0], Segment((3, 2, 3), 0, 70, Mode.NAIVE, (3,))], "twice in one segment"),
        (nested * 2, "12 rows need as many partial rows"),
    ):
        with pytest.raises(ValueError, match=message):
            build(bad, max_rows=8, target_items=1, heads=64)


def test_thousands_of_items_are_built_in_milliseconds() -> None:
    """Well under 1 ms here; the bound leaves room for a busy machine."""
    groups = groups_of(*[(32, 4759)] * 8)
    fastest = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        work = build(groups, heads=128)
        fastest = min(fastest, time.perf_counter() - start)
    assert work.n_items == 1024 and fastest < 5e-3
