"""The work list of the absorb kernels: what the host writes for segments, and the device for tails (in Triton's
interpreter).
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_mla_ext.kernels.absorb.items import (
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_FIRST_ROW,
    ITEM_LAST,
    ITEM_PAGE,
    ITEM_STRIP,
    PROGRAM_RANGES,
)
from sglang_mla_ext.kernels.absorb.schedule import (
    BLOCK_KEYS,
    ITEM_BLOCKS,
    AbsorbCapacity,
    build_segment_work,
    empty_tail_table,
    empty_work,
)
from sglang_mla_ext.kernels.absorb.stacking import TILE_ROWS
from sglang_mla_ext.kernels.absorb.tail_schedule import MIN_BLOCKS, schedule_tails
from sglang_mla_ext.kernels.partials import FIRSTS, PartialTable
from sglang_mla_ext.segment import Mode, Segment

KEY_RANGE = slice(int(ITEM_BEGIN), int(ITEM_END) + 1)
MASK = [int(ITEM_FIRST_ROW), int(ITEM_LAST)]
ODD_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 320, 599)


@dataclass(frozen=True)
class Case:
    heads: int  # of a query token
    segments: tuple[tuple[int, int], ...]  # rows and keys of each
    tails: tuple[int, ...]  # tokens, by row
    programs: int = 132
    spare_rows: int = 3  # that there is room for, beyond those of the step
    tile_rows: int = TILE_ROWS
    nested: bool = False  # each segment has rows of the one before
    queries: int = 1  # query tokens of a row
    knows_tails: bool = False  # whether the host knows how long tails are

    @property
    def rows(self) -> int:
        return len(self.tails)

    def __str__(self) -> str:
        return (
            f"h{self.heads}x{self.queries}-segments{len(self.segments)}-rows{self.rows}-programs{self.programs}"
            f"-tile{self.tile_rows}{'-known' * self.knows_tails}"
        )


def cases() -> Any:
    for heads in (8, 96, 128):
        yield Case(heads, ((7, 1000), (3, 65), (1, 1)), ODD_LENGTHS * 2)
    for heads, tile_rows in ((8, 32), (24, 8), (128, 16)):
        yield Case(heads, ((7, 1000), (3, 65), (1, 1)), ODD_LENGTHS * 2, tile_rows=tile_rows)
    yield Case(16, (), ODD_LENGTHS * 2, tile_rows=16)
    yield Case(16, (), (5001,))
    yield Case(16, (), (0, 0, 0))
    yield Case(16, ((200, 26472), *(((1, 300),) * 56)), tuple(range(256)))
    yield Case(16, ((16, 7069),) * 4, (512,) * 64)
    yield Case(16, ((64, 4759),), (100_000, *([1] * 63)))  # one long tail among short ones
    yield Case(32, ((2, 64),), (0, 3), programs=1)
    yield Case(16, ((20, 1000), (7, 65), (2, 300)), ODD_LENGTHS * 2, nested=True)
    for heads, queries in ((16, 4), (8, 3), (16, 5), (32, 7), (128, 8)):
        yield Case(heads, ((7, 1000), (3, 65), (1, 1)), ODD_LENGTHS * 2, queries=queries)
    yield Case(8, (), ODD_LENGTHS * 2, tile_rows=16, queries=2)
    yield Case(16, (), (5001, 3), queries=8)
    yield Case(16, ((32, 4759),), (77,) * 32, queries=8)
    for queries in (1, 4):
        yield Case(16, ((8, 14976),), tuple(range(25_000, 45_000, 2_500)), queries=queries, knows_tails=True)
    yield Case(16, ((24, 16000), (5, 640)), tuple(range(1_000, 9_700, 300)), knows_tails=True)


def items_of(work: Tensor, capacity: AbsorbCapacity) -> np.ndarray:
    n_items, fields = int(work[0]), int(ITEM_FIELDS)
    return work[capacity.first_item :][: n_items * fields].view(n_items, fields).numpy()


class Work:
    """The work list of a case, complete, and where the keys of its items are."""

    def __init__(self, case: Case) -> None:
        self.capacity = AbsorbCapacity(
            case.rows + case.spare_rows,
            case.heads * case.queries,
            case.programs,
            case.tile_rows,
            case.queries,
            segment_rows=sum(size for size, _ in case.segments) + 2 if case.nested else None,
            segment_partials=None if case.segments else 0,
        )
        rows = list(range(case.rows))
        random.Random(case.rows).shuffle(rows)
        self.width = max(1, -(-max(case.tails) // BLOCK_KEYS))  # pages of a row of the page table
        self.segments, self.first_pages, first_page = [], [], self.capacity.max_rows * self.width
        for size, length in case.segments:
            start = 0 if not self.segments or not case.nested else self.segments[-1].end // BLOCK_KEYS * BLOCK_KEYS
            self.segments.append(Segment(tuple(rows[:size]), start, start + length, Mode.GROUPED_ABSORB))
            self.first_pages.append(first_page)
            rows, first_page = rows[3 if case.nested else size :], first_page + -(-length // BLOCK_KEYS)
        self.pages = first_page
        tail_tokens = sum(case.tails) if case.knows_tails else 0
        self.segment_work = build_segment_work(self.segments, self.first_pages, self.capacity, tail_tokens)
        self.array = torch.from_numpy(empty_work(self.capacity))
        # What an earlier step left must not matter.
        self.array[self.capacity.first_item : self.capacity.tail_strips] = -1
        self.array[: len(self.segment_work.head)] = torch.from_numpy(self.segment_work.head)
        tiles = self.capacity.row_tiles
        with_tails = case.programs // tiles * tiles
        for ranges in (int(PROGRAM_RANGES), int(PROGRAM_RANGES) + case.programs):
            self.array[ranges : ranges + with_tails] = 1 << 30
        strips = torch.from_numpy(self.segment_work.strips)
        self.array[self.capacity.segment_strips :][: len(strips)] = strips
        table = empty_tail_table(self.capacity).to("cpu")
        table.begins.fill_(-1)
        table.counts.fill_(-1)
        page_table = torch.empty(self.capacity.max_rows, self.width, dtype=torch.int32)
        lens = torch.tensor(case.tails, dtype=torch.int32)
        schedule_tails(lens, self.array, table, self.capacity, page_table)
        self.tail_table = table

    @property
    def items(self) -> np.ndarray:
        return items_of(self.array, self.capacity)

    @property
    def tails_of_programs(self) -> list[np.ndarray]:
        """The items of each program's range."""
        begin, end = self.array[int(PROGRAM_RANGES) :][: 2 * self.capacity.programs].view(2, -1).tolist()
        return [self.items[first:last] for first, last in zip(begin, end, strict=True)]

    def blocks(self, items: np.ndarray) -> np.ndarray:
        return -(-(items[:, ITEM_END] - items[:, ITEM_BEGIN]) // BLOCK_KEYS)

    @property
    def loads(self) -> tuple[list[int], np.ndarray]:
        """Cost of each program's items in blocks, that of starting them included: of segments, and of all."""
        n_segments, programs = len(self.segment_work.items), self.capacity.programs
        cost = self.blocks(self.items) + ITEM_BLOCKS
        of_segments = [int(cost[program:n_segments:programs].sum()) for program in range(programs)]
        of_tails = [(self.blocks(own) + ITEM_BLOCKS).sum() for own in self.tails_of_programs]
        return of_segments, np.add(of_segments, of_tails)


@cache
def work_of(case: Case) -> Work:
    """For tests that only read it: the interpreter takes seconds for a list."""
    return Work(case)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_key_of_every_query_row_is_in_one_item(case: Case) -> None:
    work = work_of(case)
    capacity, array = work.capacity, work.array.numpy()
    assert len(work.items) <= capacity.max_items
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)  # (query row, first page): ranges
    for first, n_rows, begin, end, first_page, partial, *_ in work.items.tolist():
        assert capacity.tail_strips <= first < capacity.size and 0 < n_rows <= case.tile_rows
        assert begin % BLOCK_KEYS == 0 and begin < end
        for at in range(n_rows):
            strip, inside = divmod(at, capacity.strip_rows)
            found[array[first + strip] + inside, first_page].append((begin, end, partial + at))
    expected: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of a row: first pages and keys of its segments
    for segment, first_page in zip(work.segments, work.first_pages, strict=True):
        for row in segment.rows:
            expected[row].append((first_page, segment.end - segment.start))
    tails = {row: [(row * work.width, length)] for row, length in enumerate(case.tails) if length}
    for row, own in enumerate(map(work.tail_table.of_row, range(case.rows))):
        if row not in tails:
            assert not own
        if len(own) == 1:
            assert own == [capacity.max_segment_partials + row], "not in its place"
    partials = []
    for keys, table in ((expected, work.segment_work.table), (tails, work.tail_table)):
        for row, parts in keys.items():
            for head in range(capacity.heads):
                places = []
                for first_page, length in parts:
                    ranges = sorted(found.pop((row * capacity.heads + head, first_page)))
                    assert [begin for begin, _, _ in ranges] + [length] == [0] + [end for _, end, _ in ranges]
                    places += [at for _, _, at in ranges]
                own = table.of_row(row)
                assert places == [partial * capacity.heads + head for partial in own]
                assert table.firsts[row].tolist()[: len(own)] == own[:FIRSTS]
                partials += places
    assert not found, "items for rows that have no such keys"
    assert len(set(partials)) == len(partials)
    assert max(partials, default=-1) < capacity.max_partial_rows * capacity.heads
    alone = sorted(set(range(capacity.max_rows)) - set(expected))
    assert not work.segment_work.table.counts[alone].any()


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_programs_have_even_shares(case: Case) -> None:
    """Of the segments' items: to within one item. With tails: to within what it costs to cut them, and 1/16."""
    work = work_of(case)
    n_segments = len(work.segment_work.items)
    cost = work.blocks(work.items) + ITEM_BLOCKS
    of_segments, load = work.loads
    assert work.array[int(PROGRAM_RANGES) + 2 * case.programs :][: case.programs].tolist() == of_segments
    if n_segments:
        assert max(of_segments) - min(of_segments) <= cost[:n_segments].max() + -(-n_segments // case.programs)
    tails = work.tails_of_programs
    assert sorted(item for own in tails for item in own.tolist()) == sorted(work.items[n_segments:].tolist())
    share = load.sum() / (case.programs // work.capacity.row_tiles * work.capacity.row_tiles)
    most = max(share, max(of_segments)) + 2 * ITEM_BLOCKS + MIN_BLOCKS
    assert load.max() <= max(most * 17 / 16, MIN_BLOCKS + ITEM_BLOCKS)


@pytest.mark.parametrize(
    ("tails", "heads", "tile_rows", "most", "whole"),
    [
        ((8192,) * 128, 16, 16, 1.04, True),  # one piece each: two would only be merged again
        ((8192,) * 32, 128, 64, 1.04, False),
        ((8192,) * 133, 16, 16, 1.05, False),  # one more than programs
        ((262144, *((512,) * 100)), 16, 16, 1.15, False),
        (tuple(range(512, 65536, 1032)), 128, 64, 1.03, False),
        (tuple(range(100, 996, 7)), 128, 64, 1.06, True),  # snake order pairs long ones with short ones
    ],
    ids=lambda value: f"rows{len(value)}" if isinstance(value, tuple) else str(value),
)
def test_tails_end_together(tails: tuple[int, ...], heads: int, tile_rows: int, most: float, whole: bool) -> None:
    """The program that has the most, beside an even share; and whether tails are cut for that."""
    work = Work(Case(heads, (), tails, tile_rows=tile_rows))
    load = [work.blocks(own).sum() for own in work.tails_of_programs]
    assert max(load) <= most * sum(load) / 132
    assert (int(work.tail_table.counts[: len(tails)].max()) == 1) == whole


@pytest.mark.parametrize("case", [case for case in cases() if case.queries > 1], ids=str)
def test_what_only_the_last_query_tokens_see_is_known(case: Case) -> None:
    """Which of its request's query rows an item has; and that one item of a tile has all keys that any of them does not
    see. Segments have none."""
    work = work_of(case)
    capacity, array = work.capacity, work.array.numpy()
    n_segments, items = len(work.segment_work.items), work.items
    assert not items[:n_segments, MASK].any()
    of_tails = items[n_segments:]
    row, first = np.divmod(array[of_tails[:, ITEM_STRIP]], capacity.heads)
    assert (of_tails[:, ITEM_FIRST_ROW] == first).all() and (of_tails[:, ITEM_PAGE] == row * work.width).all()
    lengths = np.array(case.tails)[row]
    assert (of_tails[:, ITEM_LAST] == (of_tails[:, ITEM_END] == lengths)).all()
    last = of_tails[:, ITEM_LAST] == 1
    assert (of_tails[last, ITEM_BEGIN] <= np.maximum(lengths[last] - case.queries, 0)).all()
    tiles = -(-case.heads * case.queries // case.tile_rows)
    assert last.sum() == tiles * np.count_nonzero(case.tails)
    same_keys = of_tails[first == 0][:, KEY_RANGE].tolist() * tiles
    assert sorted(of_tails[:, KEY_RANGE].tolist()) == sorted(same_keys), "tiles of a request read the same keys"


def test_segments_are_cut_where_there_are_too_few_tiles() -> None:
    """128 rows of 16 heads are 32 tiles: four splits fill 132 programs, and 512 rows need none."""
    for rows, splits in ((128, 4), (512, 1)):
        segment = Segment(tuple(range(rows)), 0, 26472, Mode.GROUPED_ABSORB)
        work = build_segment_work([segment], [0], AbsorbCapacity(rows, 16, 132))
        assert set(work.table.counts.tolist()) == {splits}
        tiles = rows * 16 // TILE_ROWS
        same_keys = work.items[:tiles, KEY_RANGE] == work.items[0, KEY_RANGE]
        assert same_keys.all(), "tiles of the same keys stand side by side"


@pytest.mark.parametrize(
    ("rows", "prefix", "tail", "queries", "fewer"),
    [(8, 14_976, 35_000, 1, 7), (24, 16_000, 5_500, 1, 2), (8, 14_976, 35_000, 4, 2), (4, 4_096, 60_000, 1, 20)],
    ids=["long agents", "agents", "long agents, drafts", "four"],
)
def test_segments_are_cut_less_often_beside_long_tails(
    rows: int, prefix: int, tail: int, queries: int, fewer: int
) -> None:
    """Compare with segments that are cut for all programs: fewer pieces, and no program ends later."""
    tails = tuple(tail + 61 * row for row in range(rows))
    alone, beside = (
        Work(Case(16, ((rows, prefix),), tails, queries=queries, knows_tails=known)) for known in (False, True)
    )
    of_row = [int(work.segment_work.table.counts.max()) for work in (alone, beside)]
    assert of_row[1] * fewer <= of_row[0]
    ends = [work.loads[1].max() for work in (alone, beside)]
    assert ends[1] <= ends[0]


def test_short_tails_do_not_change_how_segments_are_cut() -> None:
    segment = Segment(tuple(range(128)), 0, 7040, Mode.GROUPED_ABSORB)
    works = [build_segment_work([segment], [0], AbsorbCapacity(128, 16, 132), tokens) for tokens in (0, 128 * 300)]
    assert np.array_equal(works[0].head, works[1].head)


def test_what_does_not_fit_is_refused() -> None:
    capacity = AbsorbCapacity(8, 16, 4)
    many = tuple(range(8))
    for segments, message in (
        ([((), 64)], "needs rows and keys"),
        ([((1,), 0)], "needs rows and keys"),
        ([((1, 8), 64)], "must be in"),
        ([((1, 2, 1), 64)], "once in a segment"),
        ([(many, 64), ((2,), 64)], "9 rows, but there is room for 8"),
    ):
        with pytest.raises(ValueError, match=message):
            build_segment_work(
                [Segment(rows, 64, 64 + length, Mode.GROUPED_ABSORB) for rows, length in segments], (0, 0), capacity
            )
    with pytest.raises(ValueError, match="8 rows need as many partial rows; there is room for 7"):
        tight = AbsorbCapacity(8, 16, 4, segment_partials=7)
        build_segment_work([Segment(many, 0, 64, Mode.GROUPED_ABSORB)], [0], tight)
    with pytest.raises(ValueError, match="at most 64 query tokens"):
        AbsorbCapacity(8, 16 * 65, 20, query_tokens=65)
    with pytest.raises(ValueError, match="2 programs"):
        AbsorbCapacity(8, 128, 1)
    with pytest.raises(ValueError, match="multiple of 8"):
        AbsorbCapacity(8, 20, 4).size  # noqa: B018
    work, table = torch.zeros(capacity.size, dtype=torch.int32), empty_tail_table(capacity).to("cpu")
    pages = torch.zeros(20, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match="9 rows"):
        schedule_tails(torch.zeros(9, dtype=torch.int32), work, table, capacity, pages)
    with pytest.raises(ValueError, match="lens must be int32"):
        schedule_tails(torch.zeros(8), work, table, capacity, pages)
    with pytest.raises(ValueError, match="another capacity"):
        schedule_tails(torch.zeros(8, dtype=torch.int32), work, PartialTable.empty(8, 3, "cpu"), capacity, pages)
