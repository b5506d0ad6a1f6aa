"""The composed backend in a server with speculative decoding: steps that verify drafts, without graphs and replayed,
against attention over each row's keys in float64: those of its request, the drafts before it, and its own.

Bounds as in test_backend.py, but FP8 latent rows 8e-2: of so many more rows the worst is a worse one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_world import DECODE, EXTEND, HEADS, IDLE, KINDS, MAX_REQUESTS, PAGE, Graph, World, groups_of

from sglang_mla_ext.adapter.build import assemble, budget
from sglang_mla_ext.adapter.step.passes import NOTHING_SHARED, Way, passes

BOUND = {False: 1e-5, True: 8e-2}
SYSTEM, OTHER = "abcdef", "wxyz"  # six pages: a chunk and a half; four: a chunk


def sharing(world: World) -> list[Any]:
    """Two groups and one request alone. Drafts of the first and the third end, or begin, a page."""
    texts = (SYSTEM + "1", 62), (OTHER, 1), (SYSTEM, 64), ("r", 30), (OTHER + "2", 5), (SYSTEM + "34", 3)
    return [world.start(*text) for text in texts]


@pytest.mark.parametrize(("queries", "fp8"), [(2, False), (4, True)], ids=["float32-2", "fp8-4"])
@pytest.mark.parametrize(("kind", "grouped", "mode"), KINDS, ids=str)
def test_steps_without_graphs(make_world: Any, kind: str, grouped: bool, mode: str, queries: int, fp8: bool) -> None:
    """While requests accept nothing, some, or all of their drafts, and one of them leaves."""
    world = make_world(fp8=fp8, queries=queries)
    world.make(kind, grouped=grouped, mode=mode, prefix_dtype="bf16" if fp8 else "auto")
    requests = sharing(world)
    for whole, accepted in ((False, range(6)), (True, [queries] * 6), (False, [1] * 6)):
        assert world.eager_step(requests, whole) < BOUND[fp8]
        assert groups_of(world) == [(3, 6 * PAGE, mode), (2, 4 * PAGE, mode)]
        world.accept(requests, [min(count, queries) for count in accepted])
    world.finish(requests.pop(0))
    requests.append(world.start(OTHER + "5", 2))
    assert world.eager_step(requests[::-1]) < BOUND[fp8]
    assert sorted(groups_of(world)) == [(2, 6 * PAGE, mode), (3, 4 * PAGE, mode)]
    assert not world.steps.counters.fallbacks
    assert world.steps.counters.steps_verify == 4
    if kind == "gpu" or fp8:  # SGLang's torch backend verifies nothing
        assert world.eager_step(requests[3:4]) < BOUND[fp8] and groups_of(world) == [], "a request alone"


def test_expanded_prefixes_in_fp8(make_world: Any) -> None:
    """Their keys are rounded, and so are softmax weights."""
    world = make_world(queries=4)
    world.make("gpu", prefix_dtype="fp8_e4m3")
    requests = sharing(world)
    for _ in range(2):
        assert 1e-5 < world.eager_step(requests) < 0.1
        world.accept(requests, [2] * 6)


GRAPH_KINDS = [(False, "naive"), (True, "grouped_absorb"), (True, "naive")]


@pytest.mark.parametrize(("queries", "fp8"), [(2, True), (3, False)], ids=["fp8-2", "float32-3"])
@pytest.mark.parametrize(("grouped", "mode"), GRAPH_KINDS)
def test_graphs_follow_the_plans(make_world: Any, grouped: bool, mode: str, queries: int, fp8: bool) -> None:
    """One graph of eight requests and one of a single one, captured before any is there, as SGLang does."""
    world = make_world(fp8=fp8, queries=queries)
    world.make("gpu", grouped=grouped, mode=mode, prefix_dtype="bf16" if fp8 else "auto")
    world.backend.init_cuda_graph_state(8, 8 * queries)
    eight, one = Graph(world, 8), Graph(world, 1)
    requests = sharing(world)
    for accepted in (0, 1, queries):
        assert eight.step(requests) < BOUND[fp8]
        assert len(groups_of(world)) == 2
        world.accept(requests, [accepted] * 6)
    assert one.step(requests[:1]) < BOUND[fp8], "a request for which no group can pay"
    alone = [world.start(letter, 9) for letter in "pq"]
    assert eight.step(alone) < BOUND[fp8] and groups_of(world) == [], "a graph with sharing, and an empty plan"
    assert eight.step([*alone, *requests[:3]]) < BOUND[fp8]
    world.finish(requests.pop(1))
    assert eight.step(requests[:3]) < BOUND[fp8] and one.step(alone[:1]) < BOUND[fp8]
    world.steps.forget()
    assert eight.step(requests[::-1]) < BOUND[fp8]
    assert not world.steps.counters.fallbacks
    # A single request is the stock backend's where it can read the pool. Its mask is SGLang's in any case.
    assert set(world.stock.begun) == {"graph state"} | (set() if fp8 else {"verify"})


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("mode", ["naive", "grouped_absorb"])
def test_three_levels(make_world: Any, kind: str, mode: str) -> None:
    """A prompt for all, a document for three of them, a conversation for two of these."""
    world = make_world(queries=3)
    world.make(kind, grouped=mode == "grouped_absorb", mode=mode)
    levels = [("abcd" + "efgh" + "ijkl" + "1", 3), ("abcd" + "efgh" + "ijkl" + "2", 40), ("abcd" + "efgh" + "3", 1)]
    requests = [world.start(*each) for each in [*levels, ("abcd" + "4", 65), ("abcd" + "5", 2), ("else", 9)]]
    graph = Graph(world, 8) if kind == "gpu" else None
    for accepted in (3, 0, 2):
        assert world.eager_step(requests) < BOUND[False]
        assert graph is None or graph.step(requests) < BOUND[False]
        found = [(len(each.rows), each.end // PAGE) for each in world.steps._prefixes.plan.segments]
        assert found == [(5, 4), (3, 8), (2, 12)]
        world.accept(requests, [accepted] * 6)
    assert [len(segment.rows) for segment in passes.now.rows.by_row(passes.now.plan.segments)] == [15, 9, 6]
    assert not world.steps.counters.fallbacks


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_more_rows_than_there_is_room_for(make_world: Any, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """What has room is rows, of whole requests. More of them verify by plain absorb, over an FP8 pool in parts."""
    for module in (budget, assemble):
        monkeypatch.setattr(module, "MAX_ROWS", 10)
    world = make_world(fp8=fp8, queries=3)
    world.make("gpu", prefix_dtype="bf16" if fp8 else "auto")
    requests = sharing(world)
    for _ in range(2):
        assert world.eager_step(requests[:3]) < BOUND[fp8] and len(groups_of(world)) == 1
        assert world.eager_step(requests) < BOUND[fp8] and passes.now.way is not Way.SHARED
    assert dict(world.steps.counters.fallbacks) == {"more_requests": 2}


def test_batches_padded_beyond_the_pool_of_requests(make_world: Any) -> None:
    """As SGLang pads them for several ranks of attention; with an FP8 pool they are ours."""
    world = make_world(fp8=True, queries=2)
    world.make("gpu", prefix_dtype="bf16")
    requests, larger = sharing(world), Graph(world, MAX_REQUESTS + 1)
    for _ in range(2):
        assert larger.step(requests) < BOUND[True] and passes.now.way is not Way.SHARED
    assert world.stock.begun == []


def test_a_decode_step_between(make_world: Any) -> None:
    """SGLang asks for none; it is the stock backend's where that can read the pool, and otherwise refused."""
    world = make_world(queries=3)
    world.make("gpu")
    requests = sharing(world)
    for whole in (False, True):
        assert world.eager_step(requests) < BOUND[False]
        assert world.eager_step(requests, whole, DECODE) < BOUND[False]
        assert passes.now.way is Way.STOCK and not passes.now.takes_query
    assert world.eager_step(requests) < BOUND[False] and len(groups_of(world)) == 2
    over_fp8 = make_world(fp8=True, queries=3)
    over_fp8.make("gpu", prefix_dtype="bf16")
    with pytest.raises(RuntimeError, match="decode step of a server that verifies drafts"):
        over_fp8.eager_step(sharing(over_fp8), False, DECODE)


