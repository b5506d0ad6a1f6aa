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
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import requests
import typer
from bench.client import HYBRID, sharing_between
from bench.generate import StockAnswers
from bench.hostile_attacks import Attack, Attacks
from bench.hostile_run import Verdicts, attack_both
from bench.records import write_record
from bench.server import ON_GPU, STOCK, ServerFailedError, console_of, server_info, work_folder
from bench.soak_servers import served, small_model, vocabulary
from bench.tables import specs, table

CACHE_TOKENS = 131_072 if ON_GPU else 8192
COLUMNS = specs()["docs/support.md"]["hostile"]["columns"]


def main(
    attack: Annotated[list[str] | None, typer.Option(help="One of them [all]; repeatable.")] = None,
    turns: Annotated[int, typer.Option(min=1, help="How often each is timed on each server.")] = 5,
    scale: Annotated[float, typer.Option(min=0.001, max=1, help="How much of each attack.")] = 1,
    against: Annotated[
        str, typer.Option(help="The stock backend, or what else to compare with, and its flags.")
    ] = STOCK,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    seed: int = 0,
) -> None:
    """Attack a server with hybrid_mla and a stock server, and compare."""
    console, model = console_of(width=150), small_model(work_folder())
    drawn = Attacks(vocabulary(model), cache_tokens=CACHE_TOKENS, longest=CACHE_TOKENS, seed=seed, scale=scale).all()
    if unknown := set(attack or ()) - {one.name for one in drawn}:
        raise typer.BadParameter(f"no attack: {', '.join(unknown)}")
    named = against if against.startswith(HYBRID) else f"sglang_{against}"
    case = {"cache_tokens": CACHE_TOKENS, "scale": scale, "seed": seed, "turns": turns, "against": named}
    found: list[dict[str, Any]] = []

    async def play_all(ours: str, stock: str) -> bool:
        good = True
        async with StockAnswers(stock) as answers:
            for one in (one for one in drawn if not attack or one.name in attack):
                before = server_info(ours)
                try:
                    verdicts = await attack_both(one, ours, stock, answers, turns)
                except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
                    console.print(f"{one.name}: a server died: {error}", style="red", markup=False, highlight=False)
                    found.append(record(one, Verdicts(deaths=1)))
                    return False
                found.append(record(one, verdicts, sharing_between(before, server_info(ours))))
                console.print(found[-1], markup=False, highlight=False)
                good = good and verdicts.good
        return good

    def record(one: Attack, verdicts: Verdicts, sharing: dict[str, Any] | None = None) -> dict[str, Any]:
        of = {"attack": one.name, "requests": one.requests}
        if out and not verdicts.deaths:
            write_record(out, bench="hostile", impl=HYBRID, case=of | case, **asdict(verdicts), hybrid_mla=sharing)
        return of | asdict(verdicts)

    with contextlib.ExitStack() as stack:
        try:
            arguments = ["--max-total-tokens", str(CACHE_TOKENS), "--attention-backend"]
            backends = {"ours": [HYBRID], "stock": shlex.split(against)}
            urls = (served(stack, f"hostile-{name}", arguments + of, console) for name, of in backends.items())
            good = asyncio.run(play_all(*urls))
        except (ServerFailedError, requests.RequestException) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from None
    console.print(table(COLUMNS, found), markup=False, highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
