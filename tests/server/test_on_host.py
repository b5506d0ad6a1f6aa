"""A cache on the host: what goes out of the small cache comes back to other slots, and what is expanded stays right."""

from __future__ import annotations

import time

import pytest
import requests
from conftest import Chat, Reference, Server, assert_same, counting
from test_answers import LONG, SYSTEM, question

from sglang_mla_ext.adapter.compat import contract

FILLERS = tuple(f"Case {i}. " + " ".join(f"{word} {i}" for word in SYSTEM.split()) for i in range(4))
"""Other prompts, which with their answers are more than the cache holds."""


def tokens(server: Server, what: str) -> float:
    """Of a counter of SGLang's: `load_back` from the host, `backuped` to and `prefetched` from storage."""
    lines = requests.get(f"{server.base_url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"sglang:{what}_tokens_total{{"))


def fill(server: Server) -> None:
    """Drive everything else out of the cache."""
    for filler in FILLERS:  # one by one: each needs most of the cache
        server.ask(Chat(filler, question(7), 2))


def test_a_prefix_that_was_on_the_host(stock: Reference, on_host: Server) -> None:
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(3)]
    expected = stock.asking(*chats)
    on_host.ask(Chat(SYSTEM, question(13), 1))
    assert_same(on_host.ask(*chats), expected.result())
    fill(on_host)
    before = tokens(on_host, "load_back")
    with counting(on_host) as counted:
        assert_same(on_host.ask(*chats), expected.result())
    assert tokens(on_host, "load_back") - before > 256, "the prefix was on the host"
    assert counted.steps_naive > 8


def wait_until_stored(server: Server, count: int = 256) -> None:
    """Until so many tokens are in files."""
    deadline = time.monotonic() + 60
    while tokens(server, "backuped") < count:
        assert time.monotonic() < deadline, "nothing was stored"
        time.sleep(0.2)


@pytest.mark.slow  # after changes of the host cache
@pytest.mark.usefixtures("no_files")
def test_a_prefix_that_was_in_files(stock: Reference, in_files: Server) -> None:
    """A flush leaves nothing on the device and on the host."""
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(3)]
    expected = stock.asking(*chats)
    in_files.ask(Chat(SYSTEM, question(13), 1))
    assert_same(in_files.ask(*chats), expected.result())
    wait_until_stored(in_files)
    in_files.flush()
    with counting(in_files) as counted:
        assert_same(in_files.ask(*chats), expected.result())
    assert tokens(in_files, "prefetched") > 256 and tokens(in_files, "load_back") > 256
    assert counted.steps_naive > 8


@pytest.mark.slow  # after changes of the host cache or of drafts
@pytest.mark.skipif(contract.line() != "0.5.23", reason="run on the CPU with SGLang 0.5.23 only")
def test_drafts_over_a_prefix_that_was_on_the_host(stock_demo: Reference, on_host_drafts: Server) -> None:
    """The rows of the layer that drafts go to the host and come back, too: drafts are accepted as often as before."""
    chats = [Chat(SYSTEM, question(i), LONG) for i in range(3)]
    expected = stock_demo.asking(*chats)
    on_host_drafts.ask(Chat(SYSTEM, question(13), 1))

    def verified() -> int:
        """Ask, and return how many steps that took."""
        before = on_host_drafts.info()["counters"]["steps_verify"]
        with counting(on_host_drafts) as counted:
            assert_same(on_host_drafts.ask(*chats), expected.result())
        assert counted.steps_naive > 2
        return int(on_host_drafts.info()["counters"]["steps_verify"] - before)

    steps = verified()
    fill(on_host_drafts)
    before = tokens(on_host_drafts, "load_back")
    again = verified()
    print(f"{steps} steps the first time, {again} after the prefix was on the host")
    assert tokens(on_host_drafts, "load_back") - before > 256, "the prefix was on the host"
    assert again <= steps + 2 < LONG
