"""Planning of forward passes: what it does when something fails, and whom it asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from decode_world import DECODE, EXTEND, IDLE, VERIFY

from sglang_mla_ext.adapter.step.relay import relay
from sglang_mla_ext.adapter.step.steps import FIRST_PAUSE, NOTHING_SHARED, PrefillSharing, StepPlan, Steps
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Group, Plan
from sglang_mla_ext.prefix.shared_prefixes import ExpandedGroup


class Prefixes:
    """What SharedPrefixes is asked for."""

    pool = SimpleNamespace(used_chunks=3)
    plan = Plan(0)

    def __init__(self) -> None:
        self.fails, self.calls = False, []
        self.answer = shared()

    def __getattr__(self, name: str) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, *args))
            if self.fails and name.startswith("before"):
                raise RuntimeError("no")
            return self.answer if name == "before_decode" else []

        return called

    def named(self, name: str) -> list[Any]:
        return [call for call in self.calls if call[0] == name]


class Expander:
    def __init__(self) -> None:
        self.changed = 0

    def weights_changed(self) -> None:
        self.changed += 1


def shared() -> tuple[Plan, tuple[ExpandedGroup, ...]]:
    group = Group(rows=(0, 2), node="n", start=0, end=300, mode=Mode.NAIVE)
    latent = Group(rows=(1, 3), node="g", start=0, end=128, mode=Mode.GROUPED_ABSORB)
    return Plan(5, (group, latent)), (ExpandedGroup((0, 2), 300, (0, 1)),)


def make(prefill: PrefillSharing | None = None, **options: Any) -> Steps:
    relay.clear()
    options = {"shares": True, "max_requests": 12, "budget_bytes": 1000, "chunk_bytes": 10, **options}
    return Steps(Prefixes(), Expander(), Counters(), prefill=prefill, **options)


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(rid=str(index), finished=lambda: False) for index in range(count)]


def test_a_step_in_the_kernels_terms() -> None:
    plan = StepPlan.of(*shared())
    assert [(s.rows, s.tokens, s.chunks) for s in plan.expanded] == [((0, 2), 300, (0, 1))]
    assert [(s.rows, s.start, s.end) for s in plan.latent] == [((1, 3), 0, 128)]
    assert plan.tail_starts == (300, 128, 300, 128, 0) and plan
    assert StepPlan.of(Plan(5), ()) is NOTHING_SHARED and not NOTHING_SHARED


def test_a_step_of_several_tokens_each() -> None:
    """The rows of a request follow each other; a tail begins where its request's does."""
    plan = StepPlan.of(*shared(), queries=3)
    assert [segment.rows for segment in plan.expanded] == [(0, 1, 2, 6, 7, 8)]
    assert [(s.rows, s.start, s.end) for s in plan.latent] == [((3, 4, 5, 9, 10, 11), 0, 128)]
    assert plan.tail_starts == (300, 128, 300, 128, 0)
    assert StepPlan.of(Plan(5), (), queries=3) is NOTHING_SHARED


def test_verify_steps_are_planned_where_drafts_are_verified() -> None:
    """And decode steps where they are not."""
    for queries, planned, other in ((4, VERIFY, DECODE), (1, DECODE, VERIFY)):
        steps = make(queries=queries)
        steps.before_forward(planned, requests(5), [])
        assert [len(segment.rows) for segment in steps.next.expanded] == [2 * queries]
        steps.before_forward(other, requests(5), [])
        assert steps.next is NOTHING_SHARED and len(steps._prefixes.named("before_decode")) == 1
        assert not steps._prefixes.named("before_prefill") and relay.prefill is None
        counters = steps.counters
        assert (counters.steps_naive, counters.steps_absorb, counters.steps_verify) == (1, 1, 1)


def test_an_unchanged_plan_is_the_same_object() -> None:
    steps = make()
    steps.before_forward(DECODE, requests(5), [])
    first = steps.next
    steps.before_forward(DECODE, requests(5), [])
    assert steps.next is first
    steps._prefixes.answer = shared()
    steps.before_forward(DECODE, requests(5), [])
    assert steps.next is not first and steps.next == first


