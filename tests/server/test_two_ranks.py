"""Two ranks with half of the heads each (tensor parallelism), or with half of the requests each (DP attention), and
with expanded prefixes of their own."""

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


def test_ranks_with_requests_of_their_own_answer_as_one(stock: Reference, dp_attention: Server) -> None:
    """SGLang deals requests out in turn. The first chat runs alone: its rank decodes while the other one has nothing.
    The last ones arrive while the others decode: one rank prefills, or both do, while one or both decode."""
    alone = Chat(SYSTEM, question(13), max_tokens=8)
    together = [Chat((SYSTEM, OTHER_SYSTEM)[i // 2 % 2], question(i), max_tokens=40) for i in range(8)]
    later = [Chat(SYSTEM, question(i), max_tokens=24, delay_s=0.5 * (i - 7)) for i in range(8, 13)]
    expected = stock.asking(alone, *together, *later)
    actual = dp_attention.ask(alone) + dp_attention.ask(*together, *later)
    assert_same(actual, expected.result())
    found = dp_attention.counters()
    assert len(found) == 2
    assert all(each["expansions"] >= 1 and each["steps_naive"] > 20 and not each["fallbacks"] for each in found), found
