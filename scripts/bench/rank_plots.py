"""The README's plot: ranks of whole models, ours beside the fastest of SGLang's own backends, and what `plan` says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from bench.rank_tables import LOADS, Pair, middle, pairs
from bench.tables import made_with

OURS_COLOUR, THEIRS_COLOUR, PLAN_COLOUR = "#0072B2", "#BBBBBB", "#D55E00"
"""Okabe and Ito's blue and vermilion, and a grey: told apart by brightness, too."""
BAR = 0.38


class Group(NamedTuple):
    """Two bars: tokens per second, measured and as `plan` says, and their ratio as it is written."""

    requests: int
    ours: float
    theirs: float
    predicted: tuple[float, float]
    ratio: str


Panels = dict[tuple[str, str, int], list[Group]]
"""By model and ranks, load and prompt."""


def panels(records: Iterable[dict[str, Any]]) -> Panels:
    """What the plot shows, rounded to whole tokens."""

    def group(pair: Pair) -> Group:
        predicted = pair.predicted
        assert predicted is not None  # of the models that are drawn
        said = round(predicted[0]), round(predicted[1])
        return Group(pair.requests, round(middle(pair.ours)), round(middle(pair.theirs)), said, f"{pair.ratio:.2f}x")

    return {case: [*map(group, of_case)] for case, of_case in groupby(pairs(records), key=lambda pair: pair[:3])}


def digest(drawn: Panels) -> str:
    """What a plot carries in its file, so that it can be told whether it is of these records."""
    text = json.dumps([[*case, groups] for case, groups in drawn.items()])
    return "records " + hashlib.sha256(text.encode()).hexdigest()[:16]


def draw(records: Sequence[dict[str, Any]], out: Path) -> None:
    """Write the plot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    drawn = panels(records)
    models, columns = (list(dict.fromkeys(case[part] for case in drawn)) for part in (slice(1), slice(1, 3)))
    columns.sort(key=lambda column: (list(LOADS).index(column[0]), column[1]))
    sizes = sorted({each.requests for groups in drawn.values() for each in groups})
    figure = Figure(figsize=(2.8 * len(columns), 2.6 * len(models) + 1), layout="constrained")
    grid = figure.subplots(len(models), len(columns), squeeze=False, sharey="row")
    for axes in grid.flat:
        axes.set_visible(False)
    for (model, load, prompt), groups in drawn.items():
        axes = grid[models.index((model,)), columns.index((load, prompt))]
        axes.set_visible(True)
        handles = draw_panel(axes, groups, sizes)
        axes.set_title(f"{LOADS[load]}\n{prompt:,} shared tokens", fontsize="medium")
    for (model,), row in zip(models, grid, strict=True):
        first = next(axes for axes in row if axes.get_visible())
        first.set_ylabel(f"{model}\ntokens/s of one rank")
        first.set_ylim(0, 1.12 * first.get_ylim()[1])
        first.tick_params(labelleft=True)
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    shown = [record for pair in pairs(records) for record in (*pair.ours, *pair.theirs)]
    figure.supxlabel(f"requests that share the prompt\n{made_with(shown)}", fontsize="small", color="0.35")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110, metadata={"Comment": digest(drawn)})


def draw_panel(axes: Any, groups: Sequence[Group], sizes: Sequence[int]) -> list[Any]:
    """Bars by number of requests, the ratio above them, and a mark where `plan` says that they end.

    Args:
        sizes: numbers of requests in any panel.
    Returns:
        What a legend shows.
    """
    places = [sizes.index(each.requests) for each in groups]
    left, right = ([place + side * BAR / 2 for place in places] for side in (-1, 1))
    style = {"width": BAR, "edgecolor": "0.2", "linewidth": 0.6}
    ours = axes.bar(left, [each.ours for each in groups], color=OURS_COLOUR, label="hybrid_mla", **style)
    label = "the fastest of SGLang's own"
    theirs = axes.bar(right, [each.theirs for each in groups], color=THEIRS_COLOUR, label=label, **style)
    said = [each.predicted[side] for side in (0, 1) for each in groups]
    starts, stops = ([end + side * BAR * 0.4 for end in (*left, *right)] for side in (-1, 1))
    mark = {"color": PLAN_COLOUR, "linewidth": 2.5, "label": "what `sglang-mla plan` says"}
    marks = axes.hlines(said, starts, stops, zorder=3, **mark)
    for place, each in zip(places, groups, strict=True):
        top = max(each.ours, each.theirs, *each.predicted)
        offset = {"textcoords": "offset points", "xytext": (0, 4)}
        axes.annotate(each.ratio, (place - BAR / 2, top), ha="center", fontweight="bold", **offset)
    axes.set_xlim(-0.6, len(sizes) - 0.4)
    axes.set_xticks(places, [str(each.requests) for each in groups])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return [ours, theirs, marks]
