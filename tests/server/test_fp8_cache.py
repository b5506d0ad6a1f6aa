"""The FP8 latent cache on the real server: the answers of a BF16 cache, and 1.75 times its tokens in the same memory.

The model is the demo's, which is trained: rounding decides a token only where the model itself is undecided. Both
servers size their cache by memory, take prompts in chunks of 256 tokens, and expand every shared prefix; they are asked
side by side.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import requests
from bench.server import server_info
from conftest import Chat, Server, counting, in_thread
from demo import OTHER_QUESTIONS, SYSTEM_PROMPT, WORD_QUESTIONS, lookups
from test_answers import LONG, question
from test_answers import SYSTEM as SYSTEM_OF_STATIONS
from test_on_host import fill, tokens

TIE = 0.05
"""Log-probabilities closer than this are a tie, which rounding may decide."""

SYSTEM = SYSTEM_PROMPT.read_text()


@dataclass
class Step:
    """One token of an answer, and how far the next best one was behind."""

    token: str
    logprob: float
    lead: float


def ask(server: Server, *chats: Chat, **more: Any) -> list[list[Step]]:
    """The answers, token by token; `more` is for SGLang."""

    async def one(client: Any, chat: Chat) -> list[Step]:
        messages = [{"role": "user", "content": chat.user}]
        if chat.system:
            messages.insert(0, {"role": "system", "content": chat.system})
        limits = {"temperature": 0, "max_tokens": chat.max_tokens, "logprobs": True, "top_logprobs": 5}
        answer = await client.chat.completions.create(model="default", messages=messages, **limits, extra_body=more)
        steps = []
        for token in answer.choices[0].logprobs.content:
            # Fewer than asked for where tokens are parts of characters, and so have the same text.
            best, *others = sorted((top.logprob for top in token.top_logprobs), reverse=True)
            steps.append(Step(token.token, token.logprob, best - max(others, default=-math.inf)))
        return steps

    async def everyone() -> list[list[Step]]:
        async with server.client() as client:
            return list(await asyncio.gather(*(one(client, chat) for chat in chats)))

    return asyncio.run(everyone())


def compare(actual: list[list[Step]], expected: list[list[Step]]) -> list[float]:
    """Differences of the log-probabilities of tokens before a tie was decided otherwise; other texts are an error."""
    apart = []
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for step, other in zip(ours, theirs, strict=True):
            if step.token != other.token:
                assert min(step.lead, other.lead) < TIE, f"request {index}: {step} instead of {other}"
                break
            apart.append(abs(step.logprob - other.logprob))
    return apart


def test_answers_are_those_of_a_bf16_cache(bf16_cache: Server, fp8_cache: Server) -> None:
    """The demo's chats at once, most of them with its system prompt, and one of them again, alone."""
    looked_up = lookups(SYSTEM)
    # Those that begin with the same words come last: two that were alone for a moment would share these, too.
    questions = [*WORD_QUESTIONS, *(chat.question for chat in looked_up)]
    chats = [Chat(SYSTEM, question, 28) for question in questions]
    chats += [Chat("", question, 28) for question in OTHER_QUESTIONS]

    def answers(server: Server) -> list[list[Step]]:
        server.flush()
        ask(server, Chat(SYSTEM, "Hello?", 1))
        with counting(server) as counted:
            together = ask(server, *chats)
            alone = ask(server, chats[0])  # plain absorb over cached rows
        assert counted.steps_naive >= 5 and counted.expansions == 1
        return together + alone

    expecting = in_thread(answers, bf16_cache)
    actual, expected = answers(fp8_cache), expecting.result()
    for chat, steps in zip(looked_up, actual[len(WORD_QUESTIONS) :], strict=False):
        assert chat.expected in "".join(step.token for step in steps)
    apart = compare(actual, expected)
    whole = sum([step.token for step in a] == [step.token for step in b] for a, b in zip(actual, expected, strict=True))
    tokens = sum(len(steps) for steps in expected)
    print(f"{whole} of {len(actual)} texts are equal; {len(apart)} of {tokens} tokens are before a tie;")
    print(f"their log-probabilities differ by {sum(apart) / len(apart):.4f} on average and {max(apart):.4f} at most")
    assert len(apart) > 0.7 * tokens, "ties hide what should be compared"
    assert 1e-5 < sum(apart) / len(apart) < 0.02, "close, and not equal: the cache is in FP8"


