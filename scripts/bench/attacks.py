"""Attacks of hostile clients, and what they do to a server with hybrid_mla beside a stock server.

Each attack is made of waves, and all requests of a wave are sent at once. Requests are drawn from a seed, for a server
with so many tokens of cache.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import aiohttp
import numpy as np

from bench.client import HYBRID
from bench.generate import (
    FP32,
    Answer,
    RefusedError,
    StockAnswers,
    Verdict,
    answer_of,
    body,
    flush,
    judge,
    post,
    same,
    session,
)
from bench.server import server_info
from bench.soak_run import left_bytes

SALTS = 100
# Words that are nowhere but in the prompts of `words`: their traces are looked for.
MARKERS = ("Xylograph", "Quizzaciously", "Zymurgical")
SALT_MARKER = "tenant-of-salt"


@dataclass(frozen=True)
class Attack:
    """Requests of a hostile client.

    Attributes:
        waves: bodies of `/generate`; a wave begins when the one before is answered.
        timed: whether it takes long enough to be timed.
    """

    name: str
    waves: list[list[Mapping[str, Any]]]
    timed: bool = True

    @property
    def requests(self) -> int:
        return sum(map(len, self.waves))


class Attacks:
    """Draw the attacks.

    Args:
        vocabulary: `[tokens]` the ids that prompts are drawn from.
        cache_tokens: of the server; longest: prompt and answer together, in tokens.
        scale: how much of each: 1 is all of it.
    """

    def __init__(
        self, vocabulary: np.ndarray, *, cache_tokens: int, longest: int, seed: int = 0, scale: float = 1
    ) -> None:
        self._vocabulary, self._rng = vocabulary, np.random.default_rng(seed)
        self._cache_tokens, self._longest, self._scale = cache_tokens, longest, scale

    def all(self) -> list[Attack]:
        return [
            *(self.flood(), self.deep_trees(), self.steps_of_one(), self.thrash(), self.full_pool()),
            *(self.invalid(), self.maximal(), self.salts(), self.words()),
        ]

    def flood(self) -> Attack:
        """Send short requests at once."""
        wave = [body(self._text(int(length)), 4) for length in self._rng.integers(4, 13, self._count(5000))]
        return Attack("flood", [wave])

    def deep_trees(self) -> Attack:
        """Let every request go on where another one ends: as many nested prefixes as there are requests."""
        texts = [self._text(640) for _ in range(self._count(4))]
        wave = [body(text[:end] + self._text(1), 12) for end in range(16, 641, 16) for text in texts]
        return Attack("deep_trees", [wave])

    def steps_of_one(self) -> Attack:
        """Do the same with one token from one to the next: the most nodes for the fewest tokens."""
        text = self._text(100 + self._count(300))
        return Attack("steps_of_one", [[body(text[:end], 8) for end in range(100, len(text))]])

    def thrash(self) -> Attack:
        """Send two groups whose prefixes are worth the same, in turn: memory for expanded ones could go to and fro."""
        first, second = self._text(480), self._text(480)
        waves = []
        for turn in range(self._count(20)):
            mine, other = (first, second)[:: 1 if turn % 2 else -1]
            waves.append([body(text + self._text(3), 12) for text in (mine, mine, other, other, mine, other)])
        return Attack("thrash", waves)

    def full_pool(self) -> Attack:
        """Send prompts that share nothing and need twice the cache, with answers that make it overflow."""
        length = self._cache_tokens // 24
        wave = [body(self._text(length), 32) for _ in range(self._count(48))]
        return Attack("full_pool", [wave])

    def invalid(self) -> Attack:
        """Send what is no prompt.

        Not among them: an integer that is no token's id, at which SGLang 0.5.17's scheduler ends, whatever the backend;
        and an empty prompt in a list, at which it ends without this package.
        """
        asked: list[Any] = [["five"], [None], 7, "7", {"a": 1}, [5.5], [True, "5"], [[[5]]]]
        wave = [{"input_ids": ids, "sampling_params": {"max_new_tokens": 2}} for ids in asked]
        more = [{"max_new_tokens": -1}, {"temperature": -1}, {"top_p": 7}, {"max_new_tokens": "many"}]
        wave += [{"input_ids": [5], "sampling_params": parameters} for parameters in more]
        return Attack("invalid", [wave], timed=False)

    def maximal(self) -> Attack:
        """Send empty prompts, one token, and all sizes around the largest."""
        sizes = (0, 0, 1, 1, self._longest - 1, self._longest, self._longest + 1, 2 * self._longest)
        wave = [body(self._text(size), 2) for size in sizes] + [{"text": ""}, {"text": None}, {}]
        return Attack("maximal", [wave], timed=False)

    def salts(self) -> Attack:
        """Send one text under many salts, twice: who shares with another salt would have it cached the first time."""
        text = self._text(192)
        wave = [body(text, 12, extra_key=f"{SALT_MARKER}-{salt}") for salt in range(max(2, self._count(SALTS)))]
        return Attack("salts", [wave, wave])

    def words(self) -> Attack:
        """Send text with words that nobody else uses, shared, so that it is expanded and shown."""
        text = " ".join(MARKERS) * 8
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        wave = [{"text": f"{text} {MARKERS[0]}{number}", "sampling_params": sampling} for number in range(8)]
        waves = [[{**one, "extra_key": salt} if salt else one for one in wave] for salt in (None, SALT_MARKER)]
        return Attack("words", waves, timed=False)

    def _count(self, whole: int) -> int:
        return max(1, round(whole * self._scale))

    def _text(self, length: int) -> list[int]:
        ids: list[int] = self._rng.choice(self._vocabulary, length).tolist()
        return ids


def traces(shown: str, secrets: Sequence[str]) -> list[str]:
    """Return those secrets that stand in what a server shows."""
    lower = shown.lower()
    return [secret for secret in secrets if secret.lower() in lower]


STATUS_PATH = "/hybrid_mla/status"
SHOWN_PATHS = (STATUS_PATH, "/hybrid_mla")
READ_EACH_S = 0.1


@dataclass
class Played:
    """Outcome of an attack on one server.

    Attributes:
        replies: of each request in the order in which they were sent: the status of HTTP, 0 where the connection broke;
            the answer, None where it was refused or asked for no log-probabilities; tokens found in the cache.
        most_holders: the most requests that were seen to hold one segment together.
        traces: of prompts or salts, in what the server shows.
    """

    seconds: float = 0.0
    replies: list[tuple[int, Answer | None, int | None]] = field(default_factory=list)
    most_holders: int = 0
    traces: set[str] = field(default_factory=set)


@dataclass
class Verdicts:
    """Effects of an attack on a server with hybrid_mla, beside the stock server's.

    Attributes:
        seconds, stock_seconds: medians; None where it is not timed.
        seconds_of_turns: ours, then the stock server's.
        slowdown: share of the stock backend's time that ours takes longer.
        wrong: answers that are not the stock backend's; ties left out.
        refused_otherwise: requests whose HTTP status is another than from the stock backend.
        shared_across_salts: requests that found a text of another salt in the cache, or held a segment with another's.
        traces: words, salts or token ids of prompts in what the server shows.
        fallbacks: of hybrid_mla, by reason, since the attack began.
        leaked_bytes: when the server was idle and flushed again.
        deaths: 1 where a server answers no more.
    """

    seconds: float | None = None
    stock_seconds: float | None = None
    slowdown: float | None = None
    wrong: int = 0
    refused_otherwise: int = 0
    shared_across_salts: int = 0
    traces: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    leaked_bytes: int = 0
    deaths: int = 0
    seconds_of_turns: list[list[float]] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Return whether all is as with the stock server, but for the time, which other processes disturb."""
        bad = self.wrong + self.refused_otherwise + self.shared_across_salts + len(self.traces)
        return bad + self.leaked_bytes + self.deaths == 0


