"""Two ranks with half of the heads each (tensor parallelism, on two nodes), or with half of the requests each (DP
attention), and with expanded prefixes of their own."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench.generate import post, session
from bench.server import ON_GPU, free_port, server_command
from conftest import (
    FAILING_FOLDER,
    PREFIXES,
    SIZED,
    Answer,
    Chat,
    Fail,
    Reference,
    Server,
    assert_same,
    counting,
    in_thread,
)
from server_pool import ServerPool, small
from test_answers import LONG, OTHER_SYSTEM, SYSTEM, question
from test_mixed_steps import chats_over_time, generate, prompt, texts_of

from sglang_mla_ext.adapter.compat import installed


def test_two_ranks_answer_as_one(stock: Reference, two_ranks: Server) -> None:
    chats = [Chat((SYSTEM, OTHER_SYSTEM)[i % 2], question(i), max_tokens=24) for i in range(8)]
    expected = stock.asking(*chats)
    two_ranks.ask(Chat(SYSTEM, question(13), 1), Chat(OTHER_SYSTEM, question(13), 1))
    with counting(two_ranks) as counted:
        actual = two_ranks.ask(*chats)
    assert_same(actual, expected.result())
    assert counted.expansions == 2 and counted.steps_naive > 10
    # /server_info is the first rank's; that the other one expands as well, its log says.
    logs = two_ranks.log, two_ranks.log.with_name("two_ranks-1.log")
    for rank, log in enumerate(logs):
        lines = [line for line in log.read_text().splitlines() if "expanded a shared prefix" in line]
        assert lines and all(f"TP{rank}]" in line for line in lines), lines


def ask_one_rank(stock: Reference, server: Server) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All requests go to the second rank: the first alone, which has nothing to share, then four that share its prompt.
    The counters before and after."""
    chats = [Chat(SYSTEM, question(13), max_tokens=8), *(Chat(SYSTEM, question(i), LONG) for i in range(4))]
    expected, before = stock.asking(*chats), server.counters()

    async def all_of_them() -> list[Answer]:
        async with server.client() as client:
            first, *others = (server.ask_one(client, chat, routed_dp_rank=1) for chat in chats)
            return [await first, *await asyncio.gather(*others)]

    assert_same(asyncio.run(all_of_them()), expected.result())
    after = server.counters()
    assert not any(each["fallbacks"] for each in after), after
    absorb = gained(before, after, "steps_absorb")
    assert absorb[0] <= 2 < absorb[1], "none but the end of SGLang's warm-up on the first rank"
    return before, after


def gained(before: list[dict[str, Any]], after: list[dict[str, Any]], name: str) -> list[int]:
    """Of a counter, the smallest first: SGLang does not list ranks in order."""
    found = (sorted(each[name] for each in counters) for counters in (before, after))
    return [now - then for then, now in zip(*found, strict=True)]


def test_first_requests_on_one_rank_that_shards(stock: Reference, dp_attention: Server) -> None:
    """Prefixes that ranks hold together are shared by steps of all ranks only."""
    before, after = ask_one_rank(stock, dp_attention)
    alone = [max(each["not_sharded"].get("rank_without_rows", 0) for each in found) for found in (before, after)]
    assert alone[1] - alone[0] > 10 and not any(each["steps_sharded"] for each in after), after


@pytest.mark.slow
def test_first_requests_on_one_rank_that_shares(stock: Reference, dp_attention_apart: Server) -> None:
    naive = gained(*ask_one_rank(stock, dp_attention_apart), "steps_naive")
    assert naive[0] == 0 and naive[1] > 10, naive