def test_planning_that_fails_falls_back_and_is_tried_again_later() -> None:
    """After a pause, twice as long after every further failure; after a success the first pause is short again."""
    steps, passes, tried = make(), 0, []
    steps._prefixes.fails = True
    while passes < 4 * FIRST_PAUSE:
        before = len(steps._prefixes.named("before_decode"))
        steps.before_forward(DECODE, requests(3), [])
        assert steps.next is NOTHING_SHARED
        if len(steps._prefixes.named("before_decode")) > before:
            tried.append(passes)
        passes += 1
    assert tried == [0, FIRST_PAUSE + 1, 3 * FIRST_PAUSE + 2]
    assert len(steps._prefixes.named("forget")) == 3
    assert dict(steps.counters.fallbacks) == {"planning failed: RuntimeError": 3}
    assert steps.counters.steps_absorb == passes and not steps.counters.steps_naive

    steps._prefixes.fails = False
    while steps.next is NOTHING_SHARED:
        steps.before_forward(DECODE, requests(3), [])
    steps.succeed()
    steps._prefixes.fails = True
    steps.before_forward(DECODE, requests(3), [])
    assert steps._pause == FIRST_PAUSE


def test_a_batch_that_is_too_large_shares_nothing() -> None:
    steps = make()
    steps.before_forward(DECODE, requests(13), [])
    assert steps.next is NOTHING_SHARED and not steps._prefixes.calls
    assert dict(steps.counters.fallbacks) == {"more than 12 requests in a batch": 1}
    assert steps.counters.steps_absorb == 1


def test_passes_without_anything_to_share_ask_nobody() -> None:
    for steps, mode in ((make(), IDLE), (make(shares=False), DECODE)):
        steps.before_forward(mode, requests(3), [])
        assert not steps._prefixes.calls and steps.next is NOTHING_SHARED


def test_every_pass_begins_afresh() -> None:
    for mode in (DECODE, EXTEND, IDLE):
        steps = make()
        steps.before_forward(DECODE, requests(5), [])
        relay.takes_query = relay.q_nope = relay.tail_lse = relay.prefill = relay.prefill_lens = "old"
        steps.before_forward(mode, requests(5), [], [1] * 5, [1] * 5)
        assert (relay.takes_query, relay.q_nope, relay.tail_lse, relay.prefill) == (False, None, None, None)
        assert (steps.next is NOTHING_SHARED) == (mode is not DECODE)


def test_prefill_is_planned_with_its_own_lengths() -> None:
    """Finished requests do not take part; the plan waits for the step that has the same list of lengths."""
    made: list[Any] = []
    prefill = PrefillSharing(
        make_plan=lambda parts, new_tokens: made.append(new_tokens) or "plan",
        affordable=lambda prefix_lens: sum(prefix_lens),
        can_finish=lambda prefix_lens, covered: prefix_lens != [7, 7],
    )
    steps, running, reqs = make(prefill), requests(2), requests(2)
    running[0].finished = lambda: True
    cached, new = [300, 200], [5, 6]
    steps.before_forward(EXTEND, reqs, running, cached, new)
    assert steps._prefixes.calls == [("before_prefill", reqs, running[1:], 500), ("expanded_parts", reqs, cached, new)]
    assert made == [new] and relay.prefill == "plan" and relay.prefill_lens is cached
    steps.before_forward(EXTEND, reqs, running, [7, 7], new)
    assert relay.prefill is None, "the stock backend cannot attend to the rest"
    assert steps.counters.steps_absorb == 0, "not a decode step"


def test_the_time_of_planning_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every pass: planned, paused after a failure, idle, prefill without a planner."""
    clock = SimpleNamespace(perf_counter=iter(map(float, range(100))).__next__)
    monkeypatch.setattr("sglang_mla_ext.adapter.step.steps.time", clock)
    steps = make()
    for passes, mode in enumerate((DECODE, EXTEND, IDLE, DECODE, DECODE), start=1):
        steps._prefixes.fails = passes >= 4
        steps.before_forward(mode, requests(3), [], [1] * 3, [1] * 3)
        assert (steps.counters.forward_passes, steps.counters.plan_seconds) == (passes, passes * 1.0)
    assert steps._pause, "planning failed, and the pass counts all the same"
    assert steps.report()["counters"]["plan_seconds"] == 5.0


@pytest.mark.parametrize("event", ["forget", "idle", "weights_change"])
def test_events_drop_plans_and_expansions(event: str) -> None:
    steps = make()
    steps.before_forward(DECODE, requests(5), [])
    assert steps.next
    relay.tail_lse = "old"
    getattr(steps, event)()
    assert steps.next is NOTHING_SHARED and relay.tail_lse is None
    assert steps._planned == (Plan(0), NOTHING_SHARED), "a plan's nodes keep their tree alive"
    assert steps._prefixes.calls[-1] == ("idle" if event == "idle" else "forget",)
    assert steps._expander.changed == (event == "weights_change")


def test_the_report() -> None:
    steps = make()
    report = steps.report()
    assert report["expanded_bytes"] == 30 and report["budget_bytes"] == 1000 and report["groups"] == []
