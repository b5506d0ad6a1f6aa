"""The same answers where everything is short: chunked prefill, slow expansion, hardly any memory."""

from __future__ import annotations

import re
import time

from conftest import Chat, Reference, Server, assert_same
from test_answers import OTHER_SYSTEM, SYSTEM, question, watching
from test_mixed_steps import generate, prompt

CHUNK = 256
"""New tokens of a pass."""


def test_two_prefixes_and_room_for_one_and_a_half(stock: Reference, cramped: Server) -> None:
    assert "(768 tokens in float32)" in cramped.info()["description"], "three chunks"
    chats = [Chat((SYSTEM, OTHER_SYSTEM)[i % 2], question(i), max_tokens=48) for i in range(6)]
    expected = stock.asking(*chats)
    cramped.flush()
    with watching(cramped) as seen:
        actual = cramped.ask(*chats)
    assert_same(actual, expected.result())
    assert cramped.info()["counters"]["steps_naive"] > 0
    prefixes = {group["prefix_len"] for groups in seen for group in groups}
    assert any(prefix == 256 for prefix in prefixes), prefixes  # one chunk: all that was left
    assert any(prefix > 256 for prefix in prefixes), prefixes


def test_requests_are_retracted(stock: Reference, cramped: Server) -> None:
    """2,048 tokens of cache for eight requests that need more; SGLang takes some back and runs them later."""
    chats = [Chat(SYSTEM, question(i), max_tokens=200) for i in range(8)]
    expected = stock.asking(*chats)
    actual = cramped.ask(*chats)
    assert re.search(r"#retracted_reqs: [1-9]", cramped.log.read_text())
    assert_same(actual, expected.result())


def test_prefix_is_expanded_over_several_steps(cramped: Server) -> None:
    """At most a chunk a step: the group's prefill expands the first one, and its first decode step the other, which it
    uses already."""
    cramped.flush()
    before = cramped.info()["counters"]
    cramped.ask(Chat(SYSTEM, question(13), 1))
    cramped.ask(*(Chat(SYSTEM, question(i), max_tokens=20) for i in range(3)))
    after = cramped.info()["counters"]
    assert after["expansions"] == before["expansions"] + 1
    assert after["steps_naive"] > before["steps_naive"]


def test_a_pass_is_charged_for_new_tokens_and_not_for_pages(cramped: Server) -> None:
    """SGLang charges 64 tokens for each prompt of 20, so that four of them would fill a pass."""
    cramped.flush()
    since = cramped.log.stat().st_size
    answers = generate(cramped, [prompt(seed, 20) for seed in range(12)], 2)
    # This server takes requests back now and then, which are prefilled again.
    expected = 12 + sum(answer["meta_info"]["num_retractions"] for answer in answers)
    found: list[tuple[int, int]] = []
    deadline = time.monotonic() + 10
    while sum(seqs for seqs, _ in found) < expected and time.monotonic() < deadline:
        time.sleep(0.1)
        log = cramped.log.read_bytes()[since:].decode(errors="replace")
        found = [(int(seqs), int(new)) for seqs, new in re.findall(r"#new-seq: (\d+), #new-token: (\d+)", log)]
    assert sum(seqs for seqs, _ in found) == expected and max(found)[0] > 4, found
    assert max(new for _, new in found) <= CHUNK, found
