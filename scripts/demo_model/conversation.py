"""Chats with a running server, sent at once, while what it shares is watched."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from sglang_mla_ext import top

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
        the server's status, asked several times a second meanwhile.
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
    """Collect the server's status while the context lasts."""
    snapshots: list[Any] = []

    async def watch() -> None:
        while True:
            with contextlib.suppress(top.NoAnswerError):  # a long prefill keeps it busy: it is asked again
                snapshots.append(await asyncio.to_thread(top.ask, base_url))
            await asyncio.sleep(period_s)

    watcher = asyncio.create_task(watch())
    try:
        yield snapshots
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def answers_table(chats: list[Chat]) -> Table:
    """Return what was asked and answered."""
    table = Table(title="Answers", title_justify="left")
    for name in ("system\nprompt", "question", "answer", "prompt\ntokens", "first\ntoken ms"):
        table.add_column(name, justify="right" if name[-1] == "s" else "left")
    for chat in chats:
        table.add_row(
            "shared" if chat.system else "none",
            chat.question,
            Text(printable(chat.answer, 100)),  # Text: a bracket in it is no markup
            f"{chat.prompt_tokens:,}",
            f"{(chat.first_token_s or 0) * 1e3:,.0f}",
        )
    return table


def printable(text: str, length: int) -> str:
    """The start of a text on one line, without unprintable characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= length else line[: length - 1] + "…"
