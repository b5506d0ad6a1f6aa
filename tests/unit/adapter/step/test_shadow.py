"""The shadow check: in steps without graphs and in replayed ones it finds nothing where all is well; what is wrong in a
segment it finds, and turns sharing off there and nowhere else."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_world import HEADS, KINDS, LAYER_IDS, PAGE, Graph, World, groups_of

from sglang_mla_ext.adapter.build import watching
from sglang_mla_ext.adapter.step import shadow as shadow_module
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.adapter.step.shadow import BOUND, WIDE_BOUND, CheckedRows, Finding, ShadowCheck, row_errors
from sglang_mla_ext.adapter.step.steps import FIRST_PAUSE
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.options import HybridMLAOptions, OptionError
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

EXACT = {False: 1e-5, True: 8e-2}
SYSTEM, OTHER = "abcdef", "wxyz"
GROUPS = [(3, 6 * PAGE), (2, 4 * PAGE)]


def sharing(world: World) -> list[Any]:
    """Two groups, and one request alone."""
    texts = (SYSTEM + "1", 70), (OTHER, 1), (SYSTEM, 64), ("r", 30), (OTHER + "2", 5), (SYSTEM + "34", 3)
    return [world.start(*text) for text in texts]


def groups(world: World) -> list[tuple[int, int]]:
    return [(requests, tokens) for requests, tokens, _ in groups_of(world)]


@pytest.mark.parametrize(("queries", "fp8"), [(1, True), (3, False)], ids=["fp8", "float32-verify"])
@pytest.mark.parametrize(("kind", "grouped", "mode"), KINDS, ids=str)
def test_nothing_is_found_where_all_is_well(
    make_world: Any, kind: str, grouped: bool, mode: str, queries: int, fp8: bool
) -> None:
    world = make_world(fp8=fp8, queries=queries)
    options = dict(mode=mode, prefix_dtype="bf16" if fp8 else "auto", verify_interval=1)
    if mode == "grouped_absorb":
        options["prefix_memory_gb"] = 0  # nothing is merged behind the latent space
    world.make(kind, grouped=grouped, **options)
    requests = sharing(world)
    counters = world.steps.counters
    for step in range(6):
        assert world.eager_step(requests) < EXACT[fp8]
        assert counters.shadow_checks == step, "what a step was is known before the next one"
    errors = world.steps.shadow.pop_errors()
    assert len(errors) == 5 * 6 * queries and 0 < max(errors) < EXACT[fp8]
    assert counters.shadow_failures == 0 and not counters.fallbacks and groups(world) == GROUPS
    assert world.steps.shadow.pop_errors() == []


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize(("grouped", "mode"), [(False, "naive"), (True, "grouped_absorb"), (True, "naive")], ids=str)
def test_a_graph_is_checked_as_it_is(make_world: Any, grouped: bool, mode: str, fp8: bool) -> None:
    """It was captured when nobody looked, is replayed with other batches, and is right after the check too."""
    world = make_world(fp8=fp8)
    world.make("gpu", grouped=grouped, mode=mode, prefix_dtype="bf16" if fp8 else "auto", verify_interval=2)
    eight, requests = Graph(world, 8), sharing(world)
    for step in range(8):
        batch = requests if step % 3 else requests[::-1][:5]
        assert eight.step(batch) < EXACT[fp8]
    assert world.steps.counters.shadow_checks == 3 and world.steps.counters.shadow_failures == 0
    assert max(world.steps.shadow.pop_errors()) < EXACT[fp8]
    assert not world.steps.counters.fallbacks


def test_layers_and_requests_take_turns(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_module, "ROWS", 2)
    world = make_world()
    world.make("gpu", verify_interval=1)
    requests, looks = sharing(world), []
    end_step = world.steps.shadow.end_step
    world.steps.shadow.end_step = lambda batch: looks.append(world.steps.shadow._checked) or end_step(batch)
    for _ in range(8):
        world.eager_step(requests[1:])
    assert [look.layer for look in looks] == [0, 1] * 4
    assert [look.first for look in looks] == [0, 0, 3, 3] * 2, "requests 0, 1, 3 and 4 of these share"
    assert [look.count for look in looks] == [2, 2, 2, 2] * 2


def test_a_step_that_shares_nothing_is_not_checked(make_world: Any) -> None:
    world = make_world()
    world.make("gpu", verify_interval=3)
    requests = sharing(world)
    for _ in range(5):
        world.eager_step(requests[3:4])
    assert world.steps.counters.shadow_checks == 0
    world.eager_step(requests)  # is checked, being the first one that can be
    for _ in range(3):
        world.eager_step(requests)
        assert world.steps.counters.shadow_checks == 1
    world.eager_step(requests)
    assert world.steps.counters.shadow_checks == 2


@pytest.mark.parametrize("damage", ["values", "keys", "nan"])
@pytest.mark.parametrize("in_graph", [False, True])
def test_what_is_wrong_is_found_and_no_longer_shared(
    make_world: Any, caplog: pytest.LogCaptureFixture, in_graph: bool, damage: str
) -> None:
    world = make_world()
    world.make("gpu", verify_interval=1)
    step = Graph(world, 8).step if in_graph else world.eager_step
    requests = sharing(world)
    step(requests)
    buffers = world.backend._shared._buffers
    chunk = world.steps._prefixes.plan.segments[0].chunks[0]
    part = {"values": buffers.v_t, "keys": buffers.k_nope, "nan": buffers.v_t}[damage]
    for layer in range(len(LAYER_IDS)):
        part[layer, chunk] = float("nan") if damage == "nan" else torch.randn_like(part[layer, chunk])
    damaged = groups(world)[0] if world.steps._prefixes.plan.segments[0].rows == (0, 2, 5) else groups(world)[1]
    assert not step(requests) < 0.1
    with caplog.at_level(logging.WARNING):
        assert step(requests) < EXACT[False], "as soon as it is known"
    left = [group for group in GROUPS if group != damaged]
    assert groups(world) == left
    counters = world.steps.counters
    assert counters.shadow_failures == 1 and counters.shadow_checks == 2
    (message,) = [record.getMessage() for record in caplog.records if "shadow check" in record.message]
    assert f"tokens [0, {damaged[1]}) of {damaged[0]} requests (naive)" in message and "layer 5" in message
    for _ in range(4):
        assert step(requests) < EXACT[False] and groups(world) == left
    requests.append(world.start(SYSTEM if damaged == GROUPS[0] else OTHER, 2))
    assert step(requests) < EXACT[False] and groups(world) == left, "nor by those that come later"
    assert counters.shadow_failures == 1
    world.steps.forget()  # flushed
    for _ in range(2):
        assert step(requests) < EXACT[False]
    assert len(groups(world)) == 2


@pytest.mark.parametrize(("kind", "grouped", "mode"), KINDS, ids=str)
def test_rows_of_a_mixed_step_are_checked_at_their_own_lengths(
    make_world: Any, kind: str, grouped: bool, mode: str
) -> None:
    """One request alone shares what is expanded of it among its rows."""
    world = make_world()
    options = {"prefix_memory_gb": 0} if mode == "grouped_absorb" else {}
    world.make(kind, grouped=grouped, mode=mode, verify_interval=1, mixed_tokens=64, **options)
    requests, counters = sharing(world), world.steps.counters
    world.eager_step(requests)  # expands
    for some, counts in ((slice(6), [3, 1, 2, 4, 1, 3]), (slice(1), [5]), (slice(0, 3, 2), [1, 7])) * 2:
        assert world.mixed_step(requests[some], counts) < EXACT[False]
    world.eager_step(requests)
    assert counters.shadow_checks == 7 and counters.shadow_failures == 0 and not counters.fallbacks
    assert len(world.steps.shadow.pop_errors()) == 6 + 2 * (14 + 5 + 8)
    assert groups(world) == GROUPS


def test_what_is_wrong_in_a_mixed_step_is_found(make_world: Any) -> None:
    world = make_world()
    world.make("gpu", verify_interval=1, mixed_tokens=64)
    requests = sharing(world)
    world.eager_step(requests)
    buffers = world.backend._shared._buffers
    chunk = world.steps._prefixes.plan.segments[0].chunks[0]
    for layer in range(len(LAYER_IDS)):
        buffers.v_t[layer, chunk] = torch.randn_like(buffers.v_t[layer, chunk])
    wrong = world.steps._prefixes.plan.segments[0].rows
    alone = requests[wrong[-1]]
    assert not world.mixed_step([alone], [3]) < 0.1
    assert world.mixed_step([alone], [3]) < EXACT[False] and not passes.now.plan.segments
    assert world.steps.counters.shadow_failures == 1
    assert world.mixed_step(requests, [1, 1, 2, 2, 2, 2]) < EXACT[False]
    shared = [(len(each.rows), each.end) for each in passes.now.plan.segments if len(each.rows) > 1]
    assert shared == [GROUPS[1] if wrong == (0, 2, 5) else GROUPS[0]]


def test_a_wrong_plan_is_found(make_world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last request of each group does not get its prefix."""
    world = make_world()
    world.make("gpu", verify_interval=1)
    requests = sharing(world)
    world.eager_step(requests)
    plan = world.backend._shared.plan

    def without_the_last(segments: Any, rows: int) -> None:
        plan([replace(segment, rows=segment.rows[:-1]) for segment in segments], rows)

    with monkeypatch.context() as patch:
        patch.setattr(world.backend._shared, "plan", without_the_last)
        world.backend.preparation._written = None
        assert world.eager_step(requests) > 0.1
    assert world.eager_step(requests) < EXACT[False] and groups(world) == []
    assert world.steps.counters.shadow_failures == 1


