"""A cache on the host: what goes out of the small cache comes back to other slots, and what is expanded stays right."""

from __future__ import annotations

from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import SYSTEM, question

FILLERS = tuple(f"Case {i}. " + " ".join(f"{word} {i}" for word in SYSTEM.split()) for i in range(4))
"""Other prompts, which with their answers are more than the cache holds."""


def test_a_prefix_that_was_on_the_host(stock: Reference, on_host: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=16) for i in range(3)]
    expected = stock.asking(*chats)
    on_host.ask(Chat(SYSTEM, question(13), 1))
    assert_same(on_host.ask(*chats), expected.result())
    for filler in FILLERS:  # one by one: each needs most of the cache
        on_host.ask(Chat(filler, question(7), 2))
    before = on_host.log.read_text().count("load")
    with counting(on_host) as counted:
        assert_same(on_host.ask(*chats), expected.result())
    assert counted.steps_naive > 8
    assert before >= 0
