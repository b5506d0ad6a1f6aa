"""The serving benchmark's arithmetic; its servers and its client are not started here."""

from __future__ import annotations

import numpy as np
import pytest
from bench import client
from bench.workloads import published_lengths
from bench_serving import shared_prompts

from sglang_mla_ext.configs import read_config


def test_rate_counts_only_the_full_batch():
    """Four requests, a token every 10 ms each, first tokens 0 to 300 ms apart: 400 tokens/s while all four decode."""
    first = np.array([0.1, 0.2, 0.3, 0.4])
    gaps = [np.full(100, 0.01)] * 4
    assert client.full_batch(first, gaps)[0] == pytest.approx(400, rel=0.02)


def test_the_step_is_the_median_of_the_full_batch():
    """What is slower before the last first token, and after the first end, does not count; nor does one long pause."""
    first = np.array([0.1, 0.5])
    pause = np.concatenate([np.full(20, 0.01), [0.3], np.full(79, 0.01)])
    gaps = [np.concatenate([np.full(4, 0.1), pause]), np.concatenate([pause, np.full(40, 0.05)])]
    rate, step = client.full_batch(first, gaps)
    assert step == pytest.approx(0.01) and rate == pytest.approx(200 / 1.29, rel=0.02)


def test_rate_leaves_out_the_last_requests_of_a_drained_batch():
    """One request is slower at the end, alone: it does not count."""
    gaps = [np.full(100, 0.01), np.concatenate([np.full(100, 0.01), np.full(50, 0.05)])]
    assert client.full_batch(np.array([0.1, 0.1]), gaps)[0] == pytest.approx(200, rel=0.02)


@pytest.mark.parametrize(
    ("first", "gaps"),
    [
        ([0.1, 5.0], [np.full(100, 0.01), np.full(100, 0.01)]),  # one ends before the other begins
        ([0.1, 0.2], [np.full(100, 0.01), np.array([])]),  # one has a single token
        ([0.1, 0.95], [np.full(100, 0.01), np.full(100, 0.01)]),  # both decode for a moment only
    ],
    ids=["apart", "single token", "moment"],
)
def test_no_rate_where_the_batch_was_never_full_for_long(first, gaps):
    assert client.full_batch(np.array(first), gaps) is None


def test_the_steady_rate_ends_where_the_last_request_begins():
    """Two places, a token every 10 ms in each. The last answer is alone, and not counted."""
    first = np.full(5, 0.01)
    gaps = [np.full(length, 0.01) for length in (49, 29, 69, 49, 500)]
    # places: 0.5 s then 0.5 s (request 3); 0.3 s then 0.7 s (request 2); the last one begins after 1.0 s
    assert client.steady_rate(first, gaps, 2) == pytest.approx(200, rel=0.03)


def test_no_steady_rate_where_nobody_waits_or_all_is_over_at_once():
    assert client.steady_rate(np.full(2, 0.1), [np.full(9, 0.1)] * 2, 2) is None
    assert client.steady_rate(np.array([0.1, 5.0, 0.1]), [np.full(9, 0.1)] * 3, 2) is None


def test_shared_prompts_are_sent_at_once_each_with_a_question_of_its_own():
    drawn = shared_prompts({"mine": [1, 2, 3]}, ["7"], [2, 4], 16, np.arange(9), np.random.default_rng(0))
    assert [(one.title, one.requests, one.longest_prefix) for one in drawn] == [
        *(("serving mine", 2, 3), ("serving mine", 4, 3), ("serving 7", 2, 7), ("serving 7", 4, 7)),
    ]
    for one in drawn:
        assert one.all_at_once and one.output_tokens == 16 * one.requests and one.stream_interval == 16
        assert all(turn.ids[: len(one.cached[0])] == one.cached[0] for (turn,) in one.sessions)
        assert len({tuple(turn.ids) for (turn,) in one.sessions}) == one.requests
    published = read_config("workloads", "system_prompts")["tokens"]
    known = shared_prompts({}, None, [1], 16, np.arange(9), np.random.default_rng(0))
    assert {one.case: one.longest_prefix for one in known} == published


def info(naive: int, absorb: int, read: int, saved: int) -> dict:
    counters = {
        "steps_naive": naive,
        "steps_absorb": absorb,
        "fallbacks": {},
        "prefills_naive": 0,
        "expansions": 0,
        "shared_tokens_read": read,
        "shared_tokens_saved": saved,
    }
    return {"hybrid_mla": {"groups": [], "counters": counters}}


@pytest.mark.parametrize(("passes", "seconds", "expected"), [(200, 0.05, 0.25), (0, 0.0, None)])
def test_planning_time_is_a_mean_over_passes(passes, seconds, expected):
    before, after = info(0, 0, 0, 0), info(0, 0, 0, 0)
    before["hybrid_mla"]["counters"] |= {"forward_passes": 7, "plan_seconds": 1.0}
    after["hybrid_mla"]["counters"] |= {"forward_passes": 7 + passes, "plan_seconds": 1.0 + seconds}
    assert client.plan_ms_between(before, after) == pytest.approx(expected)
    assert client.plan_ms_between({}, {}) is None


def test_sharing_is_what_the_counters_gained():
    sharing = client.sharing_between(info(5, 7, 100, 300), info(105, 17, 1100, 7300))
    steps = {"naive": 100, "absorb": 10}
    counters = {"steps_naive": 100, "steps_absorb": 10, "shared_tokens_read": 1000, "shared_tokens_saved": 7000}
    assert sharing.pop("counters") == counters
    assert sharing == {"mode": "naive", "steps": steps, "group_size": 8, "prefills": 0, "expansions": 0}
    assert client.describe_sharing(sharing) == ["steps: 100 naive, 10 absorb; groups of 8"]


def test_sharing_says_what_was_not_shared():
    before, after = info(0, 0, 0, 0), info(1, 0, 0, 0)
    before["hybrid_mla"]["counters"]["fallbacks"] = {"no memory": 2}
    after["hybrid_mla"]["counters"] |= {"fallbacks": {"no memory": 5}, "prefills_naive": 3, "expansions": 1}
    sharing = client.sharing_between(before, after)
    assert (sharing["prefills"], sharing["expansions"], sharing["fallbacks"]) == (3, 1, {"no memory": 3})
    assert client.describe_sharing(sharing)[1:] == ["3 times no memory"]


def test_sharing_without_groups_is_absorb():
    sharing = client.sharing_between(info(0, 0, 0, 0), info(0, 10, 0, 0))
    assert (sharing["mode"], sharing["group_size"]) == ("absorb", 0)


def test_a_stock_backend_shares_nothing():
    assert client.sharing_between({}, {}) is None


@pytest.mark.parametrize("workload", ["mmlu", "gsm8k", "simpleqa"])
def test_question_lengths_follow_the_workload(workload):
    lengths = published_lengths(workload, "prompt_tokens", 20_000, np.random.default_rng(0))
    quantiles = read_config("workloads", workload)["models"]["deepseek-v3"]["prompt_tokens"]["quantiles"]
    assert np.median(lengths) == pytest.approx(quantiles["50"], rel=0.05)
    assert quantiles["0"] <= min(lengths) <= max(lengths) <= quantiles["100"]
