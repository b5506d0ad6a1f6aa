"""Decode graphs with shared attention and without, captured and selected as SGLang 0.5.23 does with its variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from decode_world import Graph, World, plan_pass

from sglang_mla_ext.adapter.build import assemble
from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.step.graph_variants import PLAIN, SHARED, GraphVariants
from sglang_mla_ext.adapter.step.passes import Kind, Pass, Way, passes

BOUND = {(False, 1): 1e-5, (False, 4): 1e-5, (True, 1): 5e-2, (True, 4): 8e-2}
"""Relative error of rows, by FP8 cache and query tokens; as in test_backend.py and test_verify.py."""


class Graphs:
    """Both graphs of one size. A step shares what its plan says."""

    def __init__(self, world: World, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._world, self._graphs = world, {}
        for label in GraphVariants.capture_labels:
            monkeypatch.setattr(installed, "captured_graph", lambda label=label: label, raising=False)
            self._graphs[label] = Graph(world, size)
            assert (passes.now.way is Way.SHARED) == (label == SHARED)
            assert (passes.now.way is Way.PLAIN) == (label == PLAIN and world.steps.plain_graphs)
        monkeypatch.delattr(installed, "captured_graph")
        self._variants = GraphVariants(lambda: bool(passes.now.plan.segments))

    def step(self, requests: Sequence[Any]) -> tuple[str, float]:
        """Return which graph was replayed, and the largest relative error of its rows."""
        plan_pass(self._world.steps, self._world.mode, requests, requests)
        label = self._variants.select(None)
        return label, self._graphs[label].step(requests)


@pytest.mark.parametrize("queries", [1, 4], ids=["decode", "verify"])
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_a_step_that_shares_nothing_replays_a_plain_graph(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, fp8: bool, queries: int
) -> None:
    """State that the other graph needs is still there when it comes again."""
    world = make_world(fp8=fp8, queries=queries)
    world.make("gpu", prefix_dtype="bf16" if fp8 else "auto")
    assert world.steps.plain_graphs == (installed.has_graph_variants and not fp8)
    alone = [world.start(text, own) for text, own in (("r", 30), ("st", 3))]
    together = [world.start("abcdef", own) for own in (5, 64, 70)]
    graphs = Graphs(world, 8, monkeypatch)
    graphs.step(together)  # expands
    for requests, expected in ((together, SHARED), (alone, PLAIN), ([*together, *alone], SHARED), (alone[:1], PLAIN)):
        label, error = graphs.step(requests)
        assert label == expected and error < BOUND[fp8, queries]
    assert not world.steps.counters.fallbacks


@pytest.mark.parametrize("reason", ["none", "ranks that share for themselves", "torch compile", "nothing shares"])
def test_who_captures_plain_graphs(make_world: Any, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """SGLang's all-reduce takes other ranks' addresses from the graph that a rank replays itself."""
    world = make_world()
    world.runner.server_args.enable_torch_compile = reason == "torch compile"
    monkeypatch.setattr(assemble, "several_ranks", lambda: reason == "ranks that share for themselves")
    world.make("gpu", mode="absorb" if reason == "nothing shares" else "naive")
    expected = installed.has_graph_variants and reason == "none"
    assert world.steps.plain_graphs == expected and (world.backend._stock.plain is not None) == expected


def test_one_answer_for_a_pass() -> None:
    """SGLang may ask twice; a plan that could not be written does not change the graph."""
    shares = [False, True]
    variants = GraphVariants(shares.pop)
    passes.begin(Pass(Kind.DECODE))
    assert [variants.select(None), variants.select(None)] == [SHARED, SHARED] and shares == [False]
    passes.now.share_nothing()
    assert variants.select(None) == SHARED
    passes.end()
    assert variants.select(None) == PLAIN
    passes.end()
