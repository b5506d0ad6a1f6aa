"""Play traffic of `soak_traffic.py` to a server, one phase after the other, and judge what comes back."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import aiohttp
import psutil
import requests

from bench.client import HYBRID
from bench.generate import (
    FP32,
    TIMEOUT_S,
    Answer,
    RefusedError,
    StockAnswers,
    Tolerance,
    Verdict,
    answer_of,
    ask,
    body,
    flush,
    judge,
    judge_to_first_tie,
    post,
    ran,
    session,
)
from bench.server import server_info
from bench.soak_traffic import PENALTIES, Action, Chat, Request

PUBLISHED_S = 10.0
"""Time within which ranks have published their loads, that an idle server answers with."""
MOST_SAID = 20
"""Most wrong answers that are kept for a message."""


class ServerDiedError(RuntimeError):
    """The server ended, or answers no more."""


class Weights(NamedTuple):
    """Two checkpoints of one model, between which updates go to and fro; the same twice changes no answer."""

    first: str
    second: str


class Got(NamedTuple):
    """Answer, or a part of one, that a client received.

    Attributes:
        whole: false where the client left before its end.
        weights: which of the two they were; taken_back: retracted at least once.
    """

    chat: Chat
    answer: Answer
    whole: bool
    weights: str
    taken_back: bool


@dataclass
class Outcome:
    """Outcome of all phases so far.

    Attributes:
        verdicts: answers by `Verdict`; left: clients that went before they had any token.
        taken_back: answers of requests that SGLang retracted.
        actions: flushes, updates and sleeps that the server did.
        wrong: the first few, for a message.
        leaked_bytes: the most that was left when the server was idle and flushed: expanded prefixes and KV cache.
        rss_bytes: memory of the server's processes when idle, by phase.
    """

    requests: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    left: int = 0
    errors: int = 0
    taken_back: int = 0
    actions: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    leaked_bytes: int = 0
    deaths: int = 0
    rss_bytes: list[int] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.verdicts["wrong"] + self.errors + self.leaked_bytes + self.deaths == 0

    def metrics(self) -> dict[str, Any]:
        """Return what is recorded. Memory grows since the end of the first phase, in which buffers and caches of every
        kind came to be."""
        counted = ("taken_back", "left", "errors", "leaked_bytes", "deaths")
        return {
            "requests": self.requests,
            "judged": self.verdicts.total(),
            "wrong": self.verdicts["wrong"],
            "ties": self.verdicts["tie"],
            "lost_first": self.verdicts["lost_first"],
            **{name: getattr(self, name) for name in counted},
            "rss_growth_bytes": self.rss_bytes[-1] - self.rss_bytes[0] if self.rss_bytes else 0,
            **{name: self.actions[name] for name in ("updates", "sleeps", "flushes", "flushes_refused")},
        }


class Soak:
    """Traffic against one server, and its outcome.

    Args:
        url: of the server that is tried; it says by `weight_version` "first" or "second" which weights it has.
        stock: gives the answers that it should give.
        weights: to update from.
        at_a_time: requests in flight.
        sleeps: tags to sleep with, of SGLang's.
    """

    def __init__(
        self,
        url: str,
        stock: StockAnswers,
        weights: Weights,
        *,
        at_a_time: int = 16,
        sleeps: Sequence[str] = ("kv_cache",),
        tolerance: Tolerance = FP32,
    ) -> None:
        self.url, self.outcome = url, Outcome()
        self._stock, self._weights, self._sleeps, self._tolerance = stock, weights, list(sleeps), tolerance
        self._at_a_time, self._now = at_a_time, "first"
        self._got: list[Got] = []

    async def phase(self, traffic: Sequence[Request | Action]) -> None:
        """Send all of it, wait until the server is idle, measure what is left in it, and judge the answers.

        Raises:
            ServerDiedError
        """
        try:
            async with session() as client:
                await self._send(client, traffic)
                await self._flush(client)
            self._measure_leaks()
        except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
            self.outcome.deaths += 1
            raise ServerDiedError(f"{type(error).__name__}: {error}") from error
        finally:
            await self._judge()

    async def _send(self, client: aiohttp.ClientSession, traffic: Sequence[Request | Action]) -> None:
        free = asyncio.Semaphore(self._at_a_time)
        tasks: list[asyncio.Task[None]] = []
        updating: asyncio.Task[None] | None = None
        try:
            for event in traffic:
                if event is Action.FLUSH:
                    tasks.append(asyncio.create_task(self._flush_at_work(client)))
                elif isinstance(event, Action):
                    await asyncio.gather(*tasks)
                    await self._flush(client)
                    if event is Action.SLEEP:
                        await self._sleep(client)
                    else:
                        updating = asyncio.create_task(self._update(client))
                        tasks.append(updating)
                else:
                    await asyncio.sleep(event.gap_s)
                    await free.acquire()
                    if updating is not None and not updating.done():
                        event = replace(event, leaves_after_s=None)
                    self.outcome.requests += 1
                    tasks.append(asyncio.create_task(self._client(client, event, f"soak-{self.outcome.requests}")))
                    tasks[-1].add_done_callback(lambda _: free.release())
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, client: aiohttp.ClientSession, request: Request, rid: str) -> None:
        """Send a request as its client does, and keep what comes back."""
        chat = request.chat
        content = body(chat.ids, chat.output_tokens, chat.shape, rid=rid, return_logprob=request.logprobs)
        content |= {"return_hidden_states": True} if request.hidden else {}
        content |= {"extra_key": chat.salt} if chat.salt else {}
        seen: list[Any] = []
        url = f"{self.url}/generate"
        asking = asyncio.create_task(ask(client, url, content | {"stream": request.stream}, seen))
        try:
            if request.leaves_after_s is not None:
                done, _ = await asyncio.wait([asking], timeout=request.leaves_after_s)
                if not done and request.aborts:
                    await post(client, f"{self.url}/abort_request", {"rid": rid})
                elif not done:
                    asking.cancel()  # closes the connection
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.result()
        except RefusedError as error:
            # An abort of a request that has no token yet is an error to SGLang.
            if not (request.aborts and "abort" in str(error).lower()):
                self.outcome.errors += 1
                self._say(f"{error}, prompt of {len(chat.ids)} tokens")
                return
        finally:
            asking.cancel()
        if not (seen and seen[0].get("output_ids")):
            self.outcome.left += 1
            return
        meta = seen[0]["meta_info"]
        whole = (meta["finish_reason"] or {}).get("type") == "length"
        version = "second" if meta["weight_version"] == "second" else "first"
        # A request that waits and has tokens was retracted.
        self._got.append(Got(chat, answer_of(seen[0]), whole, version, not ran(meta) or meta["num_retractions"] > 0))

    async def _update(self, client: aiohttp.ClientSession) -> None:
        """Update an idle server to the other weights; SGLang holds back the requests that come meanwhile.

        Idle, because SGLang 0.5.17 may still hold a request whose answer it has given; its scheduler then ends, as it
        cannot flush the cache. Nor may anybody leave meanwhile, which has the same end.
        """
        self._now = "first" if self._now == "second" else "second"
        content = {"model_path": getattr(self._weights, self._now), "weight_version": self._now}
        await post(client, f"{self.url}/update_weights_from_disk", content)
        self.outcome.actions["updates"] += 1

    async def with_first_weights(self) -> None:
        """Give both servers the weights that they had at first."""
        await self._stock.update(self._weights.first, "first")
        if self._now != "first":
            async with session() as client:
                await self._update(client)

    async def _sleep(self, client: aiohttp.ClientSession) -> None:
        """Let an idle server sleep and wake."""
        for action in ("release", "resume"):
            await post(client, f"{self.url}/{action}_memory_occupation", {"tags": self._sleeps})
        self.outcome.actions["sleeps"] += 1

    async def _flush_at_work(self, client: aiohttp.ClientSession) -> None:
        """Flush the cache, which SGLang refuses where it is not idle."""
        try:
            await post(client, f"{self.url}/flush_cache", {})
            self.outcome.actions["flushes"] += 1
        except RefusedError:
            self.outcome.actions["flushes_refused"] += 1

    async def _flush(self, client: aiohttp.ClientSession) -> None:
        """Empty the cache when the last client that left is gone."""
        await flush(client, self.url)
        self.outcome.actions["flushes"] += 1

    def _measure_leaks(self) -> None:
        """Measure what an idle server whose cache is empty still holds. Ranks with DP attention publish that now and
        then."""
        left, begun = left_bytes(self.url), time.monotonic()
        while left and time.monotonic() - begun < PUBLISHED_S:
            time.sleep(0.5)
            left = left_bytes(self.url)
        self.outcome.leaked_bytes = max(self.outcome.leaked_bytes, left)
        self.outcome.rss_bytes.append(rss_bytes(self.url))

    async def _judge(self) -> None:
        got, self._got = self._got, []
        for version in ("first", "second"):
            of_version = [one for one in got if one.weights == version]
            if of_version:
                await self._stock.update(getattr(self._weights, version), version)
            await asyncio.gather(*(self._judge_one(one) for one in of_version))

    async def _judge_one(self, got: Got) -> None:
        chat, answer = got.chat, got.answer
        if got.taken_back and chat.shape in PENALTIES:  # SGLang counts anew what comes after
            self.outcome.taken_back += 1
            return
        if chat.shape is None:
            options = {"taken_back": got.taken_back, "tolerance": self._tolerance}
            verdict = await judge(chat.ids, answer, self._stock, **options)
        else:
            expected = await self._stock(chat.ids, chat.output_tokens, chat.shape)
            verdict = judge_to_first_tie(answer, expected, self._tolerance)
        missing = chat.output_tokens - len(answer.ids)
        if got.whole and missing not in ((0, 1) if verdict is Verdict.LOST_FIRST else (0,)):
            verdict = Verdict.WRONG
        self.outcome.verdicts[verdict.value] += 1
        self.outcome.taken_back += got.taken_back
        if verdict is Verdict.WRONG:
            expected = await self._stock(chat.ids, len(answer.ids) + 1, chat.shape)
            asked = f"prompt of {len(chat.ids)} tokens, salt {chat.salt}, {chat.shape}"
            how = f"weights {got.weights}, retracted {got.taken_back}, whole {got.whole}"
            self._say(f"{asked}, {how}: {answer}; stock {expected.ids} {expected.logprobs}")

    def _say(self, what: str) -> None:
        if len(self.outcome.wrong) < MOST_SAID:
            self.outcome.wrong.append(what)


def left_bytes(url: str) -> int:
    """Return what an idle server holds: what its expanded prefixes take, and the KV cache that it says is in use."""
    loads = requests.get(f"{url}/v1/loads", timeout=TIMEOUT_S).json()["loads"]
    used = sum(
        load["num_used_tokens"] / load["max_total_num_tokens"] * load["memory"]["kv_cache_gb"] * 2**30 for load in loads
    )
    return int(used) + int(server_info(url).get(HYBRID, {}).get("expanded_bytes", 0))


def rss_bytes(url: str) -> int:
    """Return the memory of all processes of the server behind a local port; 0 where it is not on this machine."""
    port = int(url.rsplit(":", 1)[1])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            server = psutil.Process(connection.pid)
            return sum(process.memory_info().rss for process in (server, *server.children(recursive=True)))
    return 0
