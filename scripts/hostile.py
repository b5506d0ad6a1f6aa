"""Hostile clients: the same attacks on a server with hybrid_mla and on one with the stock backend.

Two servers of the same settings stand side by side; each attack goes to one and then to the other, in turns, and the
median of the turns is compared. Then once more with eyes open: nothing may be shared across salts, refusals must be the
stock backend's, answers its answers, and the status page may show no word of a prompt.

    python scripts/hostile.py --out benchmarks/results/hostile.jsonl
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import requests
import typer
from bench.attacks import Attacks, Verdicts, attack_both
from bench.client import HYBRID, sharing_between
from bench.generate import StockAnswers
from bench.records import write_record
from bench.server import ON_GPU, STOCK, console_of, server_info, work_folder
from bench.soak_servers import servers, small_model, vocabulary
from bench.tables import specs, table

CACHE_TOKENS = 131_072 if ON_GPU else 8192
COLUMNS = specs()["docs/support.md"]["hostile"]["columns"]


def main(
    turns: Annotated[int, typer.Option(min=1, help="How often each is timed on each server.")] = 5,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
) -> None:
    """Attack a server with hybrid_mla and a stock server, and compare."""
    console, words = console_of(width=150), vocabulary(small_model(work_folder()))
    attacks = Attacks(words, cache_tokens=CACHE_TOKENS, longest=CACHE_TOKENS).all()
    case = {"cache_tokens": CACHE_TOKENS, "seed": 0, "turns": turns, "against": f"sglang_{STOCK}"}
    found: list[dict[str, Any]] = []

    async def play_all(ours: str, stock: str) -> bool:
        good = True
        async with StockAnswers(stock) as answers:
            for attack in attacks:
                of, before = {"attack": attack.name, "requests": attack.requests}, server_info(ours)
                try:
                    verdicts = await attack_both(attack, ours, stock, answers, turns)
                except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
                    console.print(f"{attack.name}: a server died: {error}", style="red", markup=False, highlight=False)
                    found.append(of | asdict(Verdicts(deaths=1)))
                    return False
                sharing = sharing_between(before, server_info(ours))
                if out:
                    metrics = {**asdict(verdicts), "hybrid_mla": sharing}
                    write_record(out, bench="hostile", impl=HYBRID, case=of | case, **metrics)
                found.append(of | asdict(verdicts))
                console.print(found[-1], markup=False, highlight=False)
                good = good and verdicts.good
        return good

    with servers(console) as serve:
        arguments = ["--max-total-tokens", str(CACHE_TOKENS), "--attention-backend"]
        urls = [serve(f"hostile-{name}", [*arguments, name]) for name in (HYBRID, STOCK)]
        good = asyncio.run(play_all(*urls))
    console.print(table(COLUMNS, found), markup=False, highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
