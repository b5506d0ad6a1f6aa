"""New tokens in the steps that verify drafts: the tokens of the stock backend without drafts, which computes them in
passes of their own. SGLang 0.5.23 alone; with 0.5.17 nothing is mixed where drafts are on."""

from __future__ import annotations

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from conftest import Chat, Reference, Server
from demo import SYSTEM_PROMPT, WORD_QUESTIONS
from test_answers import NAMES
from test_mixed_steps import leave, text_of, texts_of

pytestmark = pytest.mark.release("0.5.23+", reason="before, nothing is mixed with drafts")


def test_new_tokens_are_rows_of_verify_steps(stock_demo: Reference, mixed_drafts: Server) -> None:
    """Prompts differ in a few tokens or in many, some answers end at once, and somebody hangs up in the middle of one.
    The demo model knows its questions, so drafts are accepted."""
    system, questions = SYSTEM_PROMPT.read_text(), list(WORD_QUESTIONS)
    draw = random.Random(7)
    chats = []
    for i in range(24):
        own = " ".join(draw.choice(NAMES) for _ in range((0, 0, 3, 11, 30)[i % 5]))
        chats.append(Chat(system, own + questions[i % len(questions)], (24, 1, 40, 7)[i % 4], 0.15 * i))

    async def all_of_them() -> tuple[list[str | None], int]:
        async with mixed_drafts.client() as client:
            answers = asyncio.gather(*(text_of(client, chat) for chat in chats))
            return await asyncio.gather(answers, leave(client, Chat(system, questions[0], 60, 0.5)))

    texts, _ = asyncio.run(all_of_them())
    assert texts == texts_of(stock_demo, chats)
    counters = mixed_drafts.info()["counters"]
    assert counters["steps_mixed"] > 3 and counters["tokens_mixed"] > 3 * counters["steps_mixed"], counters
    assert counters["steps_mixed"] < counters["steps_verify"] and not counters["fallbacks"], counters
    assert counters["shadow_checks"] > 0 == counters["shadow_failures"], counters


def test_drafts_of_mixed_prompts_are_as_good(mixed_drafts: Server) -> None:
    """The drafting layer reads new tokens of a verify step in units, others in a pass of their own: as many drafts are
    accepted. Of hidden states that are zeros, 8 % fewer are."""
    draw = random.Random(7)
    texts = [" ".join(draw.choice(NAMES) for _ in range(20)) + " " + question for question in list(WORD_QUESTIONS)[:8]]

    def verified(text: str, tokens: int = 24) -> int:
        messages = [{"role": "system", "content": SYSTEM_PROMPT.read_text()}, {"role": "user", "content": text}]
        chat = {"model": "demo", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        chat |= {"return_meta_info": True}
        answer = requests.post(f"{mixed_drafts.base_url}/v1/chat/completions", json=chat, timeout=300).json()
        return answer["choices"][0]["meta_info"].get("spec_verify_ct", 0)

    requests.post(f"{mixed_drafts.base_url}/flush_cache", timeout=60)
    verified("", 1)
    before = mixed_drafts.info()["counters"]
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(verified, next(iter(WORD_QUESTIONS)), 600)
        while mixed_drafts.info()["counters"]["steps_verify"] == before["steps_verify"]:
            time.sleep(0.1)
        mixed = sum(map(verified, texts))
        assert not running.done(), "somebody ran all the time"
        requests.post(f"{mixed_drafts.base_url}/abort_request", json={"abort_all": True}, timeout=60)
    assert mixed_drafts.info()["counters"]["steps_mixed"] - before["steps_mixed"] == len(texts)
    requests.post(f"{mixed_drafts.base_url}/flush_cache", timeout=60)
    verified("", 1)
    alone = sum(map(verified, texts))
    assert abs(mixed - alone) <= 0.03 * alone, (mixed, alone)
