"""Make the tables of README.md and docs: records and a spec in tables.yaml become Markdown.

A spec is a table as data:

- `records`: files in benchmarks/results; `where`: values that a record or its case must have; `prefer`: fields by which
  a larger record is taken before a newer one; `derive`: a function that adds fields to a record.
- `by`: fields that tell rows apart. `beside` puts several records into one row: name -> values of such a record; a row
  without one of `needs` is left out. `best` names the fastest of some of them, by `ms` or by a `rate`, unless one of
  its `needs` is missing.
- `names`: field -> value -> label, in the order of rows; other rows are left out. `order`: fields to sort by, `-` first
  for the largest first. `repeat`: key -> name; every row is shown once for each, with `@` as the key.
- `rows`: a function of all records (and of `with`) that yields rows, for what has to be computed. `finish`: one that
  adds to all rows. `note: false`: no line that says where the figures come from. `padded: false`: for long cells.
- `columns`: heading -> cell, both format strings over a row: the fields of its (first) record and case, and the records
  of `beside`. `{ours[ms]:.3f}`; the quotient `{stock[ms]/ours[ms]:.2f}`; `{share!p:.1f}` in percent, `{traces!n}`
  counts, `{change:i2}` with the ends of its interval; `A ?? B` is B where a value of A is missing. Columns of dashes
  are left out.
"""

from __future__ import annotations

import functools
import importlib
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from tabulate import tabulate

from bench.records import REPOSITORY, RESULTS, Record, newest_by, read_records, value_of

SPECS = REPOSITORY / "scripts" / "bench" / "tables.yaml"
NOTHING = "–"

Spec = Mapping[str, Any]
Row = dict[str, Any]


class _MissingError(Exception):
    """A cell has no value to show."""


class Interval(float):
    """A value with the ends of its interval."""

    ends: tuple[float, float]

    def __format__(self, form: str) -> str:
        if not form.startswith("i"):
            return super().__format__(form)
        digits = int(form[1:])
        figures = [round(figure, digits) + 0.0 for figure in (float(self), *self.ends)]  # adding turns -0.0 into 0.0
        value, low, high = (f"{figure:+.{digits}f}" for figure in figures)
        return f"{value} ({low} to {high})" if any(figures) else "±0"


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        values = [self.value(name, kwargs) for name in field_name.split("/")]
        if None in values:
            raise _MissingError
        return (values[0] / values[1] if len(values) > 1 else values[0]), field_name

    def value(self, name: str, row: Row) -> Any:
        """Return `field`, or `record[field]`, of a row. Raises _MissingError."""
        *path, last = name.replace("]", "").split("[")
        try:
            for part in path:
                row = row[part]
            value = row[last] if isinstance(row, Mapping) else getattr(row, last)
        except (KeyError, TypeError, AttributeError):  # a record without the field, or no record
            raise _MissingError from None
        if isinstance(row, Mapping) and f"{last}_low" in row:
            value = Interval(value)
            value.ends = row[f"{last}_low"], row[f"{last}_high"]
        return value

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion == "p":
            return 100 * value
        return len(value) if conversion == "n" else super().convert_field(value, conversion)

    def cell(self, text: str, row: Row) -> str:
        for alternative in text.split(" ?? "):
            try:
                return self.vformat(alternative, (), row)
            except _MissingError:
                continue
        return NOTHING


CELLS = _Cells()


