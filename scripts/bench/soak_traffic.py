"""Traffic for a server that is left on: random trees of prompts, drawn from a seed, and what clients do besides.

Prompts are paths through a few trees that grow and are replaced. Requests come in waves; some are streamed, some
clients close their connection or abort; some texts come again, and some under another salt. Between them the cache is
flushed, weights are updated, and the server sleeps and wakes. The same seed gives the same traffic, phase by phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from bench.generate import Shape

SALTS = (*[None] * 8, "tenant-a", "tenant-b")
TREES = 2
"""Trees that stand at a time."""
MOST_NODES = 8
"""Most nodes of a tree."""
AGAIN = 0.8
"""Share of requests whose text was sent before."""
SHAPED = 0.1
"""Share of requests whose tokens are shaped by a sampling parameter."""
SHAPES: tuple[Shape, ...] = (("regex", "[A-Za-z ]+"),)
"""Sampling parameters, which SGLang applies to each request's own logits."""
PENALTIES: tuple[Shape, ...] = (("frequency_penalty", 0.8), ("repetition_penalty", 1.3))
"""Sampling parameters of servers that do not overlap steps. Where they do, SGLang counts a token one step later, or two
times, by what runs in between (`ScheduleBatch.cumulate_penalty_output_tokens`)."""
HIDDEN = 0.05
"""Share of requests that ask for hidden states."""
LEAVING = 0.08
"""Share of requests whose client goes before the answer is there: half close the connection, half abort."""


class Action(Enum):
    """Action between requests.

    A FLUSH meets running requests, and SGLang refuses it while it works. SLEEP wants an idle server. An UPDATE meets
    the requests that come after an idle moment, since nobody may leave meanwhile, and waits for those that run.
    """

    FLUSH = "flush"
    UPDATE = "update"
    SLEEP = "sleep"


@dataclass(frozen=True)
class Limits:
    """Smallest and largest numbers of tokens; `prompt` is the longest one that is sent.

    One tree in five has a long root, and one request in fifteen a long answer: it gives way when the cache is full.
    """

    root: tuple[int, int] = (40, 160)
    long_root: tuple[int, int] = (280, 400)
    branch: tuple[int, int] = (4, 60)
    own: tuple[int, int] = (1, 8)
    answer: tuple[int, int] = (1, 12)
    long_answer: tuple[int, int] = (16, 48)
    prompt: int = 600

    def times(self, factor: int) -> Limits:
        """Return limits with prompts so many times as long; answers stay as they are."""
        longer = {
            name: (getattr(self, name)[0] * factor, getattr(self, name)[1] * factor)
            for name in ("root", "long_root", "branch", "own")
        }
        return replace(self, **longer, prompt=self.prompt * factor)


@dataclass(frozen=True)
class Chat:
    """A prompt; its answer is greedy, so that a shorter one is the beginning of a longer one.

    Attributes:
        shape: of `SHAPES` or `PENALTIES`, if any.
    """

    ids: tuple[int, ...]
    output_tokens: int
    salt: str | None = None
    shape: Shape | None = None


@dataclass(frozen=True)
class Request:
    """A chat as a client sends it.

    Attributes:
        gap_s: from the request before.
        stream: whether the answer is sent token by token.
        leaves_after_s: when the client goes; None stays. `aborts`: by `/abort_request`, not by closing the connection.
        logprobs: whether it asks for log-probabilities; hidden: for hidden states.
    """

    chat: Chat
    gap_s: float
    stream: bool = False
    leaves_after_s: float | None = None
    aborts: bool = False
    logprobs: bool = True
    hidden: bool = False


Tree = list[tuple[int, ...]]
"""Prompts that begin alike: the paths from its root to each node."""


class Traffic:
    """Draw traffic, phase by phase.

    Args:
        vocabulary: `[tokens]` the ids that texts are drawn from.
        seed: of everything.
        penalties: whether some requests ask for `PENALTIES`.
        hidden: whether some ask for hidden states, which a server has to be started for.
    """

    def __init__(
        self,
        vocabulary: np.ndarray,
        seed: int,
        limits: Limits | None = None,
        *,
        penalties: bool = False,
        hidden: bool = False,
    ) -> None:
        self._vocabulary, self._limits = vocabulary, limits or Limits()
        self._hidden = HIDDEN if hidden else 0.0
        self._shapes = (*SHAPES, *PENALTIES) if penalties else SHAPES
        self._rng = np.random.default_rng(seed)
        self._trees = [self._new_tree() for _ in range(TREES)]
        self._sent: list[tuple[int, ...]] = []
        self._phases = 0

    def phase(self, requests: int) -> Iterator[Request | Action]:
        """Yield so many requests, and one of each action among them. In every second phase nobody asks for
        log-probabilities, since SGLang mixes new tokens with running requests only where none of them does."""
        self._phases += 1
        at = dict(zip(self._rng.permutation(np.arange(1, max(requests, 4)))[:3].tolist(), Action, strict=True))
        wave = 0
        for number in range(requests):
            if number in at:
                yield at[number]
            if wave == 0:
                wave, gap_s = int(self._rng.geometric(0.1)), float(self._rng.exponential(0.2))
            else:
                gap_s = float(self._rng.exponential(0.01))
            wave -= 1
            yield self._request(gap_s)

    def _request(self, gap_s: float) -> Request:
        leaves = self._rng.random() < LEAVING
        return Request(
            chat=self._chat(),
            gap_s=gap_s,
            stream=bool(self._rng.random() < 0.3),
            leaves_after_s=float(self._rng.exponential(0.2)) if leaves else None,
            aborts=bool(leaves and self._rng.random() < 0.5),
            logprobs=self._phases % 2 == 1,
            hidden=bool(self._rng.random() < self._hidden),
        )

    def _chat(self) -> Chat:
        self._grow()
        if self._sent and self._rng.random() < AGAIN:
            ids = self._sent[-1 - int(self._rng.integers(min(len(self._sent), 60)))]
        else:
            paths = self._trees[int(self._rng.integers(len(self._trees)))]
            ids = paths[int(self._rng.integers(len(paths)))] + self._text(self._limits.own)
            self._sent.append(ids)
        salt = SALTS[int(self._rng.integers(len(SALTS)))]
        long = self._rng.random() < 1 / 15
        shape = self._shapes[int(self._rng.integers(len(self._shapes)))] if self._rng.random() < SHAPED else None
        return Chat(ids, self._between(self._limits.long_answer if long else self._limits.answer), salt, shape)

    def _grow(self) -> None:
        """Give a tree a branch, or another one its place, now and then."""
        chance, which = self._rng.random(), int(self._rng.integers(len(self._trees)))
        if chance < 0.02:
            self._trees[which] = self._new_tree()
        elif chance < 0.15:
            paths = self._trees[which]
            path = paths[int(self._rng.integers(len(paths)))] + self._text(self._limits.branch)
            if len(paths) < MOST_NODES and len(path) + self._limits.own[1] <= self._limits.prompt:
                paths.append(path)

    def _new_tree(self) -> Tree:
        long = self._rng.random() < 0.2
        return [self._text(self._limits.long_root if long else self._limits.root)]

    def _text(self, length: tuple[int, int]) -> tuple[int, ...]:
        return tuple(self._rng.choice(self._vocabulary, self._between(length)).tolist())

    def _between(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(*bounds, endpoint=True))
