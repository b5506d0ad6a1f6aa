"""Requests that end and are replaced: what comes of steps in turns with prefill passes, and of mixed steps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from bench import predictions
from bench.records import RESULTS
from demo_model.rank import K3_MLA, Rank, rank_config
from typer.testing import CliRunner

from sglang_mla_ext.cli import app
from sglang_mla_ext.predict.arrivals import Served, Traffic, compared, host_seconds, pass_seconds, percentile, serve
from sglang_mla_ext.predict.drafts import drafting
from sglang_mla_ext.predict.memory import buffer_bytes
from sglang_mla_ext.predict.mixed import allowed
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.step import Deployment
from sglang_mla_ext.predict.weights import read_model

V3 = read_model("deepseek-v3")
EIGHT = Deployment(V3, Gpu.from_json("h200"), 8)
SHORT = Traffic(requests=128, prefix=7069, question=128, answer=112, host_s=0.1)


def one_rank(layers: int) -> Deployment:
    """Return one of eight tensor-parallel ranks of DeepSeek-V3, as a model of one GPU, without DeepGEMM."""
    return Deployment(rank_config(Rank("tp8", layers)), predictions.without_deep_gemm(Gpu.from_json("h100")))


@dataclass(frozen=True)
class Measured:
    """Tokens per second while others waited, by passes in turns: answers of 16 to 208 tokens, questions of 60 to 300,
    128 at a time. One rank on an H100 whose host is a slow virtual machine, SGLang 0.5.17, 2026-11-24."""

    layers: int
    prefix: int
    flashmla: float
    hybrid_mla: float
    within: float


MEASURED = [
    Measured(36, 7069, 1203, 1150, within=0.27),
    Measured(36, 26472, 957, 1122, within=0.11),
    Measured(24, 7069, 1574, 1454, within=0.53),
]


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_against_measured_servers(case):
    """Where the measured ratio of the two is below 1, the predicted one is not: what hybrid_mla adds to the host's time
    of a pass is not in it."""
    of = one_rank(case.layers)
    _, found = compared(of, Traffic(128, case.prefix, 180, 112, host_seconds(of)))
    for served, measured in ((found["absorb"], case.flashmla), (found["chosen"], case.hybrid_mla)):
        assert served.tokens_per_s == pytest.approx(measured, rel=case.within)
    ratio = found["chosen"].tokens_per_s / found["absorb"].tokens_per_s
    assert ratio == pytest.approx(case.hybrid_mla / case.flashmla, rel=0.25)


def test_short_answers_against_measured_servers():
    """The constants of a pass and of a renewal were fitted to SGLang's own backends of these records. In a record are
    the first tokens of the burst that begins it, too: a third of all, which come last. Of hybrid_mla's that burst
    takes passes that are not in the prediction; so do fa3's of all heads over a long prompt. flashinfer's passes are
    faster than the others'. With the default memory, and with all heads, a long prompt is expanded in part. With
    Kimi-K3's layers alone, where a step takes 6 ms, requests wait for SGLang's tokenizer. With DeepGEMM, at the rate of
    FP8 in the data sheet, stock's are predicted up to 25 % too slow and ours up to 30 % too fast."""
    records = [json.loads(line) for line in (RESULTS / "rank.jsonl").read_text().splitlines()]
    found = [record for record in records if record["bench"] == "short" and not record.get("excluded")]
    assert len(found) >= 39
    for record in found:
        served, alone = predictions.served(record), record["case"].get("of") == K3_MLA
        rate, first = served.tokens_per_s / record["steady_tok_s"], served.first_token_s * 1e3 / record["ttft_ms"]
        between = served.between_s * 1e3 / record["itl_ms"]
        long, of_all_heads = record["case"]["prefix"] > 20000, record["case"]["rank"] == "dp8"
        slower = 1.06 if record["case"]["deep_gemm"] else 1.0
        if record["impl"] != "hybrid_mla":
            flashinfer = record["impl"] == "sglang_flashinfer"
            soonest = 0.5 if long and of_all_heads else 0.6
            last = 1.3 if flashinfer else 1.35 if alone else 1.2
            least = 0.75 if flashinfer else 0.79
            assert least < slower * rate and rate < 1.25, (rate, record)
            assert soonest < first < slower * last, (first, record)
        elif not alone:
            partly = long and (of_all_heads or predictions.named_memory(record) is None)
            least, longest = (0.9, 1.25) if partly else (1.0, 1.12)
            most = 1.31 if record["case"]["deep_gemm"] else 1.2
            assert least < slower * rate and rate < most and 0.35 < first < 1.1, (rate, first, record)
            assert 0.8 < between < slower * longest, (between, record)


