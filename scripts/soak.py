"""Soak: traffic of every kind on a server with little memory; every answer is compared with the stock backend's.

Random trees of prompts, salts, requests that join and leave, clients that close their connection or abort, flushes,
retraction, updates to other weights and back, sleep and wake: `bench/soak_traffic.py` draws it from a seed. A stock
server at ease, beside the one that is tried, knows the answers. After each phase the server must be idle and empty.

    python scripts/soak.py --requests 20000 --out benchmarks/results/soak.jsonl
    python scripts/soak.py --minutes 10 --poison --memory-saver       # on a GPU, with CUDA graphs as SGLang makes them

SGLang's way to test retraction loses the first token's log-probability of some requests that it takes back, whatever
the backend: `--backend torch_native` (on a GPU `flashmla`) shows how many, under the same traffic. They are counted as
`lost_first`, and only if the rest of the answer is right behind that token.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import requests
import typer
from bench.client import HYBRID, sharing_between
from bench.generate import StockAnswers
from bench.records import write_record
from bench.server import (
    LAUNCHER,
    ON_GPU,
    STOCK,
    ServerFailedError,
    console_of,
    free_port,
    log_tail,
    python_path,
    running_server,
    server_info,
    work_folder,
)
from bench.soak_judge import BF16, FP32, Tolerance, Verdict
from bench.soak_run import Outcome, ServerDiedError, Soak, Weights
from bench.soak_servers import (
    POISONED,
    TAKING_BACK,
    at_ease,
    other_weights,
    pressed,
    small_model,
    vocabulary,
)
from bench.soak_traffic import Limits, Traffic
from rich.console import Console
from rich.table import Table

TOLERANCE = BF16 if ON_GPU else FP32


def main(
    request_count: Annotated[int, typer.Option("--requests", min=1, help="How many are sent.")] = 2000,
    minutes: Annotated[float | None, typer.Option(help="Send as many as fit into this time instead.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Backend that is tried; repeatable.")] = None,
    model: Annotated[Path | None, typer.Option(exists=True, help="An MLA checkpoint [a small random one].")] = None,
    other_model: Annotated[Path | None, typer.Option(exists=True, help="Weights to update to, and back.")] = None,
    penalties: Annotated[
        bool, typer.Option("--penalties", help="Ask for penalties as well; servers do not overlap steps then.")
    ] = False,
    poison: Annotated[bool, typer.Option("--poison", help="Fill free memory with NaN.")] = False,
    memory_saver: Annotated[bool, typer.Option("--memory-saver", help="Release memory in sleep; needs a GPU.")] = False,
    server_arg: Annotated[list[str] | None, typer.Option(help="Flags for the server that is tried.")] = None,
    scale: Annotated[int, typer.Option(min=1, help="Factor by which prompts are longer.")] = 8 if ON_GPU else 1,
    at_a_time: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 64 if ON_GPU else 16,
    phase: Annotated[int, typer.Option(min=4, help="Requests between two checks of the idle server.")] = 400,
    tolerance: Annotated[float, typer.Option(help="How far log-probabilities may be off on average.")] = TOLERANCE.mean,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the output of servers [.demo/logs].")] = None,
    seed: int = 0,
) -> None:
    """Try a server with traffic of every kind, and compare every answer with the stock backend's."""
    console = console_of(width=120)
    folder, logs = work_folder(), log_folder or work_folder() / "logs"
    model = model or small_model(folder)
    weights = Weights(str(model), str(other_model or other_weights(model, folder / f"{model.name}_other")))
    limits = Limits().times(scale)
    may_be_off = Tolerance(tolerance, tolerance * TOLERANCE.each / TOLERANCE.mean)
    traffic_of = {"seed": seed, "scale": scale, "at_a_time": at_a_time, "phase": phase, "poison": poison}
    traffic_of["penalties"] = penalties
    no_overlap = ["--disable-overlap-schedule"] if penalties else []
    good = True
    with contextlib.ExitStack() as stack:

        def serve(name: str, arguments: list[str], **more: Any) -> str:
            arguments = ["--model-path", str(model), *arguments]
            log = logs / f"soak-{name}.log"
            return stack.enter_context(running_server(arguments, free_port(), log, console, **more))

        try:
            stock = serve("stock", at_ease() + no_overlap)
            for name in backend or [HYBRID]:
                log = logs / f"soak-{name}.log"
                # Without a copy on the host SGLang's weights are gone after a sleep, until the next update.
                saver = ["--enable-memory-saver", "--enable-weights-cpu-backup"] if memory_saver else []
                arguments = pressed(name) + saver + no_overlap
                arguments += shlex.split(" ".join(server_arg or []))
                launcher = POISONED if poison else ("-m", LAUNCHER)
                environment = {**TAKING_BACK, "PYTHONPATH": python_path()}
                tried = serve(name, arguments, environment=environment, launcher=launcher)
                sleeps = ("kv_cache", "weights") if memory_saver else ("kv_cache",)
                soak_of = {"at_a_time": at_a_time, "sleeps": sleeps, "tolerance": may_be_off}
                console.rule(name)
                began, before, outcome = time.monotonic(), server_info(tried), Outcome()
                excluded: str | None = "stopped before its end"
                hidden = bool(before.get("enable_return_hidden_states"))
                traffic = Traffic(vocabulary(model), seed, limits, penalties=penalties, hidden=hidden)
                soak_of["outcome"] = outcome
                try:
                    asyncio.run(
                        play(tried, stock, weights, traffic, phase, request_count, minutes, soak_of, limits, console)
                    )
                    excluded = None
                finally:  # what a soak found counts, however it ended
                    took_s = time.monotonic() - began
                    if outcome.deaths:
                        console.print(log_tail(log) if log.exists() else "", markup=False, highlight=False)
                    console.print(outcome_table(name, outcome, took_s))
                    for wrong in outcome.wrong:
                        console.print(wrong, style="red", markup=False, highlight=False)
                    sharing = None if outcome.deaths else sharing_between(before, server_info(tried))
                    vacuous = sharing is not None and not sharing["expansions"]
                    if vacuous:
                        console.print(f"{name}: no prefix was expanded, so nothing was tested", style="red")
                        excluded = excluded or "no prefix was expanded"
                    if out:
                        record(out, name, traffic_of, outcome, took_s, sharing, excluded)
                good = good and outcome.good and not vacuous
        except (ServerFailedError, requests.RequestException) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            good = False
    if not good:
        raise typer.Exit(1)


