"""Which plans `calibrate.py --check` times on trees, and what the planner says of them; nothing is timed here."""

from __future__ import annotations

import pytest
from bench import step_plans

from sglang_mla_ext.prefix.cost_model import GpuRates, Mode

A, N, G = Mode.ABSORB, Mode.NAIVE, Mode.GROUPED_ABSORB
H200 = GpuRates.from_json("h200")


def test_a_tree_knows_its_paths() -> None:
    tree = step_plans.MIXED
    assert tree.batch == 160 and tree.ends == [11008, 13056, 19456, 3328]
    assert len(tree.rows_of(0)) == 90 and tree.rows_of(1) == tuple(range(30, 90))
    assert all(tokens % step_plans.CHUNK_TOKENS == 0 for other in step_plans.TREES for tokens in other.tokens)


def test_every_assignment_shares_from_the_top() -> None:
    assert set(step_plans.assignments(step_plans.NESTED, 128)) == {(A, A, A), (N, A, A), (N, N, A), (N, N, N)}
    few = list(step_plans.assignments(step_plans.NESTED, 16))
    assert len(few) == len(set(few)) == 15 and (G, N, A) in few and (A, G, A) not in few


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("heads", step_plans.HEADS)
@pytest.mark.parametrize("tree", step_plans.TREES, ids=lambda tree: tree.name)
def test_the_planner_chooses_what_is_timed(tree: step_plans.Tree, heads: int, dtype: str) -> None:
    timed = {step_plans.name_of(modes) for modes in step_plans.assignments(tree, heads)}
    assert step_plans.chosen(tree, heads, dtype, H200) in timed


def test_the_table_says_what_a_choice_loses() -> None:
    tree = step_plans.NESTED
    choice = step_plans.chosen(tree, 128, "fp8", H200)
    ms = dict.fromkeys(map(step_plans.name_of, step_plans.assignments(tree, 128)), 2.0) | {choice: 1.1}
    ms["naive naive naive"] = min(1.0, ms["naive naive naive"])
    ms["absorb absorb absorb"] = 3.0
    case = dict(tree=tree.name, heads=128, dtype="fp8", parents=tree.parents, tokens=tree.tokens, rows=tree.rows)
    row = step_plans.plans_table([{"case": case, "ms": ms}], H200).splitlines()[-1]
    assert row.startswith("nested") and "3000" in row and ("10%" in row) == (choice != "naive naive naive")
