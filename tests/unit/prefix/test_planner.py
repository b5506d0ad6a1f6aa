"""The planner: every token of every row covered once, by segments of all that hold it, and as much saved as can be."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.choice import Chooser
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Expanded, Gain, Ways, all_covers, whole
from sglang_mla_ext.prefix.planner.gains import Gains, every_range, no_launch
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.plan import Plan, plan_step
from sglang_mla_ext.prefix.planner.room import Capacity, limit_parts, rows_of
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

V3 = ModelDims.of("deepseek-v3")
PAGE, CHUNK = 64, 256
ROOM = Capacity(1 << 20, 1 << 20)
LOSS = 0.02
"""Of what the best plan saves, the most that one may not."""


def test_planner_and_cost_model_need_neither_torch_nor_sglang() -> None:
    code = """
import sys
import sglang_mla_ext.prefix.planner.cost_model, sglang_mla_ext.prefix.sharing, sglang_mla_ext.prefix.radix
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "triton", "sglang"}))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def real(gpu: str, heads: int, **flags: bool) -> Gains:
    flags = {"naive": True, "grouped": True, **flags}
    return Gains.of(HybridMLAOptions(), CostModel(V3, heads, GpuRates.from_json(gpu)), **flags)


# The cost model's groups pay from 2 to 4 rows on (cpu), from 7 to 42 (h20, 16 heads) and from 23 to 188 (128 heads).
GAINS = {
    "naive": Gains(every_range, None),
    "grouped": Gains(None, every_range),
    "cpu": real("cpu", 16, grouped=False),
    "cpu, both": real("cpu", 16),
    "h20, 16 heads": real("h20", 16),
    "h20, 128 heads": real("h20", 128, grouped=False),
    "h200, 16 heads": real("h200", 16),
    "h200, 128 heads": real("h200", 128, grouped=False),
}
NAMES = st.sampled_from(sorted(GAINS))


def plan_parts(branches: Branches, ways: Ways, expanded: Expanded) -> list[Part]:
    """What saves the most if launches cost nothing, and there is room for everything."""
    parts, dropped = plan_step(branches, ways, expanded, no_launch, ROOM)
    assert not dropped
    return parts


def limited(batch: Batch, ways: Ways, parts: Sequence[Part], capacity: Capacity) -> list[Part]:
    """`limit_parts`, of parts of a batch."""
    covers = all_covers(batch.branches, ways, batch.expanded_of)
    return limit_parts(parts, capacity, Chooser(batch.branches, covers, ways, ways.modes))


@dataclass(frozen=True)
class Batch:
    """A forest of prefix-tree nodes, and for each row of a batch the node that its path ends in."""

    parents: tuple[int, ...]
    ends: tuple[int, ...]
    rows: tuple[int, ...]
    min_prefix_len: int = 1
    expanded: tuple[int, ...] | None = None  # up to which token each node is, where not all of it
    row_counts: tuple[int, ...] = ()  # of the rows, which are requests then, where not one each

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    @cached_property
    def branches(self) -> Branches:
        counts = Rows.of(self.row_counts) if self.row_counts else None
        return Branches(SharedTree(range(len(self.ends)), self.parents, self.ends, self.rows), counts)

    def ways(self, gains: Gains) -> Ways:
        return Ways(gains.naive, gains.grouped, CHUNK, PAGE, self.min_prefix_len)

    def expanded_of(self, branch: int) -> int:
        node = self.branches[branch].nodes[-1]
        return self.ends[node] if self.expanded is None else min(self.expanded[node], self.ends[node])

    def parts(self, gains: Gains) -> list[Part]:
        return plan_parts(self.branches, self.ways(gains), self.expanded_of)

    def step(self, gains: Gains, capacity: Capacity = ROOM) -> Plan:
        """With launches paid."""
        parts, dropped = plan_step(self.branches, self.ways(gains), self.expanded_of, gains.launch, capacity)
        assert capacity is not ROOM or not dropped
        assert len(parts) <= capacity.segments
        assert sum(self.branches[part.branch].rows for part in parts) <= capacity.rows
        return self.plan_of(parts)

    def plan(self, gains: Gains) -> Plan:
        return self.plan_of(self.parts(gains))

    def plan_of(self, parts: Sequence[Part]) -> Plan:
        return Plan(len(self.rows), tuple(map(self.branches.segment, parts)))

    def rows_below(self, node: int) -> tuple[int, ...]:
        return tuple(row for row, end in enumerate(self.rows) if node in self.path(end))


