"""A file of a GPU's rates (configs/gpus): what to start from, where its values come from, and how it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from bench.planner_verdicts import (
    plans_table,
    report,
    significant,
    verdicts,
    with_fitted_overheads,
    with_fitted_segments,
)
from bench.records import commit, package_version
from sglang_mla_ext.configs import FALLBACK_GPU, device_fits, device_words, gpu_config_of, read_config
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode

FITTED = (
    "overheads of all modes, and what a segment costs: those with which the choices of --check lose least, on its grid "
    "and on its trees."
)

FITTED_RATES = ("overhead_s", "overhead_per_root_row_s", "segment_s")

WAYS = {
    "nccl": ("exchange", "NCCL's grouped sends and receives"),
    "peers": ("exchange_by_stores", "stores into each other's memory"),
}
"""Entry and words, by what a record calls it."""


def starting_config(path: Path, device: str) -> tuple[dict[str, Any], str]:
    """Rates to start from, and whose they are: what is in the file; without a file, what is shipped for this device;
    without that, the default GPU's rates under this device's name.

    Raises:
        ValueError: the file is another GPU's.
    """
    if path.exists():
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not is_of(device, config):
            raise ValueError(f"{path} has the rates of {config['name']}, and this is {device}")
        return config, "this file"
    shipped = gpu_config_of(device)
    config, origin = read_config("gpus", shipped or FALLBACK_GPU), f"configs/gpus/{shipped or FALLBACK_GPU}.json"
    if shipped is None:
        words = device_words(device)
        model = next((word for word in words if re.fullmatch(r"[a-z]+\d+", word)), words[-1])
        config |= {"name": device, "device_words": [model]}
    return config, origin


def is_of(device: str, config: Mapping[str, Any]) -> bool:
    """Return whether rates are those of this device."""
    return device_fits(device, config["device_words"]) > 0


def source_text(device: str, measured: Mapping[Mode, str], origin: str) -> str:
    """Return where rates come from: device, versions, commit, date, and what was measured of each mode; `origin` has
    the others."""
    versions = ", ".join(f"{name} {package_version(name)}" for name in ("torch", "triton", "sglang"))
    date = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    otherwise = f"not measured, what {origin} had before"
    of_modes = " ".join(f"{mode.value}: {measured.get(mode, otherwise)}." for mode in Mode)
    return (
        f"Measured by scripts/calibrate.py on {device} ({versions}, commit {commit()}, {date}), DeepSeek-V3's "
        f"dimensions, CUDA graphs, L2 flushed. {of_modes}"
    )


def refit(out: Path, records: Sequence[Mapping[str, Any]], plans: Sequence[dict[str, Any]] = ()) -> None:
    """Give the modes in a file of rates the overheads with which the choices in these records lose least, and say where
    they still lose.

    Args:
        plans: records of whole plans, from which the cost of a segment follows; without any it stays.
    Raises:
        ValueError: no record compares plain absorb with another mode.
    """
    config = json.loads(out.read_text(encoding="utf-8"))
    before = GpuRates.from_json(out)
    fitted = with_fitted_overheads(records, before)
    if plans:
        fitted = with_fitted_segments(plans, fitted)
    modes = {
        mode: config["modes"][mode.value]
        | {name: new for name in FITTED_RATES if (new := getattr(rates, name)) != getattr(before.modes[mode], name)}
        for mode, rates in fitted.modes.items()
    }
    write_rates(out, config, modes, f"{config['source'].removesuffix(FITTED).rstrip()} {FITTED}")
    print(report(verdicts(records, fitted)))
    if plans:
        print(plans_table(plans, fitted))


def write_exchange(out: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Fit a file's entries to the newest runs on its GPU, through NCCL and, where there are any, by stores: each to the
    records of one day, commit and number of ranks.

    Raises:
        ValueError: there is none through NCCL, all times are of as many bytes, or they do not grow with them.
    """
    config = json.loads(out.read_text(encoding="utf-8"))
    timed = [record for record in records if record["bench"] == "exchange" and is_of(record["gpu"], config)]
    entries = {
        name: _exchange_entry(of_way, way)
        for impl, (name, way) in WAYS.items()
        if (of_way := [record for record in timed if record["impl"] == impl])
    }
    if "exchange" not in entries:
        raise ValueError(f"no exchange through NCCL was timed on {config['name']}")
    write_config(out, config | entries)


def _exchange_entry(records: Sequence[Mapping[str, Any]], way: str) -> dict[str, Any]:
    """Fit a layer's exchange to the newest run among these records, by least squares."""

    def run_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
        return record["date"][:10], record["commit"], record["case"]["ranks"], record["case"]["heads"]

    last = max(records, key=lambda record: record["date"])
    run = [record for record in records if run_of(record) == run_of(last)]
    sent_bytes = [record["case"]["sent_bytes"] for record in run]
    if len({*sent_bytes}) < 2:
        raise ValueError("one number of bytes tells no rate: time several numbers of rows")
    per_byte, overhead = np.polyfit(sent_bytes, [record["all_us"] * 1e-6 for record in run], 1)
    if per_byte <= 0:
        raise ValueError("the times do not grow with the bytes")
    rows = sorted({record["case"]["rows"] for record in run})
    source = (
        f"Measured by scripts/bench_exchange.py on {last['case']['ranks']} {last['gpu']} (torch {last['torch']}, "
        f"commit {last['commit']}, {last['date'][:10]}): {way} with their copies, "
        f"{last['case']['heads']} heads, {rows[0]} to {rows[-1]} rows of a rank, nothing beside them."
    )
    return {"overhead_s": significant(overhead), "bytes_per_s": significant(1 / per_byte), "source": source}


def write_rates(
    out: Path, config: Mapping[str, Any], modes: Mapping[Mode, Any], source: str, l2_bytes: int | None = None
) -> None:
    """Write a file of rates with these values; modes that are not given keep theirs."""
    values = config["modes"] | {mode.value: of_mode for mode, of_mode in modes.items()}
    write_config(out, {**config, "l2_bytes": l2_bytes or config["l2_bytes"], "modes": values, "source": source})


def write_config(out: Path, config: Mapping[str, Any]) -> None:
    """Write a file of rates."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(to_json(config) + "\n", encoding="utf-8")
    print(f"wrote {out}")


def to_json(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON as in configs/gpus: short rates, and a list or object that fits a line on one line.

    Args:
        before: characters that stand before it in its line.
    """
    if isinstance(value, float):
        return f"{value:g}".replace("e+", "e")
    if not isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    if isinstance(value, dict):
        keys = [f"{json.dumps(key)}: " for key in value]
        items = [
            key + to_json(item, indent + 2, indent + 2 + len(key))
            for key, item in zip(keys, value.values(), strict=True)
        ]
    else:
        items = [to_json(item, indent + 2, indent + 2) for item in value]
    line = opening + ", ".join(items) + closing
    if len(line) <= 90 and before + len(line) < 100 and line.count(opening) == 1:
        return line
    gap = "\n" + " " * (indent + 2)
    return f"{opening}{gap}{f',{gap}'.join(items)}\n{' ' * indent}{closing}"
