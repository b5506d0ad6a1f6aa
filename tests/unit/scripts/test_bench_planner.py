"""The planner's benchmark: its trees are those it says, and its records have what they promise."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trees import whole_path
from typer.testing import CliRunner

pytestmark = pytest.mark.release("0.5.23+", reason="its trees are of this cache")

SHAPES = {  # nodes and tokens that are shared, private nodes and tokens of each request
    "one prompt": (1, 26624, 1, 512),
    "agent sessions": (1, 8192, 20, 10240),
    "shared chain": (500, 32000, 1, 512),
    "pairs": (512, 512 * 2048, 1, 512),
    "private chains": (0, 0, 1000, 64000),
}


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("bench_planner")


@pytest.fixture
def small(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small case in place of all."""
    case = bench.CASES["one prompt"]
    monkeypatch.setattr(bench, "CASES", {"one prompt": replace(case, requests=8)})


@pytest.mark.parametrize("name", SHAPES)
def test_trees(bench: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = bench.CASES[name]
    few = replace(case, requests=8)
    monkeypatch.setitem(bench.CASES, name, few)
    batch = bench.Batch(name)
    leavers = batch.requests[: bench.REPLACED]
    assert batch.replace() == batch.requests[-bench.REPLACED :] and len(batch.requests) == 8
    assert not set(leavers) & set(batch.requests)
    assert sorted(request.kind for request in batch.requests) == list(range(8))

    shared_nodes, shared_tokens, own_nodes, own_tokens = SHAPES[name]
    view = bench.installed.TreeView(batch.tree.cache)
    shared = view.shared(batch.requests)
    if name == "pairs":  # those of the other requests are not in this batch
        assert len({at for at in shared.deepest}) == 4 and set(shared.ends) == {2048}
    else:
        assert len(shared.nodes) == shared_nodes and max(shared.ends, default=0) == shared_tokens
    paths = [whole_path(view, request) for request in batch.requests]
    tokens: dict[Any, int] = {}
    holders: Counter[Any] = Counter()
    for path in paths:
        starts = [0, *(end for _, end in path)]
        tokens |= {node: end - start for (node, end), start in zip(path, starts, strict=False)}
        holders.update(node for node, _ in path)
    for path in paths:
        own = [node for node, _ in path if holders[node] == 1]
        assert len(own) == own_nodes and sum(tokens[node] for node in own) == own_tokens
    assert batch.tree.cache.protected_size() == sum(tokens.values()), "no other request holds anything"


def test_records(bench: ModuleType, small: None, tmp_path: Path) -> None:
    out = tmp_path / "plan.jsonl"
    app = bench.typer.Typer()
    app.command()(bench.main)
    answer = CliRunner().invoke(app, ["--repeats", "2", "--out", str(out)])
    assert answer.exit_code == 0, answer.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["case"]["heads"] for record in records] == [128, 16]
    for record in records:
        assert record["bench"] == "plan" and record["case"]["requests"] == 8
        assert all(record[column] > 0 for column in bench.TIMES)
        assert record["unchanged_ms"] < record["replan_ms"]
    assert "one prompt" in answer.output


def test_an_unknown_case_is_named(bench: ModuleType) -> None:
    app = bench.typer.Typer()
    app.command()(bench.main)
    answer = CliRunner().invoke(app, ["--case", "no such tree"])
    assert answer.exit_code == 2 and "no such tree" in answer.output
