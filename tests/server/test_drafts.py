"""Speculative decoding on the real server: the demo model drafts three tokens a step for itself. Answers are those of
the stock server without drafts."""

from __future__ import annotations

import pytest
from conftest import Chat, Reference, Server, assert_same, counting
from demo import SYSTEM_PROMPT, WORD_QUESTIONS

SYSTEM = SYSTEM_PROMPT.read_text()
TOKENS = 32


def chats(count: int) -> list[Chat]:
    return [Chat(SYSTEM, list(WORD_QUESTIONS)[i], TOKENS) for i in range(count)]


def test_answers_are_those_without_drafts(stock_demo: Reference, drafts: Server) -> None:
    """Drafts are accepted, or a step would yield one token of each request. Every fifth step is computed again."""
    expected = stock_demo.asking(*chats(6))
    drafts.ask(Chat(SYSTEM, "Hello", 1))
    before = drafts.info()["counters"]["steps_verify"]
    with counting(drafts) as counted:
        actual = drafts.ask(*chats(6))
    assert_same(actual, expected.result())
    found = drafts.info()["counters"]
    assert 0 < counted.steps_naive <= found["steps_verify"] - before < TOKENS - 2, found
    assert found["max_group_size"] == 6 and counted.shadow_checks > 0, found


def test_ranks_that_hold_prefixes_together(stock_demo: Reference, drafts_of_two: Server) -> None:
    """Each of two ranks of DP attention attends to half of the heads for the drafts of both."""
    expected = stock_demo.asking(*chats(6))
    drafts_of_two.ask(*[Chat(SYSTEM, "Hello", 1)] * 2)
    assert_same(drafts_of_two.ask(*chats(6)), expected.result())
    found = drafts_of_two.counters()
    assert len({each["steps_sharded"] for each in found}) == 1 < found[0]["steps_sharded"] <= found[0]["steps_naive"]
    for each in found:
        assert each["expansions"] == 1 and each["max_group_size"] == 3 and not each["fallbacks"], found
        assert each["shadow_checks"] > 0 == each["shadow_failures"], found


@pytest.mark.slow
def test_ranks_with_prefixes_of_their_own(stock_demo: Reference, drafts_apart: Server) -> None:
    expected = stock_demo.asking(*chats(8))
    drafts_apart.ask(*[Chat(SYSTEM, "Hello", 1)] * 2)
    assert_same(drafts_apart.ask(*chats(8)), expected.result())
    found = drafts_apart.counters()
    assert all(each["steps_naive"] > 2 and each["max_group_size"] == 4 and not each["fallbacks"] for each in found)
