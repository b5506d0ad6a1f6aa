"""Measurements as lines of JSON, each with everything needed to repeat it.

One file for each subject, `benchmarks/results/NAME.jsonl`. Plots and tables are made from these files.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"

Record = dict[str, Any]


def write_record(
    path: str | Path,
    *,
    bench: str,
    impl: str,
    case: Mapping[str, Any],
    gpu: str | None = None,
    command: str | None = None,
    **metrics: Any,
) -> dict[str, Any]:
    """Append one measurement to a file; its folder is created if needed.

    Args:
        bench: what kind of measurement: attention, serving, ...
        impl: what was measured: hybrid_mla or a rival.
        case: the conditions: prefix, tail, heads, batch, concurrency, ... as they apply.
        gpu: name of the device; None asks the driver ("cpu" without one).
        command: what to run to repeat the measurement; None takes this process's command line.
        metrics: the values, units in their names: `ms`, `ttft_ms`, `decode_tok_s`, ...
    Returns:
        the record as written.
    """
    record = {
        "bench": bench,
        "impl": impl,
        "case": dict(case),
        **metrics,
        "gpu": gpu or device_name(),
        "torch": package_version("torch"),
        "sglang": package_version("sglang"),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command or own_command(),
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return record


@dataclass
class Report:
    """Measurements of a run: lines of a file of records, if there is one, and rows of a table for the console.

    Attributes:
        measured: `case` and metrics of what did not fail.
    """

    bench: str
    out: Path | None
    rows: list[Record] = field(default_factory=list)
    measured: list[Record] = field(default_factory=list)

    def add(self, impl: str, case: Mapping[str, Any], metrics: Mapping[str, Any] | None, **more: Any) -> None:
        """Add a measurement; `metrics` is None for one that failed, which is not written."""
        if metrics:
            self.measured.append({"case": dict(case), **metrics})
        if metrics and self.out:
            write_record(self.out, bench=self.bench, impl=impl, case=case, **more, **metrics)
        self.rows.append({**case, "impl": impl, **more, **(metrics or {})})


def read_records(path: str | Path) -> list[Record]:
    """Return all measurements of a file, oldest first."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return a field of a record's case, else of the record."""
    return record["case"].get(name, record.get(name))


def newest_by(records: Iterable[Record], prefer: Sequence[str] = ()) -> list[Record]:
    """Sort records so that the last one of a case counts: by some fields, then by date.

    A record with a field `excluded`, which says why, does not count until its case has been measured anew.
    """
    counted = (record for record in records if not record.get("excluded"))
    return sorted(counted, key=lambda record: (*(value_of(record, name) or 0 for name in prefer), record["date"]))


def latest(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], Record]:
    """Return the newest record for each `(impl, value of each name)`."""
    return {(record["impl"], *(value_of(record, name) for name in names)): record for record in newest_by(records)}


@functools.cache
def device_name() -> str:
    """Name of the first GPU as its driver says it, without making a CUDA context; "cpu" if there is none."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    names = answer.stdout.strip().splitlines()
    return names[0].strip() if answer.returncode == 0 and names else "cpu"


def package_version(name: str) -> str | None:
    """Installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def commit() -> str | None:
    """Commit of this checkout, with `-dirty` if files differ from it.

    Outside a repository the environment variable GIT_COMMIT, or None.
    """
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(
            describe, cwd=Path(__file__).resolve().parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return os.environ.get("GIT_COMMIT")
    return answer.stdout.strip() or os.environ.get("GIT_COMMIT")


def own_command() -> str:
    """Return this process's command line. The script's path is relative to the working folder; absolute paths are cut
    to their last part, so that a record names no folder of a machine."""
    arguments = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *arguments])
