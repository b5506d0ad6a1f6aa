"""The serving benchmark's arithmetic; its servers and its client are not started here."""

from __future__ import annotations

import bench_client
import bench_serving as bench
import numpy as np
import orjson
import pytest


@pytest.mark.parametrize(("text", "tokens", "expected"), [("", 3, " "), ("", 0, ""), ("a", 3, "a")])
def test_client_takes_tokens_without_text_for_tokens(text, tokens, expected):
    """Half a character is no text yet, but it is a token; the piece that only ends an answer is none."""
    piece = bench_client.EveryPiece.loads(orjson.dumps({"text": text, "meta_info": {"completion_tokens": tokens}}))
    assert piece["text"] == expected


def test_client_leaves_pieces_of_errors_alone():
    assert bench_client.EveryPiece.loads(b'{"error": {"message": "no"}}') == {"error": {"message": "no"}}


def test_rate_counts_only_the_full_batch():
    """Four requests, a token every 10 ms each, first tokens 0 to 300 ms apart: 400 tokens/s while all four decode."""
    first = np.array([0.1, 0.2, 0.3, 0.4])
    gaps = [np.full(100, 0.01)] * 4
    assert bench.full_batch_rate(first, gaps) == pytest.approx(400, rel=0.02)


def test_rate_leaves_out_the_last_requests_of_a_drained_batch():
    """One request is slower at the end, alone: it does not count."""
    gaps = [np.full(100, 0.01), np.concatenate([np.full(100, 0.01), np.full(50, 0.05)])]
    assert bench.full_batch_rate(np.array([0.1, 0.1]), gaps) == pytest.approx(200, rel=0.02)


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
    assert bench.full_batch_rate(np.array(first), gaps) is None


def info(naive: int, absorb: int, read: int, saved: int) -> dict:
    counters = {
        "steps_naive": naive,
        "steps_absorb": absorb,
        "fallbacks": {},
        "shared_tokens_read": read,
        "shared_tokens_saved": saved,
    }
    return {"hybrid_mla": {"groups": [], "counters": counters}}


def test_sharing_is_what_the_counters_gained():
    sharing = bench.sharing_between(info(5, 7, 100, 300), info(105, 17, 1100, 7300))
    assert sharing == {"mode": "naive", "steps": {"naive": 100, "absorb": 10}, "group_size": 8}


def test_sharing_without_groups_is_absorb():
    sharing = bench.sharing_between(info(0, 0, 0, 0), info(0, 10, 0, 0))
    assert (sharing["mode"], sharing["group_size"]) == ("absorb", 0)


def test_a_stock_backend_shares_nothing():
    assert bench.sharing_between({}, {}) is None


@pytest.mark.parametrize("workload", ["mmlu", "gsm8k", "simpleqa"])
def test_question_lengths_follow_the_workload(workload):
    lengths = bench.question_lengths(workload, 20_000, np.random.default_rng(0))
    quantiles = bench.read_config("workloads", workload)["models"]["deepseek-v3"]["prompt_tokens"]["quantiles"]
    assert np.median(lengths) == pytest.approx(quantiles["50"], rel=0.05)
    assert quantiles["0"] <= min(lengths) <= max(lengths) <= quantiles["100"]