def test_short_answers_with_prefill_in_graphs_against_measured_servers():
    """SGLang 0.5.23, with drafts and without, and with an FP8 cache. Medians of first tokens are predicted 4 % too late
    to 26 % too soon: a third of those measured are of the burst. A third of the tokens come when nobody waits any more:
    with drafts the median between two is predicted up to 55 % too long. Ours over a long prompt is 12 % too fast."""
    names = ("rank-mixed", "rank-fp8-cache")
    records = [json.loads(line) for name in names for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    found = [record for record in records if record["bench"] == "short" and not record.get("excluded")]
    assert len(found) >= 12 and any(record["case"].get("drafts") for record in found)
    for record in found:
        served = predictions.served(record)
        drafts, long = bool(record["case"].get("drafts")), record["case"]["prefix"] > 20000
        within = 0.13 if drafts and long else 0.09
        assert served.tokens_per_s == pytest.approx(record["steady_tok_s"], rel=within), record["case"]
        assert served.between_s * 1e3 == pytest.approx(record["itl_ms"], rel=0.56 if drafts else 0.17), record["case"]
        assert 0.73 < served.first_token_s * 1e3 / record["ttft_ms"] < 1.05, record["case"]


def test_steps_of_ranks_against_measured_servers():
    """Compare decode steps of two and four ranks of DP attention, with prefixes alone or sharded: each is within 9 %,
    over 16 and 32 tokens up to 20 % too short. What sharing gains is within 4 % of 61 layers, of fewer within 7.1 %."""
    records = [json.loads(line) for line in (RESULTS / "spread.jsonl").read_text().splitlines()]
    found = [record for record in records if record["bench"] == "decode" and record["decode_itl_ms"]]

    def case(record: dict[str, Any]) -> tuple[str, ...]:
        of = record["case"]
        return record["sglang"], of["prompt"], str(of["layers"]), str(of["dp"])

    stock = {case(record): record for record in found if record["impl"] != "hybrid_mla"}
    assert len(found) >= 55 and len(stock) >= 12 and {record["case"]["dp"] for record in found} == {2, 4}
    for record in found:
        of, said, took = record["case"], predictions.step(record).seconds * 1e3, record["decode_itl_ms"]
        assert (0.91 if of["prefix"] > 64 else 0.8) < said / took < 1.05, of
        if of["prefix"] > 64 and (other := stock.get(case(record))) is not None:
            within = 0.04 if of["layers"] == 61 else 0.071
            gain = predictions.step(other).seconds * 1e3 / said
            assert gain == pytest.approx(other["decode_itl_ms"] / took, rel=within), of


def test_short_answers_of_whole_ranks_against_measured_servers():
    """DP attention on two and four ranks of 61 layers; with 8 layers clients and host take most of a step. SGLang
    0.5.23 was measured with `--disable-custom-all-reduce`, and on four ranks before mixed steps were evened out, which
    the prediction assumes. A third of the measured first tokens are of the burst, so their median is late."""
    records = [json.loads(line) for line in (RESULTS / "spread.jsonl").read_text().splitlines()]
    found = [record for record in records if record["bench"] == "short" and record["case"]["layers"] == 61]
    assert {record["impl"] for record in found} == {"hybrid_mla", "sglang_fa3"}
    for record in found:
        served = predictions.served(record)
        newest, ours = record["sglang"] == "0.5.23", record["impl"] == "hybrid_mla"
        least, most = ((0.95, 1.05) if ours else (0.8, 0.9)) if newest else (0.85, 1.1)
        assert least < served.tokens_per_s / record["steady_tok_s"] < most
        least, most = (0.2, 0.45) if newest else (0.6, 1.2)
        assert least < served.first_token_s * 1e3 / record["ttft_ms"] < most


def test_ranks_mix_new_tokens_into_running_requests():
    """All ranks wait for one that prefills, and for none that mixes, if prefill runs in graphs. With eager passes and
    with drafts, new tokens are mixed without running requests."""
    ranks = replace(EIGHT, dp=8, prefix_sharding=True)
    found = {}
    for host_s in (0.0, SHORT.host_s):
        _, found[host_s] = compared(ranks, replace(SHORT, requests=256, host_s=host_s))
    mixed, chosen = found[0.0]["mixed"], found[0.0]["chosen"]
    assert mixed.tokens_per_s > 1.45 * chosen.tokens_per_s and mixed.first_token_s < chosen.first_token_s
    assert mixed.tokens_per_s > 1.25 * found[SHORT.host_s]["mixed"].tokens_per_s
    _, drafting = compared(replace(ranks, query_tokens=4), replace(SHORT, requests=256, host_s=0, accepted=2.5))
    assert drafting["mixed"].tokens_per_s < 1.3 * drafting["chosen"].tokens_per_s


def test_the_host_sets_a_pass():
    """Kernels measured over 7,069 cached tokens, 24 layers: 24.7 and 22.2 ms of 1 x 192 tokens, 37.9 and 28.2 of 4 x
    128. What is predicted is a third too short, of constants that are derived for this GPU."""
    of = one_rank(24)
    for requests, question, absorb, expanded in ((1, 192, 24.7, 22.2), (4, 128, 37.9, 28.2)):
        traffic = Traffic(128, 7069, question, 112, host_s=0)
        found = [pass_seconds(of, traffic, requests, kept) * 1e3 for kept in (0, 7069)]
        assert found == pytest.approx([absorb, expanded], rel=0.4) and found[0] > found[1]
    assert host_seconds(of) == pytest.approx(24 * 2.5e-3 + 21 * 2.5e-3)
    assert pass_seconds(of, SHORT, 1) == SHORT.host_s


def test_a_pass_that_expands_for_itself():
    """Once for all of a rank's requests what nobody keeps expanded; one request alone needs it in any case."""
    alone = Deployment(V3, Gpu.from_json("h200"), 8, 8)
    itself = replace(alone, prefill_expand_tokens=8192)
    traffic = Traffic(1024, 26472, 128, 112, host_s=0)

    def apart(requests: int, kept: int) -> float:
        return pass_seconds(alone, traffic, requests, kept) - pass_seconds(itself, traffic, requests, kept)

    assert apart(8, 0) == 0 and apart(64, 26472) == 0  # one for each rank, and nothing left to expand
    assert apart(64, 26472 - 256) == 0  # seven times 256 tokens are not worth the launches
    assert apart(64, 0) == pytest.approx(7 * apart(16, 0), rel=0.01) and apart(64, 0) > 0.3
    assert 0.5 * 2**30 < buffer_bytes(itself, expands=True) - buffer_bytes(alone, expands=True) < 0.7 * 2**30
    _, found = compared(itself, traffic, chunks=0)
    _, without = compared(alone, traffic, chunks=0)
    assert found["absorb"] == without["absorb"]  # stock's own passes
    assert found["chosen"].tokens_per_s > 1.1 * without["chosen"].tokens_per_s


def test_steps_in_turns():
    """A step of 1 s and a pass of 10: after a step in which requests end come three more until they are replaced, by a
    pass; those who ended in these three take another one right behind it."""
    found = serve(SHORT, lambda running, new: 1.0, prefill=lambda requests: 10.0, client_s=0.5)
    without = 2.718 ** -(128 / 111)  # the share of steps in which none ends, by Poisson's law
    steps, passes = 1 / (1 - without) + 3, 2 - without**3
    assert found.tokens_per_s == pytest.approx(126 * steps / (steps + 10 * passes), rel=0.03)
    # Who ends in the first of the four steps has a token after 11 s, the others, behind both passes, after 20 to 18.
    assert (found.first_token_s, found.between_s, found.between_p99_s) == pytest.approx((18, 1, 21))


def test_ranks_wait_for_each_other():
    """While one takes a pass of 10 s, the others have one token for each request."""

    def serve_on(ranks: int, pass_s: float) -> Served:
        traffic = replace(SHORT, requests=128 * ranks)
        return serve(traffic, lambda running, new: 1.0, prefill=lambda requests: pass_s, ranks=ranks, client_s=0.5)

    alone, four, at_once = serve_on(1, 10.0), serve_on(4, 10.0), serve_on(4, 1.0)
    assert 0.6 < four.tokens_per_s / (4 * alone.tokens_per_s) < 0.75
    assert four.between_p99_s > 1.4 * alone.between_p99_s
    # A pass as long as a step holds up nobody but the rank's own requests, which end and are replaced after 4 steps.
    assert at_once.tokens_per_s == pytest.approx(4 * serve_on(1, 1.0).tokens_per_s, rel=0.05)
    few = serve(Traffic(1, 7069, 128, 10, host_s=0.1), lambda running, new: 1.0, prefill=lambda n: 5.0, ranks=4)
    assert few.first_token_s == pytest.approx(5.025)


def test_one_request():
    """It ends, and nothing runs until its client has asked again."""
    one = Traffic(1, 7069, 128, 10, host_s=0.1)
    found = serve(one, lambda running, new: 1.0, prefill=lambda requests: 5.0, client_s=0.5)
    assert found.first_token_s == pytest.approx(5.5) and found.between_p99_s == pytest.approx(1)
    # 9 steps, two until the end is heard, half a second, and a pass.
    assert found.tokens_per_s == pytest.approx(10 / (9 + 2 + 0.5 + 5), rel=0.02)
    mixed = serve(one, lambda running, new: 1.0, mixed_tokens=1024, client_s=0.5)
    assert mixed.first_token_s == pytest.approx(1.5)
    assert mixed.tokens_per_s == pytest.approx(10 / (10 + 2 + 0.5), rel=0.02)


def test_mixed_steps():
    """Nobody waits longer than a step where all that comes may be mixed in."""
    mixed: list[int] = []

    def step(running: int, new: int) -> float:
        assert running + -(-new // 128) <= 128
        mixed.append(new)
        return 1.0

    found = serve(SHORT, step, mixed_tokens=1024, client_s=0.5)
    assert found.tokens_per_s == pytest.approx(128 * 112 / 115, rel=0.01)  # replaced three steps later
    assert (found.first_token_s, found.between_s, found.between_p99_s) == pytest.approx((2, 1, 1))
    assert sum(mixed) / len(mixed) == pytest.approx(SHORT.new_tokens * 112 / 115, rel=0.03)


def test_what_may_not_be_mixed_waits():
    """64 tokens a step are half a request: 56 run, and 72 wait for 144 steps."""
    found = serve(SHORT, lambda running, new: 1.0, mixed_tokens=64)
    assert found.tokens_per_s == pytest.approx(56, rel=0.03)
    assert found.first_token_s == pytest.approx(144, rel=0.1)


def test_the_same_each_time():
    assert compared(EIGHT, SHORT) == compared(EIGHT, SHORT)


def test_mixed_steps_save_the_passes():
    mixed_tokens, found = compared(EIGHT, SHORT)
    assert mixed_tokens == allowed(EIGHT) > SHORT.new_tokens
    absorb, chosen, mixed = (found[way] for way in ("absorb", "chosen", "mixed"))
    assert absorb.tokens_per_s < chosen.tokens_per_s < mixed.tokens_per_s / 2
    assert mixed.first_token_s < 0.9 * chosen.first_token_s and mixed.between_p99_s < chosen.between_p99_s / 2


def test_drafts_add_several_tokens_a_step():
    """Tokens that wait longer than one verify step take a pass; drafting is part of a step."""
    drafts, traffic = replace(EIGHT, query_tokens=4), replace(SHORT, accepted=2.5)
    assert traffic.steps == 1 + round((SHORT.answer - 1) / 2.5)
    for one in (SHORT, traffic):  # between two requests are 3.5 steps
        found = serve(one, lambda running, new: 1.0, 10**6)
        assert found.tokens_per_s == pytest.approx(one.requests * one.answer / (one.steps + 3.5), rel=0.02)
        assert found.between_s == pytest.approx(1 / one.accepted)
    passes: list[int] = []
    serve(traffic, lambda running, new: 1.0, 64, lambda requests: passes.append(requests) or 3.0, drafts=True)
    assert min(passes) == 1  # a question of 128 tokens would take two steps
    steps = [drafting(of)(128, 7069, 300) for of in (EIGHT, replace(EIGHT, query_tokens=2), drafts)]
    assert 0 == steps[0] < steps[1] < steps[2] / 2
    mixed_tokens, ways = compared(drafts, replace(SHORT, accepted=2.5))
    assert mixed_tokens == allowed(drafts)
    assert ways["absorb"].tokens_per_s < ways["chosen"].tokens_per_s < ways["mixed"].tokens_per_s


def test_more_than_may_be_mixed_take_a_pass():
    """As in a server: what would take more than six mixed steps."""
    passes: list[int] = []

    def prefill(requests: int) -> float:
        passes.append(requests)
        return 3.0

    found = serve(SHORT, lambda running, new: 1.0, 64, prefill)
    assert min(passes) == 4  # 3 of 128 tokens would take 6 mixed steps
    without = serve(SHORT, lambda running, new: 1.0, 64)
    assert found.tokens_per_s > 1.2 * without.tokens_per_s and found.first_token_s < without.first_token_s / 10


def test_ranks_have_as_many_rows_as_the_largest():
    """Ranks even out new tokens: each takes the mean of what arrives, so the largest has few more than that."""
    rows: list[tuple[int, int]] = []

    def step(running: int, new: int) -> float:
        rows.append((running, new))
        return 1.0

    traffic = replace(SHORT, requests=512)
    serve(traffic, step, mixed_tokens=512, ranks=4, ahead=True)
    assert all(new % 4 == 0 and new <= 4 * 512 for _, new in rows if new)
    mean, largest = traffic.new_tokens, 4 * 320
    assert mean < sum(new for _, new in rows) / len(rows) <= largest < 4 * 512


def test_passes_that_take_no_time_leave_the_steps():
    long_answers = Traffic(128, 26472, 128, 4000, host_s=0)
    _, found = compared(EIGHT, long_answers)
    assert found["chosen"].tokens_per_s == pytest.approx(128 / found["chosen"].between_s, rel=0.05)


def test_percentiles():
    assert percentile(Counter({1.0: 98, 2.0: 1, 3.0: 1}), 0.5) == 1
    assert percentile(Counter({1.0: 98, 2.0: 1, 3.0: 1}), 0.99) == 2
    assert percentile(Counter(), 0.5) == 0
    with pytest.raises(ValueError, match="two and more"):
        Traffic(1, 1, 1, 1, 0)


def planned(*options: str, exit_code: int = 0) -> str:
    case = ("--tp", "8", "--prefix", "7069", "--batch", "128", "--arrivals", "112")
    result = CliRunner().invoke(app, ["plan", *case, *options])
    assert result.exit_code == exit_code, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_plan_shows_arrivals():
    output = planned("--prefill-pass-ms", "100")
    assert (
        "takes the host 100 ms" in output
        and "128 requests: 146 new tokens a step, up to 1024 of them in the decode graph" in output
    )
    assert "answers of 112 tokens, questions of 128" in output and " mixed " in output
    assert "takes the host 0 or 298 ms" in planned()
    others = "1024 of them in the decode graph; the others take prefill passes"
    assert others not in output and others in planned("--question", "1000")
    assert "new tokens a step of a rank" in planned("--dp", "8")


def test_arrivals_as_json():
    found = json.loads(planned("--json", "--question", "64", "--prefill-pass-ms", "100"))
    assert found["arrivals"] == {"answer": 112, "question": 64, "prefill_pass_ms": [100]}
    (case,) = found["cases"]
    (arrivals,) = case["arrivals"]
    assert arrivals["new_tokens_a_step"] == pytest.approx(128 / 112 * 64) and arrivals["mixed_tokens"] == 1024
    of_way = {"tokens_per_s", "first_token_ms", "between_ms", "between_p99_ms"}
    assert all(set(arrivals[way]) == of_way for way in ("absorb", "chosen", "mixed"))
    assert arrivals["chosen"]["first_token_ms"] == pytest.approx(134.10, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--step-ms", "60"), "without --step-ms"),
        (("--gpu", "cpu"), "has no constants"),
        (("--arrivals", "1"), "2"),
    ],
)
def test_what_arrivals_are_not_predicted_for(options, said):
    assert said in planned(*options, exit_code=2)
