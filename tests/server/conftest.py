"""SGLang's real server on the CPU, with hybrid_mla and with its own torch backend, on the demo model, in fp32.

Servers are started once for all tests; `/server_info` counts from then on, so tests look at differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from bench.server import free_port, running_server, server_info
from demo import MODEL
from rich.console import Console

LOGPROB_TOLERANCE = (
    2e-3  # fp32 in another order of summation; a wrong prefix or a wrong merge moves them by 0.1 and more
)


@dataclass(frozen=True)
class Chat:
    """One request; equal chats must get equal answers from both servers."""

    system: str
    user: str
    max_tokens: int = 16
    delay_s: float = 0.0


@dataclass
class Answer:
    tokens: list[str]
    logprobs: list[float]


class Server:
    """A running server and what tests do with it."""

    def __init__(self, base_url: str, log: Path) -> None:
        self.base_url, self.log = base_url, log

    def ask(self, *chats: Chat) -> list[Answer]:
        """Send chats at the same time (after their delays) and wait for all answers."""

        async def all_of_them() -> list[Answer]:
            async with self.client() as client:
                return list(await asyncio.gather(*(self.ask_one(client, chat) for chat in chats)))

        return asyncio.run(all_of_them())

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", timeout=300, max_retries=0)

    @staticmethod
    async def ask_one(client: openai.AsyncOpenAI, chat: Chat) -> Answer:
        await asyncio.sleep(chat.delay_s)
        messages: list[Any] = [{"role": "user", "content": chat.user}]
        if chat.system:
            messages.insert(0, {"role": "system", "content": chat.system})
        answer = await client.chat.completions.create(
            model="default",
            messages=messages,
            temperature=0,
            max_tokens=chat.max_tokens,
            logprobs=True,
            extra_body={"ignore_eos": True},  # so that requests run together as long as a test needs
        )
        content = answer.choices[0].logprobs.content
        return Answer([token.token for token in content], [token.logprob for token in content])

    def info(self) -> dict[str, Any]:
        """The `hybrid_mla` entry of `/server_info`."""
        return server_info(self.base_url)["hybrid_mla"]

    def flush(self) -> None:
        """Wait until the server is idle and empty its cache."""
        deadline = time.monotonic() + 60
        while not requests.post(f"{self.base_url}/flush_cache", timeout=60).ok:
            assert time.monotonic() < deadline, "the server does not become idle"
            time.sleep(0.2)


@dataclass
class Counted:
    """Counters of a stretch of time: differences."""

    steps_naive: int = 0
    steps_grouped: int = 0
    expansions: int = 0
    evictions: int = 0
    prefills_naive: int = 0
    prefill_tokens_saved: int = 0


@contextlib.contextmanager
def counting(server: Server) -> Iterator[Counted]:
    """Count what a server does inside the context; fall-backs are an error."""
    before = server.info()["counters"]
    counted = Counted()
    yield counted
    after = server.info()["counters"]
    for name in asdict(counted):
        setattr(counted, name, after[name] - before[name])
    assert after["fallbacks"] == before["fallbacks"]


def assert_same(actual: list[Answer], expected: list[Answer]) -> None:
    """Same tokens, same log-probabilities within rounding."""
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.tokens == b.tokens, f"request {index}"
        worst = max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
        assert worst < LOGPROB_TOLERANCE, f"request {index}: log-probabilities differ by {worst}"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """`start(arguments...) -> Server`, running until the end of the session."""
    with contextlib.ExitStack() as servers:

        def start_one(*arguments: str) -> Server:
            port = free_port()
            log = tmp_path_factory.mktemp("log") / "server.log"
            console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
            common = ("--model-path", str(MODEL), "--max-total-tokens", "16384")
            url = servers.enter_context(running_server([*common, *arguments], port, log, console, timeout_s=300))
            return Server(url, log)

        yield start_one


@pytest.fixture(scope="session")
def stock(start: Any) -> Server:
    return start("--attention-backend", "torch_native")


@pytest.fixture(scope="session")
def hybrid(start: Any) -> Server:
    """Every shared prefix of 32 tokens and more is expanded."""
    options = ("--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "32")
    return start("--attention-backend", "hybrid_mla", "--enable-metrics", *options)


@pytest.fixture(scope="session")
def grouped(start: Any) -> Server:
    """Every shared prefix of 32 tokens and more is read once for all its requests; nothing is expanded."""
    options = ("--hybrid-mla-mode", "grouped_absorb", "--hybrid-mla-min-prefix-len", "32")
    return start("--attention-backend", "hybrid_mla", *options)


@pytest.fixture(scope="session")
def two_ranks(start: Any) -> Server:
    """Tensor parallelism: half of the heads in each of two processes, which must plan alike."""
    options = ("--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang wants the cores of each rank
        return start("--attention-backend", "hybrid_mla", "--tp", "2", *options)


@pytest.fixture(scope="session")
def cramped(start: Any) -> Server:
    """Prefill in chunks, expansion in small steps, room for one prefix and a part of another, 2,048 tokens of cache."""
    options = ("--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "64")
    limits = ("--hybrid-mla-expand-tokens-per-step", "100", "--hybrid-mla-prefix-memory-gb", "0.0195")
    sizes = ("--chunked-prefill-size", "256", "--max-total-tokens", "2048")
    with pytest.MonkeyPatch.context() as patch:
        # SGLang's own way to test retraction: every so many steps it takes back a request as if its cache were full.
        patch.setenv("SGLANG_TEST_RETRACT", "1")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "60")
        return start("--attention-backend", "hybrid_mla", *options, *limits, *sizes)
