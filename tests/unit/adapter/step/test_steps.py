"""Planning of forward passes: what it does when something fails, and whom it asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import DECODE, EXTEND, IDLE, VERIFY, plan_pass

from sglang_mla_ext.adapter.step.passes import NOTHING_SHARED, Kind, Pass, passes
from sglang_mla_ext.adapter.step.reports import Reports
from sglang_mla_ext.adapter.step.steps import FIRST_PAUSE, PrefillSharing, Steps
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment


class Prefixes:
    """What SharedPrefixes is asked for."""

    pool = SimpleNamespace(used_chunks=3)
    expansion = SimpleNamespace(tokens_without_memory=0)
    plan = Plan(0)

    def __init__(self) -> None:
        self.fails, self.calls = False, []
        self.answer = shared()

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args))
            if self.fails and name.startswith("plan"):
                raise RuntimeError("no")
            if name == "plan_prefill":
                return Plan(2, (Segment((0,), 0, 300, Mode.NAIVE, (0, 1)),))
            return self.answer if name == "plan_decode" else None

        return called

    def named(self, name: str) -> list[Any]:
        return [call for call in self.calls if call[0] == name]


class Expander:
    def __init__(self) -> None:
        self.changed = 0

    def weights_changed(self) -> None:
        self.changed += 1


def shared() -> Plan:
    naive = Segment((0, 2), 0, 300, Mode.NAIVE, (0, 1))
    return Plan(5, (naive, Segment((1, 3), 0, 128, Mode.GROUPED_ABSORB)))


def make(prefill: PrefillSharing | None = None, **options: Any) -> Steps:
    passes.end()
    prefixes, counters = Prefixes(), Counters()
    reports = Reports(prefixes, counters, budget_bytes=1000, chunk_bytes=10, description="")
    options = {"shares": True, "max_requests": 12, "reports": reports, **options}
    return Steps(prefixes, Expander(), counters, prefill=prefill, **options)


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(rid=str(index), finished=lambda: False) for index in range(count)]


def test_verify_steps_are_planned_where_drafts_are_verified() -> None:
    """And decode steps where they are not. A plan is of requests, a pass has as many rows as there are tokens."""
    for queries, planned, other in ((4, VERIFY, DECODE), (1, DECODE, VERIFY)):
        steps = make(query_tokens=queries)
        plan_pass(steps, planned, requests(5), [])
        assert passes.now.plan is steps._prefixes.answer and passes.now.rows == Rows(5, queries)
        plan_pass(steps, other, requests(5), [])
        assert passes.now.plan is NOTHING_SHARED and len(steps._prefixes.named("plan_decode")) == 1
        assert not steps._prefixes.named("before_prefill") and passes.now.prefill is None
        counters = steps.counters
        assert (counters.steps_naive, counters.steps_absorb, counters.steps_verify) == (1, 1, 1)


def test_a_plan_without_segments_is_always_the_same() -> None:
    """So that it is not brought to the device again and again."""
    steps = make()
    steps._prefixes.answer = Plan(5)
    plan_pass(steps, DECODE, requests(5), [])
    assert passes.now.plan is NOTHING_SHARED and passes.now.rows == Rows(5)


def test_planning_that_fails_falls_back_and_is_tried_again_later() -> None:
    """After a pause, twice as long after every further failure; after a success the first pause is short again."""
    steps, count, tried = make(), 0, []
    steps._prefixes.fails = True
    while count < 4 * FIRST_PAUSE:
        before = len(steps._prefixes.named("plan_decode"))
        plan_pass(steps, DECODE, requests(3), [])
        assert passes.now.plan is NOTHING_SHARED
        if len(steps._prefixes.named("plan_decode")) > before:
            tried.append(count)
        count += 1
    assert tried == [0, FIRST_PAUSE + 1, 3 * FIRST_PAUSE + 2]
    assert len(steps._prefixes.named("forget")) == 3
    assert dict(steps.counters.fallbacks) == {"plan_pass": 3}
    assert steps.counters.steps_absorb == count and not steps.counters.steps_naive

    steps._prefixes.fails = False
    while passes.now.plan is NOTHING_SHARED:
        plan_pass(steps, DECODE, requests(3), [])
    steps.succeed()
    steps._prefixes.fails = True
    plan_pass(steps, DECODE, requests(3), [])
    assert steps.pause == FIRST_PAUSE


def test_a_batch_that_is_too_large_shares_nothing() -> None:
    steps = make()
    plan_pass(steps, DECODE, requests(13), [])
    assert passes.now.plan is NOTHING_SHARED and not steps._prefixes.calls
    assert dict(steps.counters.fallbacks) == {"more_requests": 1}
    assert steps.counters.steps_absorb == 1


def test_passes_without_anything_to_share_ask_nobody() -> None:
    for steps, mode in ((make(), IDLE), (make(shares=False), DECODE)):
        plan_pass(steps, mode, requests(3), [])
        assert not steps._prefixes.calls and passes.now.plan is NOTHING_SHARED


def test_every_pass_begins_afresh() -> None:
    kinds = {DECODE: Kind.DECODE, EXTEND: Kind.PREFILL, IDLE: Kind.OTHER}
    for mode, kind in kinds.items():
        steps = make()
        plan_pass(steps, DECODE, requests(5), [])
        before = passes.now
        passes.now.q_nope = passes.now.tail_lse = "old"
        plan_pass(steps, mode, requests(5), [], [1] * 5, [1, 2, 1, 1, 1])
        assert passes.now is not before and passes.now.kind is kind
        now = passes.now
        assert (now.q_nope, now.tail_lse, now.prefill, now.takes_query) == (None, None, None, False)
        assert (passes.now.plan is NOTHING_SHARED) == (mode is not DECODE)
        if mode is EXTEND:
            assert passes.now.rows == Rows.of([1, 2, 1, 1, 1])


def test_prefill_is_planned_with_its_own_lengths() -> None:
    """Finished requests do not take part."""
    made: list[Any] = []
    prefill = PrefillSharing(
        make_plan=lambda plan, rows, transient: made.append(rows) or "plan",
        affordable=lambda prefix_lens: sum(prefix_lens),
        can_finish=lambda prefix_lens, covered: prefix_lens != [7, 7] and covered == (300, 0),
    )
    steps, running, reqs = make(prefill), requests(2), requests(2)
    running[0].finished = lambda: True
    cached, new = [300, 200], [5, 6]
    plan_pass(steps, EXTEND, reqs, running, cached, new)
    assert steps._prefixes.calls == [("before_prefill", reqs, running[1:], 500), ("plan_prefill", reqs, cached, new)]
    assert made == [Rows.of(new)] and passes.now.prefill == "plan"
    plan_pass(steps, EXTEND, reqs, running, [7, 7], new)
    assert passes.now.prefill is None, "the stock backend cannot attend to the rest"
    assert steps.counters.steps_absorb == 0, "not a decode step"


def test_a_prefill_step_looks_at_no_more_requests_than_a_decode_step_may_have() -> None:
    """Those that run are left out where all together are too many, and nothing is planned for a step of too many."""
    prefill = PrefillSharing(lambda *_: "plan", lambda _: 500, lambda *_: True)
    many, few = requests(13), requests(3)
    for steps, affordable in ((make(prefill), 500), (make(), 0)):
        for reqs, running, seen in ((few, many[:9], many[:9]), (few, many[:10], []), (many[:12], few[:1], [])):
            plan_pass(steps, EXTEND, reqs, running, [1] * len(reqs), [1] * len(reqs))
            assert steps._prefixes.named("before_prefill")[-1] == ("before_prefill", reqs, seen, affordable)
        assert not steps.counters.fallbacks
        plan_pass(steps, EXTEND, many, few, [1] * 13, [1] * 13)
        assert len(steps._prefixes.named("before_prefill")) == 3
        assert dict(steps.counters.fallbacks) == {"more_requests": 1}
        assert passes.now.prefill == ("plan" if affordable else None), "what is expanded already is used"


def test_the_time_of_planning_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pass: planned, paused after a failure, idle, prefill without a planner."""
    clock = SimpleNamespace(perf_counter=iter(map(float, range(100))).__next__)
    monkeypatch.setattr("sglang_mla_ext.adapter.step.steps.time", clock)
    steps = make()
    for count, mode in enumerate((DECODE, EXTEND, IDLE, DECODE, DECODE), start=1):
        steps._prefixes.fails = count >= 4
        plan_pass(steps, mode, requests(3), [], [1] * 3, [1] * 3)
        assert (steps.counters.forward_passes, steps.counters.plan_seconds) == (count, count * 1.0)
    assert steps.pause, "planning failed, and the pass counts all the same"
    assert steps.reports.report()["counters"]["plan_seconds"] == 5.0


