"""What a user sees: counters, the entry of /server_info, and metrics of the same names."""

from __future__ import annotations

import functools
import json
import logging
import re
from dataclasses import fields
from pathlib import Path

import prometheus_client
import pytest

from sglang_mla_ext.observe import Counters, Metrics, report
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.reasons import Fallback, NotMixed, NotSharded, Reason
from sglang_mla_ext.segment import Mode, Segment

OPERATING = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
LABELS = {"model_name": "m", "tp_rank": "0"}
MIXED = Plan(3, (Segment((0, 2), 0, 200, Mode.NAIVE), Segment((1,), 0, 50, Mode.GROUPED_ABSORB)))
PLAN = Plan(6, (Segment((0, 2, 5), 0, 1000, Mode.NAIVE), Segment((1, 3), 0, 300, Mode.NAIVE)))


def counters_after_some_steps() -> Counters:
    counters = Counters(expansions=2, evictions=1)
    counters.count_step(PLAN)
    counters.count_step(Plan(6))
    counters.count_step(Plan(2, (Segment((0, 1), 0, 1000, Mode.NAIVE),)))
    counters.fall_back(Fallback.PREFIX_MEMORY_FULL)
    counters.fall_back(Fallback.PREFIX_MEMORY_FULL)
    counters.fall_back(Fallback.EXPAND)
    counters.count_mixed(MIXED, requests=3, decoding=1, new_tokens=30)
    counters.count_mixed(MIXED, requests=3, decoding=0, new_tokens=5)
    counters.not_mixed["more_rows"] += 2
    counters.not_sharded["rank_prefilling"] += 3
    for seconds in (0.25, 0.5):
        counters.count_pass(seconds)
    return counters


def test_counters() -> None:
    assert counters_after_some_steps() == Counters(
        steps_naive=3,
        steps_grouped=1,
        steps_absorb=1,
        steps_mixed=1,
        prefills_mixed=1,
        tokens_mixed=35,
        not_mixed={"more_rows": 2},
        not_sharded={"rank_prefilling": 3},
        prefill_tokens_saved=200 + 2 * 200,
        expansions=2,
        evictions=1,
        fallbacks={"prefix_memory_full": 2, "expand": 1},
        max_group_size=3,
        max_depth=1,
        shared_tokens_read=1000 + 300 + 1000 + 250,
        shared_tokens_saved=2 * 1000 + 300 + 1000 + 200,
        forward_passes=2,
        plan_seconds=0.75,
    )


def test_a_step_that_verifies_drafts_counts_for_its_modes_too() -> None:
    counters = Counters()
    group = Segment((0, 1), 0, 1000, Mode.NAIVE)
    for plan, verifies in ((Plan(2, (group,)), True), (Plan(2), True), (Plan(2, (group,)), False)):
        counters.count_step(plan, verifies=verifies)
    assert (counters.steps_verify, counters.steps_naive, counters.steps_absorb) == (2, 2, 1)
    assert counters.shared_tokens_saved == 2 * 1000, "by requests"


def test_a_step_with_groups_of_both_kinds_counts_for_both() -> None:
    naive = Segment((0, 1), 0, 1000, Mode.NAIVE)
    grouped = Segment((2, 3, 4), 0, 300, Mode.GROUPED_ABSORB)
    counters = Counters()
    for groups in ((naive, grouped), (grouped,), (naive,), ()):
        counters.count_step(Plan(6, groups))
    assert (counters.steps_naive, counters.steps_grouped, counters.steps_absorb) == (2, 2, 1)
    assert counters.max_group_size == 3 and counters.shared_tokens_saved == 2 * 1000 + 2 * 2 * 300
    assert [group["mode"] for group in report(counters, Plan(6, (naive, grouped)), 0, 0, 0)["groups"]] == [
        "naive",
        "grouped_absorb",
    ]


def test_the_first_fall_back_of_each_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters()
    with caplog.at_level(logging.WARNING, "sglang_mla_ext"):
        for reason in (Fallback.EXPAND, Fallback.EXPAND, Fallback.MERGE, Fallback.EXPAND):
            counters.fall_back(reason, RuntimeError("why"))
        counters.fall_back(Fallback.EXPAND, MemoryError("other"))
    assert [record.getMessage() for record in caplog.records] == [
        "hybrid_mla: falling back (expand): expanding failed: RuntimeError",
        "hybrid_mla: falling back (merge): merging failed: RuntimeError",
        "hybrid_mla: falling back (expand): expanding failed: MemoryError",
    ]
    assert all(record.exc_info for record in caplog.records)
    assert counters.fallbacks == {"expand": 4, "merge": 1}


