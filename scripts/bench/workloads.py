"""Workloads as `configs/workloads/*.json` describe them: a tree of shared prompts, and sessions that go on from it.

A session is one request, or several turns of which each appends to the one before and to its answer. All of it is drawn
from a seed: lengths, token ids, and the order of the sessions. A file says

- `tree`: nodes with `tokens`, the `requests` (sessions) whose shared prompt ends there, and the nodes `below`; what is
  below goes on from the node's text;
- `own_tokens`: what a session has alone, after its shared prompt; `output_tokens`: of each answer;
- `turns` of a session [1], and `tool_tokens`, what each turn but the first appends;
- `at_a_time`: so many sessions run, and the next begins where one ends; without it all are sent at once;
- `stream_interval`: tokens of an answer that are sent in one piece; the first is always sent alone;
- `profile`: which steps `--profile` looks at: so many `steps`, from `after_s` seconds after the start;
- `cases`: the same with these values instead, each with a `name`.

A length is a number, `[smallest, largest]`, or `{"workload": "mmlu", "of": "prompt_tokens"}`, drawn from the quantiles
of a published workload, as DeepSeek-V3 answers it; with `most`, longer ones are cut.

`make_load` draws those of `bench_rank.py`: requests that share one prompt, all at once or so many at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_mla_ext.configs import read_config, read_config_or_file

Lengths = int | Sequence[int] | Mapping[str, Any]
"""Description of how lengths are drawn, as above."""

FIELDS = {
    *("source", "description", "cases", "name", "tree", "own_tokens", "output_tokens"),
    *("turns", "tool_tokens", "at_a_time", "stream_interval", "profile"),
}
NODE_FIELDS = {"tokens", "requests", "below"}

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
class Turn:
    """Text that one request of a session adds to its prompt, and how long its answer is."""

    ids: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """Requests that are sent to a server.

    Attributes:
        name: of its file; case: of several in a file, None where there is one.
        cached: prompts that are in the cache before; every session's shared prompt is the beginning of one.
        sessions: in the order in which they begin.
        at_a_time: sessions that run at a time; None sends all at once.
        stream_interval: tokens of an answer in one piece.
        profile: `after_s` and `steps` of a profile; None where there is to be none.
        warm_up: sessions on the same shared prompts that are sent before and not measured, so that the server has
            expanded the prompts and compiled all that it runs.
    """

    name: str
    case: str | None
    cached: list[list[int]]
    sessions: list[list[Turn]]
    at_a_time: int | None
    stream_interval: int
    profile: Mapping[str, Any] | None = None
    warm_up: Sequence[list[Turn]] = ()

    def bodies(self) -> list[list[dict[str, Any]]]:
        """Return the bodies of `/generate` of each session's turns, without what came before them."""
        return [
            [{"input_ids": turn.ids, "sampling_params": self._sampling(turn.output_tokens)} for turn in session]
            for session in self.sessions
        ]

    def _sampling(self, output_tokens: int) -> dict[str, Any]:
        fixed = {"temperature": 0, "ignore_eos": True, "stream_interval": self.stream_interval}
        return {"max_new_tokens": output_tokens, **fixed}

    @property
    def title(self) -> str:
        return f"{self.name} {self.case}" if self.case else self.name

    @property
    def requests(self) -> int:
        """Number of requests of all sessions."""
        return sum(map(len, self.sessions))

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(turn.output_tokens for session in self.sessions for turn in session)

    @property
    def concurrency(self) -> int:
        """The most requests that run together."""
        return min(self.at_a_time or len(self.sessions), len(self.sessions))

    @property
    def all_at_once(self) -> bool:
        """Return whether every request is sent at the same time."""
        return self.concurrency == len(self.sessions) == self.requests

    @property
    def longest_prefix(self) -> int:
        """Tokens of the longest cached prompt."""
        return max(map(len, self.cached), default=0)

    @property
    def digest(self) -> str:
        """The same for the same token ids and lengths in the same order."""
        everything = hashlib.sha256()
        for session in self.sessions:
            for turn in session:
                everything.update(np.array([len(turn.ids), *turn.ids, turn.output_tokens], dtype="<i8").tobytes())
        return everything.hexdigest()[:12]


def ordinary_tokens(tokenizer: Any) -> np.ndarray:
    """Return the ids of a tokenizer that are no special tokens, `[tokens]`."""
    return np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)


def read_workloads(name_or_path: str | Path, vocabulary: np.ndarray, seed: int) -> list[Workload]:
    """The cases of a shipped workload, or of a JSON file.

    Args:
        vocabulary: `[tokens]` the ids that texts are drawn from.
    Raises:
        ValueError: there is no such workload, or it is not described as it should be.
    """
    config = read_config_or_file("workloads", name_or_path)
    name = Path(name_or_path).stem
    cases = config.pop("cases", [{}])
    return [make_workload(name, config | case, vocabulary, (seed, index)) for index, case in enumerate(cases)]


