"""Tensor parallelism: two ranks, each with half of the heads and its own expanded prefixes."""

from __future__ import annotations

from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import OTHER_SYSTEM, SYSTEM, question


def test_two_ranks_answer_as_one(stock: Reference, two_ranks: Server) -> None:
    chats = [Chat((SYSTEM, OTHER_SYSTEM)[i % 2], question(i), max_tokens=24) for i in range(8)]
    expected = stock.asking(*chats)
    two_ranks.ask(Chat(SYSTEM, question(13), 1), Chat(OTHER_SYSTEM, question(13), 1))
    with counting(two_ranks) as counted:
        actual = two_ranks.ask(*chats)
    assert_same(actual, expected.result())
    assert counted.expansions == 2 and counted.steps_naive > 10
    # /server_info is the first rank's; that the other one expands as well, its log says.
    expanded = [line for line in two_ranks.log.read_text().splitlines() if "expanded a shared prefix" in line]
    assert all(any(f"TP{rank}]" in line for line in expanded) for rank in range(2)), expanded