def specs() -> dict[str, dict[str, Any]]:
    """Return the specs of all tables: page -> block -> spec, or parts of a block."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(SPECS.read_text(encoding="utf-8"))
    return found


def block(spec: Spec) -> str:
    """Return what stands between the marks of a block: a table, and where the figures come from."""
    rows = rows_of(spec, read_all(spec["records"]) if "records" in spec else [])
    made = table(spec["columns"], rows, padded=spec.get("padded", True))
    records = [record for row in rows for record in row["records"] if spec.get("note", True)]
    return f"{made}\n\n{made_with(records)}" if records else made


def read_all(names: str | Sequence[str]) -> list[Record]:
    """Return the records of one or several files, each with the `file` that it is from."""
    names = [names] if isinstance(names, str) else names
    return [record | {"file": name} for name in names for record in read_records(RESULTS / f"{name}.jsonl")]


def rows_of(spec: Spec, records: Iterable[Record]) -> list[Row]:
    """Return the rows of a table; each has the `records` that it is made of."""
    records = map(function(spec["derive"]), records) if "derive" in spec else records
    records = [record for record in records if matches(record, spec.get("where", {}))]
    rows = (
        list(function(spec["rows"])(records, **spec.get("with", {})))
        if "rows" in spec
        else list(_joined(spec, records))
    )
    for field, labels in spec.get("names", {}).items():
        rows = [row | {field: labels[row[field]], "key": row[field]} for row in rows if row[field] in labels]
        rows.sort(key=lambda row, labels=list(labels): labels.index(row["key"]))
    for field in reversed(spec.get("order", [])):
        rows.sort(key=functools.partial(_sortable, field.lstrip("-")), reverse=field.startswith("-"))
    if "finish" in spec:
        rows = function(spec["finish"])(rows)
    return [row | {"@": key, "repeated": name} for row in rows for key, name in spec.get("repeat", {"": ""}).items()]


def matches(record: Record, wanted: Mapping[str, Any]) -> bool:
    """Return whether a record has these values, or one of a list."""
    return all(value_of(record, name) in (want if isinstance(want, list) else [want]) for name, want in wanted.items())


def function(name: str) -> Any:
    """Return a function by `module:name`."""
    module, _, of_module = name.partition(":")
    return getattr(importlib.import_module(module), of_module)


def _joined(spec: Spec, records: Iterable[Record]) -> Iterable[Row]:
    """Yield a row for each case, of its records that stand side by side."""
    beside = spec.get("beside", {"record": {}})
    found: dict[tuple[Any, ...], dict[str, Record]] = {}
    for record in newest_by(records, spec.get("prefer", ())):
        for name in (name for name, wanted in beside.items() if matches(record, wanted)):
            found.setdefault(tuple(value_of(record, field) for field in spec["by"]), {})[name] = record
    for of_row in found.values():
        if {*spec.get("needs", ())} <= {*of_row}:
            first = next(of_row[name] for name in beside if name in of_row)
            best = {name: _fastest(of_row, **choice) for name, choice in spec.get("best", {}).items()}
            yield {**first, **first["case"], **of_row, **best, "records": list(of_row.values())}


def _fastest(
    of_row: Mapping[str, Record], of: Sequence[str], needs: Sequence[str] = (), rate: str | None = None
) -> Record | None:
    """Return the record with the highest `rate`, or without one with the fewest milliseconds."""
    there = [of_row[name] for name in of if name in of_row]
    if not there or not {*needs} <= {*of_row}:
        return None
    return max(there, key=lambda record: record[rate]) if rate else min(there, key=lambda record: record["ms"])


def _sortable(name: str, row: Row) -> tuple[bool, Any]:
    return row.get(name) is not None, row.get(name)


def table(columns: Mapping[str, str], rows: Sequence[Row], *, padded: bool = True) -> str:
    """Return a table in GitHub's Markdown, without columns that have no value in any row."""
    cells = [[CELLS.cell(text.replace("@", row.get("@", "")), row) for text in columns.values()] for row in rows]
    kept = [place for place in range(len(columns)) if any(of_row[place] != NOTHING for of_row in cells)]
    headings = [CELLS.cell(heading, rows[0]) for heading in columns] if rows else list(columns)
    shown = [[of_row[place] for place in kept] for of_row in cells]
    if not padded:
        lines = [[headings[at] for at in kept], ["---"] * len(kept), *shown]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    align = ("right",) * len(kept)
    return tabulate(shown, [headings[at] for at in kept], tablefmt="github", colalign=align, disable_numparse=True)


def made_with(records: Sequence[Record]) -> str:
    """Return the GPUs and versions of records in one line; commands, commits and dates stay in the records."""
    where = [
        listed(name, (record[key] for record in records if record[key]))
        for name, key in (("", "gpu"), ("torch ", "torch"), ("sglang ", "sglang"))
        if any(record[key] for record in records)
    ]
    return ", ".join(where)


def listed(name: str, values: Iterable[Any]) -> str:
    """Return a name, and the different values in their order."""
    return name + " and ".join(dict.fromkeys(str(value) for value in values))
