"""Tables of soaks, attacks, the shadow check's cost and the sanitizer; update_tables.py writes them."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from bench.records import read_records
from bench.tables import latest, markdown

USUAL_INTERVAL = 1000
"""Steps from one shadow check to the next."""

COUNTS = ("wrong", "ties", "lost_first", "leaked_bytes", "deaths")


def soak(path: Path) -> str:
    """What came of the last soak of each backend, on each device; nothing before the first."""
    if not path.exists():
        return ""
    records = latest(
        ({**one, "case": {**one["case"], "gpu": one["gpu"]}} for one in read_records(path)), "gpu", "poison"
    )
    rows = [
        (
            *(record["gpu"], record["impl"], f"{record['requests']:,}", f"{record['judged']:,}"),
            *(f"{record['taken_back']:,}", *(f"{record[name]:,}" for name in COUNTS)),
        )
        for record in records.values()
    ]
    columns = ("device", "backend", "requests", "answers", "taken back", *(name.replace("_", " ") for name in COUNTS))
    return markdown(rows, columns, records)


def hostile(path: Path) -> str:
    """What came of the last time of each attack; nothing before the first."""
    if not path.exists():
        return ""
    records = latest(read_records(path), "attack", "against")
    rows = []
    for record in records.values():
        times = [f"{record[name]:.1f}" if record[name] else "–" for name in ("seconds", "stock_seconds")]
        slowdown = "–" if record["slowdown"] is None else f"{record['slowdown']:+.0%}"
        found = (record["wrong"], record["refused_otherwise"], record["shared_across_salts"], len(record["traces"]))
        case = record["case"]
        rows.append((case["attack"], f"{case['requests']:,}", *times, slowdown, *found, record["deaths"]))
    columns = ("attack", "requests", "s", "stock s", "slowdown", "wrong", "refused otherwise", "shared across salts")
    return markdown(rows, (*columns, "traces", "deaths"), records)


def shadow(path: Path, of_merges: Path) -> str:
    """What the shadow check costs of a decode step: medians over the rounds of the newest run, and what follows of them
    for the usual interval.

    Args:
        path: steps with and without checks, by the study engine.
        of_merges: what the number that every merge reads costs, by the study watch.
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
        cost, usual = with_checks / plain - 1, "–"
        if merge := merges.get((checked["impl"], case["heads"], case["concurrency"])):
            of_reading = merge["difference_us"] * case["layers"] / (plain * 1e3)  # in every step, checked or not
            usual = f"{(cost - of_reading) * interval / USUAL_INTERVAL + of_reading:+.2%}"
        rows.append(
            (
                f"{case['heads']} x {case['layers']}",
                f"{case['prompt']:,}",
                case["concurrency"],
                f"{interval:,}",
                f"{plain:.3f}",
                f"{with_checks:.3f}",
                f"{cost:+.2%}",
                usual,
            )
        )
    columns = ("heads x layers", "shared tokens", "requests", "every so many steps", "step ms without", "with", "cost")
    return markdown(rows, (*columns, f"at {USUAL_INTERVAL:,}"), records)


def watch(path: Path) -> str:
    """A merge that can be watched beside one that cannot."""
    records = latest(read_records(path), "heads", "requests")
    rows = [
        (
            *(record["case"][name] for name in ("heads", "requests")),
            *(f"{record[name]:.2f}" for name in ("merge_us", "merge_watched_us")),
            f"{record['difference_us']:+.2f}",
        )
        for record in records.values()
    ]
    return markdown(rows, ("heads", "requests", "merge us", "that can be watched", "difference"), records)


def sanitize(path: Path) -> str:
    """What NVIDIA's compute-sanitizer found."""
    records = latest(read_records(path), "tool", "cases")
    rows = [(one["case"]["tool"], one["case"]["cases"], one["found"], one["seconds"]) for one in records.values()]
    return markdown(rows, ("tool", "cases", "found", "s"), records)
