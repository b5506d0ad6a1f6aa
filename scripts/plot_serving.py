"""Draw throughput of servers: ranks of whole models from benchmarks/results/rank.jsonl, for the README, and decode over
concurrency of models of few layers from benchmarks/results/serving.jsonl.

    pip install matplotlib
    python scripts/plot_serving.py

Of the second: one row for each model shape, in it one panel for each prompt, one line for each backend and storage of
the cache and of expanded prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from bench import rank_plots
from bench.records import read_records
from bench.serving_tables import BF16, FP8, FP8_PREFIX, storage
from bench.tables import REPOSITORY, RESULTS, latest

PANEL = ("prompt", "prefix", "heads", "layers")
IMAGES = REPOSITORY / "docs" / "images"
STYLES = {BF16: "o-", FP8_PREFIX: "s--", FP8: "^:"}


class Line(NamedTuple):
    """What a line stands for: SGLang's name of the backend, and how it stored the cache and expanded prefixes."""

    backend: str
    storage: str

    def __str__(self) -> str:
        return f"{self.backend}, {self.storage}"


Panel = dict[Line, dict[int, float]]
"""By line: concurrency to decode tokens/s, ascending."""


def panels(records: Iterable[dict[str, Any]]) -> dict[tuple[Any, ...], Panel]:
    """The newest throughput of each case, by the case's values of `PANEL`; cases without one are left out, and
    panels of one backend alone."""
    found = [record | {"case": record["case"] | {"storage": storage(record)}} for record in records]
    newest = latest(
        (record for record in found if record["decode_tok_s"] is not None), *PANEL, "storage", "concurrency"
    )
    drawn: dict[tuple[Any, ...], Panel] = {}
    for (impl, *panel, stored, concurrency), record in newest.items():
        line = Line(impl.removeprefix("sglang_"), stored)
        drawn.setdefault(tuple(panel), {}).setdefault(line, {})[concurrency] = record["decode_tok_s"]
    return {
        panel: {line: dict(sorted(of_line.items())) for line, of_line in sorted(lines.items(), key=str)}
        for panel, lines in sorted(drawn.items(), key=str)
        if len({line.backend for line in lines}) > 1
    }


def title(panel: tuple[Any, ...]) -> str:
    """The title of a panel."""
    prompt, prefix, heads, layers = panel
    tokens = f" ({prefix:,} tokens)" if prefix else ""
    return f"prompt {prompt}{tokens}\n{heads} heads, {layers} layers"


def rows_and_columns(drawn: Iterable[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Shapes of models, those of known dimensions first and the largest of them on top, and prompts by name."""
    panels = set(drawn)
    shapes = sorted({panel[2:] for panel in panels}, key=lambda shape: [size or 0 for size in shape], reverse=True)
    return shapes, sorted({panel[:2] for panel in panels}, key=str)


def draw(drawn: dict[tuple[Any, ...], Panel], out: Path, caption: str) -> None:
    """Write the plot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shapes, prompts = rows_and_columns(drawn)
    figure = Figure(figsize=(5 * len(prompts), 3.5 * len(shapes) + 0.5), layout="constrained")
    grid = figure.subplots(len(shapes), len(prompts), squeeze=False)
    for axes in grid.flat:
        axes.set_visible(False)
    backends = dict.fromkeys(line.backend for panel in drawn.values() for line in panel)
    colours = {backend: f"C{index}" for index, backend in enumerate(backends)}
    handles: dict[Line, Any] = {}
    for panel, of_panel in drawn.items():
        axes = grid[shapes.index(panel[2:]), prompts.index(panel[:2])]
        axes.set_visible(True)
        for line, of_line in of_panel.items():
            style = dict(color=colours[line.backend], label=str(line))
            handles[line] = axes.plot(list(of_line), list(of_line.values()), STYLES[line.storage], **style)[0]
        sizes = sorted({concurrency for of_line in of_panel.values() for concurrency in of_line})
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(0, 1.1 * max(rate for of_line in of_panel.values() for rate in of_line.values()))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set(title=title(panel), xlabel="requests that share the prompt", ylabel="decode tokens/s")
        axes.grid(alpha=0.3)
    figure.legend(handles=handles.values(), loc="outside upper center", ncols=len(handles))
    figure.supxlabel(caption, fontsize="small", color="gray")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main(
    results: Annotated[Path, typer.Option(exists=True, help="Records of bench_serving.py.")] = RESULTS
    / "serving.jsonl",
    ranks: Annotated[Path, typer.Option(exists=True, help="Records of bench_rank.py.")] = RESULTS / "rank.jsonl",
    out: Annotated[Path, typer.Option(help="Folder of the plots.")] = IMAGES,
) -> None:
    """Draw the servers' throughput: ranks.png, which the README has, and serving.png."""
    records = read_records(results)
    drawn = panels(records)
    if not drawn:
        raise typer.BadParameter(f"{results} has no throughput to draw")
    try:
        rank_plots.draw(read_records(ranks), out / "ranks.png")
        draw(
            drawn,
            out / "serving.png",
            ", ".join(sorted({f"{r['gpu']}, torch {r['torch']}, sglang {r['sglang']}" for r in records})),
        )
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"needs matplotlib (the extra `plots` of this package): {error}") from error
    print(f"wrote {out}")


if __name__ == "__main__":
    typer.run(main)
