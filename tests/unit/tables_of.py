"""Cells of a generated table, made of records that a test has written."""

from __future__ import annotations

from pathlib import Path

from bench.records import read_records
from bench.tables import Spec, rows_of, table


def lines_of(spec: Spec, *paths: Path) -> list[list[str]]:
    """Headings and rows; each record has the name of its file."""
    records = [record | {"file": path.stem} for path in paths for record in read_records(path)]
    lines = table(spec["columns"], rows_of(spec, records)).splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]


def named_rows(spec: Spec, *paths: Path) -> list[dict[str, str]]:
    """Rows by the names of their columns."""
    headings, *rows = lines_of(spec, *paths)
    return [dict(zip(headings, row, strict=True)) for row in rows]
