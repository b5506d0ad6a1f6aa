"""A cache on the host: what goes out of the small cache comes back to other slots, and what is expanded stays right."""

from __future__ import annotations

import pytest
import requests
from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import SYSTEM, question

from sglang_mla_ext.adapter import contract

pytestmark = pytest.mark.skipif(contract.line() != "0.5.17", reason="refused with other releases of SGLang so far")
LOADED = "sglang:load_back_tokens_total{"
FILLERS = tuple(f"Case {i}. " + " ".join(f"{word} {i}" for word in SYSTEM.split()) for i in range(4))
"""Other prompts, which with their answers are more than the cache holds."""


def loaded_back(server: Server) -> float:
    """Tokens that came back from the host."""
    lines = requests.get(f"{server.base_url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(LOADED))


def test_a_prefix_that_was_on_the_host(stock: Reference, on_host: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=16) for i in range(3)]
    expected = stock.asking(*chats)
    on_host.ask(Chat(SYSTEM, question(13), 1))
    assert_same(on_host.ask(*chats), expected.result())
    for filler in FILLERS:  # one by one: each needs most of the cache
        on_host.ask(Chat(filler, question(7), 2))
    before = loaded_back(on_host)
    with counting(on_host) as counted:
        assert_same(on_host.ask(*chats), expected.result())
    assert loaded_back(on_host) - before > 256, "the prefix was on the host"
    assert counted.steps_naive > 8