@pytest.mark.parametrize("event", ["forget", "idle", "weights_change"])
def test_events_drop_plans_and_expansions(event: str) -> None:
    steps = make()
    plan_pass(steps, DECODE, requests(5), [])
    assert passes.now.plan.segments
    passes.now.prefill = "plan"
    forgotten: list[str] = []
    steps.shadow = SimpleNamespace(forget=lambda: forgotten.append(event))
    getattr(steps, event)()
    assert forgotten == [event] * (event != "idle"), "what it suspects is no more"
    assert passes.now.plan is NOTHING_SHARED and passes.now.prefill is None
    assert steps._prefixes.calls[-1] == ("idle" if event == "idle" else "forget",)
    assert steps._expander.changed == (event == "weights_change")


def test_the_report() -> None:
    steps = make()
    report = steps.reports.report()
    assert report["expanded_bytes"] == 30 and report["budget_bytes"] == 1000 and report["groups"] == []


def test_a_mixed_pass_is_a_decode_step_of_its_rows() -> None:
    """Beside what it expands for; planned by its rows, with as many tokens as are cached."""
    plan, running = Plan(3, (Segment((0, 2), 0, 64, Mode.NAIVE, (0,)),)), requests(2)
    for decoding in (0, 1):
        steps, reqs = make(), requests(3)
        steps._prefixes.plan_rows = lambda *args, mixed, shared: (
            steps._prefixes.calls.append(("plan_rows", *args, mixed)) or plan  # noqa: B023
        )
        plan_pass(steps, EXTEND, reqs, running, [64, 0, 65], [3, 2, 1], mixed=True, decoding=decoding)
        now, counters = passes.now, steps.counters
        assert (now.kind, now.mixed, now.decoding) == (Kind.DECODE, True, decoding)
        assert (now.rows, now.plan) == (Rows.of([3, 2, 1]), plan)
        assert now.prefill is None and not steps._prefixes.named("plan_prefill")
        assert [name for name, *_ in steps._prefixes.calls] == ["before_prefill", "plan_rows"]
        assert steps._prefixes.named("before_prefill") == [("before_prefill", reqs, running, 0)]
        assert steps._prefixes.named("plan_rows") == [
            ("plan_rows", reqs, Rows.of([3, 2, 1]), [64, 0, 65], decoding > 0)
        ]
        found = counters.steps_naive, counters.steps_mixed, counters.prefills_mixed, counters.tokens_mixed
        assert found == (0, 0, 0, 0), "it may still come to nothing"


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("new", [3, 0])
def test_a_prefill_with_running_requests_expands_for_new_ones_alone(new: int, many: bool) -> None:
    """Such passes are refused mixed batches, and decode steps that SGLang runs as a prefill. A running request is in
    the batch and among the running ones, and shares nothing with itself. Where many rows of an FP8 cache would be
    fetched for the running ones, what they share is expanded, too."""
    asked: list[Any] = []
    transient = SimpleNamespace(plan=lambda reqs, lens, *args, **kwargs: asked.append(lens))
    prefill = PrefillSharing(
        lambda plan, rows, transient: plan,
        affordable=lambda prefix_lens: asked.append(list(prefix_lens)) or sum(prefix_lens),
        can_finish=lambda *args: True,
        transient=transient,
        costs=SimpleNamespace(
            pays_alone=None, eager=lambda *args: 0, in_graph=lambda *args: 1, fetches_many=lambda *args: many
        ),
    )
    steps, (first, *others) = make(prefill), requests(3)
    of_pass = [first, *others][: new and 3] or others
    plan = Plan(len(of_pass), (Segment((len(of_pass) - 1,), 0, 64, Mode.NAIVE, (0,)),))
    steps._prefixes.plan_prefill = lambda *args, **kwargs: plan
    chosen = passes.begin(Pass(Kind.PREFILL, Rows.of([1] * len(of_pass)), decoding=2, absorbs=True))
    lens, elsewhere = [512, 100, 200][-len(of_pass) :], requests(1)
    steps.plan_pass(chosen, of_pass, [*others, *elsewhere], lens, [1] * len(of_pass))
    cached = lens[: len(of_pass) - 2]
    covered = lens[-2:] if many else [0, 64]
    assert asked == [cached, [*cached, *covered]], "a running one's, as far as it is expanded"
    assert steps._prefixes.named("before_prefill") == [("before_prefill", of_pass, elsewhere, sum(cached))]
    assert chosen.prefill is plan and chosen.absorbs and not chosen.leaves_graph


