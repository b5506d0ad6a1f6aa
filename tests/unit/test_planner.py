"""The planner: every token of every row covered once, groups of two and more on one path, as much saved as can be."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode, ModelDims
from sglang_mla_ext.prefix.gains import Gains, gain_of
from sglang_mla_ext.prefix.planner import (
    SPARE_ENTRIES,
    Gain,
    Group,
    Path,
    PathNode,
    Plan,
    Stacking,
    limit_entries,
    plan_groups,
)

V3 = ModelDims.from_json("deepseek-v3")
PAGE = 64


def test_planner_and_cost_model_need_neither_torch_nor_sglang() -> None:
    code = """
import sys
import sglang_mla_ext.prefix.cost_model, sglang_mla_ext.prefix.planner
print(sorted({name.split(".")[0] for name in sys.modules} & {"torch", "triton", "sglang"}))
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def real_gain(mode: str, gpu: str = "cpu", heads: int = 16) -> Gain:
    return gain_of(HybridMLAOptions(mode=mode), CostModel(V3, heads, GpuRates.from_json(gpu)))


# The cost model's groups pay from 2 to 4 rows on (cpu), from 7 to 42 (h20, 16 heads) and from 23 to 188 (128 heads).
GAINS = {
    "naive": real_gain("naive"),
    "cpu": real_gain("auto"),
    "h20, 16 heads": real_gain("auto", "h20"),
    "h20, 128 heads": real_gain("auto", "h20", 128),
    "h200, 128 heads": real_gain("auto", "h200", 128),
}


H20_16_HEADS = Gains.of(HybridMLAOptions(), CostModel(V3, 16, GpuRates.from_json("h20")), naive=True, grouped=True)


@dataclass(frozen=True)
class Batch:
    """A forest of prefix-tree nodes, and for each row of a batch the node that its path ends in."""

    parents: tuple[int | None, ...]
    ends: tuple[int, ...]
    rows: tuple[int | None, ...]
    min_prefix_len: int = 1
    usable: tuple[int, ...] | None = None  # of each node, where an expansion limits it

    def path(self, node: int | None) -> list[int]:
        """Nodes from the root to this one."""
        return [] if node is None else [*self.path(self.parents[node]), node]

    def paths(self, names: list[object]) -> list[Path]:
        return [tuple(PathNode(names[node], self.ends[node]) for node in self.path(end)) for end in self.rows]

    def tokens(self, node: int) -> int:
        return min(self.usable[node], self.ends[node]) if self.usable else self.ends[node]

    def rows_below(self, node: int) -> tuple[int, ...]:
        return tuple(row for row, end in enumerate(self.rows) if node in self.path(end))

    def plan(self, gain: Gain, names: list[object] | None = None, grouped_gain: Gain | None = None) -> Plan:
        names = names or list(range(len(self.ends)))
        tokens = dict(zip(names, self.usable or self.ends, strict=True))
        return plan_groups(
            self.paths(names),
            gain,
            min_prefix_len=self.min_prefix_len,
            usable=lambda step: tokens[step.node],
            grouped_gain=grouped_gain,
            page_size=PAGE,
        )


def saved(plan: Plan, gain: Gain) -> float:
    return sum(gain(len(group.rows), group.end) for group in plan.groups)


