"""A short soak on the server where everything is short; `scripts/soak.py` is the long one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
from bench.generate import StockAnswers
from bench.soak_run import Outcome, Soak, Weights
from bench.soak_servers import other_weights
from bench.soak_traffic import Limits, Traffic
from conftest import Reference, Server
from server_pool import small

PHASES, REQUESTS = 2, 20
LIMITS = Limits()


def test_every_answer_of_a_soak_is_the_stock_answer(stock: Reference, cramped: Server, tmp_path: Path) -> None:
    model = small(tmp_path)
    weights = Weights(str(model), str(other_weights(model, tmp_path / "other")))

    async def soak() -> Outcome:
        traffic = Traffic(np.arange(10, 4096), seed=0, limits=LIMITS)
        async with StockAnswers(stock.base_url, at_least=LIMITS.answer[1] + 1) as answers:
            tried = Soak(cramped.base_url, answers, weights)
            try:
                for _ in range(PHASES):
                    await tried.phase(list(traffic.phase(REQUESTS)))
            finally:
                await tried.with_first_weights()
        return tried.outcome

    before = cramped.info()["counters"]
    outcome = asyncio.run(soak())
    assert outcome.good, outcome
    assert outcome.verdicts["right"] > 0.8 * outcome.requests
    assert outcome.actions["updates"] == outcome.actions["sleeps"] == PHASES
    assert cramped.info()["counters"]["steps_naive"] > before["steps_naive"]
