"""The table of the shadow check's cost; update_tables.py writes it."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.records import read_records
from bench.tables import NOTHING, latest, markdown

USUAL_INTERVAL = 1000
"""Steps from one shadow check to the next."""


def shadow(path: Path, of_merges: Path) -> str:
    """What the shadow check costs of a decode step: medians over the rounds of the newest run, and what follows of them
    for the usual interval.

    Args:
        path: steps with and without checks.
        of_merges: what the number that every merge reads costs.
    """
    everything = read_records(path)
    records = latest(everything, "heads", "layers", "prompt", "concurrency", "verify_interval")
    merges = latest(read_records(of_merges), "heads", "requests")

    def step_ms(case: dict[str, Any], of: dict[str, Any]) -> float:
        return median(one["step_ms"] for one in everything if one["case"] == case and one["commit"] == of["commit"])

    rows = []
    for (*_, interval), checked in records.items():
        if not interval:
            continue
        case = checked["case"]
        plain = step_ms({name: value for name, value in case.items() if name != "verify_interval"}, checked)
        with_checks = step_ms(case, checked)
        cost, usual = with_checks / plain - 1, NOTHING
        if merge := merges.get((checked["impl"], case["heads"], case["concurrency"])):
            of_reading = merge["difference_us"] * case["layers"] / (plain * 1e3)  # in every step, checked or not
            usual = f"{(cost - of_reading) * interval / USUAL_INTERVAL + of_reading:+.2%}"
        of_case = f"{case['heads']} x {case['layers']}", f"{case['prompt']:,}", case["concurrency"], f"{interval:,}"
        rows.append((*of_case, f"{plain:.3f}", f"{with_checks:.3f}", f"{cost:+.2%}", usual))
    columns = ("heads x layers", "shared tokens", "requests", "every so many steps", "step ms without", "with", "cost")
    return markdown(rows, (*columns, f"at {USUAL_INTERVAL:,}"), records)
