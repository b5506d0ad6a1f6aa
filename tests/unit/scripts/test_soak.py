"""The soak's traffic and its judge; tests/server/test_soak.py plays it to servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from bench.generate import BF16, FP32, Answer, Tolerance, Verdict, judge, judge_to_first_tie
from bench.records import read_records, write_record
from bench.soak_run import Outcome
from bench.soak_traffic import PENALTIES, SHAPES, Action, Limits, Request, Traffic
from bench.tables import rows_of, specs
from soak import record
from tables_of import lines_of

SPECS = specs()["docs/support.md"]
VOCABULARY = np.arange(10, 500)
PROMPT = (1, 2, 3)
LEAD = 0.5  # of the stock server's tokens over the next best


def stock_answer(prompt: tuple[int, ...], tokens: int, lead: float) -> Answer:
    """Greedy tokens that depend on the prompt."""
    ids, logprobs, others, text = [], [], [], list(prompt)
    for _ in range(tokens):
        token = (sum(text) * 7 + len(text)) % 100
        ids.append(token)
        logprobs.append(-1 - token / 100)
        others.append(((token + 200, logprobs[-1] - lead), (token + 100, logprobs[-1] - lead)))
        text.append(token)
    return Answer(tuple(ids), tuple(logprobs), tuple(others))


def verdict(answer: Answer, lead: float = LEAD, taken_back: bool = False, tolerance: Tolerance = FP32) -> Verdict:
    async def stock(prompt: tuple[int, ...], tokens: int) -> Answer:
        return stock_answer(prompt, tokens, lead)

    return asyncio.run(judge(PROMPT, answer, stock, taken_back=taken_back, tolerance=tolerance))


def test_the_same_seed_gives_the_same_traffic() -> None:
    first, again, other = (
        [event for _ in range(3) for event in traffic.phase(50)]
        for traffic in (Traffic(VOCABULARY, 1), Traffic(VOCABULARY, 1), Traffic(VOCABULARY, 2))
    )
    assert first == again != other


@pytest.mark.parametrize("factor", [1, 8])
def test_traffic_has_everything_and_keeps_its_limits(factor: int) -> None:
    limits = Limits().times(factor)
    events = list(Traffic(VOCABULARY, 0, limits).phase(1000))
    sent = [event for event in events if isinstance(event, Request)]
    assert len(sent) == 1000 and {event for event in events if isinstance(event, Action)} == set(Action)
    chats = [request.chat for request in sent]
    assert max(len(chat.ids) for chat in chats) <= limits.prompt
    assert all(set(chat.ids) <= set(VOCABULARY.tolist()) for chat in chats)
    assert {chat.salt for chat in chats} == {None, "tenant-a", "tenant-b"}
    assert len({chat.ids for chat in chats}) < 400  # texts come again, and under other salts
    assert len({(chat.ids, chat.salt) for chat in chats}) > len({chat.ids for chat in chats})
    leaving = [request for request in sent if request.leaves_after_s is not None]
    assert 20 < sum(request.aborts for request in leaving) < len(leaving) < 150
    assert any(request.stream for request in sent) and not all(request.stream for request in sent)
    beginnings = {chat.ids[:40] for chat in chats}
    assert 2 <= len(beginnings) < 100  # trees, some of them replaced
    assert {chat.shape for chat in chats} == {None, *SHAPES}
    assert not any(request.hidden for request in sent)


def test_what_only_some_servers_are_asked_for() -> None:
    events = Traffic(VOCABULARY, 0, penalties=True, hidden=True).phase(1000)
    sent = [event for event in events if isinstance(event, Request)]
    assert {request.chat.shape for request in sent} == {None, *SHAPES, *PENALTIES}
    assert 20 < sum(request.hidden for request in sent) < 100


def test_the_stock_answer_is_right_and_so_is_its_beginning() -> None:
    answer = stock_answer(PROMPT, 8, LEAD)
    assert verdict(answer) is Verdict.RIGHT
    assert verdict(Answer(answer.ids[:3], answer.logprobs[:3])) is Verdict.RIGHT
    assert verdict(Answer((), ())) is Verdict.RIGHT


def test_another_token_is_wrong_and_so_is_another_logprob() -> None:
    answer = stock_answer(PROMPT, 8, LEAD)
    assert verdict(replace(answer, ids=(*answer.ids[:4], 499, *answer.ids[5:]))) is Verdict.WRONG
    far = answer.logprobs[3] + 2 * FP32.each
    assert verdict(replace(answer, logprobs=(*answer.logprobs[:3], far, *answer.logprobs[4:]))) is Verdict.WRONG
    assert verdict(replace(answer, logprobs=(float("nan"),) * 8)) is Verdict.WRONG
    assert verdict(replace(answer, logprobs=answer.logprobs[:-1])) is Verdict.WRONG


def test_in_bf16_one_logprob_may_be_further_off_than_all_of_them() -> None:
    answer = stock_answer(PROMPT, 8, LEAD)
    for off, expected in ((3, Verdict.RIGHT), (5, Verdict.WRONG)):
        far = answer.logprobs[3] + off * BF16.mean
        one = replace(answer, logprobs=(*answer.logprobs[:3], far, *answer.logprobs[4:]))
        assert verdict(one, tolerance=BF16) is expected
    for off, expected in ((0.9, Verdict.RIGHT), (1.1, Verdict.WRONG)):
        each = replace(answer, logprobs=tuple(each - off * BF16.mean for each in answer.logprobs))
        assert verdict(each, tolerance=BF16) is expected


def after_another_token(place: int, lead: float, tokens: int = 8) -> Answer:
    """The stock answer with its second best token at one place, and what the stock server says after it."""
    answer = stock_answer(PROMPT, tokens, lead)
    token, logprob = answer.runners_up[place][-1]
    ids, logprobs = (*answer.ids[:place], token), (*answer.logprobs[:place], logprob)
    rest = stock_answer(PROMPT + ids, tokens - place - 1, lead)
    return Answer(ids + rest.ids, logprobs + rest.logprobs)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_token_that_is_as_likely_is_a_tie_if_the_rest_follows_from_it(place: int) -> None:
    answer = after_another_token(place, FP32.mean)
    assert verdict(answer, FP32.mean) is Verdict.TIE
    assert verdict(after_another_token(place, 3 * FP32.mean), 3 * FP32.mean) is Verdict.WRONG
    changed = replace(answer, ids=(*answer.ids[:-1], 499))
    assert verdict(changed, FP32.mean) is Verdict.WRONG


def test_the_first_token_may_be_lost_of_a_request_that_was_taken_back() -> None:
    answer = stock_answer(PROMPT, 8, LEAD)
    shorter = answer.after(1)
    without_logprob = replace(answer, logprobs=answer.logprobs[1:])
    for lost in (shorter, without_logprob):
        assert verdict(lost, taken_back=True) is Verdict.LOST_FIRST
        assert verdict(lost) is Verdict.WRONG
        wrong = replace(lost, ids=(*lost.ids[:-1], 499))
        assert verdict(wrong, taken_back=True) is Verdict.WRONG
    assert verdict(answer.after(2), taken_back=True) is Verdict.WRONG


@pytest.mark.parametrize("place", [0, 1, 3, 7])
def test_an_answer_with_a_tie_may_have_lost_its_first_token(place: int) -> None:
    answer = after_another_token(place, FP32.mean)
    for lost in (answer.after(1), replace(answer, logprobs=answer.logprobs[1:])):
        assert verdict(lost, FP32.mean, taken_back=True) is Verdict.LOST_FIRST
        assert verdict(lost, FP32.mean) is Verdict.WRONG
        assert verdict(replace(lost, ids=(*lost.ids[:-1], 499)), FP32.mean, taken_back=True) is Verdict.WRONG
    # Where the other token is not as likely; it is seen, since its log-probability alone is lost.
    assert verdict(replace(answer, logprobs=answer.logprobs[1:]), taken_back=True) is Verdict.WRONG
    for other in (answer.after(2), replace(answer, logprobs=answer.logprobs[2:])):
        assert verdict(other, FP32.mean, taken_back=True) is Verdict.WRONG


def test_tables(tmp_path: Path) -> None:
    counts = dict(requests=20000, judged=19000, taken_back=9, wrong=0, ties=1, lost_first=2, leaked_bytes=0, deaths=0)
    for impl, judged in (("hybrid_mla", 1), ("hybrid_mla", 19000), ("sglang_torch_native", 500)):
        case = dict(poison=False)
        metrics = {**counts, "judged": judged}
        write_record(
            tmp_path / "s", bench="soak", impl=impl, case=case, gpu="cpu", command="run", sglang="0.5", **metrics
        )
    rest = ["9", "0", "1", "2", "0", "0"]
    assert sorted(lines_of(SPECS["soak"], tmp_path / "s")[1:]) == [
        ["cpu", version("sglang"), "hybrid_mla", "one rank", "20,000", "19,000", *rest],
        ["cpu", version("sglang"), "sglang_torch_native", "one rank", "20,000", "500", *rest],
    ]
    found = dict(wrong=0, refused_otherwise=0, shared_across_salts=0, traces=[], deaths=0)
    for attack, seconds, slowdown in (("flood", 5.0, 0.05), ("invalid", None, None)):
        case = dict(attack=attack, requests=5000)
        times = dict(seconds=seconds, stock_seconds=seconds, slowdown=slowdown)
        write_record(
            tmp_path / "h", bench="hostile", impl="hybrid_mla", case=case, gpu="cpu", command="run", **times, **found
        )
    assert lines_of(SPECS["hostile"], tmp_path / "h")[1:] == [
        ["flood", "5,000", "5.0", "5.0", "+5%", *5 * "0"],
        ["invalid", "5,000", "–", "–", "–", *5 * "0"],
    ]


def test_a_soak_that_was_stopped_is_recorded_and_in_no_table(tmp_path: Path) -> None:
    outcome = Outcome(requests=5)
    outcome.verdicts["right"] = 5
    for excluded in ("stopped before its end", None):
        record(tmp_path / "s", "hybrid_mla", {}, outcome, excluded, minutes=1.0)
        assert len(rows_of(SPECS["soak"], read_records(tmp_path / "s"))) == (excluded is None)


def test_the_cost_of_checks_is_between_medians(tmp_path: Path) -> None:
    """Rounds in turn, of which one was disturbed."""
    path, merges, case = tmp_path / "shadow", tmp_path / "watch", dict(heads=128, layers=4, prompt=7069, concurrency=8)
    of_all = dict(impl="hybrid_mla", gpu="G", command="run")
    for plain, checked, often in ((4.0, 4.01, 4.03), (9.0, 4.02, 4.04), (4.0, 4.02, 4.04)):
        of_steps = (plain, {}), (checked, dict(verify_interval=1000)), (often, dict(verify_interval=10))
        for step_ms, more in of_steps:
            write_record(path, bench="serving", case=case | more, step_ms=step_ms, **of_all)

    def record_merge(requests: int, apart: float) -> None:
        of_merge = dict(case=dict(heads=128, requests=requests), merge_us=1, merge_watched_us=1, difference_us=apart)
        write_record(merges, bench="watch", **of_merge, **of_all)

    def rows() -> list[list[str]]:
        return [line[4:] for line in lines_of(specs()["docs/operating.md"]["shadow"], path, merges)[1:]]

    record_merge(16, 9.0)  # of other batches
    assert rows() == [["4.000", "4.020", "+0.50%"], ["4.000", "4.040", "+1.00%"]]
    record_merge(8, 0.5)  # four read 2 us of 4 ms, 0.05 %, in every step; the rest of 1 % comes a hundredth as often
    assert rows() == [["4.000", "4.020", "+0.50%", "+0.50%"], ["4.000", "4.040", "+1.00%", "+0.06%"]]


def test_an_answer_whose_tokens_depend_on_those_before_is_judged_to_the_first_tie() -> None:
    """Tokens behind it are not compared. A token that the stock answer clearly leads is wrong, and so is one that is
    not among its runners-up."""
    runners_up = (((9, -1.3), (8, -4.0)),) * 3
    expected = Answer((1, 2, 3), (-1.0, -1.0, -1.0), runners_up)
    for ids, verdict in (
        ((1, 2), Verdict.RIGHT),
        ((1, 9, 77), Verdict.TIE),
        ((1, 8, 3), Verdict.WRONG),
        ((1, 5, 3), Verdict.WRONG),
    ):
        assert judge_to_first_tie(Answer(ids, (-1.0,) * len(ids)), expected, BF16) is verdict
    for logprobs in ((-1.0, -4.0, -1.3), (-1.0, -1.0, -4.0)):  # before the tie, and of the token itself
        assert judge_to_first_tie(Answer((1, 2, 9), logprobs), expected, BF16) is Verdict.WRONG
