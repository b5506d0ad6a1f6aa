"""Which plans `calibrate.py --check` times on trees, and what the planner says of them; nothing is timed here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bench import planner_verdicts as plan_trees

from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode

A, N, G = Mode.ABSORB, Mode.NAIVE, Mode.GROUPED_ABSORB
H200 = GpuRates.from_json("h200")


def test_a_tree_knows_its_paths() -> None:
    tree = plan_trees.MIXED
    assert tree.batch == 160 and tree.ends == [11008, 13056, 19456, 3328]
    assert len(tree.rows_of(0)) == 90 and tree.rows_of(1) == tuple(range(30, 90))
    assert all(tokens % plan_trees.CHUNK == 0 for other in plan_trees.TREES for tokens in other.tokens)


def test_every_assignment_shares_from_the_top() -> None:
    assert set(plan_trees.assignments(plan_trees.NESTED, 128)) == {(A, A, A), (N, A, A), (N, N, A), (N, N, N)}
    few = list(plan_trees.assignments(plan_trees.NESTED, 16))
    assert len(few) == len(set(few)) == 15 and (G, N, A) in few and (A, G, A) not in few


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", plan_trees.TREE_HEADS)
@pytest.mark.parametrize("tree", plan_trees.TREES, ids=lambda tree: tree.name)
def test_the_planner_chooses_what_is_timed(tree: plan_trees.Tree, heads: int, dtype: str) -> None:
    timed = {plan_trees.name_of(modes) for modes in plan_trees.assignments(tree, heads)}
    assert plan_trees.chosen(tree, heads, dtype, H200) in timed


def test_the_table_says_what_a_choice_loses() -> None:
    tree = plan_trees.NESTED
    choice = plan_trees.chosen(tree, 128, "fp8", H200)
    ms = dict.fromkeys(map(plan_trees.name_of, plan_trees.assignments(tree, 128)), 2.0) | {choice: 1.1}
    ms["naive naive naive"] = min(1.0, ms["naive naive naive"])
    ms["absorb absorb absorb"] = 3.0
    case = dict(tree=tree.name, heads=128, dtype="fp8", parents=tree.parents, tokens=tree.tokens, rows=tree.rows)
    row = plan_trees.plans_table([{"case": case, "ms": ms}], H200).splitlines()[-1]
    assert row.startswith("nested") and "3000" in row and ("10%" in row) == (choice != "naive naive naive")


def test_segments_cost_what_loses_least() -> None:
    """Records in which naive attention is chosen where it should not be, unless its segments cost more."""
    tree, heads, dtype = plan_trees.SMALL, 16, "fp8"
    names = list(map(plan_trees.name_of, plan_trees.assignments(tree, heads)))
    free = replace(H200, modes={mode: replace(rates, segment_s=0.0) for mode, rates in H200.modes.items()})
    cheap = plan_trees.chosen(tree, heads, dtype, free)
    ms = dict.fromkeys(names, 2.0) | {cheap: 1.5, "grouped_absorb grouped_absorb grouped_absorb grouped_absorb": 1.0}
    case = dict(tree=tree.name, heads=heads, dtype=dtype, parents=tree.parents, tokens=tree.tokens, rows=tree.rows)
    records = [{"case": case, "ms": ms}]
    fitted = plan_trees.with_fitted_segments(records, H200)
    assert plan_trees.judged(records[0], fitted).loss < plan_trees.judged(records[0], free).loss
    assert fitted.modes[N].segment_s > fitted.modes[G].segment_s == 0.0
    right = [{"case": case, "ms": ms | {cheap: 0.5}}]
    assert plan_trees.with_fitted_segments(right, H200).modes[N].segment_s == 0.0