def check_dp_attention(stock: Reference, server: Server, ranks: int = 2) -> list[dict[str, Any]]:
    """SGLang deals requests out in turn. The first chat runs alone: its rank decodes while the other one has nothing.
    The last ones arrive while the others decode: one rank prefills, or both do, while one or both decode."""
    alone = Chat(SYSTEM, question(13), max_tokens=8)
    together = [Chat((SYSTEM, OTHER_SYSTEM)[i // 2 % 2], question(i), max_tokens=40) for i in range(8)]
    later = [Chat(SYSTEM, question(i), max_tokens=24, delay_s=0.5 * (i - 7)) for i in range(8, 13)]
    expected = stock.asking(alone, *together, *later)
    actual = server.ask(alone) + server.ask(*together, *later)
    assert_same(actual, expected.result())
    found = server.counters()
    assert len(found) == ranks
    assert all(each["expansions"] >= 1 and each["steps_naive"] > 10 and not each["fallbacks"] for each in found), found
    return found


def check_sharded(found: list[dict[str, Any]]) -> None:
    """Prefixes are sharded: all steps that shared anything the ranks shared."""
    sharded = {each["steps_sharded"] for each in found}
    assert len(sharded) == 1 and min(sharded) > 10 and not any(each["shadow_failures"] for each in found), found
    assert all(each["shadow_checks"] > 1 and each["not_sharded"]["rank_without_rows"] > 0 for each in found), found


def sharded_since(before: list[dict[str, Any]], server: Server) -> int:
    """Steps in which ranks attended for each other, which are the same on all of them."""
    (sharded,) = {
        now["steps_sharded"] - then["steps_sharded"] for now, then in zip(server.counters(), before, strict=True)
    }
    return sharded


def test_ranks_with_requests_of_their_own_answer_as_one(stock: Reference, dp_attention: Server) -> None:
    """Then what they hold is there for new tokens that are mixed in on both of them; where too many come together, a
    pass of each expands all heads of it for them."""
    check_sharded(check_dp_attention(stock, dp_attention))
    chats = [Chat(SYSTEM, question(i), max_tokens=4) for i in range(4)]
    expected = stock.asking(*chats)
    assert_same(dp_attention.ask(*chats), expected.result())
    found = dp_attention.counters()
    assert all(each["prefill_tokens_saved"] for each in found), found
    before = [each["prefill_tokens_expanded"] for each in found]
    for attempt in range(5):
        # Two of them are too many rows to be mixed. Nobody has said the same before, of which one request alone would
        # have a part cached: on a CPU all that is cached has to be expanded. How many come into one pass, only the
        # machine's speed says.
        many = [Chat(SYSTEM, f"{attempt}{i}. {question(i) * 60}", max_tokens=4) for i in range(8)]
        expected = stock.asking(*many)
        assert_same(dp_attention.ask(*many), expected.result())
        found = dp_attention.counters()
        if any(each["prefill_tokens_expanded"] > most for each, most in zip(found, before, strict=True)):
            break
    else:
        raise AssertionError(f"no pass expanded for itself: {found}")
    assert not any(each["fallbacks"] for each in found), found
    check_sharded(found)


@pytest.mark.skipif(ON_GPU, reason="a server that is no fork has nothing of the tests in it")
def test_a_changed_plan_on_one_rank_is_shared_by_none(stock: Reference, dp_attention: Server, fail: Fail) -> None:
    """Nobody waits for it, answers stay the same, and the ranks share again."""
    # Six of eight requests have the same prompt, so it reaches both ranks in any order of requests.
    chats = [Chat((SYSTEM, SYSTEM, OTHER_SYSTEM)[i % 3], question(i), max_tokens=16 + 4 * i) for i in range(8)]
    expected = stock.asking(*chats)
    dp_attention.ask(*chats)
    before = dp_attention.counters()
    fail(changing=3)
    deadline = time.monotonic() + 60
    while list(FAILING_FOLDER.iterdir()):
        assert_same(dp_attention.ask(*chats), expected.result())
        assert time.monotonic() < deadline, "no plan was changed"
    assert_same(dp_attention.ask(*chats), expected.result())
    found = dp_attention.counters()
    differed = {each["not_sharded"].get("plans_differ", 0) for each in found}
    assert len(differed) == 1 and min(differed) >= 3, found
    assert sharded_since(before, dp_attention) > 10 and not any(each["fallbacks"] for each in found), found


def check_mixed(stock: Reference, server: Server) -> None:
    """Check answers and counters while new requests join steps of running ones. Further prompts, which are never mixed,
    make one rank prefill, and then the mixed batch of the other runs as a prefill. SGLang 0.5.17 mixes nothing there.
    Timing decides which of these meet, so the load is repeated until all have."""
    before, mixes, seed = server.counters(), installed.shares_in_prefill_graphs, 0
    for attempt in range(8):
        chats = chats_over_time(40, seed=50 + attempt)
        expected, answers = (in_thread(texts_of, each, chats) for each in (stock, server))
        # Not by the clock: chats take longer on a busy machine. And only every other time: hardly a step is mixed then.
        while attempt % 2 == 0 and not answers.done():
            generate(server, prompt(seed := seed + 1, 30), 0)
        assert answers.result() == expected.result()
        found = server.counters()
        mixed, as_prefill = (gained(before, found, name) for name in ("steps_mixed", "rows_as_prefill"))
        if not mixes or (min(mixed) >= 5 and max(as_prefill) >= 5):
            break
    assert not any(each["fallbacks"] or each["shadow_failures"] for each in found), found
    if mixes:
        assert min(mixed) >= 5 and max(as_prefill) >= 5, found
        assert max(each["not_mixed"].get("rank_prefilling", 0) for each in found) > 0, found
    else:
        assert mixed == as_prefill == [0, 0] and min(gained(before, found, "prefills_mixed")) > 0, found


def test_running_requests_and_new_tokens_in_one_step(stock: Reference, dp_attention: Server) -> None:
    before = dp_attention.counters()
    check_mixed(stock, dp_attention)
    assert sharded_since(before, dp_attention) > 10


@pytest.mark.slow
def test_running_requests_and_new_tokens_over_prefixes_of_each_rank(
    stock: Reference, dp_attention_apart: Server
) -> None:
    check_mixed(stock, dp_attention_apart)


@pytest.mark.slow
def test_running_requests_and_new_tokens_on_ranks_in_pairs(stock: Reference, dp_attention_of_two: Server) -> None:
    check_mixed(stock, dp_attention_of_two)


def test_prompts_made_for_one_name_keep_their_own_keys(stock: Reference, dp_attention: Server) -> None:
    """Two chunks that had the same name in a server without a key of its own, in requests on both ranks."""
    draw = random.Random(0)
    chunks = json.loads((Path(__file__).parents[1] / "unit/colliding_chunks.json").read_text())
    prompts = [chunks[which] + [draw.randrange(10, 3000) for _ in range(9)] for which in "aaaabb"]
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}

    async def answers(url: str) -> list[list[int]]:
        async with session() as client:
            bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt in prompts]
            return [each["output_ids"] for each in await asyncio.gather(*(post(client, url, each) for each in bodies))]

    before = dp_attention.counters()
    expected, found = (asyncio.run(answers(f"{server.base_url}/generate")) for server in (stock, dp_attention))
    assert found == expected
    assert sharded_since(before, dp_attention) > 0


def test_prompts_with_other_salts_are_not_shared(stock: Reference, dp_attention: Server) -> None:
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(6)]
    expected = stock.asking(*chats)

    def answers(*salts: str) -> list[Answer]:
        async def all_of_them() -> list[Answer]:
            async with dp_attention.client() as client:
                asked = zip(chats, salts, strict=True)
                return await asyncio.gather(
                    *(dp_attention.ask_one(client, chat, cache_salt=salt) for chat, salt in asked)
                )

        return asyncio.run(all_of_them())

    before = dp_attention.counters()
    assert_same(answers("a", "b", "c", "d", "e", "f"), expected.result())
    assert sharded_since(before, dp_attention) == 0
    assert_same(answers(*["g"] * 6), expected.result())
    assert sharded_since(before, dp_attention) > 10


