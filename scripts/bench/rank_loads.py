"""Loads of `bench_rank.py`: requests that share one prompt, all at once or so many at a time, and a warm-up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.workloads import Turn, Workload, make_workload
from sglang_mla_ext.configs import read_config

DATASETS = ("mmlu", "gsm8k", "simpleqa")
AGENTS = {"agents": "short histories", "long_agents": "long histories"}
"""Kinds of agent sessions, and their cases of the workload `agent_sessions`."""
KINDS = ("decode", "short", *AGENTS, *DATASETS)
OWN_TOKENS = [350, 450]
"""Fewest and most own tokens of a request of `decode`."""
MOST_TOKENS = 2048
"""Longest answers of a dataset, as in TyphoonMLA's figure 3."""
DECODE_INTERVAL = 16
"""Tokens of an answer of `decode` sent in one piece, so that HTTP does not set the pace. Of the others each is sent
alone: what holds up one token must not be spread over several."""
WARM_UP_TOKENS = 64
"""Longest answers of a warm-up."""
AGENTS_OF_WARM_UP = 2
MOST_WARM_UP = 64
"""Requests of `decode`'s warm-up: as many as expand the prompt and fill a prefill pass several times."""


@dataclass(frozen=True)
class Load:
    """A workload, and what is sent before on the same shared prompt, so that the server has expanded it and compiled
    all that it runs."""

    workload: Workload
    warm_up: Workload


def make_load(
    kind: str,
    prompt_tokens: int,
    concurrency: int,
    vocabulary: np.ndarray,
    seed: int,
    *,
    answers: int,
    output_tokens: int,
    stream_interval: int | None = None,
) -> Load:
    """Draw a load.

    Args:
        kind: `decode` sends all requests at once, agents all sessions; the others so many at a time, with the lengths
            of the workload `short_answers` or of a dataset.
        vocabulary: `[tokens]` the ids that texts are drawn from.
        answers: of all but `decode`, as a multiple of `concurrency`; output_tokens: of each answer of `decode`.
        stream_interval: tokens in one piece; None for what suits the kind.
    """
    decode, agents = kind == "decode", kind in AGENTS
    measured = concurrency if decode or agents else answers * concurrency
    # Those that take a free place are prefilled by themselves, which the first ones are not.
    before = min(concurrency, MOST_WARM_UP) if decode else concurrency + -(-concurrency // 4)
    before = AGENTS_OF_WARM_UP if agents else before
    config = lengths(kind, output_tokens) | {
        "name": f"{prompt_tokens:,} tokens, {concurrency} requests",
        "tree": [{"tokens": prompt_tokens, "requests": before + measured}],
        "at_a_time": concurrency,
        "stream_interval": stream_interval or (DECODE_INTERVAL if decode else 1),
    }
    whole = make_workload(kind, config, vocabulary, (seed, prompt_tokens, concurrency))
    first, rest = whole.sessions[:before], whole.sessions[before:]
    shorter = [[Turn(turn.ids, min(turn.output_tokens, WARM_UP_TOKENS)) for turn in session] for session in first]
    return Load(replace(whole, sessions=rest), replace(whole, sessions=shorter))


def lengths(kind: str, output_tokens: int) -> dict[str, Any]:
    """Return the lengths of questions and answers; see `make_load`."""
    if kind == "decode":
        return {"own_tokens": OWN_TOKENS, "output_tokens": output_tokens}
    if kind in AGENTS:
        config = read_config("workloads", "agent_sessions")
        (case,) = (case for case in config["cases"] if case["name"] == AGENTS[kind])
        return {name: (config | case)[name] for name in ("own_tokens", "output_tokens", "turns", "tool_tokens")}
    if kind == "short":
        config = read_config("workloads", "short_answers")
        return {name: config[name] for name in ("own_tokens", "output_tokens")}
    answers = {"workload": kind, "of": "generated_tokens", "most": MOST_TOKENS}
    return {"own_tokens": {"workload": kind, "of": "prompt_tokens"}, "output_tokens": answers}
