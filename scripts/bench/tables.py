"""What the tables of measured figures have in common: the newest records, their cells as data, Markdown, and where
figures come from."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

from bench.records import read_records

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
STORAGE_NAMES = {"bf16": "BF16", "fp8": "FP8"}
NOT_MEASURED = "Not measured yet."
NOTHING = "–"

Records = dict[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Spec:
    """A table as data; `table_of` makes it of a file of records.

    Attributes:
        by: what tells its records apart, see `latest`.
        headings, cells: with bars between columns. A cell is a format string over a row, which has the fields of its
            record and of the record's case, and the records of `beside`: `{heads}`, `{ours[ms]:.3f}`, and the quotient
            `{stock[ms]/ours[ms]:.2f}`. A cell of what is None, or of a record that there is not, is a dash.
        beside: where a row is of several records, of which the first is the row's: name -> implementation, and values
            of the last names of `by`.
        against: of a record's key the key of what the row has as `stock`.
        optional: names of records beside a row; a row that lacks another one is left out.
        of: makes of a record the one that is shown, None for none.
        order: fields to sort rows by; without them they are as they were measured first.
    """

    by: tuple[str, ...]
    headings: str
    cells: str
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    against: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] | None = None
    optional: tuple[str, ...] = ()
    of: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda record: record
    order: tuple[str, ...] = ()


class _NothingError(Exception):
    """There is nothing to put into a cell."""


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        try:
            values = [super(_Cells, self).get_field(name, args, kwargs)[0] for name in field_name.split("/")]
        except TypeError as error:  # a field of a record that there is not
            raise _NothingError from error
        if None in values:
            raise _NothingError
        return (values[0] / values[1] if len(values) > 1 else values[0]), field_name

    def cell(self, text: str, row: Mapping[str, Any]) -> str:
        try:
            return self.vformat(text.strip(), (), row)
        except _NothingError:
            return NOTHING


def table_of(spec: Spec, path: Path) -> str:
    """The table of a file's records, and where they come from; nothing where there is no such file."""
    if not path.exists():
        return ""
    records = latest(filter(None, map(spec.of, read_records(path))), *spec.by)
    rows = list(_joined(spec, records) if spec.beside else _compared(spec, records))
    if spec.order:
        rows.sort(key=lambda row: [row[name] for name in spec.order])
    if spec.against and not spec.optional:  # what has nothing beside it is not shown
        records = {(place, name): row[name] for place, row in enumerate(rows) for name in ("record", "stock")}
    cells = [tuple(_Cells().cell(cell, row) for cell in spec.cells.split("|")) for row in rows]
    return markdown(cells, tuple(heading.strip() for heading in spec.headings.split("|")), records)


def _joined(spec: Spec, records: Records) -> Iterable[dict[str, Any]]:
    """A row for each case, of its records that stand side by side."""
    further = len(next(iter(spec.beside.values()))) - 1
    for case in dict.fromkeys(key[1 : len(key) - further] for key in records):
        found = {name: records.get((impl, *case, *rest)) for name, (impl, *rest) in spec.beside.items()}
        if all(found[name] for name in found if name not in spec.optional):
            first = next(iter(found.values())) or {}
            yield {**first, **first["case"], **found}


def _compared(spec: Spec, records: Records) -> Iterable[dict[str, Any]]:
    """A row for each record, with what it is compared with."""
    for key, record in records.items():
        stock = records.get(spec.against(key)) if spec.against else None
        if stock or spec.optional or not spec.against:
            yield {**record, **record["case"], "record": record, "stock": stock}


def latest(records: Iterable[dict[str, Any]], *names: str) -> Records:
    """The newest record for each `(impl, case[name], ...)`; a name that its case lacks may be one of its own fields.

    A record with a field `excluded`, which says why, does not count: it stays in its file, and appears again in tables
    once the case has been measured anew.
    """
    return {
        (record["impl"], *(record["case"].get(name, record.get(name)) for name in names)): record
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
        listed(name, (record[key] for record in records if record[key]))
        for name, key in (("", "gpu"), ("torch ", "torch"), ("sglang ", "sglang"))
        if any(record[key] for record in records)
    )
    commits = [str(record["commit"])[:7] for record in records]
    dates = listed("", sorted(record["date"][:10] for record in records))
    return ", ".join([*where, listed("commits " if len(set(commits)) > 1 else "commit ", commits), dates])


def listed(name: str, values: Iterable[Any]) -> str:
    """A name, and the different values in their order."""
    return name + " and ".join(dict.fromkeys(str(value) for value in values))


def provenance(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Return where the figures come from; each record has the command that was run."""
    return made_with(list(records.values()))