@pytest.mark.parametrize("where", ["begin_step", "end_step", "judge"])
def test_a_check_that_fails_itself_changes_no_answer(
    make_world: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    world = make_world()
    world.make("gpu", verify_interval=1)
    requests = sharing(world)
    assert world.eager_step(requests) < EXACT[False]

    def broken(*args: Any) -> None:
        raise MemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(world.steps.shadow, where, broken)
        assert world.eager_step(requests) < EXACT[False]
    reason = "plan_pass" if where == "judge" else "shadow_check"
    assert dict(world.steps.counters.fallbacks) == {reason: 1}
    for _ in range(FIRST_PAUSE + 2):
        assert world.eager_step(requests) < EXACT[False]
    assert groups(world) == GROUPS, "it comes back"
    world.eager_step(requests)
    assert world.steps.counters.shadow_checks > 0


@pytest.mark.parametrize("queries", [1, 2])
def test_whom_it_suspects(queries: int) -> None:
    """What the wrong ones hold and nobody holds who is right; if there is nothing like that, all that they hold."""
    system = Segment((0, 1, 2, 3), 0, 256, Mode.NAIVE), ("s",)
    first = Segment((0, 1), 256, 512, Mode.NAIVE), ("a",)
    second = Segment((2, 3), 256, 512, Mode.GROUPED_ABSORB), ("b",)

    def found(*errors: float, first_request: int = 0) -> Finding:
        check = object.__new__(ShadowCheck)
        check._query_tokens, check._bound = queries, 0.1
        check._layers = [SimpleNamespace(attn_mqa=SimpleNamespace(layer_id=7))]
        rows = torch.tensor([error for each in errors for error in ([0.0] * (queries - 1) + [each])])
        look = CheckedRows(0, first_request * queries, len(rows), Rows(4, queries), [system, first, second])
        check._arriving = look, rows, None
        finding = check.finding()
        assert check.finding() is None and finding.layer == 7
        return finding

    assert found(0, 0, 0, 0).wrong == frozenset() and found(0, 0, 0, 0).suspects == []
    assert found(1, 1, 0, 0).suspects == [first]
    assert found(float("nan"), 1, 0, 0).suspects == [first]
    assert found(1, 1, 1, 1).suspects == [system, first, second]
    assert found(0, 1, 0, 0).suspects == [system, first], "one of two: what both hold may yet be wrong for one"
    assert found(1, first_request=3).suspects == [system, second] and found(1, first_request=3).wrong == {3}


def test_errors_of_rows() -> None:
    expected = torch.tensor([[[3.0, 4.0]], [[0.0, 0.0]], [[0.0, 0.0]], [[1.0, 0.0]]])
    actual = torch.tensor([[[3.0, 4.5]], [[0.0, 0.0]], [[0.0, 1.0]], [[float("nan"), 0.0]]])
    assert row_errors(actual, expected)[:3].tolist() == [pytest.approx(0.1), 0.0, float("inf")]
    assert row_errors(actual, expected)[3].isnan()


def test_a_tree_without_some_nodes() -> None:
    tree = SharedTree("abcdef", [-1, 0, 1, 0, -1, 4], [1, 2, 3, 2, 1, 2], [2, 3, 5, -1, 1, 4])
    assert list(tree.without({"b"}).deepest) == [0, 3, 5, -1, 0, 4]
    assert list(tree.without({"a", "f"}).deepest) == [-1, -1, 4, -1, -1, 4]
    assert list(tree.without({"x"}).deepest) == list(tree.deepest)


@pytest.mark.parametrize("grouped_only", [False, True])
def test_its_memory_is_in_the_budget(make_world: Any, grouped_only: bool) -> None:
    mode = dict(mode="grouped_absorb", prefix_memory_gb=0) if grouped_only else {}
    world = make_world()
    world.make("gpu", grouped=grouped_only, verify_interval=10, **mode)
    taken = world.steps.shadow._watch.workspace_bytes
    assert 64 * HEADS * 4 < taken <= ShadowCheck.workspace_bytes_for(world.layers[0], torch.float32, 1)


def test_fewer_tokens_are_expanded_for_it(make_world: Any) -> None:
    chunks = [0, 0]
    for interval in (0, 10):
        for budget_kib in range(16 << 10, 17 << 10, 100):
            world = make_world()
            world.make("gpu", verify_interval=interval, budget_bytes=budget_kib << 10)
            assert (world.steps.shadow is None) == (interval == 0)
            chunks[interval > 0] += world.backend._shared._buffers.chunks
    assert chunks[1] < chunks[0]


def test_options_and_bounds() -> None:
    assert HybridMLAOptions().verify_interval == 0
    with pytest.raises(OptionError, match="verify-interval"):
        HybridMLAOptions(verify_interval=-1)
    assert 0.01 < BOUND < WIDE_BOUND < 0.3


@pytest.mark.parametrize(
    ("ranks", "prefix", "latent", "bound"),
    [
        (1, torch.bfloat16, torch.bfloat16, BOUND),
        (2, torch.bfloat16, torch.bfloat16, WIDE_BOUND),
        (1, FP8, torch.bfloat16, WIDE_BOUND),
        (1, torch.bfloat16, FP8, WIDE_BOUND),
    ],
    ids=str,
)
def test_the_bound_fits_what_is_expanded(
    monkeypatch: pytest.MonkeyPatch, ranks: int, prefix: torch.dtype, latent: torch.dtype, bound: float
) -> None:
    """Keys in FP8, or of another rank's latent rows, are not as near to those of plain absorb."""
    found: list[float] = []
    shadow = SimpleNamespace(try_out=lambda: None)
    monkeypatch.setattr(watching, "ShadowCheck", lambda *_, bound, **more: found.append(bound) or shadow)
    monkeypatch.setattr(watching, "weights_of", lambda layer, dtype: ())
    sharing = SimpleNamespace(sharding=ranks)
    context: Any = SimpleNamespace(
        server=SimpleNamespace(options=HybridMLAOptions(verify_interval=1), ranks=sharing, query_tokens=1),
        model=SimpleNamespace(
            first=None, layers=[], dtype=torch.bfloat16, latent_dtype=latent, prefix_dtype=lambda options: prefix
        ),
        runner=SimpleNamespace(device="cpu"),
        counters=None,
        memory=None,
    )
    nothing: Any = None
    assert watching.make_shadow(context, nothing, nothing, naive=True) is shadow and found == [bound]
