"""Draw the images of README.md and docs: the rows of a table (bench/tables.py), and what of them is shown.

- `column`: a format string that tells panels apart, and their title; `row`: one that is the same for all, their title
  together; `x`: the field along the axis.
- `series`: label -> `y` and `mark` (a second value, a line across a bar), which are fields as in cells.
- `kind`: `bars`, or `lines` on a logarithmic scale; `above`: what stands above each group of bars.
- `xlabel`, `ylabel`, and `panel`: width and height in inches.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from bench.tables import CELLS, Row, Spec, made_with, read_all, rows_of

COLOURS = ("#0072B2", "#BBBBBB", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#F0E442")
"""Okabe and Ito's colours, and a grey; neighbours are told apart by brightness, too."""

Panels = dict[tuple[str, str], list[Row]]
"""Rows by the titles of their panel's row and column."""


def panels(spec: Spec) -> Panels:
    """Return what a plot shows."""
    found: Panels = {}
    for row in rows_of(spec, read_all(spec["records"])):
        titles = CELLS.cell(spec.get("row", ""), row), CELLS.cell(spec["column"], row)
        found.setdefault(titles, []).append(row)
    return found


def values(spec: Spec, name: str, part: str, rows: Sequence[Row]) -> list[float | None]:
    """Return a series of a panel; None where there is no value."""
    field = spec["series"][name].get(part)
    return [CELLS.value(field.replace("@", row["@"]), row) if field else None for row in rows]


def digest(spec: Spec, found: Panels) -> str:
    """Return what a plot carries in its file, so that it can be told whether it is of these records."""
    shown = [
        [
            titles,
            name,
            part,
            [row[spec["x"]] for row in rows],
            [y and f"{y:.4g}" for y in values(spec, name, part, rows)],
        ]
        for titles, rows in found.items()
        for name in spec["series"]
        for part in ("y", "mark")
    ]
    return "records " + hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def draw(spec: Spec, out: Path) -> None:
    """Write a plot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    found = panels(spec)
    width, height = spec.get("panel", (5, 4.5))
    figure = Figure(figsize=(width * len(found), height + 1), layout="constrained")
    (grid,) = figure.subplots(1, len(found), squeeze=False, sharey=spec.get("sharey", "row"))
    ticks = sorted({row[spec["x"]] for of_panel in found.values() for row in of_panel})
    shown: dict[str, Any] = {}
    for axes, ((_, title), of_panel) in zip(grid, found.items(), strict=True):
        shown |= (bars if spec["kind"] == "bars" else lines)(axes, spec, of_panel, ticks)
        axes.set_title(title, fontsize="medium")
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    of_row, _ = next(iter(found))
    grid[0].set_ylabel(f"{of_row}\n{spec['ylabel']}".strip())
    figure.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=min(5, len(shown)), frameon=False)
    footer = textwrap.fill(
        made_with([one for of in found.values() for row in of for one in row["records"]]), 30 * len(found)
    )
    figure.supxlabel(f"{spec['xlabel']}\n{footer}", fontsize="small", color="0.35")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Comment": digest(spec, found)})


def bars(axes: Any, spec: Spec, rows: Sequence[Row], ticks: Sequence[Any]) -> Mapping[str, Any]:
    """Draw bars side by side for each value of x, their marks, and what stands above; return what a legend shows."""
    shown, width = {}, 0.76 / len(spec["series"])
    tops = [0.0] * len(rows)
    for index, (name, of) in enumerate(spec["series"].items()):
        offset = (index - (len(spec["series"]) - 1) / 2) * width
        places = [ticks.index(row[spec["x"]]) + offset for row in rows]
        heights = [y or 0 for y in values(spec, name, "y", rows)]
        shown[name] = axes.bar(places, heights, width, color=COLOURS[index], edgecolor="0.2", linewidth=0.6)
        marked = values(spec, name, "mark", rows)
        if of.get("mark"):
            ends = ([place + side * width * 0.4 for place in places] for side in (-1, 1))
            across = [mark or nan for mark in marked]
            shown[spec["mark"]] = axes.hlines(across, *ends, color=COLOURS[2], linewidth=2.5, zorder=3)
        tops = [max(top, height, mark or 0) for top, height, mark in zip(tops, heights, marked, strict=True)]
    for row, top in zip(rows, tops, strict=True):
        text, place = CELLS.cell(spec.get("above", ""), row), (ticks.index(row[spec["x"]]), top)
        axes.annotate(text, place, textcoords="offset points", xytext=(0, 4), ha="center", fontweight="bold")
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    return shown


def lines(axes: Any, spec: Spec, rows: Sequence[Row], ticks: Sequence[Any]) -> Mapping[str, Any]:
    """Draw lines over x on a logarithmic scale; return what a legend shows."""
    axes.set_yscale("log")
    axes.set_xticks(ticks)
    return {
        name: axes.plot([row[spec["x"]] for row in rows], values(spec, name, "y", rows), "os^Dvxp*h"[index] + "-",
                        color=COLOURS[index])[0]
        for index, name in enumerate(spec["series"])
    }  # fmt: skip
