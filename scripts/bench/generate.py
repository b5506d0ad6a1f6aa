"""Ask many clients' requests of SGLang's native API, and judge answers by the stock server's.

Token ids go in, token ids with log-probabilities come out. An answer is right if it has the same tokens, with the same
log-probabilities within rounding where they were asked for. An answer that leaves the stock answer where another token
is as likely, within rounding, is a *tie*: what follows is compared with what the stock server says after that token. An
answer that is one without its first token is what SGLang's own `SGLANG_TEST_RETRACT` makes of a request that it took
back, whatever the backend: *lost first*.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import aiohttp


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


def judge_to_first_tie(answer: Answer, expected: Answer, tolerance: Tolerance) -> Verdict:
    """Judge an answer that cannot be asked to go on behind a tie, because its tokens depend on more than those before
    them. What follows a tie is not looked at."""
    if same(answer, expected, tolerance):
        return Verdict.RIGHT
    return Verdict.WRONG if tie_at(answer, expected, tolerance) is None else Verdict.TIE


async def compare(prompt: tuple[int, ...], answer: Answer, stock: Stock, tolerance: Tolerance) -> Verdict:
    """Return whether an answer is right, a tie, or wrong."""
    if answer.logprobs is not None and len(answer.logprobs) != len(answer.ids):
        return Verdict.WRONG
    expected = await stock(prompt, len(answer.ids) + 1)
    verdict = Verdict.RIGHT
    while not same(answer, expected, tolerance):
        at = tie_at(answer, expected, tolerance)
        if at is None:
            return Verdict.WRONG
        verdict = Verdict.TIE
        prompt, answer = prompt + answer.ids[: at + 1], answer.after(at + 1)
        expected = await stock(prompt, len(answer.ids) + 1)
    return verdict


def tie_at(answer: Answer, expected: Answer, tolerance: Tolerance) -> int | None:
    """Return the place at which an answer leaves the expected one by a tie, and is the same before; None where it is
    wrong there or before."""
    at = first_difference(answer, expected)
    if at is None or not same(answer.first(at), expected, tolerance):
        return None
    logprob = as_likely(expected, at, tolerance).get(answer.ids[at])
    own = logprob if answer.logprobs is None else answer.logprobs[at]
    return None if logprob is None or abs(own - logprob) > tolerance.each else at


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


Shape = tuple[str, float | str]
"""A sampling parameter and its value."""
RUNNERS_UP = 8
"""Tokens beside the best one that the stock server names: a random model in BF16 has three and more as likely."""
# A client that waits longer than that was forgotten.
TIMEOUT_S = 300
LONGEST_LINE = 1 << 26
"""Bytes of a streamed piece, with the hidden states of a long prompt in it."""


class RefusedError(RuntimeError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


def session(timeout_s: float = TIMEOUT_S) -> aiohttp.ClientSession:
    """Open as many connections as there are requests, each of which may take so long."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        read_bufsize=LONGEST_LINE,
    )


def body(ids: Sequence[int], output_tokens: int, shape: Shape | None = None, **more: Any) -> dict[str, Any]:
    """A greedy request with an answer of exactly so many tokens; `more` goes beside.

    Args:
        shape: one more sampling parameter.
    """
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True} | dict([shape] if shape else [])
    return {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **more}


async def post(client: aiohttp.ClientSession, url: str, content: Mapping[str, Any]) -> Any:
    """The JSON of an answer. Raises RefusedError, or aiohttp's errors where there is no answer."""
    async with client.post(url, json=content) as response:
        text = await response.text()
        if response.status != 200:
            raise RefusedError(response.status, text[:300])
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)
        return text


async def flush(client: aiohttp.ClientSession, url: str, within_s: float = 60) -> None:
    """Empty the cache of a server as soon as it is idle. Raises TimeoutError where it does not become that."""
    try:
        await post(client, f"{url}/flush_cache?timeout={within_s}", {})
    except RefusedError:
        raise TimeoutError("the server does not become idle") from None


async def ask(client: aiohttp.ClientSession, url: str, content: Mapping[str, Any], seen: list[Any]) -> None:
    """Put an answer into `seen`: of a streamed one each piece, which holds all before it, in place of the last.

    But for the piece that says that a request was aborted while it waited: SGLang puts a single token into it.
    """
    if not content.get("stream"):
        seen[:] = [await post(client, url, content)]
        return
    async with client.post(url, json=content) as response:
        if response.status != 200:
            raise RefusedError(response.status, (await response.text())[:300])
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                piece = json.loads(data)
                if "error" in piece:
                    raise RefusedError(200, json.dumps(piece["error"])[:300])
                if ran(piece["meta_info"]):
                    seen[:] = [piece]


def ran(meta: Mapping[str, Any]) -> bool:
    """Return whether an answer comes from a running request, and not from one that was aborted while it waited."""
    return "num_retractions" in meta


def answer_of(response: Mapping[str, Any]) -> Answer:
    """Return what SGLang says of an answer; with `top_logprobs_num` above 1 it knows the runners-up."""
    meta = response["meta_info"]
    if "output_token_logprobs" not in meta:
        return Answer(tuple(response["output_ids"]), None)
    chosen, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs") or []
    others = (
        tuple((token, logprob) for logprob, token, _ in top if token != own[1])
        for own, top in zip(chosen, tops, strict=False)
    )
    return Answer(tuple(response["output_ids"]), tuple(logprob for logprob, *_ in chosen), tuple(others))


class StockAnswers:
    """Greedy answers of the stock server, each prompt asked once, or once more if a longer answer is wanted of it.

    Args:
        url: of a server under no pressure.
        at_a_time: requests in flight.
        at_least: tokens that are asked for.
    """

    def __init__(self, url: str, at_a_time: int = 16, at_least: int = 1) -> None:
        self._url, self._free, self._at_least = url, asyncio.Semaphore(at_a_time), at_least
        self._known: dict[tuple[str, tuple[int, ...], Shape | None], Answer] = {}
        self._client: aiohttp.ClientSession | None = None
        self.weights = ""
        """Weights that the server has now."""

    async def __aenter__(self) -> StockAnswers:
        self._client = session()
        return self

    async def __aexit__(self, *unused: object) -> None:
        assert self._client is not None
        await self._client.close()

    async def update(self, model: str, weights: str) -> None:
        """Load weights, and answer with them from now on.

        Not before the server is idle: SGLang 0.5.17 may still hold a request whose answer it has given, and its
        scheduler then ends, as it cannot flush the cache.
        """
        assert self._client is not None
        if weights != self.weights:
            await flush(self._client, self._url)
            await post(self._client, f"{self._url}/update_weights_from_disk", {"model_path": model})
            self.weights = weights

    async def __call__(self, ids: tuple[int, ...], tokens: int, shape: Shape | None = None) -> Answer:
        assert self._client is not None
        known = self._known.get((self.weights, ids, shape))
        if known is None or len(known.ids) < tokens:
            tokens = max(tokens, self._at_least)
            async with self._free:
                asked = body(ids, tokens, shape, top_logprobs_num=1 + RUNNERS_UP)
                response = await post(self._client, f"{self._url}/generate", asked)
            known = self._known[self.weights, ids, shape] = answer_of(response)
        return known
