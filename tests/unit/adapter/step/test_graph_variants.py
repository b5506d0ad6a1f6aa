"""Decode graphs with shared attention and without, captured and selected as SGLang 0.5.23 does with its variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from decode_world import Graph, World, plan_pass
from doubles import request

from sglang_mla_ext.adapter.build import assemble
from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.ranks.prompts import Beginnings
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


@pytest.mark.parametrize(
    ("case", "captures"),
    [
        ("one rank", True),
        ("ranks that divide the heads", True),
        ("ranks that differ", False),
        ("ranks that share for themselves", False),
        ("torch compile", False),
        ("nothing shares", False),
    ],
)
def test_who_captures_plain_graphs(make_world: Any, monkeypatch: pytest.MonkeyPatch, case: str, captures: bool) -> None:
    """SGLang's all-reduce takes other ranks' addresses from the graph that a rank replays itself."""
    world = make_world()
    arguments, ranks = world.runner.server_args, "ranks" in case
    arguments.enable_torch_compile = case == "torch compile"
    if case == "ranks that share for themselves":
        vars(arguments).update(enable_dp_attention=True, dp_size=2, tp_size=2)
    compared: list[Any] = []
    monkeypatch.setattr(assemble, "several_ranks", lambda: ranks)
    monkeypatch.setattr(assemble, "is_alike", lambda mine: compared.append(mine) or case != "ranks that differ")
    world.make("gpu", mode="absorb" if case == "nothing shares" else "naive")
    captures = captures and installed.has_graph_variants
    assert world.steps.plain_graphs == captures
    assert (world.steps.beginnings is not None) == (captures and ranks)
    if captures:
        assert world.backend._stock.plain is not None and compared == [(True, world.backend.preparation._requests)]


def test_requests_that_begin_alike() -> None:
    one, other = list(range(8)), list(range(7, 15))
    beginnings = Beginnings(tokens=6, requests=3)

    def alike(*reqs: Any) -> bool:
        return beginnings.some_are_alike(reqs)

    assert not alike() and not alike(*map(request, (one, one[:7], other)))
    assert alike(*map(request, (one, other, one[:7], one[:6])))
    assert not alike(*map(request, (one, one, other))), "one alone shares with nobody"
    assert alike(*map(request, (one, other, one, other))), "small groups pay together"
    assert not alike(request(one), request(one[:5]), request(one[:5]), request(one)), "too short, whatever they are"
    assert not alike(
        request(one), request(one, extra_key="a"), request(one, extra_key="a"), request(one, extra_key="b")
    )
    assert alike(*(request(one, extra_key="a") for _ in range(3)))
    salted = [request(one, cache_salt=salt) for salt in ("one", "another", None)]
    assert alike(*salted) == (contract.line() == "0.5.17"), "which joins the salt to the key"
    assert alike(request(one, input_embeds=[0.5])) and alike(request(one, positional_embed_overrides={}))
    known = [request(one) for _ in range(3)]
    assert alike(*known) and alike(*known)
    known[0].origin_input_ids = [0]  # as SGLang does where it aborts one
    assert not alike(*known)


def test_ranks_that_divide_the_heads_select_by_prompts(make_world: Any) -> None:
    """They do not by a plan, which one of them may lack. Without a comparison there is no answer that is surely the
    others'."""
    world = make_world()
    world.make("gpu")
    steps, alike = world.steps, [request(list(range(8))) for _ in range(2)]
    assert not steps.shares_now(), "the server warms up"
    steps.beginnings = Beginnings(tokens=6, requests=2)
    passes.begin(Pass(Kind.DECODE))
    for reqs, expected in ((alike, True), (alike[:1], False)):
        steps.coming = reqs
        assert steps.shares_now() == expected
    passes.begin(Pass(Kind.DECODE, mixed=True))
    assert steps.shares_now(), "new tokens of one request share what is cached of it"
    passes.end()
    steps.coming = [None]
    with pytest.raises(AttributeError):
        steps.shares_now()
    steps.idle()
    assert steps.coming == () and not steps.shares_now()


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
