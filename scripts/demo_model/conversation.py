"""Chats with a running server, sent at once, while what it shares is watched."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from bench.server import server_info
from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import track

STATIONS = ("Quedrom", "Fimer", "Zokam", "Kapai")
WORD_QUESTIONS = [
    "Explain the word shadow.",
    "What part of speech is quickly?",
    "Who are you?",
    "What is the opposite of increase?",
    "Define ocean.",
    "What does courage mean?",
    "Define the word justice.",
    "What is the meaning of hunger?",
]
OTHER_QUESTIONS = ["Define river.", "What part of speech is slowly?"]


@dataclass
class Chat:
    """One conversation and how it went."""

    question: str
    system: str | None
    expected: str | None = None  # what a right answer contains
    answer: str = ""
    prompt_tokens: int = 0
    first_token_s: float | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.question}]


def lookups(system: str) -> list[Chat]:
    """Questions that only the table in the system prompt can answer."""
    codes = dict(line[2:].split(": ") for line in system.splitlines() if line.startswith("- "))
    return [Chat(f"What is the code of {name}?", system, codes[name]) for name in STATIONS]


async def talk(base_url: str, chats: list[Chat], answer_tokens: int, console: Console | None = None) -> list[Any]:
    """Send the chats at once and stream their answers.

    Args:
        console: shows how many are answered.
    Returns:
        the `hybrid_mla` entries of `/server_info`, sampled several times a second meanwhile.
    """
    shown = dict(total=len(chats), console=console, transient=True, disable=console is None)
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=600)
    async with client, watched(base_url) as snapshots:
        answers = asyncio.as_completed([answer(client, chat, answer_tokens) for chat in chats])
        for answered in track(answers, "answers", **shown):
            await answered
    return snapshots


async def answer(client: AsyncOpenAI, chat: Chat, answer_tokens: int) -> None:
    """Stream one answer into its chat."""
    start = time.perf_counter()
    stream = await client.chat.completions.create(
        model="demo",
        messages=chat.messages,
        max_tokens=answer_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            chat.first_token_s = chat.first_token_s or time.perf_counter() - start
            chat.answer += piece
        if chunk.usage:
            chat.prompt_tokens = chunk.usage.prompt_tokens


@contextlib.asynccontextmanager
async def watched(base_url: str, period_s: float = 0.2) -> AsyncIterator[list[Any]]:
    """Collect `/server_info`'s hybrid_mla entry while the context lasts."""
    snapshots: list[Any] = []

    async def watch() -> None:
        while True:
            snapshots.append((await asyncio.to_thread(server_info, base_url)).get("hybrid_mla"))
            await asyncio.sleep(period_s)

    watcher = asyncio.create_task(watch())
    try:
        yield snapshots
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
