"""New tokens mixed into decode steps: the tokens of the stock backend, which computes them in passes of their own.

Chats come over some seconds, so that there are running requests to be mixed with, and without log-probabilities: SGLang
mixes no batch that returns any.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
import requests
from conftest import Chat, Reference, Server, assert_same, in_thread
from test_answers import NAMES, OTHER_SYSTEM, SYSTEM, question

SECONDS = 2.5
MIXED_TOKENS = 128
"""New tokens that a step of the server `mixed` may have."""


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


def test_tokens_are_mixed_with_running_requests(
    stock: Reference, mixed: Server, chats: list[Chat], expected: list[str | None]
) -> None:
    """Beside them somebody hangs up in the middle, and somebody wants four samples."""
    in_the_middle, sampled = Chat(SYSTEM, question(3), 100, 0.4 * SECONDS), Chat(SYSTEM, question(4), 20, 0.6 * SECONDS)

    async def all_of_them() -> tuple[list[str | None], int, list[str | None]]:
        async with mixed.client() as client:
            return await asyncio.gather(
                asyncio.gather(*(text_of(client, chat) for chat in chats)),
                leave(client, in_the_middle),
                samples_of(client, sampled, 4),
            )

    texts, came, samples = asyncio.run(all_of_them())
    assert texts == expected
    assert came == 5 and samples == texts_of(stock, [sampled]) * 4
    counters = mixed.info()["counters"]
    assert counters["steps_mixed"] >= 5 and counters["tokens_mixed"] > 100, counters
    assert counters["steps_naive"] > counters["steps_absorb"] and not counters["fallbacks"], counters
    assert counters["shadow_checks"] > 0 and counters["shadow_failures"] == 0


def test_with_log_probabilities_they_are_computed_alone(stock: Reference, mixed: Server) -> None:
    chats = [Chat(SYSTEM, question(index), 12, 0.1 * index) for index in range(6)]
    before = mixed.info()["counters"]
    assert_same(mixed.ask(*chats), stock.ask(*chats))
    after = mixed.info()["counters"]
    assert after["prefills_mixed"] > before["prefills_mixed"] and after["steps_mixed"] == before["steps_mixed"]
    assert not after["fallbacks"]


def test_in_pieces_and_while_requests_are_taken_back(
    mixed_in_pieces: Server, chats: list[Chat], expected: list[str | None]
) -> None:
    assert texts_of(mixed_in_pieces, chats) == expected
    counters = mixed_in_pieces.info()["counters"]
    assert counters["steps_mixed"] >= 5 and counters["tokens_mixed"] > 100 and not counters["fallbacks"], counters
    assert re.search(r"#retracted_reqs: [1-9]", mixed_in_pieces.log.read_text())


def generate(
    server: Server, tokens: list[int] | list[list[int]], count: int, sampling: dict[str, Any] | None = None, **more: Any
) -> Any:
    """SGLang's own request: the answer to a prompt of these tokens, or to each of several."""
    sampling_params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **(sampling or {})}
    body = {"input_ids": tokens, "sampling_params": sampling_params, **more}
    response = requests.post(f"{server.base_url}/generate", json=body, timeout=120)
    response.raise_for_status()
    return response.json()


def prompt(seed: int, length: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    return random.Random(seed).sample(range(10, 4000), length)


@contextlib.contextmanager
def running(server: Server, seed: int, **more: Any) -> Iterator[Any]:
    """A request that runs longer than what is done inside; a place in the list for its answer."""
    found: list[Any] = []
    future = in_thread(functools.partial(generate, server, prompt(seed, 40), 400, **more))
    time.sleep(0.7)
    yield found
    assert not future.done(), "it ended before the others"
    found.append(future.result())


def prefills(server: Server, since: int) -> list[int]:
    """New tokens of each prefill batch in a server's log from a place on."""
    log = server.log.read_bytes()[since:].decode(errors="replace")
    return [int(count) for count in re.findall(r"Prefill batch.*?#new-token: (\d+)", log)]


ALONE: dict[str, dict[str, Any]] = {
    "nothing is generated": {"count": 0},
    "input log-probabilities": {"return_logprob": True, "logprob_start_len": 0},
    "log-probabilities": {"return_logprob": True},
    "hidden states": {"return_hidden_states": True},
}


@pytest.mark.parametrize("asks", ALONE.values(), ids=ALONE)
def test_a_prompt_that_cannot_be_mixed_is_not_cut_for_it(mixed: Server, asks: dict[str, Any]) -> None:
    length = 4 * MIXED_TOKENS + 10
    with running(mixed, seed=11):
        since = mixed.log.stat().st_size
        generate(mixed, prompt(len(str(asks)), length), **{"count": 4, **asks})
        time.sleep(0.2)
        assert prefills(mixed, since) == [length]
    mixed.flush()


def test_sglang_goes_on_with_every_prompt_that_is_cut(stock: Reference, mixed: Server) -> None:
    """SGLang 0.5.17 computes the first piece of a request that it keeps out of its tree again and again."""
    length, kept_out = MIXED_TOKENS + 70, {"bootstrap_host": "2.2.2.2", "bootstrap_room": 1}
    expected = generate(stock, prompt(21, length), 8, **kept_out)["output_ids"]
    with running(mixed, seed=12):
        assert generate(mixed, prompt(21, length), 8, **kept_out)["output_ids"] == expected
    assert mixed.process.poll() is None


def test_hidden_states_beside_others_are_those_of_a_request_alone(mixed: Server) -> None:
    """A row for each token of the prompt, and one for each that was generated."""
    asked = {"return_hidden_states": True}
    alone = generate(mixed, prompt(13, 40), 400, **asked)["meta_info"]["hidden_states"]
    long_alone = generate(mixed, prompt(14, 2 * MIXED_TOKENS), 4, **asked)["meta_info"]["hidden_states"]
    mixed.flush()
    before = mixed.info()["counters"]["steps_mixed"]
    with running(mixed, seed=13, **asked) as beside:
        for seed in range(30, 36):
            generate(mixed, prompt(seed, 20), 3)
        long = generate(mixed, prompt(14, 2 * MIXED_TOKENS), 4, **asked)["meta_info"]["hidden_states"]
    for found, expected in ((beside[0]["meta_info"]["hidden_states"], alone), (long, long_alone)):
        assert [np.shape(each) for each in found] == [np.shape(each) for each in expected]
        for each, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, other, rtol=2e-2, atol=2e-3)
    assert mixed.info()["counters"]["steps_mixed"] == before


def test_sampling_masks_are_those_of_each_request(mixed: Server) -> None:
    """The one thing that SGLang returns for each token and mixes: the tokens that could be sampled."""
    asked = {"return_sampling_mask": True, "sampling": {"temperature": 1.0, "top_k": 3, "top_p": 1.0}}
    before = mixed.info()["counters"]["steps_mixed"]
    with running(mixed, seed=15, **asked) as beside:
        late = [generate(mixed, prompt(seed, 40), 5, **asked) for seed in range(40, 46)]
    assert mixed.info()["counters"]["steps_mixed"] > before
    for answer in (*beside, *late):
        masks = answer["meta_info"]["output_token_sampling_mask"]
        assert len(masks) == len(answer["output_ids"])
        for token, mask in zip(answer["output_ids"], masks, strict=True):
            assert token in mask and len(mask) == 3
