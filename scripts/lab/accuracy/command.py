"""Measure how much rounding costs: the studies of SnapMLA, AMLA and FlashMLA-ETAP on drawn data, and one of a trained
model.

Without `--model` the studies on drawn data run (drawn.py): a few minutes on two cores, 2 GiB. With
`--model demo` the shipped model (configs/demo_model) is examined as each implementation would serve it
(trained.py); this needs the data that `study.py training prepare` writes. With `--outliers` its latent rows are made
as large as large models' first (outliers.py). With `--server` real servers are asked, and not the references
(on_server.py), all at the same time: on a CPU name few of them by `--impl`, and few tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from bench.records import REPOSITORY, Report, commit
from bench.server import ServerFailedError, work_folder
from rich.console import Console

from lab.accuracy.drawn import amla, etap, snapmla
from lab.accuracy.on_server import SETUPS, served_study
from lab.accuracy.outliers import put_outliers
from lab.accuracy.served import IMPLS, Served
from lab.accuracy.trained import Plan, demo
from lab.training.batches import Data
from lab.training.network import load_network

app = typer.Typer(add_completion=False)

console = Console()
MODEL = REPOSITORY / "configs" / "demo_model"


def lengths_of(texts: Iterable[str], prompts: int = 50) -> dict[int, int]:
    """Read `TOKENS` or `TOKENS:PROMPTS`; return prompts by length. Raises typer.BadParameter."""
    try:
        found = (text.partition(":") for text in texts)
        return {int(length): int(count or prompts) for length, _, count in found}
    except ValueError as error:
        raise typer.BadParameter(f"a length is TOKENS or TOKENS:PROMPTS: {error}") from error


@app.command()
def main(
    out: Annotated[Path | None, typer.Option(help="Append records to this JSON-lines file.")] = None,
    model: Annotated[Literal["demo"] | None, typer.Option(help="Study a model.")] = None,
    data: Annotated[Path, typer.Option(help="Folder that `study.py training prepare` wrote.")] = Path(".demo/data"),
    device: Annotated[str, typer.Option(help="Where to compute.")] = "cpu",
    prose_tokens: Annotated[int, typer.Option(help="Tokens of held-out prose to score, about; 0: none.")] = 30_000,
    cases: Annotated[int, typer.Option(help="Dictionary questions of each kind; 0: none.")] = 100,
    lengths: Annotated[
        list[str] | None,
        typer.Option(help="Look-ups: TOKENS:PROMPTS, repeatable; 0: none. 512:50, 2048:50 and 8192:50 if left out."),
    ] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Only these, and sglang_bf16; repeatable.")] = None,
    outliers: Annotated[bool, typer.Option("--outliers", help="With latent rows as large models have them.")] = False,
    server: Annotated[bool, typer.Option("--server", help="Ask real servers, not the references.")] = False,
) -> None:
    """Run the three studies on drawn data, or the study of a model."""
    commit()  # cached now: the checkout may have moved on by the time the first record is written
    if server and (outliers or model is None):
        raise typer.BadParameter("--server is for --model alone, without --outliers")
    if server and (unknown := set(impl or ()) - set(SETUPS)):
        raise typer.BadParameter(f"unknown: {sorted(unknown)}; there are {', '.join(SETUPS)}", param_hint="--impl")
    gpu = "cpu" if model and not server and device == "cpu" else None  # else this machine's
    if model is None:
        found = (record for study in (snapmla, amla, etap) for record in study())
    else:
        chosen = lengths_of(lengths or ["512", "2048", "8192"])
        chosen.pop(0, None)
        try:
            plan = Plan(() if server else tuple(impl or IMPLS), prose_tokens, cases, chosen)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        if server:
            logs = work_folder() / "logs" / "accuracy"
            found = served_study(MODEL, Data(data), plan, impl or list(SETUPS), logs, console)
        else:
            network = load_network(MODEL)
            if outliers:
                put_outliers(network)
            found = demo(Served(network.to(device)), Data(data), plan)
    report = Report("accuracy", out)
    try:
        for name, case, metrics in found:
            if outliers:
                case["study"] = case["study"].replace("demo", "outliers")
            figures = ", ".join(f"{metric} {value:.4g}" for metric, value in metrics.items())
            console.print(f"{name} {case}: {figures}", soft_wrap=True)
            report.add(name, case, metrics, gpu=gpu)
    except ServerFailedError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