@pytest.mark.slow
def test_nodes_with_other_options_stop(servers: ServerPool, tmp_path: Path) -> None:
    """Both of them, with the values of both."""
    port, processes, logs = free_port(), [], [tmp_path / "0", tmp_path / "1"]
    for node, tokens in enumerate(("32", "2048")):
        arguments = ["--model-path", str(small(tmp_path)), *SIZED, *PREFIXES, "--attention-backend", "hybrid_mla"]
        arguments += ["--hybrid-mla-min-prefix-len", tokens, "--tp", "2", "--nnodes", "2", "--node-rank", str(node)]
        command, environment = server_command([*arguments, "--dist-init-addr", f"127.0.0.1:{port}"], free_port())
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
        with logs[node].open("wb") as output:
            processes.append(servers.popen(command, env=environment, stdout=output, stderr=output))
    for process, log in zip(processes, logs, strict=True):
        assert process.wait(timeout=180) != 0
        assert "--hybrid-mla-min-prefix-len: 32 on rank 0, 2048 on rank 1. " in log.read_text()


@pytest.mark.slow
def test_ranks_wait_for_one_that_stops_for_a_second(stock: Reference, dp_attention: Server) -> None:
    """Use one prompt, which reaches both ranks in any order of requests; of two prompts each rank might get one."""
    chats = [Chat(SYSTEM, question(i), max_tokens=40) for i in range(8)]
    expected, before = stock.asking(*chats), dp_attention.counters()
    answers = in_thread(dp_attention.ask, *chats)
    processes = psutil.Process(dp_attention.process.pid).children(recursive=True)
    rank = max(processes, key=lambda process: process.memory_info().rss)  # a scheduler: it has a model
    for _ in range(3):
        time.sleep(0.7)
        rank.suspend()
        time.sleep(1)
        rank.resume()
    assert_same(answers.result(), expected.result())
    sharded = [
        now["steps_sharded"] - then["steps_sharded"] for now, then in zip(dp_attention.counters(), before, strict=True)
    ]
    assert sharded[0] == sharded[1] > 0, dp_attention.counters()


@pytest.mark.slow
def test_four_ranks_that_hold_prefixes_together(stock: Reference, dp_attention_of_four: Server) -> None:
    check_sharded(check_dp_attention(stock, dp_attention_of_four, ranks=4))


@pytest.mark.slow
def test_ranks_with_prefixes_of_their_own(stock: Reference, dp_attention_apart: Server) -> None:
    found = check_dp_attention(stock, dp_attention_apart)
    assert not any(each["steps_sharded"] or each["not_sharded"] for each in found)


@pytest.mark.slow
def test_ranks_in_pairs_with_requests_of_their_own(stock: Reference, dp_attention_of_two: Server) -> None:
    check_dp_attention(stock, dp_attention_of_two)