async def attack_both(attack: Attack, ours: str, stock: str, answers: StockAnswers, turns: int) -> Verdicts:
    """Time an attack on both servers, in turns; then play it once more, and look at ours meanwhile."""
    seconds: dict[str, list[float]] = {ours: [], stock: []}
    for turn in range(turns if attack.timed else 0):
        for url in (ours, stock)[:: 1 if turn % 2 else -1]:
            seconds[url].append((await play(url, attack, reads_status=False)).seconds)
    found = await verdicts(attack, ours, stock, answers)
    if attack.timed:
        mine, theirs = (median(seconds[url]) for url in (ours, stock))
        found.seconds, found.stock_seconds = round(mine, 2), round(theirs, 2)
        found.slowdown = round(mine / theirs - 1, 3)
        found.seconds_of_turns = [[round(each, 2) for each in of_server] for of_server in seconds.values()]
    return found


async def verdicts(attack: Attack, ours: str, stock: str, answers: StockAnswers) -> Verdicts:
    """Play an attack to both servers, and look at ours meanwhile."""
    before = server_info(ours)[HYBRID]["counters"]["fallbacks"]
    mine, theirs = await play(ours, attack, reads_status=True), await play(stock, attack, reads_status=False)
    found = Verdicts(traces=sorted(mine.traces))
    contents = [content for wave in attack.waves for content in wave]
    for content, (status, answer, _), (expected_status, expected, _) in zip(
        contents, mine.replies, theirs.replies, strict=True
    ):
        found.refused_otherwise += status != expected_status
        if answer is not None and expected is not None and not same(answer, expected, FP32):
            verdict = await judge(tuple(content["input_ids"]), answer, answers, taken_back=False)
            found.wrong += verdict is Verdict.WRONG
    if attack.name == "salts":
        # Each salt asks once in a wave: who shares then, shares with another salt.
        found.shared_across_salts = sum(bool(cached) for _, _, cached in mine.replies[: len(attack.waves[0])])
        found.shared_across_salts += mine.most_holders if mine.most_holders > 1 else 0
    after = server_info(ours)[HYBRID]["counters"]["fallbacks"]
    found.fallbacks = {reason: count - before.get(reason, 0) for reason, count in after.items()}
    async with session() as client:
        await flush(client, ours)
    found.leaked_bytes = left_bytes(ours)
    return found


