"""The tables of ranks that hold prefixes together, from records of `bench_exchange.py`."""

from __future__ import annotations

from pathlib import Path

from bench.records import read_records
from bench.tables import STORAGE_NAMES, latest, markdown

LINK_BYTES_PER_S = 450e9
"""Out of an H100 or H200 over NVLink, by the data sheet."""


def exchange(path: Path) -> str:
    """What ranks pay in a layer, and the time of its bytes on the link."""
    found = (record for record in read_records(path) if record["bench"] == "exchange")
    records = latest(found, "ranks", "heads", "rows")
    rows = []
    for record in sorted(records.values(), key=lambda record: (record["impl"], record["case"]["rows"])):
        case = record["case"]
        floor = case["sent_bytes"] / LINK_BYTES_PER_S * 1e6
        times = (f"{value:.1f}" for value in (record["wire_us"], record["all_us"], floor))
        rows.append((record["impl"], case["ranks"], case["rows"], f"{case['sent_bytes'] / 1e6:.2f}", *times))
    columns = ("via", "ranks", "rows of a rank", "MB out of a rank", "wire, us", "all, us", "floor of the wire, us")
    return markdown(rows, columns, records)


def one_of_ranks(path: Path) -> str:
    """Attention of one of several ranks in a layer, against what a rank does alone."""
    found = (record for record in read_records(path) if record["bench"] == "one_of_ranks")
    records = latest(found, "ranks", "heads", "dtype", "prefix", "batch")
    rows = []
    for (impl, *key), record in sorted(records.items(), key=lambda item: str(item[0][3:]).rjust(40)):
        if impl != "spread":
            continue
        case, spread = record["case"], record["ms"]
        flashmla, alone = (records[(name, *key)]["ms"] for name in ("flashmla", "alone"))
        gib = [61 * records[(name, *key)]["case"]["prefix_bytes"] / (1 << 30) for name in ("alone", "spread")]
        times = (f"{ms * 1e3:.0f}" for ms in (flashmla, alone, spread))
        prefix = f"{STORAGE_NAMES[case['dtype']]} {case['prefix']:,}"
        ratio = f"{flashmla / spread:.2f}x"
        rows.append((case["ranks"], prefix, case["batch"], *times, ratio, *(f"{size:.1f}" for size in gib)))
    rows.sort(key=lambda row: (row[0], row[1].split()[0], int(row[1].split()[1].replace(",", "")), row[2]))
    columns = ("ranks", "prefix", "rows of a rank", "flashmla, us", "alone, us", "spread, us", "flashmla / spread")
    return markdown(rows, (*columns, "GiB of 61 layers, alone", "GiB, spread"), records)