def test_a_mixed_pass_shares_nothing_where_planning_fails_or_nothing_can_be_shared() -> None:
    steps, reqs = make(), requests(2)
    steps._prefixes.fails = True
    for _ in range(FIRST_PAUSE):  # which fails once; then it is paused
        plan_pass(steps, EXTEND, reqs, [], [64, 64], [1, 2], mixed=True, decoding=1)
        assert passes.now.mixed and passes.now.plan is NOTHING_SHARED and passes.now.rows == Rows.of([1, 2])
    assert steps.counters.fallbacks == {"plan_pass": 1}
    assert len(steps._prefixes.named("plan_rows")) == 1
    steps = make(shares=False)
    plan_pass(steps, EXTEND, reqs, [], [64, 64], [1, 2], mixed=True)
    assert passes.now.plan is NOTHING_SHARED and steps._prefixes.calls == []


@pytest.mark.parametrize("mixed", [False, True])
def test_what_ranks_agreed_on_is_the_plan(mixed: bool) -> None:
    """Of a step and of a mixed pass, whatever has failed since; without an agreement nothing is shared."""
    steps = make()
    sharded = ShardedPlan(shared(), (), 5, (), ())
    steps.sharded = SimpleNamespace(shared_plan=lambda: sharded)
    of_pass = (EXTEND, requests(5), [], [300] * 5, [2] * 5) if mixed else (DECODE, requests(5), [])
    for pause in (0, FIRST_PAUSE):
        steps.pause = pause
        plan_pass(steps, *of_pass, mixed=mixed)
        steps.fail(Fallback.EXPAND, MemoryError())
        assert passes.now.sharded is sharded and passes.now.plan is sharded.mine
    assert steps.counters.steps_sharded == 2 and not steps._prefixes.named("plan_decode")
    steps.sharded, steps.pause = SimpleNamespace(shared_plan=lambda: None), 0
    assert steps.can_share()
    plan_pass(steps, *of_pass, mixed=mixed)
    assert passes.now.sharded is None and passes.now.plan is NOTHING_SHARED
