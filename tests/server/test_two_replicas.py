"""Data parallelism without DP attention: two schedulers behind one server, each with its own tree and expansions."""

from __future__ import annotations

from conftest import Chat, Reference, Server, assert_same
from test_answers import OTHER_SYSTEM, SYSTEM, question


def test_two_replicas_answer_as_one_and_each_keeps_a_prompt(stock: Reference, two_replicas: Server) -> None:
    """Dealt out in turn, each would have half of the chats on each prompt, and expand both."""
    chats = [Chat((SYSTEM, OTHER_SYSTEM)[i % 2], question(i), max_tokens=24) for i in range(12)]
    expected = stock.asking(*chats)
    two_replicas.ask(*chats[:2])  # at the same time, so that each replica gets one
    assert_same(two_replicas.ask(*chats), expected.result())
    found = two_replicas.counters()
    assert len(found) == 2
    assert all(each["expansions"] == 1 and each["steps_naive"] > 10 and not each["fallbacks"] for each in found), found
