"""What the tables of measured figures have in common: the newest records, Markdown, and where figures come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
STORAGE_NAMES = {"bf16": "BF16", "fp8": "FP8"}
NOT_MEASURED = "Not measured yet."


def latest(records: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest record for each `(impl, case[name], ...)`.

    A record with a field `excluded`, which says why, does not count: it stays in its file, and appears again in tables
    once the case has been measured anew.
    """
    return {
        (record["impl"], *(record["case"].get(name) for name in names)): record
        for record in sorted(records, key=lambda record: record["date"])
        if not record.get("excluded")
    }


def markdown(rows: list[tuple[Any, ...]], columns: tuple[str, ...], records: dict[tuple[Any, ...], Any]) -> str:
    """A table, and below it where its figures come from."""
    return f"{table(rows, columns)}\n\n{provenance(records)}"


def table(rows: list[tuple[Any, ...]], columns: tuple[str, ...]) -> str:
    """A table in GitHub's Markdown."""
    align = ("right",) * len(columns)
    return tabulate(rows, columns, tablefmt="github", colalign=align, disable_numparse=True)


def made_with(records: Sequence[dict[str, Any]]) -> str:
    """GPUs, versions, commits and dates of all records, in one line."""
    where = (
        listed(name, (record[key] for record in records))
        for name, key in (("", "gpu"), ("torch ", "torch"), ("sglang ", "sglang"))
    )
    commits = [record["commit"] for record in records]
    dates = listed("", sorted(record["date"][:10] for record in records))
    return ", ".join([*where, listed("commits " if len(set(commits)) > 1 else "commit ", commits), dates])


def listed(name: str, values: Iterable[Any]) -> str:
    """A name, and the different values in their order."""
    return name + " and ".join(dict.fromkeys(str(value) for value in values))


def provenance(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Where the figures come from: GPU, versions, commits, dates, commands. More than two lines are folded."""
    lines = []
    for command in dict.fromkeys(record["command"] for record in records.values()):
        first = next(record for record in records.values() if record["command"] == command)
        versions = [f"{name} {first[name]}" for name in ("torch", "sglang") if first[name]]
        where = ", ".join([first["gpu"], *versions])
        lines.append(f"{where}, commit {first['commit']}, {first['date'][:10]}: `{command}`")
    text = "\n\n".join(lines)
    if len(lines) <= 2:
        return text
    return f"<details><summary>GPU, versions, commits, dates and commands</summary>\n\n{text}\n\n</details>"
