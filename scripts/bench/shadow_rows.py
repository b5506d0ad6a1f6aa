"""Rows of the table of the shadow check's cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from bench.records import Record, latest

USUAL_INTERVAL = 1000
"""Steps from one shadow check to the next."""


def cost(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield a decode step with and without checks, medians over the rounds of the newest run, and the cost that follows
    for the usual interval from what the number that every merge reads costs (records of `watch`)."""
    records = list(records)
    steps = [record for record in records if record["file"] == "shadow"]
    merges = latest((record for record in records if record["file"] == "watch"), "heads", "requests")

    def step_ms(case: dict[str, Any], of: Record) -> float:
        return median(one["step_ms"] for one in steps if one["case"] == case and one["commit"] == of["commit"])

    for (*_, interval), record in latest(steps, "heads", "layers", "prompt", "concurrency", "verify_interval").items():
        if not interval:
            continue
        case = record["case"]
        plain = step_ms({name: value for name, value in case.items() if name != "verify_interval"}, record)
        checked, usual = step_ms(case, record), None
        if merge := merges.get((record["impl"], case["heads"], case["concurrency"])):
            of_reading = merge["difference_us"] * case["layers"] / (plain * 1e3)  # in every step, checked or not
            usual = (checked / plain - 1 - of_reading) * interval / USUAL_INTERVAL + of_reading
        yield {
            **case,
            "plain": plain,
            "checked": checked,
            "cost": checked / plain - 1,
            "usual": usual,
            "records": [record],
        }
