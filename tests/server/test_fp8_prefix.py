"""Expanded prefixes in FP8 on the real server: close to the stock server, and not equal, so that they are in use."""

from __future__ import annotations

from conftest import Chat, Reference, Server, counting
from test_answers import SYSTEM, question


def test_answers_are_close(stock: Reference, fp8_prefix: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=24) for i in (0, 1, 2, 3, 4, 6)]  # no two begin alike
    fp8_prefix.flush()
    fp8_prefix.ask(Chat(SYSTEM, question(13), 1))
    with counting(fp8_prefix) as counted:
        actual = fp8_prefix.ask(*chats)
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
