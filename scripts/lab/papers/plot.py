"""Draw the papers' experiments as they were measured here, in the papers' form, one image for each.

    pip install matplotlib
    python scripts/study.py papers plot

Reads the records of `reproduce`; an experiment without any is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.tables import REPOSITORY, RESULTS

from lab.papers import experiments as kinds
from lab.papers.experiments import EXPERIMENTS, Implementation
from lab.papers.formulas import snapmla_peak
from lab.papers.tables import NAMES, UNITS, Row, rows_of
from lab.papers.values import NOMINAL_BF16_TFLOPS
from sglang_mla_ext.configs import gpu_config_of

DPI = 80
DPI_OF_MANY = 64  # more than three lines of panels
COLOURS = {
    kinds.FLASHMLA_BF16.label: "0.6",
    kinds.FLASHMLA_FP8.label: "0.35",
    kinds.FLASHINFER.label: "C1",
    kinds.TYPHOON_PARTS.label: "C4",
    kinds.OURS_BF16.label: "C0",
    kinds.OURS_STACKED.label: "C0",
    kinds.OURS_FP8.label: "C2",
    kinds.OURS_FP8_PREFIX.label: "C2",
}
STACKS = {  # bars of TyphoonMLA's figure 4, from below
    "ours BF16": (kinds.STAGE_1, kinds.STAGE_2, kinds.W_KC, kinds.W_VC, kinds.MERGE),
    "ours, FP8 prefix": (kinds.STAGE_1_FP8, kinds.STAGE_2, kinds.W_KC, kinds.W_VC, kinds.MERGE),
    "FlashMLA BF16": (kinds.ABSORB_ONLY, kinds.W_KC, kinds.W_VC),
}
STAGES = {  # of those bars: label, colour
    "naive": ("stage 1 (naive)", "C0"),
    "tail": ("stage 2 (absorb)", "C1"),
    "all": ("stage 2 (absorb)", "C1"),
    "w_kc": ("W_KV,B1", "C2"),
    "w_vc": ("W_KV,B2", "C3"),
    "merge": ("merge", "C4"),
}
FIELDS = {"batch": "{} requests", "tail": "{:,} tokens", "s_q": "query tokens: {}", "heads": "{} heads"}


def main(
    results: Annotated[Path, typer.Option(help="Records of `reproduce`.")] = RESULTS / "papers.jsonl",
    out: Annotated[Path, typer.Option(help="The folder of the images.")] = REPOSITORY / "docs" / "images",
) -> None:
    """Write `reproduced_NAME.png` for every experiment that has been measured."""
    try:
        import matplotlib.figure
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"needs matplotlib (the extra `plots` of this package): {error}") from None
    out.mkdir(parents=True, exist_ok=True)
    for name in EXPERIMENTS:
        if not (rows := rows_of(name, results)):
            print(f"{name}: not measured yet")
            continue
        figure = matplotlib.figure.Figure(layout="constrained")
        stages(figure, rows) if name == "typhoonmla-figure-4" else panels(figure, name, rows)
        figure.suptitle(f"{EXPERIMENTS[name].title}, on {gpu_of(rows)}")
        path = out / f"reproduced_{name}.png"
        many = figure.get_figheight() > 10
        figure.savefig(path, dpi=DPI_OF_MANY if many else DPI, pil_kwargs={"optimize": True})
        print(f"wrote {path}")


def gpu_of(rows: Sequence[Row]) -> str:
    """The GPU of all of them."""
    name: str = next(iter(rows[0].of.values()))["gpu"]
    return name


def panels(figure: Any, name: str, rows: Sequence[Row]) -> None:
    """One panel of bars for each value of the experiment's `panel`, three in a line at most."""
    experiment = EXPERIMENTS[name]

    def of_panel(row: Row) -> tuple[Any, ...]:
        return tuple(row.field(field) for field in experiment.panel)

    grouped = [(values, list(same)) for values, same in groupby(rows, of_panel)]
    columns = min(3, len(grouped)) if len(grouped) % 2 or len(grouped) > 4 else 2
    lines = -(-len(grouped) // columns)
    figure.set_size_inches(4.6 * columns, (1.9 if lines > 3 else 2.8) * lines + 0.8)
    grid = figure.subplots(lines, columns, squeeze=False)
    shown = [of for of in experiment.implementations if any(of in row.of for row in rows)]
    for axes, (values, of_values) in zip(grid.flat, grouped, strict=False):
        bars(axes, of_values, shown, experiment.x, experiment.metric)
        axes.set_title(", ".join(map(titled, experiment.panel, values)), fontsize="medium")
        if name.startswith("snapmla") and (nominal := NOMINAL_BF16_TFLOPS.get(gpu_config_of(gpu_of(rows)) or "")):
            peak = snapmla_peak(nominal)
            axes.axhline(peak, color="C3", linestyle="--", label=f"equation 7: {peak:,.0f}")
    for axes in list(grid.flat)[len(grouped) :]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel(UNITS[experiment.metric])
    for axes in grid[-1]:
        axes.set_xlabel(dict(batch="requests", tail="tokens").get(experiment.x, experiment.x))
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")


def titled(field: str, value: Any) -> str:
    """A part of a panel's title."""
    if field == "prompt":
        return f"prompt {value}"
    return FIELDS[field].format(value) if field in FIELDS else NAMES.get(value, value)


def bars(axes: Any, rows: Sequence[Row], shown: Sequence[Implementation], x: str, metric: str) -> None:
    """A group of bars for each case, one for each implementation."""
    width = 0.85 / len(shown)
    for index, of in enumerate(shown):
        values = [row.value(of, metric) or 0 for row in rows]
        places = [place + (index - (len(shown) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(places, values, width, label=of.label, color=COLOURS[of.label])
    axes.set_xticks(range(len(rows)), [short(row.field(x)) for row in rows], fontsize="small")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}k" if value >= 10_000 else f"{value:,.0f}")
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)


def short(value: int) -> str:
    """A number of tokens or requests below an axis."""
    return f"{value // 1024}k" if value > 1024 and value % 1024 == 0 else str(value)


def stages(figure: Any, rows: Sequence[Row]) -> None:
    """TyphoonMLA's figure 4: stacked bars of stages, ours beside absorb alone."""
    figure.set_size_inches(9, 4.2)
    axes = figure.subplots()
    width, names = 0.27, {}
    for index, (label, parts) in enumerate(STACKS.items()):
        for place, row in enumerate(rows):
            foot, x = 0.0, place + (index - 1) * (width + 0.02)
            for part in parts:
                height = row.value(part, "ms") or 0.0
                name, colour = STAGES[part.part]
                names[name] = axes.bar(x, height, width, foot, color=colour, edgecolor="white", linewidth=0.5)
                foot += height
            axes.text(x, foot, label, rotation=90, fontsize="x-small", ha="center", va="bottom")
    axes.margins(y=0.35)
    axes.set_xticks(range(len(rows)), [f"{row.case.batch:,}" for row in rows])
    axes.set(xlabel="requests", ylabel="ms of a layer, parts timed alone")
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(names.values(), list(names), loc="outside lower center", ncols=len(names), fontsize="small")