def test_later_requests_use_the_expanded_prefix_in_their_prefill(bf16_cache: Server, fp8_cache: Server) -> None:
    # No two begin alike: what is cached of one in a pass and not expanded, a CPU would have to expand.
    asked = [f"{number}. {question}" for number, question in enumerate((*WORD_QUESTIONS[-4:], *WORD_QUESTIONS[:3]), 1)]
    chats, late = [Chat(SYSTEM, question, 40) for question in asked[:4]], [Chat(SYSTEM, each, 24) for each in asked[4:]]
    expecting = in_thread(bf16_cache.ask, *chats, *late)
    fp8_cache.flush()
    fp8_cache.ask(Chat(SYSTEM, "Hello?", 1))
    with counting(fp8_cache) as counted:
        actual = fp8_cache.ask(*chats, *(replace(chat, delay_s=0.4) for chat in late))
    expected = expecting.result()
    assert counted.prefills_naive > 0
    same = [ours.tokens == theirs.tokens for ours, theirs in zip(actual, expected, strict=True)]
    print(f"{sum(same)} of {len(same)} texts are equal")
    assert sum(same) >= len(same) / 2


def test_the_prefix_follows_the_cache(bf16_cache: Server, fp8_cache: Server) -> None:
    assert "tokens in float32)" in bf16_cache.log.read_text()
    assert "tokens in float8_e4m3fn)" in fp8_cache.log.read_text()


def test_the_same_memory_holds_more_tokens(bf16_cache: Server, fp8_cache: Server) -> None:
    """The machine's free memory is another for each server; what they had is four times what they took for prefixes."""
    per_byte = []
    for server in (bf16_cache, fp8_cache):
        tokens = requests.get(f"{server.base_url}/server_info", timeout=30).json()["max_total_num_tokens"]
        memory = 4 * server_info(server.base_url)["hybrid_mla"]["budget_bytes"]
        print(f"max_total_num_tokens {tokens} in {memory / (1 << 30):.3f} GiB (a quarter of it for prefixes)")
        per_byte.append(tokens / memory)
    assert per_byte[1] / per_byte[0] == pytest.approx(1.75, rel=0.02)


@pytest.mark.slow  # after changes of the host cache or of FP8 rows
def test_a_prefix_in_fp8_that_was_on_the_host(fp8_cache: Server, on_host_fp8: Server) -> None:
    """The answers of an FP8 cache that never left the device, with which it shares its rounding but for ties."""
    chats = [Chat(SYSTEM_OF_STATIONS, question(i), LONG) for i in range(3)]

    def answers(server: Server) -> list[list[Step]]:
        """Of requests that run together for long; their beginnings are compared."""
        return [steps[:16] for steps in ask(server, *chats, ignore_eos=True)]

    for server in (fp8_cache, on_host_fp8):
        server.ask(Chat(SYSTEM_OF_STATIONS, question(13), 1))
    expected = answers(fp8_cache)
    first = answers(on_host_fp8)
    fill(on_host_fp8)
    before = tokens(on_host_fp8, "load_back")
    with counting(on_host_fp8) as counted:
        second = answers(on_host_fp8)
    assert tokens(on_host_fp8, "load_back") - before > 256, "the prefix was on the host"
    assert counted.steps_naive > 8
    for actual in (first, second):
        apart = compare(actual, expected)
        print(f"{len(apart)} tokens differ by {sum(apart) / len(apart):.5f} on average and {max(apart):.5f} at most")
        assert len(apart) > 0.7 * sum(len(steps) for steps in expected) and sum(apart) / len(apart) < 0.01
