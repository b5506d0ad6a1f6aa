"""Judge whether an answer is the stock server's: the same tokens, with the same log-probabilities within rounding where
they were asked for.

An answer that leaves the stock answer where another token is as likely, within rounding, is a *tie*: what follows is
compared with what the stock server says after that token. An answer that is one without its first token is what
SGLang's own `SGLANG_TEST_RETRACT` makes of a request that it took back, whatever the backend: *lost first*.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Tolerance(NamedTuple):
    """Largest differences of log-probabilities: on average over an answer, and each. A lead of twice `mean` is none."""

    mean: float
    each: float


FP32 = Tolerance(mean=2e-3, each=2e-3)
"""Another order of summation moves them by less; a wrong prefix, or a wrong merge, by 0.1 and more."""
BF16 = Tolerance(mean=0.5, each=2.0)
"""Rounding moves them by less than 0.1 on average on the random model, but by 1 where attention chooses between two
keys that are as good; a chunk of 64 tokens among 700 that is wrong moves them by more than 1 on average."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their log-probabilities.

    Attributes:
        logprobs: None of a request that did not ask for them.
        runners_up: of the stock server's: at each place the next best tokens, each with its log-probability.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    runners_up: tuple[tuple[tuple[int, float], ...], ...] = ()

    def after(self, tokens: int) -> Answer:
        """Return it without its first tokens."""
        rest = None if self.logprobs is None else self.logprobs[tokens:]
        return Answer(self.ids[tokens:], rest, self.runners_up[tokens:])

    def first(self, tokens: int) -> Answer:
        """Return its first tokens alone."""
        return Answer(self.ids[:tokens], None if self.logprobs is None else self.logprobs[:tokens])


class Verdict(Enum):
    RIGHT = "right"
    TIE = "tie"
    LOST_FIRST = "lost_first"
    WRONG = "wrong"


Stock = Callable[[tuple[int, ...], int], Awaitable[Answer]]
"""The stock answer to a prompt, with at least so many tokens."""


async def judge(
    prompt: tuple[int, ...], answer: Answer, stock: Stock, *, taken_back: bool, tolerance: Tolerance = FP32
) -> Verdict:
    """Judge an answer by the stock server's.

    Args:
        answer: whole, or the beginning of one.
        taken_back: whether SGLang took the request back and ran it again later.
    """
    verdict = await compare(prompt, answer, stock, tolerance)
    if verdict is Verdict.WRONG and taken_back:
        for first, rest in without_first(answer, await stock(prompt, len(answer.ids) + 1), tolerance):
            if await compare((*prompt, first), rest, stock, tolerance) is not Verdict.WRONG:
                return Verdict.LOST_FIRST
    return verdict


async def compare(prompt: tuple[int, ...], answer: Answer, stock: Stock, tolerance: Tolerance) -> Verdict:
    """Return whether an answer is right, a tie, or wrong."""
    if answer.logprobs is not None and len(answer.logprobs) != len(answer.ids):
        return Verdict.WRONG
    expected = await stock(prompt, len(answer.ids) + 1)
    verdict = Verdict.RIGHT
    while not same(answer, expected, tolerance):
        at = first_difference(answer, expected)
        if at is None or not same(answer.first(at), expected, tolerance):
            return Verdict.WRONG
        logprob = as_likely(expected, at, tolerance).get(answer.ids[at])
        own = logprob if answer.logprobs is None else answer.logprobs[at]
        if logprob is None or abs(own - logprob) > tolerance.each:
            return Verdict.WRONG
        verdict = Verdict.TIE
        prompt, answer = prompt + answer.ids[: at + 1], answer.after(at + 1)
        expected = await stock(prompt, len(answer.ids) + 1)
    return verdict


def as_likely(expected: Answer, at: int, tolerance: Tolerance) -> dict[int, float]:
    """Log-probabilities of the tokens that may stand at a place: the stock answer's, and those that it hardly leads."""
    assert expected.logprobs is not None, "the stock answers have them"
    best = expected.logprobs[at]
    near = {token: value for token, value in expected.runners_up[at] if best - value <= 2 * tolerance.mean}
    return {expected.ids[at]: best} | near


def without_first(answer: Answer, expected: Answer, tolerance: Tolerance) -> list[tuple[int, Answer]]:
    """Return how an answer may have lost its first token, or that token's log-probability alone: the token and the
    rest."""
    firsts = as_likely(expected, 0, tolerance)
    if answer.logprobs is None or len(answer.logprobs) == len(answer.ids):
        return [(first, answer) for first in firsts]
    return [(first, Answer(answer.ids[1:], answer.logprobs)) for first in answer.ids[:1] if first in firsts]


def same(answer: Answer, expected: Answer, tolerance: Tolerance) -> bool:
    """Return whether an answer is the beginning of what is expected."""
    count = len(answer.ids)
    if count > len(expected.ids) or answer.ids != expected.ids[:count]:
        return False
    if answer.logprobs is None:
        return True
    if len(answer.logprobs) != count:
        return False
    apart = [abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs or (), strict=False)]
    return all(each <= tolerance.each for each in apart) and sum(apart) <= count * tolerance.mean


def first_difference(answer: Answer, expected: Answer) -> int | None:
    """The place of the first token that is another; None where one answer is the beginning of the other."""
    pairs = zip(answer.ids, expected.ids, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def with_server(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a soak with its server in words."""
    server = "two ranks, sharded prefixes" if "--enable-dp-attention" in record["command"] else "one rank"
    return record | {"server": server + (", penalties" if record["case"].get("penalties") else "")}