def saved(segments: Sequence[Segment], gains: Gains) -> float:
    by_mode = {Mode.NAIVE: gains.naive, Mode.GROUPED_ABSORB: gains.grouped}
    return sum(by_mode[each.mode](len(each.rows), each.start, each.end) for each in segments)


@st.composite
def batches(draw: st.DrawFn, most_nodes: int = 9) -> Batch:
    parents: list[int] = []
    ends: list[int] = []
    for node in range(draw(st.integers(1, most_nodes))):
        parent = draw(st.just(-1) | st.integers(0, node - 1)) if node else -1
        pages = draw(st.sampled_from([1, 1, 2, 4, 30]) | st.integers(1, 400))
        parents.append(parent)
        ends.append((0 if parent < 0 else ends[parent]) + PAGE * pages)
    most = draw(st.sampled_from([1, 3, 50]))
    rows = [-1] * draw(st.integers(0, 2))
    for node in range(len(ends)):
        rows += [node] * draw(st.integers(0, most))
    random.Random(draw(st.integers(0, 1 << 30))).shuffle(rows)
    expanded = None
    if draw(st.booleans()):
        starts = [0 if parent < 0 else ends[parent] for parent in parents]
        expanded = tuple(
            draw(st.sampled_from([0, (start + end) // 2 // CHUNK * CHUNK, end // CHUNK * CHUNK, end]))
            for start, end in zip(starts, ends, strict=True)
        )
    return Batch(tuple(parents), tuple(ends), tuple(rows), draw(st.sampled_from([1, PAGE, 1000])), expanded)


ENDS_ABOVE = Batch(
    parents=(-1, -1, 1),
    ends=(64, 1920, 1984),
    rows=(*[2] * 49, *[1] * 16),
    min_prefix_len=1,
    expanded=(0, 768, 0),
    row_counts=(),
)
"""A segment of the rows below a node that ends in the node above, of which no more is expanded."""


@settings(max_examples=200, deadline=None)
@example(ENDS_ABOVE, "h20, 128 heads")
@given(batches(), NAMES)
def test_every_token_is_covered_once_and_segments_are_sound(batch: Batch, name: str) -> None:
    gains = GAINS[name]
    plan = batch.plan(gains)
    ranges: list[list[tuple[int, int]]] = [[] for _ in batch.rows]
    for segment, part in zip(plan.segments, batch.parts(gains), strict=True):
        node = batch.branches[part.branch].nodes[-1]
        assert len(segment.rows) >= 2 and segment.start < segment.end <= batch.ends[node]
        assert segment.rows == batch.rows_below(node), "all rows that hold the tokens, and no others"
        if segment.mode is Mode.NAIVE:
            assert gains.naive is not None and segment.start % CHUNK == 0
            expanded = batch.expanded
            of_path = batch.ends[node] if expanded is None else max(expanded[each] for each in batch.path(node))
            assert segment.end <= of_path, "it may end in a node above, as far as that is expanded"
        else:
            assert gains.grouped is not None and segment.start % PAGE == segment.end % PAGE == 0
        for row in segment.rows:
            ranges[row].append((segment.start, segment.end))
    for row, node in enumerate(batch.rows):
        total = row + (batch.ends[node] if node >= 0 else 0)
        ranges[row].append((plan.prefix_lens[row], total))
        assert ranges[row][0][0] == 0 and plan.prefix_lens[row] <= total
        assert all(before[1] == after[0] for before, after in pairwise(ranges[row]))
    for each in plan.segments:
        followed = any(other.start == each.end and set(other.rows) <= set(each.rows) for other in plan.segments)
        assert followed or each.end >= batch.min_prefix_len


class Possible(NamedTuple):
    """A plan that is allowed: what it saves without its launches and with them, its segments, and rows of all these."""

    gain: float
    net: float
    segments: int
    rows: int


def covers_of(batch: Batch, gains: Gains, branch: int, first: int, end: int) -> list[tuple[int, float, int, int]]:
    """Of tokens from the beginning of one branch to the end of another: where each way to attend to them ends, what it
    saves, its ways as bits, and how many segments it has."""
    branches, path = batch.branches, [branch]
    while path[0] != first:
        path.insert(0, branches[path[0]].parent)
    reach = begin = branches[first].start // CHUNK * CHUNK
    for index in path:
        last = end if index == branch else branches[index].end // CHUNK * CHUNK
        reach = max(reach, min(batch.expanded_of(index), last))
        if reach < last:
            break
    found, count, paged = [], branches[branch].rows, end // PAGE * PAGE
    if gains.naive and reach > begin:
        found.append((reach, gains.naive(count, begin, reach), 1, 1))
        if gains.grouped and reach % PAGE == 0 and reach < paged:
            found.append((paged, found[0][1] + gains.grouped(count, reach, paged), 3, 2))
    if gains.grouped and paged > begin:
        found.append((paged, gains.grouped(count, begin, paged), 2, 1))
    return found


def all_plans(batch: Batch, gains: Gains) -> Iterator[Possible]:
    """Every allowed plan. Each branch is left out, or the last of its path, or followed by others, or joined to those
    below it; one of these is used then."""
    branches, shortest = batch.branches, batch.min_prefix_len
    Place = tuple[int, int]  # of what may follow a branch: where it begins, -1 for the end of that, and ways launched

    def choose(
        index: int, at: tuple[Place | None, ...], unfollowed: frozenset[int], rows: tuple[int, int], so_far: Possible
    ) -> Iterator[Possible]:
        if index == len(branches):
            if not unfollowed:
                launched = zip((Mode.NAIVE, Mode.GROUPED_ABSORB), rows, strict=True)
                cost = sum(gains.launch(mode, count) for mode, count in launched if count)
                yield so_far._replace(net=so_far.gain - cost)
            return
        yield from choose(index + 1, (*at, None), unfollowed, rows, so_far)
        branch = branches[index]
        place = at[branch.parent] if branch.parent >= 0 else (-1, 0)
        if place is None:
            return
        first, launched = place[0] if place[0] >= 0 else index, place[1]
        followed = unfollowed - {branch.parent}
        inner = branch.end // CHUNK * CHUNK
        options = [(False, each) for each in covers_of(batch, gains, index, first, branch.end) if each[0] >= shortest]
        options += [(True, each) for each in covers_of(batch, gains, index, first, inner) if each[0] == inner]
        for goes_on, (_, gain, modes, segments) in options:
            new = modes & ~launched
            more = (rows[0] + branch.rows * (new & 1), rows[1] + branch.rows * (new >> 1))
            taken = Possible(so_far.gain + gain, 0.0, so_far.segments + segments, so_far.rows + segments * branch.rows)
            below = (-1, launched | modes) if goes_on else None
            yield from choose(index + 1, (*at, below), followed | {index} if goes_on else followed, more, taken)
        yield from choose(index + 1, (*at, (first, launched)), followed | {index}, rows, so_far)

    yield from choose(0, (), frozenset(), (0, 0), Possible(0.0, 0.0, 0, 0))


@settings(max_examples=120, deadline=None)
@example(Batch((-1, 0), (256, 2176), (0,) * 10 + (1,) * 22, min_prefix_len=1000), "h20, 128 heads")  # 6 us less 6
@given(batches(most_nodes=5), NAMES)
def test_no_other_plan_saves_more(batch: Batch, name: str) -> None:
    gains = GAINS[name]
    best = max(plan.gain for plan in all_plans(batch, gains))
    assert saved(batch.plan(gains).segments, gains) == pytest.approx(best, rel=1e-9, abs=1e-12)


def net(segments: Sequence[Segment], gains: Gains) -> float:
    """What segments save, with what the step launches for them paid."""
    rows: dict[Mode, set[int]] = {}
    for segment in segments:
        rows.setdefault(segment.mode, set()).update(segment.rows)
    return saved(segments, gains) - sum(gains.launch(mode, len(of_mode)) for mode, of_mode in rows.items())


@settings(max_examples=80, deadline=None)
@given(batches(), NAMES)
def test_launches_are_paid_once_a_step_and_only_where_they_pay(batch: Batch, name: str) -> None:
    """A step is no worse than with all that gains without launches, in both ways or in one."""
    gains = GAINS[name]
    ways = (gains, gains._replace(naive=None), gains._replace(grouped=None))
    others = max(0.0, *(net(batch.plan(way).segments, gains) for way in ways))
    assert net(batch.step(gains).segments, gains) >= others * (1 - 1e-9) - 1e-15


@settings(max_examples=120, deadline=None, derandomize=True)
@given(batches(most_nodes=5), NAMES)
def test_no_other_plan_saves_much_more_with_its_launches(batch: Batch, name: str) -> None:
    """Not the best of all: which rows share a launch is a choice of sets. So it is measured, on the same trees always.
    Of 12,000 others none lost as much, but for four with rates of an H20, whose launches cost less with more rows."""
    gains = GAINS[name]
    best = max(plan.net for plan in all_plans(batch, gains))
    assert best * (1 - LOSS) - 1e-15 <= net(batch.step(gains).segments, gains) <= best * (1 + 1e-9) + 1e-15


def test_what_pays_less_than_it_adds_to_a_launch_is_left_out() -> None:
    """200 requests on 512 tokens gain 17 us a layer where the launch is there, which costs 63 more with them."""
    gains = real("h200", 16)
    batch = Batch((-1, -1), (65536, 512), (0,) * 4 + (1,) * 200)
    for expanded in (None, (0, 0)):
        batch = replace(batch, expanded=expanded)
        segments = batch.step(gains).segments
        assert [(len(segment.rows), segment.end) for segment in segments] == [(4, 65536)]
        assert net(segments, gains) == pytest.approx(47.5e-6, rel=1e-2)
        assert len(batch.plan(gains).segments) == 2 and net(batch.plan(gains).segments, gains) < 18e-6


def test_a_launch_that_is_negative_makes_one_way_save_more_than_two() -> None:
    """With one way of two the ranges gain less, and yet the step may save more."""
    gains = GAINS["cpu, both"]
    batch = Batch((-1, -1), (64, 64), (0,) * 2 + (1,) * 100, expanded=(64, 0))
    assert gains.launch(Mode.GROUPED_ABSORB, 102) < 0
    both = batch.plan(gains).segments
    assert {segment.mode for segment in both} == {Mode.NAIVE, Mode.GROUPED_ABSORB}
    assert net(both, gains) == pytest.approx(0.243e-3, rel=1e-2)
    segments = batch.step(gains).segments
    assert {segment.mode for segment in segments} == {Mode.GROUPED_ABSORB} and len(segments) == 2
    assert net(segments, gains) == pytest.approx(0.449e-3, rel=1e-2)


@pytest.mark.parametrize("name", [name for name in sorted(GAINS) if "heads" in name or "cpu" in name])
def test_a_group_alone_is_attended_to_as_the_cost_model_says(name: str) -> None:
    """Whose overheads were fitted to groups alone."""
    gains, heads = GAINS[name], 128 if "128" in name else 16
    cost = CostModel(V3, heads, GpuRates.from_json(name.split(",")[0]))
    allowed = [Mode.ABSORB, Mode.NAIVE, *([Mode.GROUPED_ABSORB] if gains.grouped else [])]
    for rows, tokens in itertools.product((2, 4, 8, 16, 24, 32, 40, 64, 128, 300), (1024, 4736, 7040, 26432)):
        batch = Batch((-1,), (tokens,), (0,) * rows)
        segments = batch.step(gains).segments
        chosen = segments[0].mode if segments else Mode.ABSORB
        best = break_even.best_mode(cost, rows, tokens, allowed)
        assert cost.seconds(chosen, rows, tokens) == pytest.approx(cost.seconds(best, rows, tokens)), (rows, tokens)


def test_a_second_group_does_not_pay_for_the_launch_again() -> None:
    """Beside one that pays, groups are shared that would not pay alone: only its growth with their rows is paid."""
    gains = real("h200", 128, grouped=False)
    small = Batch((-1, -1), (26432, 7040), (1,) * 40)
    assert small.step(gains).segments == ()
    both = replace(small, rows=(1,) * 40 + (0,) * 128)
    segments = both.step(gains).segments
    assert [(len(segment.rows), segment.end) for segment in segments] == [(128, 26432), (40, 7040)]


@settings(max_examples=80, deadline=None)
@given(batches(), NAMES, st.randoms(use_true_random=False))
def test_depends_on_nothing_but_the_tree(batch: Batch, name: str, shuffler: random.Random) -> None:
    """With rows permuted the segments are the same, with room for everything and without."""
    gains = GAINS[name]
    order = list(range(len(batch.rows)))
    shuffler.shuffle(order)
    permuted = replace(batch, rows=tuple(batch.rows[row] for row in order))
    for capacity in (ROOM, Capacity(256, len(batch.rows) * 3 // 2), Capacity(3, 1 << 20)):
        plan = batch.step(gains, capacity)
        assert batch.step(gains, capacity) == plan
        segments = permuted.step(gains, capacity).segments
        back = [replace(each, rows=tuple(sorted(order[row] for row in each.rows))) for each in segments]
        assert back == list(plan.segments)


# -- cases with a known answer -----------------------------------------------------------------------------------------


def segments_of(batch: Batch, gains: Gains) -> list[tuple[tuple[int, ...], int, int, int]]:
    """Rows, the node that it ends in, start and end of each segment."""
    plan, parts = batch.plan(gains), batch.parts(gains)
    ends = [batch.branches[part.branch].nodes[-1] for part in parts]
    return [(each.rows, node, each.start, each.end) for each, node in zip(plan.segments, ends, strict=True)]


def constant(value: float) -> Gain:
    return lambda rows, start, end: value


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_no_groups_where_none_pays(value: float) -> None:
    batch = Batch((-1, 0), (512, 1024), (0, 0, 1, 1))
    assert batch.plan(Gains(constant(value), constant(value))).segments == ()
    assert batch.plan(Gains(None, None)).segments == ()


@pytest.mark.parametrize("rows", [(), (0,), (-1, -1), (0, 1), (0, -1)], ids=str)
def test_no_groups_where_nobody_shares(rows: tuple[int, ...]) -> None:
    plan = Batch((-1, -1), (512, 512), rows).plan(GAINS["naive"])
    assert plan == Plan(len(rows))
    assert plan.prefix_lens == (0,) * len(rows)


def test_nested_groups_continue_each_other() -> None:
    """Two agents below one system prompt, a third request without an agent, and a stranger. 600 ends inside a chunk:
    both agents begin with the whole of it, and the third request ends before it."""
    batch = Batch((-1, 0, 0, -1), (600, 8192, 9000, 512), (1, 2, 0, 1, 2, 3, 0, -1))
    plan = batch.plan(GAINS["naive"])
    assert segments_of(batch, GAINS["naive"]) == [
        ((0, 1, 2, 3, 4, 6), 0, 0, 512),
        ((0, 3), 1, 512, 8192),
        ((1, 4), 2, 512, 9000),
    ]
    assert plan.prefix_lens == (8192, 9000, 512, 8192, 9000, 0, 512, 0)


def test_nodes_that_the_same_rows_hold_are_one_group() -> None:
    batch = Batch((-1, 0, 1, 2), (64, 128, 640, 700), (2, 2, 3))
    assert segments_of(batch, GAINS["naive"]) == [((0, 1, 2), 2, 0, 640)]


def test_branches_inside_the_first_chunk_have_nothing_above() -> None:
    """Everybody begins with the same page: no group is as short as that where others follow."""
    batch = Batch((-1, 0, 0), (64, 6400, 3200), (1, 1, 2, 2))
    assert segments_of(batch, GAINS["naive"]) == [((0, 1), 1, 0, 6400), ((2, 3), 2, 0, 3200)]


def test_a_branch_that_does_not_pay_is_left_to_the_tails() -> None:
    """The overheads of one more segment are more than two rows save on a page; the upper part ends where it ends."""
    batch = Batch((-1, 0), (8256, 8320), (0,) * 126 + (1, 1))
    assert segments_of(batch, GAINS["h200, 128 heads"]) == [(tuple(range(128)), 0, 0, 8256)]


def test_minimum_length_is_that_of_a_path() -> None:
    batch = Batch((-1, 0), (256, 512), (1, 1), min_prefix_len=512)
    assert segments_of(batch, GAINS["naive"]) == [((0, 1), 1, 0, 512)]
    assert replace(batch, min_prefix_len=513).plan(GAINS["naive"]).segments == ()
    nested = replace(batch, rows=(0, 0, 1, 1))
    assert segments_of(nested, GAINS["naive"]) == [((0, 1, 2, 3), 0, 0, 256), ((2, 3), 1, 256, 512)]


def test_a_plan_refuses_a_row_twice() -> None:
    plan = Batch((-1,), (256,), (0, 0)).plan(GAINS["naive"])
    with pytest.raises(AssertionError, match="adjoin"):
        Plan(2, (*plan.segments, *plan.segments))


# -- two ways ----------------------------------------------------------------------------------------------------------

FASTER_NAIVE = Gains(lambda rows, start, end: 3.0 * rows * (end - start), lambda rows, start, end: rows * (end - start))


def modes_of(batch: Batch) -> list[tuple[int, int, int, Mode]]:
    """With FASTER_NAIVE: the node that it ends in, start, end and mode of each segment."""
    parts = batch.parts(FASTER_NAIVE)
    return [(batch.branches[part.branch].nodes[-1], part.start, part.end, part.mode) for part in parts]


def test_naive_where_it_is_expanded_and_grouped_where_not() -> None:
    naive, grouped = Mode.NAIVE, Mode.GROUPED_ABSORB
    batch = Batch((-1, 0, 0), (512, 8192, 8192), (1,) * 40 + (2,) * 40, expanded=(0, 8192, 0))
    assert modes_of(batch) == [(0, 0, 512, grouped), (1, 512, 8192, naive), (2, 512, 8192, grouped)]
    part = replace(batch, expanded=(512, 2048, 0))
    assert modes_of(part) == [
        (0, 0, 512, naive),
        (1, 512, 2048, naive),
        (1, 2048, 8192, grouped),
        (2, 512, 8192, grouped),
    ]


def test_without_grouped_absorb_sharing_ends_where_the_expansion_does() -> None:
    batch = Batch((-1, 0), (1024, 2048), (1, 1, 1, 0), expanded=(768, 2048))
    assert segments_of(batch, GAINS["naive"]) == [((0, 1, 2, 3), 0, 0, 768)]


def test_grouped_absorb_takes_whole_pages() -> None:
    batch = Batch((-1,), (5 * PAGE + 10,), (0, 0), min_prefix_len=5 * PAGE)
    grouped = Gains(None, every_range)
    assert segments_of(batch, grouped) == [((0, 1), 0, 0, 5 * PAGE)]
    assert replace(batch, min_prefix_len=5 * PAGE + 1).plan(grouped).segments == ()


# -- room --------------------------------------------------------------------------------------------------------------


def test_groups_beyond_the_room_that_save_least_are_left_out() -> None:
    ends = tuple(PAGE * (10 + index) for index in range(20))
    batch = Batch((-1,) * 20, ends, tuple(index for index in range(20) for _ in range(5)))
    branches = batch.branches
    parts = plan_parts(branches, batch.ways(GAINS["naive"]), whole(branches))
    assert len(parts) == 20
    ways = batch.ways(GAINS["naive"])
    assert limited(batch, ways, parts, Capacity(20, 100)) == parts
    for capacity in (Capacity(16, 100), Capacity(20, 84)):
        left = limited(batch, ways, parts, capacity)
        assert [part.branch for part in left] == list(range(4, 20)), "the shortest ones were dropped"


@settings(max_examples=80, deadline=None)
@given(batches(), NAMES, st.integers(0, 6), st.integers(0, 60))
def test_what_is_left_out_is_no_ones_ground(batch: Batch, name: str, most_segments: int, most_rows: int) -> None:
    parts = batch.parts(GAINS[name])
    left = limited(batch, batch.ways(GAINS[name]), parts, Capacity(most_segments, most_rows))
    assert len(left) <= len(parts)
    places = {(part.branch, part.end // CHUNK) for part in parts}
    assert all((part.branch, part.end // CHUNK) in places for part in left), "they end where they ended"
    assert {part.start for part in left} <= {part.start for part in parts}
    segments = batch.plan_of(left).segments  # which adjoin
    assert len(left) <= most_segments and sum(len(segment.rows) for segment in segments) <= most_rows


@pytest.mark.parametrize(
    ("heads", "query_tokens", "requests", "saved_us"), [(128, 4, 48, 910), (16, 1, 1024, 6255)], ids=str
)
def test_a_full_batch_keeps_the_deepest_of_three_levels(
    heads: int, query_tokens: int, requests: int, saved_us: float
) -> None:
    """All share 768 tokens, halves 1,024 more, and thirds of these 20,480 more, which save the most. With a segment for
    each level there is room for two of three; joined to those below it, the first level takes none and costs little."""
    cost = CostModel(V3, heads, GpuRates.from_json("h200"), expanded_element_bytes=1, query_tokens=query_tokens)
    gains = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=heads <= 32, step_tokens=125696)
    batch = Batch(
        (-1, 0, 0, 1, 1, 1, 2, 2, 2), (768, *(1792,) * 2, *(22272,) * 6), tuple(3 + row % 6 for row in range(requests))
    )
    every_level = [Segment(batch.rows_below(node), 0, 0, Mode.NAIVE) for node in range(9)]
    starts = (0, 768, 768, *(1792,) * 6)
    every_level = [
        replace(each, start=start, end=end) for each, start, end in zip(every_level, starts, batch.ends, strict=True)
    ]
    plan = batch.step(gains, Capacity(256, 2 * requests))
    assert net(plan.segments, gains) == pytest.approx(saved_us * 1e-6, rel=5e-3)
    assert net(plan.segments, gains) >= net(every_level, gains)
    assert set(plan.prefix_lens) == {22272}


def random_batch(seed: int) -> tuple[Batch, Gains, CostModel]:
    """A tree with up to five nodes, requests that end in any of them, some with many rows, and real rates."""
    draw = random.Random(seed)
    gpu, heads = draw.choice(["h100", "h200", "h20", "a100"]), draw.choice([8, 16, 32, 64, 128])
    parents, ends = [-1], [PAGE * draw.choice([1, 4, 5, 16, 64, 112, 413])]
    for node in range(1, draw.randint(1, 5)):
        parents.append(draw.randrange(-1, node))
        tokens = draw.choice([64, 256, 300, 1024, 4096, 4759, 7069, 26472, PAGE * draw.randint(1, 300)])
        ends.append(tokens + (ends[parents[-1]] if parents[-1] >= 0 else 0))
    requests = draw.choice([4, 16, 48, 128, 256, 1024])
    rows = tuple(draw.choices(range(len(ends)), [draw.random() ** 3 for _ in ends], k=requests))
    counts = [1] * requests
    for _ in range(draw.choice([0, 0, 3])):
        counts[draw.randrange(requests)] += draw.randint(0, max(1024 - sum(counts), 0) // 2)
    expanded = tuple(draw.choice([0, end // CHUNK * CHUNK, end, end]) for end in ends) if draw.random() < 0.3 else None
    element_bytes = draw.choice([1, 2])
    cost = CostModel(V3, heads, GpuRates.from_json(gpu), element_bytes, query_tokens=draw.choice([1, 1, 2, 4]))
    batch = Batch(tuple(parents), tuple(ends), rows, 256, expanded, tuple(counts))
    grouped = heads <= 32 and cost.rates.modes[Mode.GROUPED_ABSORB].measured
    flags = {"naive": True, "grouped": grouped, "step_tokens": batch.branches.tokens}
    return batch, Gains.of(HybridMLAOptions(), cost, **flags), cost


def lost_by(batch: Batch, gains: Gains, cost: CostModel, capacity: Capacity, plans: Sequence[Possible]) -> float:
    """What the planner's plan loses against the best one, of the time of attention to shared tokens with that."""
    room = [plan for plan in plans if plan.segments <= capacity.segments and plan.rows <= capacity.rows]
    best = max(plan.net for plan in room)
    from_memory = cost.exceeds_l2(batch.branches.tokens)
    absorb = sum(
        (each.end - each.start) * cost.token_seconds(Mode.ABSORB, each.rows, from_memory) for each in batch.branches
    )
    return (best - net_of(batch, batch.step(gains, capacity).segments, gains)) / (absorb - best) if best else 0.0


def net_of(batch: Batch, segments: Sequence[Segment], gains: Gains) -> float:
    """`net`, where requests have several rows."""
    counts, total = batch.row_counts, 0.0
    for mode, gain in ((Mode.NAIVE, gains.naive), (Mode.GROUPED_ABSORB, gains.grouped)):
        of_mode = [each for each in segments if each.mode is mode]
        total += sum(gain(sum(counts[row] for row in each.rows), each.start, each.end) for each in of_mode)
        if of_mode:
            total -= gains.launch(mode, sum(counts[row] for row in set().union(*(each.rows for each in of_mode))))
    return total


def test_random_trees_lose_little_against_the_best_plan() -> None:
    """With room for everything and with room for two segments a row. Of 11,570 others none lost more than 2.4 %."""
    losses = []
    for seed in range(400):
        batch, gains, cost = random_batch(seed)
        if not len(batch.branches):
            continue
        plans = list(all_plans(batch, gains))
        for capacity in (ROOM, Capacity(256, 2 * sum(batch.row_counts))):
            losses.append((lost_by(batch, gains, cost, capacity, plans), seed))
    worst = sorted(losses)[-2:]
    assert len(losses) > 600 and worst[1][0] < 0.05 and worst[0][0] < 0.03, worst


def test_deep_nesting_costs_what_its_branches_do() -> None:
    """Each row ends in a node of its own, below that of the one before."""

    def judged(nodes: int) -> int:
        found = []

        def counted(gain: Gain) -> Gain:
            return lambda *args: found.append(args) or gain(*args)

        tree = SharedTree(range(nodes), range(-1, nodes - 1), range(CHUNK, CHUNK * (nodes + 1), CHUNK), range(nodes))
        branches, gains = Branches(tree), real("h200", 16)
        ways = Ways(counted(gains.naive), counted(gains.grouped), CHUNK, PAGE)
        parts, dropped = plan_step(branches, ways, whole(branches), gains.launch, Capacity(256, 3 * nodes))
        assert dropped > 0 and rows_of(parts, branches) <= 3 * nodes
        top = sum(gains.naive(nodes - index, index * CHUNK, (index + 1) * CHUNK) for index in range(3))
        assert sum(part.gain for part in parts) > 5 * top, "that of the three upper ranges"
        return len(found)

    assert judged(1024) <= 5 * judged(256) <= 5 * 256 * 8


def test_the_cost_is_that_of_the_tree() -> None:
    """A chain of nodes with 256 rows, each of which leaves at a node of its own."""
    nodes = 500
    rows = tuple(range(0, nodes, 2)) + (nodes - 1,) * 6
    tree = SharedTree(range(nodes), range(-1, nodes - 1), range(PAGE, PAGE * (nodes + 1), PAGE), rows)
    branches = Branches(tree)
    assert len(branches) == 251 and branches.tokens == PAGE * nodes
    assert [branches[branch].rows for branch in (0, 1, 250)] == [256, 255, 6]
    ways = Ways(every_range, None, CHUNK, PAGE)
    covers, parts = all_covers(branches, ways, whole(branches)), plan_parts(branches, ways, whole(branches))
    assert branches.segment(parts[0]).rows == tuple(range(2, 256)), "two leave inside the first chunk"
    left = limit_parts(parts, Capacity(256, 512), Chooser(branches, covers, ways, ways.modes))
    assert len(left) < len(parts) and sum(branches[part.branch].rows for part in left) <= 512
    assert sum(part.gain for part in left) > 5 * sum(part.gain for part in parts[:2]), "joined, not dropped"
