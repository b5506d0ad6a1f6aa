"""New tokens that ride in decode steps: the tokens of the stock backend, which computes them in passes of their own.

Chats come over some seconds, so that there are running requests to ride with, and without log-probabilities: SGLang
mixes no batch that returns any.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import openai
import pytest
from conftest import Chat, Reference, Server, assert_same
from test_answers import NAMES, OTHER_SYSTEM, SYSTEM, question

SECONDS = 2.5


def chats_over_time(count: int, seed: int) -> list[Chat]:
    """Over two system prompts; every seventh one may be longer than what a step takes along."""
    draw = random.Random(seed)

    def words(number: int) -> str:
        return " ".join(draw.choice(NAMES) for _ in range(number))

    return [
        Chat(
            (SYSTEM, OTHER_SYSTEM)[draw.random() < 0.3],
            words(draw.choice([3, 15, 90] if index % 7 == 0 else [2, 6, 15])) + question(index % len(NAMES)),
            draw.choice([4, 9, 17, 30]),
            draw.random() * SECONDS,
        )
        for index in range(count)
    ]


async def say(client: openai.AsyncOpenAI, chat: Chat, **more: Any) -> Any:
    """The request of a chat, without log-probabilities."""
    await asyncio.sleep(chat.delay_s)
    messages: Any = [{"role": "system", "content": chat.system}, {"role": "user", "content": chat.user}]
    options: Any = dict(temperature=0, max_tokens=chat.max_tokens, extra_body={"ignore_eos": True}, **more)
    return await client.chat.completions.create(model="default", messages=messages, **options)


async def text_of(client: openai.AsyncOpenAI, chat: Chat) -> str | None:
    return (await say(client, chat)).choices[0].message.content


def texts_of(server: Server, chats: list[Chat]) -> list[str | None]:
    async def all_of_them() -> list[str | None]:
        async with server.client() as client:
            return list(await asyncio.gather(*(text_of(client, chat) for chat in chats)))

    return asyncio.run(all_of_them())


async def leave(client: openai.AsyncOpenAI, chat: Chat) -> int:
    """Hang up in the middle of an answer; how much had come."""
    stream, came = await say(client, chat, stream=True), 0
    async for _ in stream:
        came += 1
        if came == 5:
            break
    await stream.close()
    return came


async def samples_of(client: openai.AsyncOpenAI, chat: Chat, count: int) -> list[str | None]:
    return [choice.message.content for choice in (await say(client, chat, n=count)).choices]


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return chats_over_time(40, seed=5)


@pytest.fixture(scope="module")
def expected(stock: Reference, chats: list[Chat]) -> list[str | None]:
    return texts_of(stock, chats)


def test_tokens_ride_with_running_requests(
    stock: Reference, riding: Server, chats: list[Chat], expected: list[str | None]
) -> None:
    """Beside them somebody hangs up in the middle, and somebody wants four samples."""
    in_the_middle, sampled = Chat(SYSTEM, question(3), 100, 0.4 * SECONDS), Chat(SYSTEM, question(4), 20, 0.6 * SECONDS)

    async def all_of_them() -> tuple[list[str | None], int, list[str | None]]:
        async with riding.client() as client:
            return await asyncio.gather(
                asyncio.gather(*(text_of(client, chat) for chat in chats)),
                leave(client, in_the_middle),
                samples_of(client, sampled, 4),
            )

    texts, came, samples = asyncio.run(all_of_them())
    assert texts == expected
    assert came == 5 and samples == texts_of(stock, [sampled]) * 4
    counters = riding.info()["counters"]
    assert counters["steps_mixed"] >= 5 and counters["tokens_ridden"] > 100, counters
    assert counters["steps_naive"] > counters["steps_absorb"] and not counters["fallbacks"], counters
    assert counters["shadow_checks"] > 0 and counters["shadow_failures"] == 0


def test_with_log_probabilities_they_ride_alone(stock: Reference, riding: Server) -> None:
    chats = [Chat(SYSTEM, question(index), 12, 0.1 * index) for index in range(6)]
    before = riding.info()["counters"]
    assert_same(riding.ask(*chats), stock.ask(*chats))
    after = riding.info()["counters"]
    assert after["prefills_ridden"] > before["prefills_ridden"] and after["steps_mixed"] == before["steps_mixed"]
    assert not after["fallbacks"]


def test_in_pieces_and_while_requests_are_taken_back(
    riding_in_pieces: Server, chats: list[Chat], expected: list[str | None]
) -> None:
    assert texts_of(riding_in_pieces, chats) == expected
    counters = riding_in_pieces.info()["counters"]
    assert counters["steps_mixed"] >= 5 and counters["tokens_ridden"] > 100 and not counters["fallbacks"], counters
    assert re.search(r"#retracted_reqs: [1-9]", riding_in_pieces.log.read_text())
