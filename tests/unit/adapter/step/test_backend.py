"""The composed backend, driven as SGLang drives it: steps without graphs, and steps captured once and replayed with
other batches, against attention over all keys in float64.

Bounds: float32 in another order of summation 1e-5; FP8 latent rows 5e-2, because tails are rounded in blocks of their
own, and queries too. A prefix that is left out, taken twice or merged wrongly moves results by more than 0.1.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_world import (
    DECODE,
    DR,
    EXTEND,
    HEADS,
    IDLE,
    KINDS,
    LAYER_IDS,
    MAX_REQUESTS,
    PAGE,
    RANK,
    Graph,
    World,
    groups_of,
    plan_pass,
)

from sglang_mla_ext.adapter.step.passes import NOTHING_SHARED, Kind, Pass, Way, passes
from sglang_mla_ext.adapter.step.steps import FIRST_PAUSE
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

BOUND = {False: 1e-5, True: 5e-2}
SYSTEM, OTHER = "abcdef", "wxyz"  # six pages: a chunk and a half; four: a chunk


def sharing(world: World) -> list[Any]:
    """Two groups, and one request alone."""
    texts = (SYSTEM + "1", 70), (OTHER, 1), (SYSTEM, 64), ("r", 30), (OTHER + "2", 5), (SYSTEM + "34", 3)
    return [world.start(*text) for text in texts]


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize(("kind", "grouped", "mode"), KINDS, ids=str)
def test_steps_without_graphs(make_world: Any, kind: str, grouped: bool, mode: str, fp8: bool) -> None:
    world = make_world(fp8=fp8)
    world.make(kind, grouped=grouped, mode=mode, prefix_dtype="bf16" if fp8 else "auto")
    requests = sharing(world)
    for whole in (False, True):
        assert world.eager_step(requests, whole) < BOUND[fp8]
        assert groups_of(world) == [(3, 6 * PAGE, mode), (2, 4 * PAGE, mode)]
    world.finish(requests.pop(0))
    requests.append(world.start(OTHER + "5", 2))
    assert world.eager_step(requests[::-1]) < BOUND[fp8]
    assert sorted(groups_of(world)) == [(2, 6 * PAGE, mode), (3, 4 * PAGE, mode)]
    assert world.eager_step(requests[3:4]) < BOUND[fp8] and groups_of(world) == [], "a request alone"
    before = list(world.stock.begun) if kind == "gpu" else []
    alone = [world.start(letter, 9) for letter in "pq"]
    assert world.eager_step(alone) < BOUND[fp8] and groups_of(world) == []
    if kind == "gpu":  # nothing of what is shared is launched, if the stock backend can read the pool
        assert world.stock.begun == [*before, *([] if fp8 else ["decode"])]
    assert not world.steps.counters.fallbacks


GRAPH_KINDS = [(False, "naive"), (True, "grouped_absorb"), (True, "naive")]


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize(("grouped", "mode"), GRAPH_KINDS, ids=str)
def test_graphs_follow_the_plans(make_world: Any, grouped: bool, mode: str, fp8: bool) -> None:
    """One graph of eight rows and one of a single row, captured before any request is there, as SGLang does."""
    world = make_world(fp8=fp8)
    world.make("gpu", grouped=grouped, mode=mode, prefix_dtype="bf16" if fp8 else "auto")
    world.backend.init_cuda_graph_state(8, 8)
    eight, one = Graph(world, 8), Graph(world, 1)
    requests = sharing(world)
    assert eight.step(requests) < BOUND[fp8]
    assert len(groups_of(world)) == 2
    assert one.step(requests[:1]) < BOUND[fp8], "a row for which no group can pay"
    alone = [world.start(letter, 9) for letter in "pq"]
    assert eight.step(alone) < BOUND[fp8] and groups_of(world) == [], "a graph with sharing, and an empty plan"
    assert eight.step([*alone, *requests[:3]]) < BOUND[fp8]
    assert eight.step(requests[:3]) < BOUND[fp8] and one.step(alone[:1]) < BOUND[fp8]
    world.steps.forget()
    assert eight.step(requests[::-1]) < BOUND[fp8]
    assert not world.steps.counters.fallbacks
    of_stock = {"graph state", "decode"} if not fp8 else set()
    assert set(world.stock.begun) == of_stock, "it decodes a single row where it can read the pool, and nothing else"


def test_a_graph_takes_other_rows_between(make_world: Any) -> None:
    """A change of rows alone writes the plan again, and an eager step of more rows than share leaves nothing behind."""
    world = make_world()
    world.make("gpu")
    requests = sharing(world)
    four, eight = Graph(world, 4), Graph(world, 8)
    for _ in range(2):
        assert four.step(requests[:4]) < BOUND[False]
        assert eight.step(requests) < BOUND[False]
        assert world.eager_step(requests[:5]) < BOUND[False]
        assert world.eager_step(requests[3:4]) < BOUND[False]


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_more_rows_than_it_has_room_for(make_world: Any, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """They decode by plain absorb; with an FP8 pool by our kernel, in parts of as many rows as it takes at once."""
    from sglang_mla_ext.adapter.build import assemble, budget

    for module in (budget, assemble):
        monkeypatch.setattr(module, "MAX_ROWS", 3)
    world = make_world(fp8=fp8)
    world.make("gpu", prefix_dtype="bf16" if fp8 else "auto")
    requests = sharing(world)
    for _ in range(2):
        assert world.eager_step(requests[:3]) < BOUND[fp8] and len(groups_of(world)) == 1
        assert world.eager_step(requests) < BOUND[fp8] and passes.now.way is not Way.SHARED
    assert dict(world.steps.counters.fallbacks) == {"more_requests": 2}


def test_batches_padded_beyond_the_pool_of_requests(make_world: Any) -> None:
    """As SGLang pads them for several ranks of attention; with an FP8 pool they are ours."""
    world = make_world(fp8=True)
    world.make("gpu", prefix_dtype="bf16")
    requests, larger = sharing(world), Graph(world, MAX_REQUESTS + 1)
    for _ in range(2):
        assert larger.step(requests) < BOUND[True] and passes.now.way is not Way.SHARED
    assert world.stock.begun == []


def test_other_steps_are_the_stock_backends(make_world: Any) -> None:
    world = make_world()
    backend = world.make("gpu")
    requests = sharing(world)
    world.eager_step(requests)
    for mode in (EXTEND, IDLE):
        batch = world.batch(requests, mode)
        backend.init_forward_metadata(batch)
        backend.init_forward_metadata_out_graph(batch)
        assert passes.now.way is Way.STOCK and not passes.now.takes_query
    assert world.stock.begun == ["extend", "extend", "idle", "idle"]
    q, k = torch.randn(2, HEADS, RANK), torch.randn(2, 1, RANK)
    q_rope, k_rope = torch.randn(2, HEADS, DR), torch.randn(2, 1, DR)
    batch = SimpleNamespace(forward_mode=EXTEND)
    whole = backend.forward_extend(q, k, k, "layer", batch, True, q_rope=q_rope, k_rope=k_rope)
    assert torch.equal(whole[0], torch.cat([q, q_rope], dim=-1)) and torch.equal(
        whole[1], torch.cat([k, k_rope], dim=-1)
    )
    assert whole[2] is k and whole[3:] == ("layer", batch, True)
    assert backend.forward_extend(q, k, k, "layer", batch)[0] is q


@pytest.mark.parametrize(("planned_as", "rows"), [(None, 0), (DECODE, 3), (IDLE, 0)])
def test_rows_that_sglang_pads_to_prefill_are_counted(make_world: Any, planned_as: Any, rows: int) -> None:
    """As it does to a data-parallel rank that decodes while another one prefills."""
    world = make_world()
    backend = world.make("gpu")
    batch = world.batch(sharing(world)[:3], EXTEND)
    batch._original_forward_mode = planned_as
    backend.init_forward_metadata(batch)
    assert world.steps.counters.rows_as_prefill == rows
    assert world.stock.begun == ["extend"]


@pytest.mark.parametrize("decoding", [2, 0])
def test_rows_of_running_requests_in_a_prefill_are_counted(make_world: Any, decoding: int) -> None:
    """Count rows of a mixed batch that another rank refused, and of a decode step that SGLang runs as an extend."""
    world = make_world()
    backend = world.make("gpu")
    batch = world.batch(sharing(world)[:3], EXTEND)
    batch._original_forward_mode = None
    passes.begin(Pass(Kind.PREFILL, Rows.of([5, 1, 1]), decoding=decoding, absorbs=decoding > 0))
    backend.init_forward_metadata(batch)
    assert world.steps.counters.rows_as_prefill == decoding


def test_sglang_reads_the_stock_backends_attributes(make_world: Any) -> None:
    world = make_world()
    backend = world.make("gpu")
    assert backend.token_to_kv_pool is world.pool and backend.req_to_token_pool is world.stock.req_to_token_pool
    assert backend.needs_cpu_seq_lens is False and backend.get_cuda_graph_seq_len_fill_value() == 1
    assert not hasattr(backend, "init_mha_chunk_metadata"), "as this stock backend has none"
    world.stock.init_mha_chunk_metadata = len
    assert backend.init_mha_chunk_metadata is len
    backend.forward_metadata = "metadata"
    assert world.stock.forward_metadata == backend.forward_metadata == "metadata"
    with pytest.raises(AttributeError, match="no attribute 'prepare_prefill_qkv'"):
        backend.prepare_prefill_qkv  # noqa: B018


def test_a_layer_that_skips_its_output_projection_is_noticed(make_world: Any) -> None:
    world = make_world()
    backend = world.make("gpu")
    requests = sharing(world)
    world.eager_step(requests)
    batch, inputs = world.batch(requests), world.inputs(len(requests))
    world.layers[0].o_proj = torch.nn.Identity()  # without the hook
    with pytest.raises(RuntimeError, match="its shared part is lost"):
        world.forward(batch, inputs)
    plan_pass(world.steps, DECODE, requests, requests)
    now = passes.now
    assert now.tail_lse is None and now.q_nope is None and not now.takes_query, "a new pass begins afresh"
    assert backend._layer_index == {layer_id: index for index, layer_id in enumerate(LAYER_IDS)}


def test_naive_and_grouped_segments_in_one_step(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    world.make("gpu", grouped=True)
    eight, requests = Graph(world, 8), sharing(world)
    for _ in range(2):
        eight.step(requests)
    plan = world.steps._prefixes.plan_decode(requests)
    first, second = plan.segments
    both = Plan(plan.requests, (first, replace(second, mode=Mode.GROUPED_ABSORB, chunks=())))
    monkeypatch.setattr(world.steps._prefixes, "plan_decode", lambda reqs: both)
    assert eight.step(requests) < BOUND[False] and world.eager_step(requests) < BOUND[False]
    assert passes.now.plan is both and passes.now.way is Way.SHARED


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("mode", ["naive", "grouped_absorb"])
def test_three_levels(make_world: Any, kind: str, mode: str) -> None:
    """A prompt for all, a document for three of them, a conversation for two of these; in graphs and without, while
    requests leave each level, and with a new one that parts from the others inside a segment."""
    world = make_world()
    world.make(kind, grouped=mode == "grouped_absorb", mode=mode)
    levels = [("abcd" + "efgh" + "ijkl" + "1", 3), ("abcd" + "efgh" + "ijkl" + "2", 40), ("abcd" + "efgh" + "3", 1)]
    requests = [world.start(*each) for each in [*levels, ("abcd" + "4", 65), ("abcd" + "5", 2), ("else", 9)]]
    graph = Graph(world, 8) if kind == "gpu" else None

    def groups_of(*rows: int) -> list[tuple[int, int]]:
        """Rows and end, in pages, of each group of a step with these requests."""
        batch = [requests[row] for row in rows]
        for _ in range(2):
            assert world.eager_step(batch) < BOUND[False]
            assert graph is None or graph.step(batch) < BOUND[False]
        plan = world.steps._prefixes.plan
        assert {segment.mode.value for segment in plan.segments} <= {mode}
        return [(len(segment.rows), segment.end // PAGE) for segment in plan.segments]

    assert groups_of(0, 1, 2, 3, 4, 5) == [(5, 4), (3, 8), (2, 12)]
    assert groups_of(5, 4, 2, 1, 0) == [(4, 4), (3, 8), (2, 12)]
    assert groups_of(1, 3, 4, 5) == [(3, 4)]
    requests.append(world.start("abcd" + "ef" + "6", 5))
    assert groups_of(0, 1, 2, 6) == [(4, 4), (3, 8), (2, 12)]
    world.finish(*requests)
    assert world.steps.counters.fallbacks == {}


def test_a_capture_ignores_the_plan(make_world: Any) -> None:
    """A graph may be captured while requests are running; what it was captured with must not stay in it."""
    world = make_world()
    backend = world.make("gpu")
    requests = sharing(world)
    for _ in range(2):
        world.eager_step(requests)
    assert passes.now.plan.segments
    backend.init_forward_metadata_out_graph(world.batch(requests), in_capture=True)
    assert passes.now.way is Way.SHARED and backend.preparation._written[0] is NOTHING_SHARED
    assert not world.latent._starts.on_device.any()


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize(("kind", "grouped", "mode"), KINDS, ids=str)
def test_requests_of_any_number_of_rows(make_world: Any, kind: str, grouped: bool, mode: str, fp8: bool) -> None:
    """The last tokens of a request, each a row of its own that sees those before it; a row of padding behind them."""
    world = make_world(fp8=fp8)
    world.make(kind, grouped=grouped, mode=mode, prefix_dtype="bf16" if fp8 else "auto")
    requests, padding, counts = sharing(world), world.start("q", 2), [3, 1, 2, 1, 0, 1]
    for _ in range(2):
        world.eager_step(requests)
    written = []
    for rows in (counts, [1, 0, 1, 2, 1, 3], counts):
        of_rows = [request for request, count in zip(requests, rows, strict=True) for _ in range(count)]
        batch = world.batch([*of_rows, padding])
        later = [left for count in rows for left in reversed(range(count))] + [0]
        batch.seq_lens = batch.seq_lens - torch.tensor(later)
        batch.out_cache_loc = world.req_to_token[batch.req_pool_indices, batch.seq_lens - 1].long()
        plan_pass(world.steps, DECODE, requests, requests)
        passes.now.rows = Rows.of(rows)
        inputs = world.inputs(batch.batch_size)
        world.backend.init_forward_metadata(batch)
        assert passes.now.way is Way.SHARED
        assert world.error(world.forward(batch, inputs), batch, inputs) < BOUND[fp8]
        written.append(world.backend.preparation._written)
    assert written[0] == written[2] != written[1] and written[0][1].total == 9
    assert not world.steps.counters.fallbacks


def test_a_batch_that_was_not_planned_shares_nothing(make_world: Any) -> None:
    """As one with fewer requests than the scheduler told of."""
    world = make_world()
    world.make("gpu")
    requests = sharing(world)
    for _ in range(2):
        world.eager_step(requests)
    plan_pass(world.steps, DECODE, requests, requests)
    assert passes.now.plan.segments
    batch, inputs = world.batch(requests[:2]), world.inputs(2)
    world.backend.init_forward_metadata(batch)
    assert not passes.now.plan.segments and passes.now.way is Way.STOCK
    assert world.error(world.forward(batch, inputs), batch, inputs) < BOUND[False]


def test_what_ranks_agreed_on_is_written_whatever_fails(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank without requests, too. Where it cannot be, the pass ends: the other ranks count on this one."""
    world = make_world()
    backend = world.make("gpu")
    sharded = ShardedPlan(Plan(0), (), 4, (Segment((1, 2), 0, 256, Mode.NAIVE, (0,)),), ((b"",),))
    written: list[Any] = []
    monkeypatch.setattr(backend._shared, "plan", lambda *args: written.append(args))
    passes.now = Pass(Kind.OTHER, sharded=sharded)
    world.steps.fail(Fallback.EXPAND, MemoryError())
    for _ in range(2):
        backend.init_forward_metadata_out_graph(world.batch([], padded=4))
        assert passes.now.way is Way.SHARED and passes.now.sharded is sharded and passes.now.takes_query
    assert written == [(sharded.segments, 4)]
    with pytest.raises(RuntimeError, match="agreed on 4 rows of each, and the graph has 8"):
        backend.init_forward_metadata_out_graph(world.batch([], padded=8))
    backend.init_forward_metadata_out_graph(world.batch([], padded=4), in_capture=True)
    assert written[-1] == ((), 4)
    mine = Plan(2, (Segment((0, 1), 0, 256, Mode.NAIVE, (0,)),))
    passes.now = Pass(Kind.OTHER, sharded=replace(sharded, mine=mine))
    with pytest.raises(RuntimeError, match="another batch"):
        backend.init_forward_metadata_out_graph(world.batch([], padded=4))
    passes.now = Pass(Kind.OTHER, sharded=replace(sharded))
    monkeypatch.setattr(backend._shared, "plan", None)
    with pytest.raises(TypeError):
        backend.init_forward_metadata_out_graph(world.batch([], padded=4))


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_be_written_leaves_plain_absorb(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out: the step goes on with an empty plan, in its graph too, and so do those after it."""
    world = make_world()
    world.make("gpu")
    eight, requests = Graph(world, 8), sharing(world)
    assert eight.step(requests) < BOUND[False]
    shared, written = world.backend._shared, []
    whole = shared.plan

    def plan(segments: Any, rows: int) -> None:
        if segments:
            raise MemoryError("no")
        written.append(rows)
        whole(segments, rows)

    monkeypatch.setattr(shared, "plan", plan)
    world.finish(requests.pop())  # another plan
    for _ in range(2):
        assert eight.step(requests) < BOUND[False]
        assert groups_of(world) == []
    assert written == [8]
    assert dict(world.steps.counters.fallbacks) == {"write_plan": 1}
    assert world.steps._next_pause == 2 * FIRST_PAUSE


@pytest.mark.parametrize("fp8", [False, True])
def test_preparing_a_step_fails_once(make_world: Any, monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """Nothing is shared in it, in a graph and without; and neither are the steps after it, for a while."""
    monkeypatch.setattr("sglang_mla_ext.adapter.step.steps.FIRST_PAUSE", 2)
    world = make_world(fp8=fp8)
    world.make("gpu", prefix_dtype="bf16" if fp8 else "auto")
    requests, eight = sharing(world), Graph(world, 8)
    for _ in range(2):
        eight.step(requests)
    assert groups_of(world)
    begin, failures = world.latent.begin_step, [MemoryError(), MemoryError()]

    def begin_step(batch: Any, **how: Any) -> None:
        if failures and how["sharing"]:
            raise failures.pop()
        begin(batch, **how)

    monkeypatch.setattr(world.latent, "begin_step", begin_step)
    failures.pop()
    assert eight.step(requests) < BOUND[fp8]
    assert dict(world.steps.counters.fallbacks) == {"prepare_step": 1}
    while not passes.now.plan.segments:
        assert eight.step(requests) < BOUND[fp8]
    failures.append(MemoryError())
    assert world.eager_step(requests) < BOUND[fp8]
    assert dict(world.steps.counters.fallbacks) == {"prepare_step": 2}
    while not passes.now.plan.segments:
        assert world.eager_step(requests) < BOUND[fp8]


def test_a_plan_that_cannot_be_written_for_good_is_not_needed_without_a_graph(
    make_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.make("gpu")
    requests = sharing(world)

    def plan(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(world.latent, "plan", plan)
    for _ in range(3):  # prefixes are expanded, and then planned with
        assert world.eager_step(requests) < BOUND[False]
    assert dict(world.steps.counters.fallbacks) == {"write_plan": 1}


def test_what_a_failure_left_on_the_device_is_written_over(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph in which nothing is shared, as in its capture; a step without one had begun to write a plan."""
    world = make_world()
    world.make("gpu")
    requests, eight = sharing(world), Graph(world, 8)
    whole, failures = world.latent.plan, [MemoryError()]

    def plan(segments: Any, tail_starts: Any, units: int, tail_tokens: int) -> None:
        if failures and any(tail_starts):
            raise failures.pop()
        whole(segments, tail_starts, units, tail_tokens)

    monkeypatch.setattr(world.latent, "plan", plan)
    for _ in range(3):  # prefixes are expanded, and then planned with
        assert world.eager_step(requests) < BOUND[False]
    assert not failures
    assert eight.step(requests) < BOUND[False]
    assert groups_of(world) == []


def test_the_plan_is_written_once(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world()
    world.make("gpu")
    requests = sharing(world)
    written: list[tuple[int, int]] = []
    whole = world.latent.plan

    def plan(segments: Any, tail_starts: Any, units: int, tail_tokens: int) -> None:
        written.append((sum(start > 0 for start in tail_starts), units))
        whole(segments, tail_starts, units, tail_tokens)

    eight = Graph(world, 8)
    for _ in range(2):  # prefixes are expanded, and then planned with
        eight.step(requests)
    monkeypatch.setattr(world.latent, "plan", plan)
    for _ in range(3):
        eight.step(requests)
    assert written == []
    world.eager_step(requests)
    eight.step(requests[:2])
    assert written == [(5, 6), (0, 8)]


def test_a_flushed_tree_is_not_kept(make_world: Any) -> None:
    """Plans on their way to the device and on it hold nothing of the tree."""
    import gc
    import weakref

    world = make_world()
    world.make("gpu")
    requests = sharing(world)
    world.eager_step(requests)
    nodes = list(map(weakref.ref, world.steps._prefixes.source.tree.hold(requests)))
    assert len(nodes) == len(requests)
    world.finish(*requests)
    world.steps.forget()
    world.tree.cache.reset()
    del requests
    gc.collect()
    assert not any(node() for node in nodes)


def test_a_query_is_kept_for_decode_alone(make_world: Any) -> None:
    """With another backend for prefill, ours is not told of a prefill step but by the scheduler."""
    world = make_world()
    world.make("gpu")
    requests = sharing(world)
    world.eager_step(requests)
    plan_pass(world.steps, EXTEND, requests, [], [0] * 6, [1] * 6)
    from sglang_mla_ext.adapter.step.layer import after_split_q

    after_split_q((torch.zeros(6, HEADS, 16), None, None), world.layers[0])
    assert passes.now.q_nope is None


def test_a_kept_query_is_scaled_as_the_absorbed_one_is(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model scales queries by their positions, as Mistral Large 3."""
    world = make_world()
    backend = world.make("gpu")
    backend.init_forward_metadata_out_graph(world.batch(sharing(world)))
    from sglang_mla_ext.adapter.step import layer

    scaling = torch.tensor([1.0, 1.5, 2.0]).view(3, 1, 1)
    monkeypatch.setattr(passes.now, "query_scaling", None)
    monkeypatch.setattr(passes.now, "takes_query", True)
    layer.after_query_scaling(scaling)
    query = torch.ones(3, HEADS, 16, dtype=torch.bfloat16)
    layer.after_split_q((query, None, None), world.layers[0])
    assert passes.now.q_nope.dtype == query.dtype and torch.equal(passes.now.q_nope, (query * scaling).bfloat16())
    passes.end()


@pytest.mark.parametrize("rows", [1, MAX_REQUESTS + 1])
def test_rows_outside_of_what_graphs_have_shared_attention_for(make_world: Any, rows: int) -> None:
    world = make_world()
    backend = world.make("gpu")
    requests = sharing(world)
    world.eager_step(requests)
    batch = world.batch(requests[:1], padded=rows)
    backend.init_forward_metadata_out_graph(batch)
    assert passes.now.way is Way.STOCK and world.stock.begun == ["decode"]
