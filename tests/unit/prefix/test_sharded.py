"""What ranks shard is the same on all of them, whatever each of them does: random lives of ranks in threads, which
meet where they exchange something."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sharded_ranks import CHUNK, OTHER, SYSTEM, Meeting, Rank, make, member_of, names_of, together, without_ids

from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.report import MOST_NAMES, Report
from sglang_mla_ext.reasons import NotSharded


@pytest.mark.parametrize(("seed", "count"), [(0, 3), (1, 3), (2, 3), (3, 3), (4, 2), (5, 4)])
def test_ranks_agree_whatever_each_does(seed: int, count: int) -> None:
    """Requests join and leave, on ranks whose memory differs; ranks are idle, fail, are flushed and find a prefix
    wrong, alone. Prompts share beginnings and diverge anywhere."""
    rng = random.Random(seed)
    meeting = Meeting(count)
    ranks = [Rank(rank, meeting, member_of(rank, count, chunks=rng.choice([3, 6, 40]))) for rank in range(count)]
    shared = 0
    for _ in range(40):
        for rank in ranks:
            for _ in range(rng.randrange(3)):
                start = rng.choice([SYSTEM, OTHER, SYSTEM + OTHER, ()])
                own = tuple(rng.randrange(1000, 1003) for _ in range(rng.randrange(2 * CHUNK)))
                rank.running.append(start[: rng.randrange(len(start) + 1)] + own if rng.random() < 0.2 else start + own)
            rank.running = [each for each in rank.running if rng.random() < 0.8][:8]
            rank.willing = rng.random() < 0.95
            if rng.random() < 0.05:
                rank.prefixes.forget()
            if rng.random() < 0.02 and rank.prefixes.held():
                rank.prefixes.distrust(rng.choice(rank.prefixes.held())[1])
        if any(rank.running for rank in ranks):
            plans = together(ranks)
            shared += plans[0] is not None and bool(plans[0].segments)
    assert shared and not any(rank.failures for rank in ranks)


def test_a_prefix_is_sharded_when_every_rank_has_it() -> None:
    """One request on each of two ranks is enough. It stays sharded when it has left one of them."""
    ranks = make(2)
    ranks[0].running, ranks[1].running = [SYSTEM, SYSTEM], [OTHER]
    for _ in range(4):
        assert together(ranks)[0].segments == ()
    assert not any(rank.memory for rank in ranks)
    ranks[0].running, ranks[1].running = [SYSTEM], [(*SYSTEM, 1, 2)]
    lens = [max((each.end for each in together(ranks)[1].segments), default=0) for _ in range(4)]
    assert lens == [0, 0, 2 * CHUNK, 4 * CHUNK], "two chunks a step, once all have said what they have"
    exchanges = ranks[0].meeting.exchanges
    plan = together(ranks)[0]
    assert together(ranks)[0] is plan and ranks[0].meeting.exchanges == exchanges + 2, "one each: nothing has changed"
    shown = ranks[1].prefixes.shown_segments()
    assert [(each.start, each.end, each.holders, each.mode, each.chunks) for each in shown] == [(0, 16, 1, "naive", 4)]
    assert ranks[1].prefixes.shown_segments() == shown
    ranks[0].running, ranks[1].running = [SYSTEM, SYSTEM], []
    assert without_ids(together(ranks)[1].segments) == [((0, 1), 0, 4 * CHUNK)]
    assert [rank.prefixes._counters.expansions for rank in ranks] == [1, 1]
    ranks[1].prefixes.forget()
    assert together(ranks) == [None, None] and ranks[0].refused is NotSharded.RANK_PAUSED
    assert not any(rank.prefixes.pool.used_chunks for rank in ranks), "all forget with one"
    assert together(ranks)[0].segments == ()
    ranks[1].running = [SYSTEM]
    lens = [max((each.end for each in together(ranks)[1].segments), default=0) for _ in range(4)]
    assert lens == [0, 0, 2 * CHUNK, 4 * CHUNK]
    ranks = make(2)
    for rank in ranks:
        rank.running = [SYSTEM]
    together(ranks)
    ranks[1].prefixes.forget()  # and what it tells stays the same
    assert together(ranks) == [None, None]
    assert [bool(together(ranks)[0].segments) for _ in range(3)] == [False, False, True]


def test_what_one_rank_forgets_does_not_keep_two_prompts_apart() -> None:
    """Memory holds one of two prompts. The second one is worth more, but not so much that it takes the first one's
    place; a rank whose memory is empty would give it to the second one, and then no rank could share any."""
    second = tuple(range(100, 100 + len(SYSTEM)))
    ranks = make(2, chunks=4)
    for rank in ranks:
        rank.running = [SYSTEM] * 5
    while not (plan := together(ranks)[0]).segments:
        pass
    for rank in ranks:
        rank.running += [second] * 6
    for _ in range(3):
        plan = together(ranks)[0]
    assert [(len(each.rows), each.end) for each in plan.segments] == [(10, len(SYSTEM))]
    ranks[1].prefixes.forget()
    plans = [together(ranks)[0] for _ in range(6)]
    assert plans[0] is None and [(len(each.rows), each.end) for each in plans[-1].segments] == [(12, len(second))]


def test_a_report_is_made_where_something_has_changed() -> None:
    (rank,) = make(1)
    rank.running = [SYSTEM, SYSTEM]
    while not together([rank])[0].segments:
        pass
    together([rank])
    paths, rows = rank.given()
    first = rank.member.report(paths, rows)
    assert rank.member.report([*paths], [*rows]) is first
    for changed in ((paths[:1], rows[:1]), (paths, [2, 1]), ([paths[0], paths[1][:1]], rows)):
        assert rank.member.report(*changed) != first
    again = rank.member.report(paths, rows)
    rank.prefixes.distrust([paths[0][1]])
    assert rank.member.report(paths, rows) != again == first


def test_a_step_of_more_rows_is_planned_anew() -> None:
    """What a row of another rank is called depends on how many each has."""
    ranks = make(2)
    for rank in ranks:
        rank.running = [SYSTEM]
    while not together(ranks)[0].segments:
        pass
    for each in (1, 4, 2):
        plan = together(ranks, each)[0]
        assert plan.each == each and {segment.rows for segment in plan.segments} == {(0, each)}


def test_a_failure_on_one_rank_is_everyones_in_that_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make(2)
    for rank in ranks:
        rank.running = [SYSTEM]
    while not together(ranks)[0].segments:
        pass
    together(ranks)

    def broken(*args: object) -> None:
        raise MemoryError("no")

    for name in ("report", "agree"):
        ranks[1].running.append(OTHER)  # there is something to agree on
        with monkeypatch.context() as patched:
            patched.setattr(ranks[1].member, name, broken)
            assert together(ranks) == [None, None] and ranks[0].refused == NotSharded.RANK_PAUSED
        assert together(ranks)[0].segments
    assert len(ranks[1].failures) == 2 and not ranks[0].failures
    ranks[0].willing = False
    assert together(ranks) == [None, None]
    ranks[0].willing, ranks[0].running = True, [SYSTEM, SYSTEM]
    tokens = [1, len(ranks[1].running)]  # as SGLang says, and not what the rank tells
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda rank: rank.step(tokens), ranks)) == [None, None]


def sharing(ranks: list[Rank], prompt: tuple[int, ...] = SYSTEM) -> list[Rank]:
    """The ranks, when each has a request with a prompt that they share."""
    for rank in ranks:
        rank.running = [prompt]
    while not together(ranks)[0].segments:
        pass
    return ranks


def other_rows(plan: ShardedPlan) -> ShardedPlan:
    (segment,) = plan.segments
    return replace(plan, segments=(replace(segment, rows=segment.rows[:-1]),))


CHANGES: dict[str, Callable[[ShardedPlan], ShardedPlan]] = {
    "nothing": lambda plan: replace(plan, segments=(), names=()),
    "segments": lambda plan: replace(plan, segments=()),
    "rows": other_rows,
    "end": lambda plan: replace(plan, segments=(replace(plan.segments[0], end=plan.segments[0].end - 1),)),
    "names": lambda plan: replace(plan, names=(plan.names[0][::-1],)),
    "each": lambda plan: replace(plan, each=plan.each + 1),
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_that_is_another_one_on_one_rank_is_shared_by_none(
    change: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = sharing(make(count))
    ranks[0].running.append(OTHER)  # there is something to agree on
    agree = ranks[-1].member.agree
    with monkeypatch.context() as patched:
        patched.setattr(ranks[-1].member, "agree", lambda *args: CHANGES[change](agree(*args)))
        for _ in range(2):
            assert together(ranks) == [None] * count
            assert {rank.refused for rank in ranks} == {NotSharded.PLANS_DIFFER}
    assert together(ranks)[0].segments and not any(rank.failures for rank in ranks)


@pytest.mark.parametrize(
    "unlike",
    [{"min_prefix_len": 100 * CHUNK}, {"mode": "auto"}],
    ids=str,
)
def test_ranks_with_other_rules_share_nothing(unlike: dict[str, object]) -> None:
    """Who wants nothing comes to no vote for a few steps, and who wants something would wait for it there."""
    meeting = Meeting(2)
    ranks = [Rank(rank, meeting, member_of(rank, 2, **unlike if rank else {})) for rank in range(2)]
    for rank in ranks:
        rank.running = [SYSTEM]
    for _ in range(3):
        assert together(ranks) == [None, None]
        assert [rank.refused for rank in ranks] == [NotSharded.PLANS_DIFFER] * 2
    assert ranks[1].member.asks_for_nothing and not ranks[0].member.asks_for_nothing
    for rank in ranks:
        rank.running = [OTHER[: CHUNK - 1]]  # nothing is worth anything to either of them
    assert together(ranks)[0].segments == ()


def test_ranks_with_rates_of_other_gpus_share_nothing() -> None:
    """Of 90 requests that have 8,192 tokens in common, on an H200 and an H100."""
    meeting, ranks = Meeting(2), []
    for rank, gpu in enumerate(("h200", "h100")):
        found = member_of(rank, 2, mode="auto", per_step=1 << 15, chunk=256, gpu=gpu)
        ranks.append(Rank(rank, meeting, found, [tuple(range(8192))] * 45))
    assert together(ranks) == [None, None] and ranks[0].refused == NotSharded.PLANS_DIFFER
    assert [rank.member.asks_for_nothing for rank in ranks] == [False, True]


def test_nobody_overwrites_what_a_plan_still_reads() -> None:
    """Memory goes to a prefix that is worth more while the one that had it is shared, and nobody's batch changes: the
    plan is another one from the step on in which the first chunk is given away."""
    ranks = sharing(make(2, chunks=4))
    for rank in ranks:
        rank.running += [OTHER] * 3
    for step in range(4):
        plan = together(ranks)[0]  # checks what stands in each chunk
        if step == 0:
            assert without_ids(plan.segments) == [((0, 4), 0, 4 * CHUNK)], "still there"
    assert [segment.end for segment in plan.segments if len(segment.rows) == 6] == [3 * CHUNK]
    assert all(rank.prefixes._counters.evictions for rank in ranks) and not any(rank.failures for rank in ranks)


@pytest.mark.parametrize("cut", range(4))
def test_a_chunk_that_is_distrusted_is_never_shared_again(cut: int) -> None:
    """On no rank, though one alone has found it wrong; what is before it stays shared."""
    ranks = sharing(make(2))
    while together(ranks)[0].segments[0].end < 4 * CHUNK:
        pass
    distrusted = names_of(SYSTEM, CHUNK)[cut]
    ranks[1].prefixes.distrust([distrusted])
    for step in range(6):
        plan = together(ranks)[0]
        assert not any(distrusted in path for path in plan.names)
        assert without_ids(plan.segments) == ([((0, 1), 0, cut * CHUNK)] if cut else []), step
        assert distrusted not in ranks[1].member.report(*ranks[1].given()).names
    ranks[0].running, ranks[1].running = [SYSTEM, SYSTEM], [SYSTEM, OTHER]
    for _ in range(4):
        assert not any(distrusted in path for path in together(ranks)[0].names)


def test_few_requests_on_many_ranks_share_by_cost() -> None:
    """Eight ranks with 32 requests each, of 26,000 tokens: the cost model has all of them attend together, where so
    few share nothing on a rank of its own."""
    meeting = Meeting(8)
    prompt = tuple(range(26_000))
    ranks = []
    for rank in range(8):
        found = member_of(rank, 8, mode="auto", per_step=1 << 15, chunk=256)
        ranks.append(Rank(rank, meeting, found, [prompt] * 32))
    alone = CostModel(ModelDims.of("deepseek-v3"), 128, GpuRates.from_json("h200"))
    assert break_even.smallest_profitable_group(alone, 26_000) > 32
    plan = [together(ranks)[3] for _ in range(3)][-1]
    assert without_ids(plan.segments) == [(tuple(range(8 * 32)), 0, 16_384)]  # what memory holds
    assert plan.mine.prefix_lens == (16_384,) * 32


def test_private_histories_do_not_keep_others_from_sharing() -> None:
    """Reports that they fill leave no room for the second prompt, until they are cut; also one that comes later."""

    def histories(first: int, prompt: tuple[int, ...], chunks: int) -> list[tuple[int, ...]]:
        return [prompt + (1000 + first + request,) * (chunks * CHUNK) for request in range(4)]

    each = MOST_NAMES // 6
    meeting, ranks = Meeting(2), []
    for rank in range(2):
        running = [*histories(10 * rank, SYSTEM, each), *histories(10 * rank + 5, OTHER, each)]
        ranks.append(Rank(rank, meeting, member_of(rank, 2, chunks=64), running))

    def shared() -> list[tuple[int, int]]:
        plan = [together(ranks)[0] for _ in range(6)][-1]
        return sorted((len(segment.rows), segment.end) for segment in plan.segments)

    assert shared() == sorted((8, len(prompt)) for prompt in (SYSTEM, OTHER))
    for rank in ranks:
        assert len(rank.reports._report[1].names) < 100, "only what may be shared soon"
        rank.running.append(SYSTEM + (2000 + rank.rank,) * (each * CHUNK))
    assert shared() == sorted([(10, len(SYSTEM)), (8, len(OTHER))])


def test_reports_travel_as_integers() -> None:
    paths, held = [names_of(SYSTEM, CHUNK), names_of(SYSTEM + OTHER, CHUNK), ()], names_of(OTHER, CHUNK)
    report = Report.of(paths, [1, 3, 1], held)
    assert len(report.names) == 7 and report.deepest == (3, 6, -1) and set(report.held) == set(held)
    assert Report.from_words([*report.words(), 0, 0]) == report
    long = names_of(tuple(range(3 * MOST_NAMES)), 1)
    cut = Report.of([long, names_of(OTHER, CHUNK), long], [1, 1, 1], [])
    assert len(cut.names) == MOST_NAMES and cut.deepest == (MOST_NAMES - 1, -1, MOST_NAMES - 1)
