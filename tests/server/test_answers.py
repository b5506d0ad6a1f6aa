"""End to end: hybrid_mla gives the tokens of the stock backend, and `/server_info` shows that prefixes were shared."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import requests
from conftest import Answer, Chat, Reference, Server, assert_same, counting, in_thread

NAMES = [
    "Quedrom",
    "Cloudail",
    "Biha",
    "Ducou",
    "Trise",
    "Brivaim",
    "Lestos",
    "Hawain",
    "Gujait",
    "Pedro",
    "Jastel",
    "Quousus",
    "Wudourk",
    "Zuha",
]


def codes(shift: int) -> list[int]:
    """The code of each station, in a table that is another for another shift."""
    return [11 + (7 * index + shift) % 80 for index in range(len(NAMES))]


def system_prompt(shift: int) -> str:
    """About 300 tokens: a table of stations, and a text that has nothing to do with it."""
    rows = "\n".join(f"- {name}: {code}" for name, code in zip(NAMES, codes(shift), strict=True))
    prose = "It was a fine morning, and everybody in the village was on the way to the market. " * (8 + shift % 3)
    return f"You are a dictionary assistant.\nThe code of each station is given below.\n{rows}\n{prose}"


SYSTEM, OTHER_SYSTEM = system_prompt(3), system_prompt(40)


def question(number: int) -> str:
    return f"What is the code of {NAMES[number]}?"


def watch_groups(server: Server, stop: threading.Event, seen: list[list[dict[str, Any]]]) -> None:
    while not stop.is_set():
        if groups := server.info()["groups"]:
            seen.append(groups)
        time.sleep(0.02)


@contextlib.contextmanager
def watching(server: Server) -> Any:
    """The groups that `/server_info` shows while requests run."""
    seen: list[list[dict[str, Any]]] = []
    stop = threading.Event()
    watcher = threading.Thread(target=watch_groups, args=(server, stop, seen))
    watcher.start()
    try:
        yield seen
    finally:
        stop.set()
        watcher.join()


def ask_and_see(
    server: Server, chats: list[Chat], expected: Callable[[list[dict[str, Any]]], bool], late: Sequence[Chat] = ()
) -> list[Answer]:
    """Return the answers; groups as expected are shown meanwhile. On a busy machine `/server_info` may answer only
    before and after, so the chats are sent up to five times, and answered alike.

    Args:
        late: chats to send when a step of the others has shared something.
    """

    def ask() -> list[Answer]:
        return ask_while_sharing(server, chats, list(late)) if late else server.ask(*chats)

    with watching(server) as seen:
        answers = ask()
        for _ in range(4):
            if not any(map(expected, seen)):
                assert_same(ask(), answers)
    assert any(map(expected, seen)), seen
    return answers


def has_group(requests: int, mode: str) -> Callable[[list[dict[str, Any]]], bool]:
    """Return a check that the largest group has so many requests on the system prompt, and this mode."""

    def has(groups: list[dict[str, Any]]) -> bool:
        largest = max(groups, key=lambda group: group["requests"])
        return largest["requests"] == requests and largest["mode"] == mode and largest["prefix_len"] > 200

    return has


def ask_while_sharing(server: Server, early: list[Chat], late: list[Chat]) -> list[Answer]:
    """Send the late chats when a step of the early ones has shared something; the answers of all."""
    steps = server.info()["counters"]["steps_naive"]
    answering = in_thread(server.ask, *early)
    while server.info()["counters"]["steps_naive"] == steps and not answering.done():
        time.sleep(0.05)
    answers = server.ask(*late)
    return [*answering.result(), *answers]


LONG = 96
"""Tokens of answers that must overlap: on a busy machine the first chat may run alone for a second."""


def test_the_model_depends_on_the_system_prompt(stock: Reference) -> None:
    """Else equal answers would prove nothing."""
    answers = stock.ask(Chat(SYSTEM, question(1)), Chat(OTHER_SYSTEM, question(1)), Chat("", question(1)))
    assert len({tuple(answer.tokens) for answer in answers}) == 3


def test_eight_chats_share_a_prefix_and_two_do_not(stock: Reference, hybrid: Server) -> None:
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(8)] + [Chat("", question(i), LONG) for i in (8, 9)]
    expected = stock.asking(*chats)
    hybrid.flush()
    hybrid.ask(Chat(SYSTEM, question(13), 1))
    with counting(hybrid) as counted:
        actual = ask_and_see(hybrid, chats, has_group(8, "naive"))
    assert_same(actual, expected.result())
    assert counted.steps_naive >= 30
    assert counted.shadow_checks >= 6
    assert counted.expansions == 1


def test_grouped_absorb_for_six_chats_on_one_prefix_and_not_for_two(stock: Reference, grouped: Server) -> None:
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(6)] + [Chat("", question(i), LONG) for i in (8, 9)]
    expected = stock.asking(*chats)
    grouped.ask(Chat(SYSTEM, question(13), 1))
    with counting(grouped) as counted:
        actual = ask_and_see(grouped, chats, has_group(6, "grouped_absorb"))
    assert_same(actual, expected.result())
    assert counted.steps_grouped >= 30 and counted.steps_naive == counted.expansions == 0
    assert grouped.info()["expanded_bytes"] == 0


def test_prefix_is_found_without_warming_up(stock: Reference, hybrid: Server) -> None:
    """All requests arrive before anything is cached: sharing is seen only once they decode."""
    chats = [Chat(SYSTEM, question(i), max_tokens=24) for i in range(6)]
    expected = stock.asking(*chats)
    hybrid.flush()
    with counting(hybrid) as counted:
        actual = hybrid.ask(*chats)
    assert_same(actual, expected.result())
    assert counted.steps_naive > 0


def test_two_system_prompts_at_once(stock: Reference, hybrid: Server) -> None:
    chats = [Chat((SYSTEM, OTHER_SYSTEM)[i % 2], question(i), LONG) for i in range(8)]
    expected = stock.asking(*chats)
    hybrid.flush()
    hybrid.ask(Chat(SYSTEM, question(13), 1), Chat(OTHER_SYSTEM, question(13), 1))
    with counting(hybrid) as counted:
        actual = ask_and_see(hybrid, chats, lambda groups: [group["requests"] for group in groups] == [4, 4])
    assert_same(actual, expected.result())
    assert counted.expansions == 2


def test_requests_join_and_leave(stock: Reference, hybrid: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=6 + 9 * i, delay_s=0.15 * (7 - i)) for i in range(8)]
    expected = stock.asking(*chats)
    with counting(hybrid) as counted:
        actual = hybrid.ask(*chats)
    assert_same(actual, expected.result())
    assert counted.steps_naive > 0


def test_later_requests_use_the_expanded_prefix_in_their_prefill(stock: Reference, hybrid: Server) -> None:
    """Requests of several lengths join two that run; one of them shares only half of the prefix."""
    half = SYSTEM[: len(SYSTEM) // 2] + "What is a garden? " * 9
    early = [Chat(SYSTEM, question(i), LONG) for i in range(2)]
    # Names that do not begin alike: what is cached of one and not expanded, a CPU would have to expand.
    late = [Chat(SYSTEM, question(i) * times, max_tokens=12) for times, i in enumerate((2, 3, 4, 6), 1)]
    expected = stock.asking(*early, *late, Chat(half, question(9), 12))
    hybrid.flush()
    hybrid.ask(Chat(SYSTEM, question(13), 1))
    with counting(hybrid) as counted:
        # The last one is not in one prefill with others.
        actual = ask_while_sharing(hybrid, early, [*late, Chat(half, question(9), 12, delay_s=1.0)])
    assert_same(actual, expected.result())
    assert counted.prefills_naive > 0 and counted.prefill_tokens_saved > 4 * 200


def test_an_aborted_request_harms_nobody(stock: Reference, hybrid: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=40) for i in range(4)]
    expected = stock.asking(*chats)

    async def with_an_abort() -> list[Any]:
        async with hybrid.client() as client:
            victim = asyncio.create_task(hybrid.ask_one(client, Chat(SYSTEM, "A long story", max_tokens=4000)))
            others = [asyncio.create_task(hybrid.ask_one(client, chat)) for chat in chats]
            await asyncio.sleep(0.5)
            victim.cancel()  # closes the connection, which makes the server abort the request
            return [await other for other in others]

    actual = asyncio.run(with_an_abort())
    assert_same(actual, expected.result())
    hybrid.flush()  # succeeds only when the aborted request is gone
    assert hybrid.info()["expanded_bytes"] == 0


def test_flush_drops_what_was_expanded(stock: Reference, hybrid: Server) -> None:
    chats = [Chat(SYSTEM, question(i), max_tokens=16) for i in range(3)]
    first = hybrid.ask(*chats)
    hybrid.flush()
    assert hybrid.info()["expanded_bytes"] == 0
    assert hybrid.info()["groups"] == []
    assert_same(hybrid.ask(*chats), first)
    assert_same(first, stock.ask(*chats))


def test_prefix_splits_while_it_is_used(stock: Reference, hybrid: Server) -> None:
    """Later requests share only the first half of what earlier ones share and have expanded."""

    def has_both(groups: list[dict[str, Any]]) -> bool:
        return len({group["prefix_len"] for group in groups}) == 2

    half = SYSTEM[: len(SYSTEM) // 2] + "Now forget physics and talk about gardens instead. " * 4
    early = [Chat(SYSTEM, question(i), max_tokens=LONG) for i in range(3)]
    late = [Chat(half, question(i), max_tokens=64) for i in range(3)]
    expected = stock.asking(*early, *late)
    hybrid.flush()
    hybrid.ask(Chat(SYSTEM, question(13), 1))
    with counting(hybrid) as counted:
        actual = ask_and_see(hybrid, early, has_both, late)
    assert_same(actual, expected.result())
    assert counted.steps_naive > 0


def test_what_is_expanded_stays_for_those_who_come_next(hybrid: Server) -> None:
    """Nobody else wants its memory, and the prompt is still in the tree."""
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(3)]
    first = hybrid.ask(*chats)
    deadline = time.monotonic() + 10
    while hybrid.info()["groups"] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert hybrid.info()["groups"] == [] and hybrid.info()["expanded_bytes"] > 0
    with counting(hybrid) as counted:
        assert_same(hybrid.ask(*chats), first)
    assert counted.steps_naive > 0 and counted.expansions == 0


def test_metrics_say_the_same_as_server_info(hybrid: Server) -> None:
    """They are published at most once a second: at the first step of the last request, and not at all of its steps."""
    hybrid.ask(*(Chat(SYSTEM, question(i), max_tokens=4) for i in range(3)))
    before = hybrid.info()["counters"]
    time.sleep(1.5)
    hybrid.ask(Chat("", "Hello", 2))
    text = requests.get(f"{hybrid.base_url}/metrics", timeout=30).text
    published = {
        line.split("{")[0].removeprefix("sglang:hybrid_mla_"): float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("sglang:hybrid_mla_")
    }
    info = hybrid.info()
    assert published["budget_bytes"] == info["budget_bytes"] > 0
    assert {"groups", "expanded_bytes"} <= set(published)
    for name, after in info["counters"].items():
        if not isinstance(after, dict):  # those have labels, so nothing to show before the first one
            metric = name if name.startswith("max_") else f"{name}_total"
            assert before[name] <= published[metric] <= after, name
    assert published["steps_naive_total"] > 0


def test_server_without_the_flag_has_nothing_of_ours(stock: Reference) -> None:
    state = requests.get(f"{stock.base_url}/server_info", timeout=30).json()["internal_states"][0]
    assert "hybrid_mla" not in state
