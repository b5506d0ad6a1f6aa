"""Prefill and decode on servers of their own. NIXL moves the cache from one to the other, or Mooncake where NIXL is not
installed: the real libraries, over shared memory or TCP.

A test sends each chat to both servers, as a router does. Answers come from the decode server.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import random
from string import ascii_letters

import openai
import pytest
from bench.server import free_port
from conftest import (
    FILES,
    IN_FILES,
    LINEAR,
    NAIVE,
    PREFIXES,
    SIZED,
    STOCK,
    Answer,
    Chat,
    Reference,
    Server,
    _server,
    assert_same,
    counting,
    demo,
    kimi_linear,
)
from test_answers import OTHER_SYSTEM, SYSTEM, question
from test_on_host import tokens, wait_until_stored

from sglang_mla_ext.adapter.compat import contract

TRANSFER = next((name for name in ("nixl", "mooncake") if importlib.util.find_spec(name)), None)
if TRANSFER is None:
    pytest.skip("neither NIXL nor Mooncake is installed", allow_module_level=True)

PORTS = {cache: free_port() for cache in ("bf16", "fp8", "files", "linear")}
"""Where decode servers find the prefill server that has such a cache."""


def role(mode: str, cache: str) -> tuple[str, ...]:
    tree = ("--disaggregation-decode-enable-radix-cache",) if mode == "decode" else ()
    transfer = ("--disaggregation-transfer-backend", TRANSFER, "--disaggregation-bootstrap-port", str(PORTS[cache]))
    return "--disaggregation-mode", mode, *transfer, *tree


# By itself NIXL takes 8 threads, which wait for work by looking for it; and Mooncake wants InfiniBand.
ENVIRONMENT = {"SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": '{"num_threads": "0"}', "MC_FORCE_TCP": "1"}
OURS = (*NAIVE, *SIZED, *PREFIXES)
FP8 = ("--kv-cache-dtype", "fp8_e4m3")
pd_prefill = _server("pd_prefill", *OURS, *role("prefill", "bf16"), environment=ENVIRONMENT)
pd_decode = _server("pd_decode", *OURS, *role("decode", "bf16"), environment=ENVIRONMENT)
pd_stock = _server("pd_stock", *STOCK, *role("decode", "bf16"), environment=ENVIRONMENT)
pd_files_prefill = _server("pd_files_prefill", *IN_FILES, *role("prefill", "files"), environment=ENVIRONMENT | FILES)
pd_fp8_prefill = _server("pd_fp8_prefill", *OURS, *FP8, *role("prefill", "fp8"), environment=ENVIRONMENT, model=demo)
pd_linear = dict(environment=ENVIRONMENT, model=kimi_linear)
pd_linear_prefill = _server("pd_linear_prefill", *OURS, *LINEAR, *role("prefill", "linear"), **pd_linear)
pd_linear_stock = _server("pd_linear_stock", *STOCK, *LINEAR, *role("decode", "linear"), **pd_linear)
pd_fp8_decode = _server("pd_fp8_decode", *OURS, *FP8, *role("decode", "fp8"), environment=ENVIRONMENT, model=demo)


def ask(prefill: Server, decode: Server, port: int, *chats: Chat, together: bool = False) -> list[Answer]:
    """Send chats at the same time, each to both servers, and wait for all answers.

    Args:
        together: the prefill server begins none before it has taken all.
    """

    async def one(clients: list[openai.AsyncOpenAI], chat: Chat) -> Answer:
        room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": random.getrandbits(62)}
        return (await asyncio.gather(*(Server.ask_one(client, chat, **room) for client in clients)))[1]

    async def all_of_them() -> list[Answer]:
        async with prefill.client() as first, decode.client() as second:
            with prefill.paused() if together else contextlib.nullcontext():
                answers = asyncio.gather(*(one([first, second], chat) for chat in chats))
                if together:
                    await prefill.has_taken(len(chats))
            return list(await answers)

    return asyncio.run(all_of_them())


def chats_of(attempt: int) -> list[Chat]:
    """Six on two system prompts. Their questions begin with letters of their own, so that any two requests of one
    system prompt share just that, and no attempt's are cached by an earlier one: that would leave nothing to prefill.
    """
    letters = ascii_letters[6 * attempt : 6 * attempt + 6]
    return [Chat((SYSTEM, OTHER_SYSTEM)[i % 2], f"{letter}: {question(i)}", 16) for i, letter in enumerate(letters)]


CHATS = chats_of(0)
FIRST = [Chat(SYSTEM, f"1: {question(13)}", 1), Chat(OTHER_SYSTEM, f"1: {question(13)}", 1)]


def ask_until_prefilled(prefill: Server, decode: Server, port: int) -> tuple[list[Chat], list[Answer]]:
    """Ask until the prefill server has computed something over an expanded prefix: it expands one when several requests
    hold it at once, and holds each for a moment only, so it begins them together. Returns all chats and their answers.
    """
    chats, answers = [], []
    before = prefill.info()["counters"]["prefills_naive"]
    for attempt in range(8):
        chats += (asked := chats_of(attempt))
        answers += ask(prefill, decode, port, *asked, together=True)
        if prefill.info()["counters"]["prefills_naive"] > before:
            return chats, answers
    raise AssertionError("no prefill over an expanded prefix")


def test_both_servers_share_prefixes(stock: Reference, pd_prefill: Server, pd_decode: Server) -> None:
    ask(pd_prefill, pd_decode, PORTS["bf16"], *FIRST)
    with counting(pd_prefill) as prefilled, counting(pd_decode) as decoded:
        chats, actual = ask_until_prefilled(pd_prefill, pd_decode, PORTS["bf16"])
    assert_same(actual, stock.ask(*chats))
    assert decoded.steps_naive > 10 and decoded.expansions == 2
    assert prefilled.prefill_tokens_saved > 200 and prefilled.steps_naive == 0


@pytest.mark.slow  # after changes of the pool or its layout
def test_a_stock_decode_server_takes_a_bf16_cache(stock: Reference, pd_prefill: Server, pd_stock: Server) -> None:
    expected = stock.asking(*CHATS)
    assert_same(ask(pd_prefill, pd_stock, PORTS["bf16"], *CHATS), expected.result())


@pytest.mark.slow
@pytest.mark.usefixtures("no_files")
def test_a_prefill_server_with_a_cache_on_the_host_and_in_files(
    stock: Reference, pd_files_prefill: Server, pd_decode: Server
) -> None:
    """A flush of the prefill server leaves nothing but files."""
    expected = stock.asking(*CHATS)
    ask(pd_files_prefill, pd_decode, PORTS["files"], *FIRST)
    for _ in range(2):
        with counting(pd_decode) as decoded:
            assert_same(ask(pd_files_prefill, pd_decode, PORTS["files"], *CHATS), expected.result())
        assert decoded.steps_naive > 8
        wait_until_stored(pd_files_prefill)
        pd_files_prefill.flush()
    assert tokens(pd_files_prefill, "prefetched") > 256


@pytest.mark.slow  # after changes of the pool or its layout
def test_an_fp8_cache(stock_demo: Reference, pd_fp8_prefill: Server, pd_fp8_decode: Server) -> None:
    """Its rows are ours on both servers. Log-probabilities of the tokens before a text is another one are near those of
    fp32; rows that were taken for others would have them far off."""
    ask(pd_fp8_prefill, pd_fp8_decode, PORTS["fp8"], *FIRST)
    with counting(pd_fp8_decode) as decoded:
        chats, actual = ask_until_prefilled(pd_fp8_prefill, pd_fp8_decode, PORTS["fp8"])
    assert decoded.steps_naive > 10
    apart = []
    for ours, theirs in zip(actual, stock_demo.ask(*chats), strict=True):
        steps = zip(ours.tokens, theirs.tokens, ours.logprobs, theirs.logprobs, strict=True)
        for token, other, logprob, expected_logprob in steps:
            if token != other:
                assert abs(logprob - expected_logprob) < 0.2, "another text where neither is as likely as the other"
                break
            apart.append(abs(logprob - expected_logprob))
    print(f"{len(apart)} of {16 * len(chats)} tokens, apart by {sum(apart) / len(apart):.4f}, at most {max(apart):.4f}")
    assert len(apart) > 8 * len(chats) and sum(apart) / len(apart) < 0.03


@pytest.mark.slow  # after changes of the pool or its layout
@pytest.mark.skipif(contract.line() == "0.5.17", reason="its prefixes are in a tree of another kind")
def test_layers_with_linear_attention(
    stock_kimi_linear: Reference, pd_linear_prefill: Server, pd_linear_stock: Server
) -> None:
    """Their states are sent beside the rows of those with MLA. The decode server is SGLang's: ours has nothing to share
    (models.beside_linear_layers)."""
    ask(pd_linear_prefill, pd_linear_stock, PORTS["linear"], *FIRST)
    with counting(pd_linear_prefill) as prefilled:
        chats, actual = ask_until_prefilled(pd_linear_prefill, pd_linear_stock, PORTS["linear"])
    assert_same(actual, stock_kimi_linear.ask(*chats))
    assert prefilled.prefill_tokens_saved > 200 and prefilled.steps_naive == 0
