"""Other models than the demo model: random weights of their architecture, both servers on each."""

from __future__ import annotations

import pytest
from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import SYSTEM, question

from sglang_mla_ext.adapter.compat import contract


def check(stock: Reference, hybrid: Server, requests: int = 6, max_tokens: int = 24) -> None:
    """Requests that share a system prompt get the stock server's answers from what is expanded."""
    chats = [Chat(SYSTEM, question(i), max_tokens) for i in range(requests)]
    expected = stock.asking(*chats)
    hybrid.ask(Chat(SYSTEM, question(13), 1))
    with counting(hybrid) as counted:
        actual = hybrid.ask(*chats)
    assert_same(actual, expected.result())
    assert counted.steps_naive >= max_tokens - 4 and counted.expansions == 1


def check_prefill(stock: Reference, hybrid: Server) -> None:
    """Requests that come later get the stock server's answers, prefilled over what `check` has left expanded."""
    # Neither begins as another question does: what is cached of one and not expanded, a CPU would have to expand.
    late = [Chat(SYSTEM, question(i), 4) for i in (7, 9)]
    with counting(hybrid) as counted:
        actual = hybrid.ask(*late)
    assert_same(actual, stock.ask(*late))
    assert counted.prefills_naive and counted.steps_naive and not counted.expansions


def test_queries_of_one_projection(stock_v2_lite: Reference, hybrid_v2_lite: Server) -> None:
    """DeepSeek-V2-Lite's: no q_lora_rank."""
    check(stock_v2_lite, hybrid_v2_lite)


def test_layers_of_experts(stock_experts: Reference, hybrid_experts: Server) -> None:
    """DeepSeek-V3's and Kimi-K2's."""
    check(stock_experts, hybrid_experts)


@pytest.mark.slow
def test_kimi_k2(stock_kimi_k2: Reference, hybrid_kimi_k2: Server) -> None:
    """Its own configuration: 64 heads, 384 experts in one group, another YaRN than DeepSeek's."""
    check(stock_kimi_k2, hybrid_kimi_k2, requests=3, max_tokens=12)  # many heads are slow on the stock server


@pytest.mark.slow
def test_longcat_flash(stock_longcat_flash: Reference, hybrid_longcat_flash: Server) -> None:
    """Two attentions a layer, whose expansions lie beside each other; no YaRN."""
    check(stock_longcat_flash, hybrid_longcat_flash)


@pytest.mark.slow
@pytest.mark.skipif(contract.line() == "0.5.17", reason="its prefixes are in a tree of another kind")
def test_kimi_linear(stock_kimi_linear: Reference, hybrid_kimi_linear: Server) -> None:
    """Layers with linear attention, whose states SGLang keeps for its tree, among those with MLA."""
    check(stock_kimi_linear, hybrid_kimi_linear)
    (counters,) = hybrid_kimi_linear.counters()
    assert counters["shadow_checks"] and not counters["shadow_failures"]


@pytest.mark.slow
@pytest.mark.skipif(contract.line() == "0.5.17", reason="its prefixes are in a tree of another kind")
def test_kimi_k3(stock_kimi_k3: Reference, hybrid_kimi_k3: Server) -> None:
    """A gate on what MLA gives to its output projection."""
    check(stock_kimi_k3, hybrid_kimi_k3, requests=4, max_tokens=12)  # its 896 experts are slow here


@pytest.mark.slow
def test_mistral_large_3(stock_mistral_large_3: Reference, hybrid_mistral_large_3: Server) -> None:
    """Queries that are scaled by their positions. On a CPU SGLang absorbs them in prefill, too, and scales all."""
    check(stock_mistral_large_3, hybrid_mistral_large_3)
    check_prefill(stock_mistral_large_3, hybrid_mistral_large_3)


@pytest.mark.slow
def test_glm_4_7_flash(stock_glm_4_7_flash: Reference, hybrid_glm_4_7_flash: Server) -> None:
    """20 heads, of other sizes than DeepSeek's: 192 content and 256 value dimensions; no YaRN."""
    check(stock_glm_4_7_flash, hybrid_glm_4_7_flash)
    check_prefill(stock_glm_4_7_flash, hybrid_glm_4_7_flash)
