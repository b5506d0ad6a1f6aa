"""A little of each attack of `scripts/hostile.py`, which does all of it and takes the time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from bench.attacks import Attack, Attacks, Verdicts, verdicts
from bench.generate import StockAnswers
from conftest import Reference, Server

ATTACKS = Attacks(np.arange(10, 4096), cache_tokens=16384, longest=1024, scale=0.04)


@pytest.mark.parametrize(
    "attack",
    [
        *(pytest.param(attack, marks=pytest.mark.slow) for attack in (ATTACKS.flood(), ATTACKS.words())),
        *(ATTACKS.steps_of_one(), ATTACKS.thrash(), ATTACKS.invalid(), ATTACKS.salts()),
    ],
    ids=lambda attack: attack.name,
)
def test_attacks_change_and_show_nothing(stock: Reference, hybrid: Server, attack: Attack) -> None:
    async def attacked() -> Verdicts:
        async with StockAnswers(stock.base_url) as answers:
            return await verdicts(attack, hybrid.base_url, stock.base_url, answers)

    found = asyncio.run(attacked())
    assert found.good, found