def best_saving(batch: Batch, gain: Gain) -> float:
    """The most that any choice of nodes saves, when each row goes to its deepest chosen ancestor. Tries all."""
    eligible = [node for node in range(len(batch.ends)) if batch.tokens(node) >= batch.min_prefix_len]
    ancestors = [batch.path(end)[::-1] for end in batch.rows]
    best = 0.0
    for count in range(len(eligible) + 1):
        for chosen in combinations(eligible, count):
            deepest = [next((node for node in path if node in chosen), None) for path in ancestors]
            sizes = {node: deepest.count(node) for node in chosen}
            if all(size >= 2 for size in sizes.values()):
                best = max(best, sum(gain(size, batch.tokens(node)) for node, size in sizes.items()))
    return best


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    parents: list[int | None] = []
    ends: list[int] = []
    for node in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.integers(0, node - 1)) if node else None
        pages = draw(st.sampled_from([1, 1, 2, 30]) | st.integers(1, 400))
        parents.append(parent)
        ends.append((0 if parent is None else ends[parent]) + PAGE * pages)
    most = draw(st.sampled_from([1, 3, 50]))
    rows: list[int | None] = [None] * draw(st.integers(0, 2))
    for node in range(len(ends)):
        rows += [node] * draw(st.integers(0, most))
    random.Random(draw(st.integers(0, 1 << 30))).shuffle(rows)
    usable = None
    if draw(st.booleans()):
        usable = tuple(draw(st.sampled_from([0, end // 2, end - 1, end, end + 1])) for end in ends)
    return Batch(tuple(parents), tuple(ends), tuple(rows), draw(st.sampled_from([1, PAGE, 1000])), usable)


@settings(max_examples=1500, deadline=None)
@given(batches(), st.sampled_from(sorted(GAINS)))
def test_every_token_is_covered_once_and_groups_are_sound(batch: Batch, name: str) -> None:
    gain = GAINS[name]
    plan = batch.plan(gain)
    seq_lens = [row + (0 if end is None else batch.ends[end]) for row, end in enumerate(batch.rows)]
    ranges: list[list[tuple[int, int]]] = [[] for _ in seq_lens]
    for group in plan.groups:
        assert group.start == 0 and group.mode is Mode.NAIVE
        assert len(group.rows) >= 2 and list(group.rows) == sorted(set(group.rows))
        assert batch.min_prefix_len <= group.end <= batch.tokens(group.node) <= batch.ends[group.node]
        assert gain(len(group.rows), group.end) > 0
        assert set(group.rows) <= set(batch.rows_below(group.node)), "a row of the group does not hold its prefix"
        assert len({batch.path(batch.rows[row])[0] for row in group.rows}) == 1, "a group spans two namespaces"
        for row in group.rows:
            ranges[row].append((group.start, group.end))
    for row, total in enumerate(seq_lens):
        ranges[row].append((plan.prefix_lens[row], total))
        assert ranges[row][0][0] == 0 and plan.prefix_lens[row] <= total
        assert all(before[1] == after[0] for before, after in pairwise(ranges[row]))
    assert list(plan.groups) == sorted(plan.groups, key=lambda group: group.rows)
    assert sum(len(group.rows) for group in plan.groups) == sum(map(bool, plan.prefix_lens))


@settings(max_examples=300, deadline=None)
@given(batches(), st.sampled_from(sorted(GAINS)))
def test_saves_at_least_what_any_one_group_would(batch: Batch, name: str) -> None:
    gain = GAINS[name]
    singles = [
        gain(len(rows), batch.tokens(node))
        for node in range(len(batch.ends))
        if len(rows := batch.rows_below(node)) >= 2 and batch.tokens(node) >= batch.min_prefix_len
    ]
    assert saved(batch.plan(gain), gain) >= max(singles, default=0.0) * (1 - 1e-9)


@settings(max_examples=300, deadline=None)
@given(batches(), st.sampled_from(sorted(GAINS)), st.randoms(use_true_random=False))
def test_depends_on_nothing_but_the_paths(batch: Batch, name: str, shuffler: random.Random) -> None:
    gain = GAINS[name]
    plan = batch.plan(gain)
    assert batch.plan(gain) == plan

    objects = [object() for _ in batch.ends]  # equal only to themselves; their hashes are as good as random
    shuffler.shuffle(objects)
    again = batch.plan(gain, objects)
    assert [replace(group, node=objects.index(group.node)) for group in again.groups] == list(plan.groups)

    order = list(range(len(batch.rows)))
    shuffler.shuffle(order)
    permuted = replace(batch, rows=tuple(batch.rows[row] for row in order)).plan(gain)
    assert saved(permuted, gain) == pytest.approx(saved(plan, gain), rel=1e-9)


def random_small_batch(rng: random.Random) -> Batch:
    parents: list[int | None] = []
    ends: list[int] = []
    for node in range(rng.randint(1, 6)):
        parent = rng.randrange(node) if node and rng.random() < 0.8 else None
        parents.append(parent)
        ends.append((0 if parent is None else ends[parent]) + PAGE * rng.randint(1, rng.choice([4, 40, 400])))
    most = rng.choice([2, 8, 40])
    rows = [node for node in range(len(ends)) for _ in range(rng.randint(0, most))]
    rng.shuffle(rows)
    return Batch(tuple(parents), tuple(ends), tuple(rows), rng.choice([1, 256]))


@pytest.mark.parametrize("name", sorted(GAINS))
def test_is_near_the_best_choice(name: str) -> None:
    """At least 0.9 of the optimum in 98 of 100 random trees and 0.99 on average.

    Not always: the planner is greedy, and trees made to mislead it exist (see the next test).
    """
    gain = GAINS[name]
    rng = random.Random(0)
    ratios = []
    while len(ratios) < 250:
        batch = random_small_batch(rng)
        if (best := best_saving(batch, gain)) > 0:
            ratios.append(saved(batch.plan(gain), gain) / best)
    print(f"{name}: worst {min(ratios):.3f}, mean {sum(ratios) / len(ratios):.4f}")
    assert max(ratios) <= 1 + 1e-9
    assert sum(ratios) / len(ratios) >= 0.99
    assert sum(ratio < 0.9 for ratio in ratios) <= len(ratios) * 0.02
    assert min(ratios) >= 0.5


@pytest.mark.parametrize(
    ("name", "parents", "ends", "counts", "share"),
    [
        ("naive", (None, 0, 1, 1), (12096, 12288, 12416, 22976), (1, 1, 2, 3), 0.87),
        ("naive", (None, 0, 1, 1, 2, 2), (7040, 7296, 7360, 7360, 21760, 7424), (0, 1, 1, 0, 2, 1), 0.79),
        ("h20, 16 heads", (None, 0, 1, 0), (4096, 4160, 17344, 4160), (0, 8, 11, 9), 0.72),
    ],
)
def test_what_greed_costs_in_misleading_trees(
    name: str, parents: tuple[int | None, ...], ends: tuple[int, ...], counts: tuple[int, ...], share: float
) -> None:
    """Below a node, a child's groups stay or join all together; the worst trees that a search found."""
    batch = Batch(parents, ends, tuple(node for node, count in enumerate(counts) for _ in range(count)))
    assert saved(batch.plan(GAINS[name]), GAINS[name]) >= share * best_saving(batch, GAINS[name])


# -- cases with a known answer -----------------------------------------------------------------------------------------


def groups_of(plan: Plan) -> list[tuple[tuple[int, ...], int, int]]:
    return [(group.rows, group.node, group.end) for group in plan.groups]


@pytest.mark.parametrize("gain", [lambda size, tokens: 0.0, lambda size, tokens: -1.0], ids=["zero", "loss"])
def test_no_groups_where_none_pays(gain: Gain) -> None:
    assert Batch((None, 0), (512, 1024), (0, 0, 1, 1)).plan(gain).groups == ()


@pytest.mark.parametrize("rows", [(), (0,), (None, None), (0, 1), (0, None)], ids=str)
def test_no_groups_where_nobody_shares(rows: tuple[int | None, ...]) -> None:
    plan = Batch((None, None), (512, 512), rows).plan(GAINS["naive"])
    assert plan == Plan(len(rows))
    assert plan.prefix_lens == (0,) * len(rows)


def test_deep_and_shallow_groups_in_one_plan() -> None:
    """Two agents below one system prompt, a third request without an agent, and a stranger."""
    batch = Batch((None, 0, 0, None), (512, 8192, 8192, 512), (1, 2, 0, 1, 2, 3, 0, None))
    plan = batch.plan(GAINS["naive"])
    assert groups_of(plan) == [((0, 3), 1, 8192), ((1, 4), 2, 8192), ((2, 6), 0, 512)]
    assert plan.prefix_lens == (8192, 8192, 512, 8192, 8192, 0, 512, 0)


def test_a_long_common_prefix_beats_short_branches() -> None:
    batch = Batch((None, 0, 0), (8192, 8256, 8256), (1, 1, 2, 2))
    assert groups_of(batch.plan(GAINS["naive"])) == [((0, 1, 2, 3), 0, 8192)]


def test_minimum_length_is_inclusive() -> None:
    batch = Batch((None,), (256,), (0, 0), min_prefix_len=256)
    assert groups_of(batch.plan(GAINS["naive"])) == [((0, 1), 0, 256)]
    assert replace(batch, min_prefix_len=257).plan(GAINS["naive"]).groups == ()


def test_no_more_than_is_usable() -> None:
    batch = Batch((None, 0), (1024, 2048), (1, 1, 1), min_prefix_len=256, usable=(700, 700))
    assert [end for _, _, end in groups_of(batch.plan(GAINS["naive"]))] == [700]
    assert replace(batch, usable=(255, 255)).plan(GAINS["naive"]).groups == ()


def test_a_plan_refuses_a_row_twice() -> None:
    plan = Batch((None,), (256,), (0, 0)).plan(GAINS["naive"])
    with pytest.raises(AssertionError, match="adjoin"):
        Plan(2, groups=(*plan.groups, *plan.groups))


# -- two ways ----------------------------------------------------------------------------------------------------------


@settings(max_examples=500, deadline=None)
@given(batches())
def test_at_each_node_the_way_that_saves_more(batch: Batch) -> None:
    naive, grouped = H20_16_HEADS.naive, H20_16_HEADS.grouped
    plan = batch.plan(naive, grouped_gain=grouped)
    assert plan.groups == tuple(
        sorted(plan.of_mode(Mode.NAIVE) + plan.of_mode(Mode.GROUPED_ABSORB), key=lambda group: group.rows)
    )

    def savings(node: int, size: int) -> dict[Mode, float]:
        lengths = {Mode.NAIVE: batch.tokens(node), Mode.GROUPED_ABSORB: batch.ends[node] // PAGE * PAGE}
        gains = {Mode.NAIVE: naive, Mode.GROUPED_ABSORB: grouped}
        return {mode: gains[mode](size, tokens) for mode, tokens in lengths.items() if tokens >= batch.min_prefix_len}

    for group in plan.groups:
        found = savings(group.node, len(group.rows))
        assert found[group.mode] == max(found.values()) > 0
        assert batch.min_prefix_len <= group.end <= batch.ends[group.node]
        assert group.mode is Mode.NAIVE or group.end == batch.ends[group.node] // PAGE * PAGE
    total = sum(savings(group.node, len(group.rows))[group.mode] for group in plan.groups)
    rows_below = {node: len(batch.rows_below(node)) for node in range(len(batch.ends))}
    singles = [max(savings(node, size).values(), default=0.0) for node, size in rows_below.items() if size >= 2]
    assert total >= max(singles, default=0.0) * (1 - 1e-9)


def test_naive_where_it_is_expanded_and_grouped_where_not() -> None:
    batch = Batch((None, 0, 0), (512, 8192, 8192), (1,) * 40 + (2,) * 40, usable=(0, 8192, 0))
    gains = {"gain": lambda size, tokens: 3.0 * size * tokens, "grouped_gain": lambda size, tokens: 1.0 * size * tokens}
    plan = batch.plan(**gains)
    assert [(group.node, group.end, group.mode) for group in plan.groups] == [
        (1, 8192, Mode.NAIVE),
        (2, 8192, Mode.GROUPED_ABSORB),
    ]
    part = replace(batch, usable=(0, 2048, 0)).plan(**gains)
    assert [group.mode for group in part.groups] == [Mode.GROUPED_ABSORB] * 2, (
        "a small part that is expanded saves less"
    )


def test_grouped_absorb_takes_whole_pages() -> None:
    batch = Batch((None,), (5 * PAGE + 10,), (0, 0), min_prefix_len=5 * PAGE)
    plan = batch.plan(GAINS["naive"], grouped_gain=lambda size, tokens: 1e9)
    assert [(group.end, group.mode) for group in plan.groups] == [(5 * PAGE, Mode.GROUPED_ABSORB)]
    longer = replace(batch, min_prefix_len=5 * PAGE + 1)
    assert [group.mode for group in longer.plan(GAINS["naive"], grouped_gain=lambda *_: 1e9).groups] == [Mode.NAIVE]


def test_entries() -> None:
    stacking = Stacking(PAGE, rows_per_entry=4)
    assert [stacking.entries(size) for size in (1, 4, 5, 64)] == [1, 1, 2, 16]
    assert stacking.max_entries(74) == 19 + SPARE_ENTRIES
    assert Stacking().entries(64) == 1 and Stacking().max_entries(74) == 74


def test_groups_beyond_the_entries_that_save_least_are_left_out() -> None:
    """Groups of five need two entries each: 40 of 100 rows' 33 entries."""
    ends = tuple(PAGE * (10 + index) for index in range(20))
    rows = tuple(index for index in range(20) for _ in range(5))
    plan = Batch((None,) * 20, ends, rows).plan(lambda *_: 0.0, grouped_gain=GAINS["naive"])
    assert len(plan.groups) == 20
    limited = limit_entries(plan, GAINS["naive"], Stacking(PAGE, 4))
    assert (25 + SPARE_ENTRIES) // 2 == len(limited.groups) == 16
    assert [group.node for group in limited.groups] == list(range(4, 20)), "the shortest ones were dropped"
    assert limited.num_rows == 100 and limited.prefix_lens[:20] == (0,) * 20
    assert limit_entries(plan, GAINS["naive"], Stacking()) is plan

    naive = Group((0, 1), "expanded", 0, 64, Mode.NAIVE)
    mixed = Plan(102, (naive, *(replace(group, rows=tuple(row + 2 for row in group.rows)) for group in plan.groups)))
    assert naive in limit_entries(mixed, GAINS["naive"], Stacking(PAGE, 4)).groups
