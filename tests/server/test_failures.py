"""Parts of the extension fail in a running server: the answers stay the stock backend's, and sharing comes back."""

from __future__ import annotations

import re
import time

import pytest
from bench.server import ON_GPU
from conftest import FAILING_FOLDER, Chat, Fail, Reference, Server, assert_same
from test_answers import SYSTEM, question

pytestmark = pytest.mark.skipif(ON_GPU, reason="a server that is no fork has nothing of the tests in it")

CHATS = [Chat(SYSTEM, question(i), max_tokens=24 + 8 * i) for i in range(4)]
LATER = [Chat(SYSTEM, question(i), max_tokens=8, delay_s=0.4) for i in range(4, 6)]


def test_failures_under_running_chats(stock: Reference, failing: Server, fail: Fail) -> None:
    chats = [*CHATS, *LATER]
    expected = stock.asking(*chats)
    failing.ask(Chat(SYSTEM, question(13), 1))

    def ask_until_all_have_failed(**times: int) -> None:
        """Again and again: each failure that is seen keeps others from being reached for a while."""
        fail(**times)
        deadline = time.monotonic() + 60
        while list(FAILING_FOLDER.iterdir()):
            assert_same(failing.ask(*chats), expected.result())
            assert time.monotonic() < deadline, f"not reached: {list(FAILING_FOLDER.iterdir())}"

    ask_until_all_have_failed(expanding=2, attention=2, metrics=2)
    ask_until_all_have_failed(writing=1, merging=1, idle=1)
    ask_until_all_have_failed(preparing=1, absorb=1)
    fail(forgetting=3)  # in the hook, where that is seen, and before the next forward pass
    failing.flush()
    ask_until_all_have_failed()

    counters = failing.info()["counters"]
    # A failure in a layer is counted by the kind of pass that meets it first, which depends on timing.
    in_a_layer = ("attention", "prefill_attention", "merge", "prefill_in_graph")
    assert sum(counters["fallbacks"].get(reason, 0) for reason in in_a_layer) == 4, counters["fallbacks"]
    assert {reason: times for reason, times in counters["fallbacks"].items() if reason not in in_a_layer} == {
        "plan_pass": 2,
        "publish_metrics": 2,
        "write_plan": 1,
        "become_idle": 1,
        "prepare_step": 1,
        "flush_cache": 1,
        "repair": 2,
    }
    log = failing.log.read_text()
    for reason in counters["fallbacks"]:
        assert len(re.findall(rf"falling back \({reason}\): .*: MemoryError\n", log)) == 1, reason
    assert log.count("a test wants it") >= len(counters["fallbacks"]), "with tracebacks"

    assert_same(failing.ask(*chats), expected.result())
    after = failing.info()["counters"]
    assert after["fallbacks"] == counters["fallbacks"]
    assert after["steps_naive"] > counters["steps_naive"] + 8, "sharing came back"
