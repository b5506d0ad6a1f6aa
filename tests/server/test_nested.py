"""Prompts that nest, parallel samples of one prompt, and conversations: the tokens of the stock backend.

Expanded prefixes come in chunks of 256 tokens, so each level here is longer than that.
"""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import NAMES, SYSTEM, question, watching

PROSE = "The garden was quiet, and on the hill above it somebody had lit a fire for the night. "
DOCUMENTS = [SYSTEM + "\nDocument one. " + PROSE * 16, SYSTEM + "\nDocument two. " + PROSE * 16]
CHAPTERS = [DOCUMENTS[0] + f"\nChapter {name}. " + PROSE * 16 for name in ("A", "B")]


def test_three_levels(stock: Reference, hybrid: Server) -> None:
    prompts = [SYSTEM] * 2 + [DOCUMENTS[1]] * 2 + [CHAPTERS[0]] * 2 + [CHAPTERS[1]] * 2
    chats = [Chat(prompt, question(index), 64) for index, prompt in enumerate(prompts)]
    expected = stock.asking(*chats)
    hybrid.flush()
    hybrid.ask(*(Chat(prompt, question(13), 1) for prompt in prompts[::2]))
    with counting(hybrid) as counted, watching(hybrid) as seen:
        actual = hybrid.ask(*chats)
    assert_same(actual, expected.result())
    assert counted.steps_naive >= 30
    levels = sorted((group["start"], group["requests"]) for group in max(seen, key=len))
    # For all; the rest of the system prompt alone and both documents; both chapters of the first.
    assert levels == [(0, 8), (256, 2), (256, 2), (256, 4), (512, 2), (512, 2)]
    assert hybrid.info()["counters"]["max_depth"] == 3


def test_eight_samples_of_one_prompt(stock: Reference, hybrid: Server) -> None:
    """They end in the same node of the tree, and share nearly all they have."""

    async def sample(server: Server) -> list[Any]:
        async with server.client() as client:
            answer = await client.chat.completions.create(
                model="default",
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": question(4)}],
                n=8,
                temperature=0,
                max_tokens=48,
                logprobs=True,
                extra_body={"ignore_eos": True},
            )
            return [[token.token for token in choice.logprobs.content] for choice in answer.choices]

    (expected,) = stock.ask(Chat(SYSTEM, question(4), 48))
    hybrid.flush()
    with counting(hybrid) as counted:
        samples = asyncio.run(sample(hybrid))
    assert samples == [expected.tokens] * 8
    assert counted.steps_naive >= 30 and hybrid.info()["counters"]["max_group_size"] >= 8


@pytest.mark.slow
def test_conversations_of_ten_turns(stock: Reference, hybrid: Server) -> None:
    """Three at once below one system prompt; each turn ends where the one before went on, and splits nothing."""

    async def talk(client: openai.AsyncOpenAI, first: int) -> list[str | None]:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        for turn in range(10):
            messages.append({"role": "user", "content": question((first + turn) % len(NAMES))})
            answer = await client.chat.completions.create(
                model="default", messages=messages, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return [message["content"] for message in messages]

    async def all_of_them(server: Server) -> list[list[str | None]]:
        async with server.client() as client:
            return list(await asyncio.gather(*(talk(client, first) for first in (0, 3, 6))))

    hybrid.flush()
    with counting(hybrid) as counted:
        actual = asyncio.run(all_of_them(hybrid))
    assert actual == asyncio.run(all_of_them(stock))
    assert counted.steps_naive > 0
