"""Hostile clients: the same attacks on a server with hybrid_mla and on one with the stock backend.

Two servers of the same settings stand side by side; each attack goes to one and then to the other, in turns, and the
median of the turns is compared. Then once more with eyes open: nothing may be shared across salts, refusals must be the
stock backend's, answers its answers, and the status page may show no word of a prompt.

    python scripts/hostile.py --out benchmarks/results/hostile.jsonl
    python scripts/hostile.py --against "hybrid_mla --hybrid-mla-mode absorb"   # what sharing alone costs and saves
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import statistics
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import requests
import typer
from bench.client import HYBRID, sharing_between
from bench.generate import StockAnswers
from bench.hostile_attacks import Attack, Attacks
from bench.hostile_run import play
from bench.hostile_verdicts import Verdicts, verdicts
from bench.records import write_record
from bench.server import (
    ON_GPU,
    STOCK,
    ServerFailedError,
    console_of,
    free_port,
    running_server,
    server_info,
    work_folder,
)
from bench.soak_servers import small_model, vocabulary
from rich.console import Console
from rich.table import Table

CACHE_TOKENS = 131_072 if ON_GPU else 8192


def main(
    model: Annotated[Path | None, typer.Option(exists=True, help="An MLA checkpoint [a small random one].")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="One of them [all]; repeatable.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="How often each is timed on each server.")] = 5,
    scale: Annotated[float, typer.Option(min=0.001, max=1, help="How much of each attack.")] = 1,
    cache_tokens: Annotated[int, typer.Option(min=1024, help="KV cache of each server.")] = CACHE_TOKENS,
    against: Annotated[
        str, typer.Option(help="The stock backend, or what else to compare with, and its flags.")
    ] = STOCK,
    hybrid_arg: Annotated[list[str] | None, typer.Option(help="Flags for the server with hybrid_mla.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the output of servers [.demo/logs].")] = None,
    seed: int = 0,
) -> None:
    """Attack a server with hybrid_mla and a stock server, and compare."""
    console = console_of(width=120)
    logs, model = log_folder or work_folder() / "logs", model or small_model(work_folder())
    attacks = Attacks(vocabulary(model), cache_tokens=cache_tokens, longest=cache_tokens, seed=seed, scale=scale).all()
    chosen = [one for one in attacks if not attack or one.name in attack]
    if unknown := set(attack or ()) - {one.name for one in attacks}:
        raise typer.BadParameter(f"no attack: {', '.join(unknown)}")
    named = against if against.startswith(HYBRID) else f"sglang_{against}"
    case = {"cache_tokens": cache_tokens, "scale": scale, "seed": seed, "turns": turns, "against": named}
    with contextlib.ExitStack() as stack:

        def serve(backend: str, *flags: str) -> str:
            arguments = ["--model-path", str(model), "--max-total-tokens", str(cache_tokens), *flags]
            arguments += ["--attention-backend", backend]
            log = logs / f"hostile-{len(flags)}-{backend}.log"
            return stack.enter_context(running_server(arguments, free_port(), log, console))

        try:
            rival, *flags = shlex.split(against)
            stock = serve(rival, *flags)
            ours = serve(HYBRID, *shlex.split(" ".join(hybrid_arg or [])))
            found = asyncio.run(all_of_them(ours, stock, chosen, turns, out, case, console))
        except (ServerFailedError, requests.RequestException) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from None
    console.print(table(found))
    if not all(one.good for one in found):
        raise typer.Exit(1)


async def all_of_them(
    ours: str, stock: str, attacks: list[Attack], turns: int, out: Path | None, case: dict[str, Any], console: Console
) -> list[Verdicts]:
    """Each attack on both servers: timed in turns, then looked at."""
    found = []
    async with StockAnswers(stock) as answers:
        for attack in attacks:
            seconds: dict[str, list[float]] = {ours: [], stock: []}
            before = server_info(ours)
            try:
                for turn in range(turns if attack.timed else 0):
                    for url in (ours, stock)[:: 1 if turn % 2 else -1]:
                        seconds[url].append((await play(url, attack, reads_status=False)).seconds)
                one = await verdicts(attack, ours, stock, answers)
            except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
                console.print(f"{attack.name}: a server died: {error}", style="red", markup=False, highlight=False)
                return [*found, Verdicts(attack.name, attack.requests, deaths=1)]
            if attack.timed:
                one.seconds, one.stock_seconds = (statistics.median(seconds[url]) for url in (ours, stock))
            found.append(one)
            console.print(one.describe())
            if out:
                sharing = sharing_between(before, server_info(ours))
                metrics = {**one.metrics(), "seconds_of_turns": [[round(s, 2) for s in seconds[u]] for u in seconds]}
                case_of = {"attack": attack.name, "requests": attack.requests, **case}
                write_record(out, bench="hostile", impl=HYBRID, case=case_of, **metrics, hybrid_mla=sharing)
    return found


def table(found: list[Verdicts]) -> Table:
    """All attacks."""
    made = Table(title="Hostile clients", title_justify="left")
    made.add_column("attack")
    found_out = ("wrong", "refused\notherwise", "shared\nacross salts", "traces", "deaths")
    for name in ("requests", "s", "stock s", "slowdown", *found_out):
        made.add_column(name, justify="right")
    for one in found:
        times = ("-", "-", "-")
        if one.slowdown is not None:
            times = (f"{one.seconds:.1f}", f"{one.stock_seconds:.1f}", f"{one.slowdown:+.1%}")
        rest = (one.wrong, one.refused_otherwise, one.shared_across_salts, len(one.traces), one.deaths)
        made.add_row(one.attack, f"{one.requests:,}", *times, *map(str, rest))
    return made


if __name__ == "__main__":
    typer.run(main)
