"""Judge what an attack did to a server with hybrid_mla, beside a stock server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.client import HYBRID
from bench.generate import StockAnswers, flush, session
from bench.hostile_attacks import Attack
from bench.hostile_run import Played, play
from bench.server import server_info
from bench.soak_judge import FP32, Verdict, judge, same
from bench.soak_run import left_bytes


@dataclass
class Verdicts:
    """
    Attributes:
        seconds, stock_seconds: medians; None where it is not timed.
        wrong: answers that are not the stock backend's; ties left out.
        refused_otherwise: requests whose HTTP status is another than from the stock backend.
        shared_across_salts: requests that found a text of another salt in the cache, or held a segment with another's.
        traces: words, salts or token ids of prompts in what the server shows.
        fallbacks: of hybrid_mla, by reason, since the attack began.
        leaked_bytes: when the server was idle and flushed again.
        deaths: 1 where a server answers no more.
    """

    attack: str
    requests: int
    wrong: int = 0
    refused_otherwise: int = 0
    shared_across_salts: int = 0
    traces: set[str] = field(default_factory=set)
    fallbacks: dict[str, int] = field(default_factory=dict)
    leaked_bytes: int = 0
    deaths: int = 0
    seconds: float | None = None
    stock_seconds: float | None = None

    @property
    def slowdown(self) -> float | None:
        """Share of the stock backend's time that ours takes longer."""
        if self.seconds is None or self.stock_seconds is None:
            return None
        return self.seconds / self.stock_seconds - 1

    @property
    def good(self) -> bool:
        """Return whether all is as with the stock server, but for the time, which other processes disturb."""
        bad = self.wrong + self.refused_otherwise + self.shared_across_salts + len(self.traces)
        return bad + self.leaked_bytes + self.deaths == 0

    def metrics(self) -> dict[str, Any]:
        """Return what is recorded."""
        slowdown = self.slowdown
        return {
            "seconds": self.seconds and round(self.seconds, 2),
            "stock_seconds": self.stock_seconds and round(self.stock_seconds, 2),
            "slowdown": slowdown if slowdown is None else round(slowdown, 3),
            "wrong": self.wrong,
            "refused_otherwise": self.refused_otherwise,
            "shared_across_salts": self.shared_across_salts,
            "traces": sorted(self.traces),
            "fallbacks": self.fallbacks,
            "leaked_bytes": self.leaked_bytes,
            "deaths": self.deaths,
        }

    def describe(self) -> str:
        said = "" if self.slowdown is None else f" {self.seconds:.1f} s, stock {self.stock_seconds:.1f} s"
        return f"{self.attack}:{said} {self.metrics()}"


async def verdicts(attack: Attack, ours: str, stock: str, answers: StockAnswers) -> Verdicts:
    """Play an attack to both servers, and look at ours meanwhile."""
    before = server_info(ours)[HYBRID]["counters"]["fallbacks"]
    mine, theirs = await play(ours, attack, reads_status=True), await play(stock, attack, reads_status=False)
    found = Verdicts(attack.name, attack.requests, traces=mine.traces)
    found.wrong = await _wrong(attack, mine, theirs, answers)
    found.refused_otherwise = sum(a != b for a, b in zip(mine.statuses, theirs.statuses, strict=True))
    if attack.name == "salts":
        # Each salt asks once in a wave: who shares then, shares with another salt.
        first = len(attack.waves[0])
        found.shared_across_salts = sum(bool(cached) for cached in mine.cached[:first])
        found.shared_across_salts += mine.most_holders if mine.most_holders > 1 else 0
    after = server_info(ours)[HYBRID]["counters"]["fallbacks"]
    found.fallbacks = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    async with session() as client:
        await flush(client, ours)
    found.leaked_bytes = left_bytes(ours)
    return found


async def _wrong(attack: Attack, mine: Played, theirs: Played, answers: StockAnswers) -> int:
    """Answers that are another than the stock server's, and no tie with it."""
    count = 0
    contents = [content for wave in attack.waves for content in wave]
    for content, a, b in zip(contents, mine.answers, theirs.answers, strict=True):
        if a is not None and b is not None and not same(a, b, FP32):
            verdict = await judge(tuple(content["input_ids"]), a, answers, taken_back=False)
            count += verdict is Verdict.WRONG
    return count
