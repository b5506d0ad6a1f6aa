"""Workloads are what their files say, and the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.workloads import Workload, draw_lengths, make_workload, read_workloads

VOCABULARY = np.arange(10, 30_000)
SHIPPED = ("mixed", "churn", "agents", "burst")


def shipped(name: str, seed: int = 0) -> list[Workload]:
    return read_workloads(name, VOCABULARY, seed)


def make(seed: int = 0, **config: Any) -> Workload:
    config = {"tree": [{"tokens": 5, "requests": 3}], "own_tokens": 2, "output_tokens": 4, **config}
    return make_workload("tiny", config, VOCABULARY, (seed,))


def prompts(workload: Workload) -> list[list[int]]:
    return [session[0].ids for session in workload.sessions]


def starts(prompt: list[int], shared: list[int]) -> bool:
    return prompt[: len(shared)] == shared


@pytest.mark.parametrize("name", SHIPPED)
def test_a_seed_says_everything(name: str) -> None:
    once, again, other = shipped(name), shipped(name), shipped(name, seed=1)
    assert once == again and [w.digest for w in once] == [w.digest for w in again]
    assert not {w.digest for w in once} & {w.digest for w in other}
    assert {token for w in once for session in w.sessions for turn in session for token in turn.ids} <= {*VOCABULARY}


def test_lengths_do_not_depend_on_the_vocabulary() -> None:
    def lengths(vocabulary: np.ndarray) -> list[list[tuple[int, int]]]:
        (workload,) = read_workloads("mixed", vocabulary, 0)
        return [[(len(turn.ids), turn.output_tokens) for turn in session] for session in workload.sessions]

    assert lengths(VOCABULARY) == lengths(np.arange(100, 4000))


def test_mixed() -> None:
    (mixed,) = shipped("mixed")
    assert mixed.requests == mixed.concurrency == 180 and mixed.all_at_once
    nested, longest, shortest = mixed.cached
    assert [len(prompt) for prompt in (nested, longest, shortest)] == [15_000, 19_500, 3_300]
    shared: Counter[int] = Counter()
    for prompt in prompts(mixed):
        held = [
            block for block in (nested[:11_000], nested[:13_000], nested, longest, shortest) if starts(prompt, block)
        ]
        length = max(map(len, held), default=0)
        shared[length] += 1
        assert 50 <= len(prompt) - length <= 1500
    assert shared == {11_000: 30, 13_000: 30, 15_000: 30, 19_500: 40, 3_300: 30, 0: 20}
    ends = [len(prompt) for prompt in prompts(mixed)]
    assert ends != sorted(ends) and len(set(ends[:20])) > 10, "shuffled"


def test_churn() -> None:
    (churn,) = shipped("churn")
    assert (churn.requests, churn.concurrency, churn.longest_prefix) == (512, 128, 20_000) and not churn.all_at_once
    (prompt,) = churn.cached
    assert all(starts(asked, prompt) and len(asked) > 20_000 for asked in prompts(churn))
    assert len({len(asked) for asked in prompts(churn)}) > 50
    assert len({session[0].output_tokens for session in churn.sessions}) > 50


def test_agents() -> None:
    (agents,) = shipped("agents")
    (prompt,) = agents.cached
    assert len(prompt) == 6_000 and agents.concurrency == len(agents.sessions) == 64
    assert agents.requests == 64 * 20 and not agents.all_at_once
    for first, *later in agents.sessions:
        assert starts(first.ids, prompt) and len(later) == 19
        assert all(200 <= len(turn.ids) <= 2000 and not starts(turn.ids, prompt[:10]) for turn in later)
        assert all(50 <= turn.output_tokens <= 300 for turn in (first, *later))
    outputs = np.array([[turn.output_tokens for turn in session] for session in agents.sessions])
    assert outputs.min() < 60 and outputs.max() > 290 and outputs.sum() == agents.output_tokens


def test_burst() -> None:
    long, short = shipped("burst")
    assert (long.title, short.title) == ("burst A", "burst B")
    assert (long.longest_prefix, short.longest_prefix) == (26_472, 7_069)
    for burst in (long, short):
        assert burst.requests == burst.concurrency == 128 and burst.stream_interval == 1
        assert {len(prompt) - burst.longest_prefix for prompt in prompts(burst)} == {128}
    assert long.cached[0][:100] != short.cached[0][:100]


def test_texts_differ_but_for_what_is_shared() -> None:
    workload = make(tree=[{"tokens": 4, "requests": 40}, {"requests": 40}], own_tokens=4)
    own = [tuple(prompt[-4:]) for prompt in prompts(workload)]
    assert len(set(own)) == 80 and Counter(map(len, prompts(workload))) == {8: 40, 4: 40}


def test_a_node_without_requests_only_holds_others() -> None:
    """Inner nodes are cached by those below them; branches have their own text."""
    below = [{"tokens": 3, "requests": 1}, {"tokens": 3, "requests": 1}]
    workload = make(tree=[{"tokens": 5, "below": below}])
    first, second = workload.cached
    assert len(first) == len(second) == 8 and first[:5] == second[:5] and first[5:] != second[5:]
    assert len(workload.sessions) == 2


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    common = {"own_tokens": [1, 3], "output_tokens": 2, "at_a_time": 2}
    cases = [{"name": name, "tree": [{"tokens": size, "requests": 4}]} for name, size in (("x", 3), ("y", 6))]
    file.write_text(json.dumps(common | {"cases": cases}))
    found = read_workloads(file, VOCABULARY, 0)
    assert [(w.name, w.case, w.longest_prefix, w.concurrency) for w in found] == [
        ("mine", "x", 3, 2),
        ("mine", "y", 6, 2),
    ]


def test_fewer_sessions_than_may_run() -> None:
    assert make(at_a_time=10).concurrency == 3 and make(at_a_time=3).all_at_once
    assert not make(at_a_time=2).all_at_once


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tree": []}, "no requests"),
        ({"tree": [{"tokens": 5}]}, "no requests"),
        ({"tree": [{"tokens": -1, "requests": 1}]}, "no node"),
        ({"tree": [{"requests": 1, "children": []}]}, "no node"),
        ({"own_tokens": 0}, "no lengths"),
        ({"output_tokens": [5, 4]}, "no lengths"),
        ({"at_a_time": 0}, "at least 1"),
        ({"turns": 0}, "at least 1"),
        ({"concurency": 4}, "unknown fields: concurency"),
        ({"turns": 2}, "tool_tokens"),
    ],
)
def test_what_is_no_workload(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**config)


def test_lengths_of_questions_are_no_workload() -> None:
    with pytest.raises(ValueError, match="no tree"):
        shipped("mmlu")


def test_both_ends_of_a_range_are_drawn() -> None:
    rng = np.random.default_rng(0)
    assert set(draw_lengths([3, 5], 200, rng)) == {3, 4, 5} and set(draw_lengths(7, 5, rng)) == {7}
    assert draw_lengths([3, 5], 0, rng) == []