async def play(url: str, attack: Attack, *, reads_status: bool) -> Played:
    """Send an attack to a server, and read what comes back.

    Args:
        reads_status: whether to read its status page meanwhile, which disturbs timings.
    """
    played = Played()
    async with session() as client:
        await flush(client, url)
        watcher = asyncio.create_task(_read_again(client, url, played)) if reads_status else None
        begin = time.monotonic()
        for wave in attack.waves:
            played.replies += await asyncio.gather(*(_ask(client, url, content) for content in wave))
        played.seconds = time.monotonic() - begin
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            await _read_shown(client, url, played)
    return played


async def _ask(
    client: aiohttp.ClientSession, url: str, content: Mapping[str, Any]
) -> tuple[int, Answer | None, int | None]:
    try:
        response = await post(client, f"{url}/generate", content)
    except RefusedError as error:
        return error.status, None, None
    except (aiohttp.ClientError, TimeoutError):
        return 0, None, None
    if not isinstance(response, dict):
        return 200, None, None
    answer = answer_of(response) if content.get("return_logprob") else None
    return 200, answer, response["meta_info"].get("cached_tokens")


async def _read_again(client: aiohttp.ClientSession, url: str, played: Played) -> None:
    while True:
        await _read_shown(client, url, played)
        await asyncio.sleep(READ_EACH_S)


async def _read_shown(client: aiohttp.ClientSession, url: str, played: Played) -> None:
    """Search what the server shows for words and salts of the prompts, and see who holds what together."""
    for path in SHOWN_PATHS:
        async with client.get(f"{url}{path}") as response:
            shown = await response.text()
        played.traces |= set(traces(shown, [*MARKERS, SALT_MARKER]))
        if path == STATUS_PATH:
            status = json.loads(shown)
            played.traces |= set(_lists_of_numbers(status))
            held = (segment["holders"] for rank in status["ranks"] for segment in rank["segments"])
            played.most_holders = max(played.most_holders, *held, 0)


def _lists_of_numbers(shown: Any) -> list[str]:
    """Return where a status holds numbers in a row, as token ids would be."""
    if isinstance(shown, dict):
        return [found for value in shown.values() for found in _lists_of_numbers(value)]
    if isinstance(shown, list):
        numbers = any(isinstance(value, int | float) for value in shown)
        return ["numbers in a row"] if numbers else [found for value in shown for found in _lists_of_numbers(value)]
    return []
