"""The entries `exchange` and `exchange_by_stores` of a GPU's rates (configs/gpus), from records of an exchange."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.rates_file import is_of, write_config

WAYS = {
    "nccl": ("exchange", "NCCL's grouped sends and receives"),
    "peers": ("exchange_by_stores", "stores into each other's memory"),
}
"""Entry and words, by what a record calls it."""


def fitted(sent_bytes: Sequence[float], seconds: Sequence[float]) -> dict[str, float]:
    """Fit what a layer's exchange costs: `overhead_s`, and `bytes_per_s` out of a GPU, by least squares.

    Raises:
        ValueError: all times are of as many bytes, or do not grow with them.
    """
    if len({*sent_bytes}) < 2:
        raise ValueError("one number of bytes tells no rate: time several numbers of rows")
    per_byte, overhead = np.polyfit(sent_bytes, seconds, 1)
    if per_byte <= 0:
        raise ValueError("the times do not grow with the bytes")
    return {"overhead_s": float(f"{overhead:.3g}"), "bytes_per_s": float(f"{1 / per_byte:.3g}")}


def write_exchange(out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Fit a file's entries to the newest runs on its GPU, through NCCL and, where there are any, by stores: each to the
    records of one day, commit and number of ranks.

    Raises:
        ValueError: there is none through NCCL, or what `fitted` raises.
    """
    config = json.loads(out.read_text(encoding="utf-8"))
    entries = {}
    for impl, (name, way) in WAYS.items():
        of_gpu = [
            record
            for record in records
            if record["bench"] == "exchange" and record["impl"] == impl and is_of(record["gpu"], config)
        ]
        if of_gpu:
            entries[name] = _entry(of_gpu, way)
    if "exchange" not in entries:
        raise ValueError(f"no exchange through NCCL was timed on {config['name']}")
    write_config(out, config | entries)


def _entry(records: Sequence[Mapping[str, Any]], way: str) -> dict[str, Any]:
    """Fit the newest run among these records."""
    last = max(records, key=lambda record: record["date"])

    def run_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return record["date"][:10], record["commit"], record["case"]["ranks"], record["case"]["heads"]

    run = [record for record in records if run_of(record) == run_of(last)]
    rates = fitted([record["case"]["sent_bytes"] for record in run], [record["all_us"] * 1e-6 for record in run])
    rows = sorted({record["case"]["rows"] for record in run})
    source = (
        f"Measured by scripts/bench_exchange.py on {last['case']['ranks']} {last['gpu']} (torch {last['torch']}, "
        f"commit {last['commit']}, {last['date'][:10]}): {way} with their copies, "
        f"{last['case']['heads']} heads, {rows[0]} to {rows[-1]} rows of a rank, nothing beside them."
    )
    return rates | {"source": source}
