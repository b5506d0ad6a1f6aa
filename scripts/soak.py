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
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from bench.client import HYBRID, sharing_between
from bench.generate import BF16, FP32, StockAnswers
from bench.records import write_record
from bench.server import LAUNCHER, ON_GPU, STOCK, console_of, log_tail, python_path, server_info, work_folder
from bench.soak_run import Outcome, ServerDiedError, Soak, Weights
from bench.soak_servers import (
    POISONED,
    TAKING_BACK,
    at_ease,
    log_of,
    other_weights,
    pressed,
    servers,
    small_model,
    vocabulary,
)
from bench.soak_traffic import Limits, Traffic

TOLERANCE = BF16 if ON_GPU else FP32
SCALE, AT_A_TIME = (8, 64) if ON_GPU else (1, 16)
"""Factor by which prompts are longer, and requests in flight."""
LIMITS = Limits().times(SCALE)


def main(
    request_count: Annotated[int, typer.Option("--requests", min=1, help="How many are sent.")] = 2000,
    minutes: Annotated[float | None, typer.Option(help="Send as many as fit into this time instead.")] = None,
    backend: Annotated[str, typer.Option(help="Backend that is tried.")] = HYBRID,
    penalties: Annotated[
        bool, typer.Option("--penalties", help="Ask for penalties as well; servers do not overlap steps then.")
    ] = False,
    poison: Annotated[bool, typer.Option("--poison", help="Fill free memory with NaN.")] = False,
    memory_saver: Annotated[bool, typer.Option("--memory-saver", help="Release memory in sleep; needs a GPU.")] = False,
    server_arg: Annotated[list[str] | None, typer.Option(help="Flags for the server that is tried.")] = None,
    phase: Annotated[int, typer.Option(min=4, help="Requests between two checks of the idle server.")] = 400,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    seed: int = 0,
) -> None:
    """Try a server with traffic of every kind, and compare every answer with the stock backend's."""
    console, model = console_of(width=120), small_model(work_folder())
    weights = Weights(str(model), str(other_weights(model, model.with_name(f"{model.name}_other"))))
    case = {"seed": seed, "scale": SCALE, "at_a_time": AT_A_TIME, "phase": phase, "poison": poison}
    case |= {"penalties": penalties, "against": f"sglang_{STOCK}"}
    no_overlap = ["--disable-overlap-schedule"] if penalties else []
    # Without a copy on the host SGLang's weights are gone after a sleep, until the next update.
    saver = ["--enable-memory-saver", "--enable-weights-cpu-backup"] if memory_saver else []
    sleeps = ("kv_cache", "weights") if memory_saver else ("kv_cache",)
    launcher = {"environment": {**TAKING_BACK, "PYTHONPATH": python_path()}}
    launcher["launcher"] = POISONED if poison else ("-m", LAUNCHER)

    def say(what: object, style: str = "red") -> None:
        console.print(what, style=style, markup=False, highlight=False)

    async def play(soak: Soak, traffic: Traffic, began: float) -> None:
        """Play phase after phase, until there are enough requests, the time is over, or the server died."""
        outcome = soak.outcome
        while time.monotonic() - began < 60 * minutes if minutes else outcome.requests < request_count:
            size = phase if minutes else min(phase, request_count - outcome.requests)
            await soak.phase(list(traffic.phase(size)))
            verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(outcome.verdicts.items()))
            console.print(f"{outcome.requests:,} requests: {verdicts}, {outcome.leaked_bytes} bytes leaked")

    async def try_it(tried: str, stock_url: str) -> bool:
        before, began = server_info(tried), time.monotonic()
        hidden = bool(before.get("enable_return_hidden_states"))
        traffic = Traffic(vocabulary(model), seed, LIMITS, penalties=penalties, hidden=hidden)
        excluded: str | None = "stopped before its end"
        async with StockAnswers(stock_url, at_least=LIMITS.answer[1] + 1) as stock:
            soak = Soak(tried, stock, weights, at_a_time=AT_A_TIME, sleeps=sleeps, tolerance=TOLERANCE)
            outcome = soak.outcome
            try:
                await play(soak, traffic, began)
                excluded = None
            except ServerDiedError as error:
                say(f"The server died: {error}\n{log_tail(log_of(f'soak-{backend}'))}")
                excluded = None
            finally:  # what a soak found counts, however it ended
                took = round((time.monotonic() - began) / 60, 1)
                say({"backend": backend, **outcome.metrics(), "minutes": took}, "none")
                for wrong in outcome.wrong:
                    say(wrong)
                sharing = None if outcome.deaths else sharing_between(before, server_info(tried))
                vacuous = sharing is not None and not sharing["expansions"]
                if vacuous:
                    say(f"{backend}: no prefix was expanded, so nothing was tested")
                    excluded = excluded or "no prefix was expanded"
                if out:
                    record(out, backend, case, outcome, excluded, minutes=took, hybrid_mla=sharing)
        return outcome.good and not vacuous

    with servers(console) as serve:
        stock = serve("soak-stock", at_ease() + no_overlap)
        arguments = [*pressed(backend), *saver, *no_overlap, *shlex.split(" ".join(server_arg or []))]
        good = asyncio.run(try_it(serve(f"soak-{backend}", arguments, **launcher), stock))
    if not good:
        raise typer.Exit(1)


def record(out: Path, backend: str, case: dict[str, Any], outcome: Outcome, excluded: str | None, **more: Any) -> None:
    """Append a run to a file of records.

    Args:
        excluded: why no table may quote this run.
    """
    impl = backend if backend == HYBRID else f"sglang_{backend}"
    more |= {"excluded": excluded} if excluded else {}
    write_record(out, bench="soak", impl=impl, case=case, **outcome.metrics(), **more)


if __name__ == "__main__":
    typer.run(main)