@pytest.mark.parametrize("reasons", [Fallback, NotMixed, NotSharded], ids=lambda reasons: reasons.__name__)
def test_reasons_are_codes_and_the_docs_have_each(reasons: type[Reason]) -> None:
    symptoms = OPERATING.read_text(encoding="utf-8").split("## When something is wrong")[1]
    assert len(reasons) > 4 and all(re.fullmatch("[a-z0-9]+(_[a-z0-9]+)*", reason.code) for reason in reasons)
    assert all(reason.name == reason.code.upper() for reason in reasons)
    assert not [reason.code for reason in reasons if f"`{reason.code}`" not in symptoms]


def test_report() -> None:
    info = report(counters_after_some_steps(), PLAN, expanded_bytes=10, budget_bytes=20, tokens_without_memory=30)
    assert json.loads(json.dumps(info)) == info
    assert list(info) == ["groups", "expanded_bytes", "budget_bytes", "tokens_without_memory", "counters"]
    assert info["groups"] == [
        {"start": 0, "prefix_len": 1000, "requests": 3, "mode": "naive"},
        {"start": 0, "prefix_len": 300, "requests": 2, "mode": "naive"},
    ]
    assert (info["expanded_bytes"], info["budget_bytes"], info["tokens_without_memory"]) == (10, 20, 30)
    assert list(info["counters"]) == [field.name for field in fields(Counters)]
    assert info["counters"]["fallbacks"] == {"prefix_memory_full": 2, "expand": 1}
    assert info["counters"]["not_mixed"] == {"more_rows": 2}


def test_a_report_does_not_change_later() -> None:
    counters = counters_after_some_steps()
    info = report(counters, PLAN, 10, 20, 0)
    before = json.dumps(info)
    counters.fall_back(Fallback.REPAIR)
    counters.not_mixed["new"] += 1
    counters.count_step(PLAN)
    assert json.dumps(info) == before


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(
            prometheus_client, kind, functools.partial(getattr(prometheus_client, kind), registry=registry)
        )
    return registry


def test_metrics_are_the_report_under_the_same_names(registry: prometheus_client.CollectorRegistry) -> None:
    nested = Plan(6, (*PLAN.segments, Segment((0, 2), 1000, 1256, Mode.GROUPED_ABSORB)))
    info = report(counters_after_some_steps(), nested, expanded_bytes=10, budget_bytes=20, tokens_without_memory=30)
    Metrics(LABELS).publish(info, [0.0, 0.004, float("nan")])

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang:hybrid_mla_{name}", {**LABELS, **labels})

    totals = {name: total for name, total in info["counters"].items() if not isinstance(total, dict)}
    gauges = {name: totals.pop(name) for name in ("max_group_size", "max_depth")}
    gauges |= {"expanded_bytes": 10, "budget_bytes": 20, "tokens_without_memory": 30}
    gauges |= {"groups": 3, "shared_requests": 5}  # a request counts once, however many groups it is in
    assert {name: value(name) for name in gauges} == gauges
    assert {name: value(f"{name}_total") for name in totals} == totals
    assert value("fallbacks_total", reason="prefix_memory_full") == 2 and value("fallbacks_total", reason="expand") == 1
    assert value("not_mixed_total", reason="more_rows") == 2
    kinds = {metric.name.removeprefix("sglang:hybrid_mla_"): metric.type for metric in registry.collect()}
    by_reason = ("fallbacks", "not_mixed", "not_sharded")
    by_name = dict.fromkeys(gauges, "gauge") | dict.fromkeys([*totals, *by_reason], "counter")
    assert kinds == by_name | {"shadow_error": "histogram"}
    below = {bound: value("shadow_error_bucket", le=bound) for bound in ("1e-05", "0.002", "0.005", "+Inf")}
    assert below == {"1e-05": 1, "0.002": 1, "0.005": 2, "+Inf": 3} and value("shadow_error_count") == 3


def test_metrics_follow_the_next_report(registry: prometheus_client.CollectorRegistry) -> None:
    metrics, counters = Metrics(LABELS), counters_after_some_steps()
    metrics.publish(report(counters, PLAN, 10, 20, 0))
    counters.evictions += 3
    counters.fall_back(Fallback.EXPAND)
    metrics.publish(report(counters, Plan(0), 0, 20, 0))
    assert registry.get_sample_value("sglang:hybrid_mla_evictions_total", LABELS) == 4
    assert registry.get_sample_value("sglang:hybrid_mla_fallbacks_total", {**LABELS, "reason": "expand"}) == 2
    assert registry.get_sample_value("sglang:hybrid_mla_groups", LABELS) == 0
    assert registry.get_sample_value("sglang:hybrid_mla_shared_requests", LABELS) == 0
    assert registry.get_sample_value("sglang:hybrid_mla_expanded_bytes", LABELS) == 0