def make_workload(name: str, config: Mapping[str, Any], vocabulary: np.ndarray, seed: Sequence[int]) -> Workload:
    """Draw a workload; raises ValueError as `read_workloads` does."""
    if "tree" not in config:
        raise ValueError(f"the workload {name} has no tree of prompts to send")
    if unknown := set(config) - FIELDS:
        raise ValueError(f"the workload {name} has unknown fields: {', '.join(sorted(unknown))}")
    if missing := {"own_tokens", "output_tokens", *(["tool_tokens"] if config.get("turns", 1) > 1 else [])} - set(
        config
    ):
        raise ValueError(f"the workload {name} has no {', '.join(sorted(missing))}")
    turns, at_a_time, interval = config.get("turns", 1), config.get("at_a_time"), config.get("stream_interval", 1)
    if min(turns, interval, 1 if at_a_time is None else at_a_time) < 1:
        raise ValueError(f"the workload {name}: turns, at_a_time and stream_interval are at least 1")
    rng = np.random.default_rng(seed)
    # Lengths come first: they are the same for every vocabulary.
    tree = nodes(config["tree"])
    ends = [index for index, node in enumerate(tree) for _ in range(node.requests)]  # of the sessions' shared prompts
    order: list[int] = rng.permutation(ends).tolist()
    if not order:
        raise ValueError(f"the workload {name} has no requests")
    count = len(order)
    outputs = draw_lengths(config["output_tokens"], count * turns, rng)
    texts = [draw_lengths(config["own_tokens"], count, rng)]
    texts += [draw_lengths(config["tool_tokens"], count, rng) for _ in range(turns - 1)]

    def random_ids(length: int) -> list[int]:
        ids: list[int] = rng.choice(vocabulary, length).tolist()
        return ids

    prompts: list[list[int]] = []
    for node in tree:
        above = [] if node.parent is None else prompts[node.parent]
        prompts.append(above + random_ids(node.tokens))
    parents = {node.parent for node in tree}
    return Workload(
        name=name,
        case=config.get("name"),
        cached=[prompt for index, prompt in enumerate(prompts) if prompt and index not in parents],
        sessions=[
            [
                Turn((prompts[end] if turn == 0 else []) + random_ids(texts[turn][i]), outputs[i * turns + turn])
                for turn in range(turns)
            ]
            for i, end in enumerate(order)
        ],
        at_a_time=at_a_time,
        stream_interval=interval,
        profile=config.get("profile"),
    )


@dataclass(frozen=True)
class Node:
    """A node of the tree of prompts; `parent` is the index of the one above, None at the top."""

    tokens: int
    requests: int
    parent: int | None


def nodes(tree: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Return all nodes, each after the one above it. Raises ValueError for what is no tree of prompts."""
    found: list[Node] = []

    def add(siblings: Sequence[Mapping[str, Any]], parent: int | None) -> None:
        for fields in siblings:
            node = Node(fields.get("tokens", 0), fields.get("requests", 0), parent)
            if set(fields) - NODE_FIELDS or min(node.tokens, node.requests) < 0:
                raise ValueError(f"no node of a tree of prompts: {dict(fields)}")
            found.append(node)
            add(fields.get("below", ()), len(found) - 1)

    add(tree, None)
    return found


def draw_lengths(lengths: Lengths, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` lengths in tokens. Raises ValueError for lengths below 1."""
    if isinstance(lengths, Mapping):
        return published_lengths(**lengths, count=count, rng=rng)
    low, high = (lengths, lengths) if isinstance(lengths, int) else lengths
    if not 1 <= low <= high:
        raise ValueError(f"no lengths: {lengths}")
    drawn: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
    return drawn


def published_lengths(
    workload: str, of: str, count: int, rng: np.random.Generator, most: int | None = None
) -> list[int]:
    """Lengths in tokens, drawn from the quantiles of a published workload with DeepSeek-V3's tokens and answers.

    Args:
        of: `prompt_tokens` or `generated_tokens`.
        most: longer ones are cut.
    """
    quantiles = read_config("workloads", workload)["models"]["deepseek-v3"][of]["quantiles"]
    percents = [float(percent) for percent in quantiles]
    drawn = np.interp(rng.uniform(0, 100, count), percents, list(quantiles.values()))
    lengths: list[int] = drawn.round().clip(1, most).astype(int).tolist()
    return lengths


def make_load(
    kind: str,
    prompt_tokens: int,
    concurrency: int,
    vocabulary: np.ndarray,
    seed: int,
    *,
    answers: int,
    output_tokens: int,
) -> Workload:
    """Draw a workload and its warm-up.

    Args:
        kind: `decode` sends all requests at once, agents all sessions; the others so many at a time, with the lengths
            of the workload `short_answers` or of a dataset.
        vocabulary: `[tokens]` the ids that texts are drawn from.
        answers: of all but `decode`, as a multiple of `concurrency`; output_tokens: of each answer of `decode`.
    """
    decode, agents = kind == "decode", kind in AGENTS
    measured = concurrency if decode or agents else answers * concurrency
    # Those that take a free place are prefilled by themselves, which the first ones are not.
    before = min(concurrency, MOST_WARM_UP) if decode else concurrency + -(-concurrency // 4)
    before = AGENTS_OF_WARM_UP if agents else before
    config = lengths_of(kind, output_tokens) | {
        "name": f"{prompt_tokens:,} tokens, {concurrency} requests",
        "tree": [{"tokens": prompt_tokens, "requests": before + measured}],
        "at_a_time": concurrency,
        "stream_interval": DECODE_INTERVAL if decode else 1,
    }
    whole = make_workload(kind, config, vocabulary, (seed, prompt_tokens, concurrency))
    first, rest = whole.sessions[:before], whole.sessions[before:]
    shorter = [[Turn(turn.ids, min(turn.output_tokens, WARM_UP_TOKENS)) for turn in session] for session in first]
    return replace(whole, sessions=rest, warm_up=shorter)


def lengths_of(kind: str, output_tokens: int) -> dict[str, Any]:
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
