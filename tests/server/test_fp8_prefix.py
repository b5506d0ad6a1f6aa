"""Expanded prefixes in FP8 on the real server: close to the stock server, and not equal, so that they are in use."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Chat, Server, counting
from test_answers import SYSTEM, question


@pytest.fixture(scope="module")
def fp8(start: Any) -> Server:
    options = ("--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "32")
    return start("--attention-backend", "hybrid_mla", "--hybrid-mla-prefix-dtype", "fp8_e4m3", *options)


def test_answers_are_close(stock: Server, fp8: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=24) for i in range(6)]
    fp8.flush()
    fp8.ask(Chat(SYSTEM, question(13), 1))
    with counting(fp8) as counted:
        actual = fp8.ask(*chats)
    expected = stock.ask(*chats)
    assert counted.steps_naive >= 20 and counted.prefills_naive > 0
    apart = []
    for ours, theirs in zip(actual, expected, strict=True):
        for token, other, value, other_value in zip(
            ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=True
        ):
            if token != other:
                break
            apart.append(abs(value - other_value))
    print(f"{len(apart)} tokens compared, mean {sum(apart) / len(apart):.4f}, max {max(apart):.4f}")
    assert len(apart) >= 2 * len(chats)
    assert 1e-4 < sum(apart) / len(apart) < 0.1