async def play(
    url: str,
    stock_url: str,
    weights: Weights,
    traffic: Traffic,
    phase: int,
    request_count: int,
    minutes: float | None,
    soak_of: dict[str, Any],
    limits: Limits,
    console: Console,
) -> None:
    """Phase after phase, until there are enough requests, the time is over, or the server died."""
    async with StockAnswers(stock_url, at_least=limits.answer[1] + 1) as stock:
        soak = Soak(url, stock, weights, **soak_of)
        outcome, end = soak.outcome, time.monotonic() + 60 * (minutes or 0)
        while time.monotonic() < end if minutes else outcome.requests < request_count:
            size = phase if minutes else min(phase, request_count - outcome.requests)
            try:
                await soak.phase(list(traffic.phase(size)))
            except ServerDiedError as error:
                console.print(f"The server died: {error}", style="red", markup=False, highlight=False)
                break
            verdicts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.verdicts.items()))
            console.print(f"{outcome.requests:,} requests: {verdicts}, {outcome.leaked_bytes} bytes leaked")


def metrics(outcome: Outcome, took_s: float) -> dict[str, Any]:
    """Return what is recorded of a run."""
    verdicts = {verdict.value: outcome.verdicts[verdict.value] for verdict in Verdict}
    return {
        "requests": outcome.requests,
        "judged": sum(verdicts.values()),
        "wrong": verdicts["wrong"],
        "ties": verdicts["tie"],
        "lost_first": verdicts["lost_first"],
        "taken_back": outcome.taken_back,
        "left": outcome.left,
        "errors": outcome.errors,
        "leaked_bytes": outcome.leaked_bytes,
        "rss_growth_bytes": outcome.rss_growth_bytes,
        "deaths": outcome.deaths,
        **{name: outcome.actions[name] for name in ("updates", "sleeps", "flushes", "flushes_refused")},
        "minutes": round(took_s / 60, 1),
    }


def record(
    out: Path,
    backend: str,
    case: dict[str, Any],
    outcome: Outcome,
    took_s: float,
    sharing: dict[str, Any] | None,
    excluded: str | None = None,
) -> None:
    """Append a run to a file of records.

    Args:
        excluded: why no table may quote this run.
    """
    impl = backend if backend == HYBRID else f"sglang_{backend}"
    case = {**case, "against": f"sglang_{STOCK}"}
    more = {"excluded": excluded} if excluded else {}
    write_record(out, bench="soak", impl=impl, case=case, **metrics(outcome, took_s), hybrid_mla=sharing, **more)


def outcome_table(backend: str, outcome: Outcome, took_s: float) -> Table:
    """Return a table of the outcome."""
    table = Table(title=f"Soak: {backend}", title_justify="left", show_header=False)
    for name, value in metrics(outcome, took_s).items():
        table.add_row(name.replace("_", " "), f"{value:,}")
    return table


if __name__ == "__main__":
    typer.run(main)
