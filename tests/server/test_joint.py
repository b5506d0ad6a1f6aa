"""Running requests that decode in prefill passes, with and without drafts: the tokens of the stock backend, which
computes the two apart. SGLang 0.5.23 alone: 0.5.17 has no prefill graphs with MLA."""

from __future__ import annotations

import asyncio
import random

import pytest
from conftest import Chat, Reference, Server
from demo import SYSTEM_PROMPT, WORD_QUESTIONS
from test_answers import NAMES, SYSTEM, question
from test_riding import leave, text_of, texts_of

from sglang_mla_ext.adapter.compat import contract

pytestmark = pytest.mark.skipif(contract.line() == "0.5.17", reason="no prefill graphs with MLA")


def test_with_drafts(stock_demo: Reference, joint_drafts: Server) -> None:
    """Some answers end at once, and somebody hangs up in the middle of one."""
    system, questions = SYSTEM_PROMPT.read_text(), list(WORD_QUESTIONS)  # what the demo model was trained on
    chats = [Chat(system, questions[i % len(questions)], (24, 1, 40, 7)[i % 4], 0.15 * i) for i in range(24)]

    async def all_of_them() -> tuple[list[str | None], int]:
        async with joint_drafts.client() as client:
            answers = asyncio.gather(*(text_of(client, chat) for chat in chats))
            return await asyncio.gather(answers, leave(client, Chat(system, questions[0], 60, 0.5)))

    texts, _ = asyncio.run(all_of_them())
    assert texts == texts_of(stock_demo, chats)
    counters = joint_drafts.info()["counters"]
    assert counters["prefills_joint"] > 3 and counters["tokens_joint"] > counters["prefills_joint"], counters
    assert counters["steps_verify"] > 3 and not counters["fallbacks"], counters


def test_without_drafts(stock: Reference, joint: Server) -> None:
    """What waits has a pass of its own where it would take more than six decode steps of 64 new tokens."""
    draw = random.Random(11)
    own = [" ".join(draw.choice(NAMES) for _ in range(100)) for _ in range(24)]
    chats = [Chat(SYSTEM, words + question(i % len(NAMES)), (50, 4)[i % 2], i // 6) for i, words in enumerate(own)]
    assert texts_of(joint, chats) == texts_of(stock, chats)
    counters = joint.info()["counters"]
    assert counters["prefills_joint"] > 1 and not counters["fallbacks"], counters
