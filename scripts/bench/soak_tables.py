"""Tables of soaks and of attacks; update_tables.py writes them."""

from __future__ import annotations

from pathlib import Path

from bench.records import read_records
from bench.tables import latest, markdown

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