def test_other_steps_are_the_stock_backends(make_world: Any) -> None:
    world = make_world(queries=2)
    backend = world.make("gpu")
    requests = sharing(world)
    world.eager_step(requests)
    for mode in (EXTEND, IDLE):
        batch = world.batch(requests, mode)
        backend.init_forward_metadata(batch)
        backend.init_forward_metadata_out_graph(batch)
        assert passes.now.way is Way.STOCK and not passes.now.takes_query
    assert world.stock.begun == ["extend", "extend", "idle", "idle"]


def test_a_capture_ignores_the_plan(make_world: Any) -> None:
    world = make_world(queries=2)
    backend = world.make("gpu")
    requests = sharing(world)
    for _ in range(2):
        world.eager_step(requests)
    assert passes.now.plan.segments
    backend.init_forward_metadata_out_graph(world.batch(requests), in_capture=True)
    assert passes.now.way is Way.SHARED and backend.preparation._written[0] is NOTHING_SHARED


@pytest.mark.parametrize(
    ("requests", "queries", "rows"), [(48, 4, 192), (256, 4, 1024), (300, 4, 1024), (2000, 1, 1024), (500, 3, 1023)]
)
def test_rows_of_a_step_are_those_of_whole_requests(requests: int, queries: int, rows: int) -> None:
    """And as many new tokens beside them, or in steps of their own, as fill whole units."""
    assert budget.max_rows(requests, queries) == rows
    assert budget.max_rows(requests, queries, 130) == rows + 130 // queries * queries
    assert budget.max_rows(requests, queries, 5000) == rows + 1024 // queries * queries
    assert budget.max_rows(requests, queries, 130, alone=True) == rows
    assert budget.max_rows(8, queries, 130, alone=True) == 130 // queries * queries


def test_tails_are_scheduled_for_all_query_tokens(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashMLA's schedule depends on the rows of a request, and on lengths that the drafts are counted in."""
    world = make_world(queries=4)
    world.make("gpu")
    scheduled: list[tuple[Any, int]] = []
    schedule = world.latent._schedule

    def recorded(lens: torch.Tensor) -> Any:
        made = schedule(lens)
        scheduled.append((lens.tolist(), int(made[0][0, 1])))
        return made

    requests = sharing(world)
    world.eager_step(requests)
    monkeypatch.setattr(world.latent, "_schedule", recorded)
    world.eager_step(requests)
    starts = passes.now.plan.prefix_lens
    lens = [int(world.lens[request.index]) - start + 4 for request, start in zip(requests, starts, strict=True)]
    assert scheduled == [(lens, 4 * HEADS)]
