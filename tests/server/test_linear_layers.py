"""Models with linear attention in some layers and MLA in the others, on servers with more than their model."""

from __future__ import annotations

import pytest
from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import LONG, SYSTEM, question
from test_on_host import fill, tokens

from sglang_mla_ext.adapter.compat import contract

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(contract.line() == "0.5.17", reason="its prefixes are in a tree of another kind"),
]


def test_an_fp8_cache(stock_kimi_linear: Reference, linear_fp8: Server) -> None:
    """Log-probabilities of the tokens before a text is another one are near those of fp32, which random weights leave
    undecided more often than trained ones. Rows that were taken for others would make the first token another one."""
    chats = [Chat(SYSTEM, question(i), 16) for i in range(6)]
    expected = stock_kimi_linear.asking(*chats)
    linear_fp8.ask(Chat(SYSTEM, question(13), 1))
    with counting(linear_fp8) as counted:
        actual = linear_fp8.ask(*chats)
    assert counted.steps_naive > 8 and counted.expansions == 1
    apart = []
    for ours, theirs in zip(actual, expected.result(), strict=True):
        same = next((i for i in range(16) if ours.tokens[i] != theirs.tokens[i]), 16)
        apart += [abs(a - b) for a, b in zip(ours.logprobs[:same], theirs.logprobs[:same], strict=True)]
    print(f"{len(apart)} of 96 tokens, apart by {sum(apart) / len(apart):.4f}, at most {max(apart):.4f}")
    assert len(apart) > 24 and 1e-5 < sum(apart) / len(apart) < 0.1, "close, and not equal: the cache is in FP8"
    (counters,) = linear_fp8.counters()
    assert counters["shadow_checks"] and not counters["shadow_failures"]


def test_a_prefix_that_was_on_the_host(stock_kimi_linear: Reference, linear_on_host: Server) -> None:
    """With the states of linear layers at its end."""
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(3)]
    expected = stock_kimi_linear.asking(*chats)
    linear_on_host.ask(Chat(SYSTEM, question(13), 1))
    assert_same(linear_on_host.ask(*chats), expected.result())
    fill(linear_on_host)
    before = tokens(linear_on_host, "load_back")
    with counting(linear_on_host) as counted:
        assert_same(linear_on_host.ask(*chats), expected.result())
    assert tokens(linear_on_host, "load_back") - before > 256, "the prefix was on the host"
    assert counted.steps_naive > 8
