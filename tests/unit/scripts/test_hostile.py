"""Hostile clients: what is drawn from a seed, and what is looked for."""

from __future__ import annotations

import numpy as np
import pytest
from bench.attacks import MARKERS, SALT_MARKER, Attacks, _lists_of_numbers, traces

VOCABULARY = np.arange(10, 500)


def attacks(scale: float = 1, seed: int = 0) -> dict:
    made = Attacks(VOCABULARY, cache_tokens=8192, longest=8192, scale=scale, seed=seed).all()
    return {attack.name: attack for attack in made}


def test_attacks_are_what_they_say() -> None:
    found = attacks()
    assert found["flood"].requests == len(found["flood"].waves[0]) == 5000
    assert sum(len(one["input_ids"]) for one in found["full_pool"].waves[0]) == pytest.approx(2 * 8192, rel=0.01)
    lengths = [len(one["input_ids"]) for one in found["steps_of_one"].waves[0]]
    assert lengths == list(range(100, 400))
    salts = [one["extra_key"] for wave in found["salts"].waves for one in wave]
    assert len(set(salts)) == 100 and len(salts) == 200
    assert len({tuple(one["input_ids"]) for wave in found["salts"].waves for one in wave}) == 1
    groups = {tuple(one["input_ids"][:480]) for wave in found["thrash"].waves for one in wave}
    assert len(groups) == 2
    sizes = [len(one["input_ids"]) for one in found["maximal"].waves[0] if "input_ids" in one]
    assert min(sizes) == 0 and max(sizes) == 2 * 8192
    assert not any(
        isinstance(token, int) and token < 0
        for one in found["invalid"].waves[0]
        if isinstance(one["input_ids"], list)
        for token in one["input_ids"]
    )


def test_the_same_seed_gives_the_same_attacks_and_a_scale_fewer() -> None:
    assert attacks() == attacks() != attacks(seed=1)
    small = attacks(scale=0.01)
    assert small["flood"].requests == 50 and all(attack.requests for attack in small.values())


def test_traces_are_found_whatever_their_case() -> None:
    secrets = [*MARKERS, SALT_MARKER]
    assert traces("...XYLOGRAPH... Tenant-of-Salt-7", secrets) == [MARKERS[0], SALT_MARKER]
    assert not traces('{"segments": [{"tokens": 7}]}', secrets)


def test_numbers_in_a_row_are_found() -> None:
    assert _lists_of_numbers({"ranks": [{"segments": [{"path": [5, 6, 7]}]}]}) == ["numbers in a row"]
    assert not _lists_of_numbers({"ranks": [{"segments": [{"id": 1}], "counters": {"a": 2}}]})
