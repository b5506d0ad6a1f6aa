"""What ranks spread is the same on all of them, whatever each of them does: random lives of ranks in threads, which
meet where they exchange something."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.cost_model import CostModel
from sglang_mla_ext.prefix.expanded_pool import ExpandedPool
from sglang_mla_ext.prefix.gpu_rates import GpuRates
from sglang_mla_ext.prefix.model_dims import ModelDims
from sglang_mla_ext.prefix.planner import Capacity
from sglang_mla_ext.prefix.spread.names import Names, chunk_names
from sglang_mla_ext.prefix.spread.plan import SpreadPlan
from sglang_mla_ext.prefix.spread.prefixes import SpreadPrefixes
from sglang_mla_ext.prefix.spread.report import MOST_NAMES, Report
from sglang_mla_ext.prefix.spread.vote import Vote
from sglang_mla_ext.segment import Segment

CHUNK = 4
KEY = bytes(range(32))


@functools.cache
def names_of(prompt: tuple[int, ...], chunk: int) -> Names:
    return chunk_names(prompt, None, chunk, KEY)


class Meeting:
    """Where ranks exchange integers; one that comes alone, or brings another number of them, is an error on all."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=10)
        self._said: list[Sequence[int]] = [()] * ranks
        self.exchanges = 0

    def gather(self, rank: int) -> Callable[[Sequence[int]], Sequence[Sequence[int]]]:
        def exchange(mine: Sequence[int]) -> Sequence[Sequence[int]]:
            self._said[rank] = mine
            self._barrier.wait()
            found = list(self._said)
            self.exchanges += rank == 0
            self._barrier.wait()
            assert len({len(each) for each in found}) == 1
            return found

        return exchange


def prefixes(
    rank: int, ranks: int, chunks: int = 64, mode: str = "naive", per_step: int = 8, chunk: int = CHUNK
) -> SpreadPrefixes:
    cost = CostModel(ModelDims.from_json("deepseek-v3"), 128, GpuRates.from_json("h200"), ranks=ranks)
    options = HybridMLAOptions(min_prefix_len=CHUNK, mode=mode, expand_tokens_per_step=per_step)
    capacity = Capacity(256, 2 * 64 * ranks)
    return SpreadPrefixes(options, cost, ExpandedPool(chunks, chunk), Counters(), rank=rank, capacity=capacity)


@dataclass
class Rank:
    """One scheduler. `memory` is what stands in each chunk on its device: the name that was expanded there."""

    rank: int
    meeting: Meeting
    prefixes: SpreadPrefixes
    running: list[tuple[int, ...]] = field(default_factory=list)  # prompts
    failures: list[str] = field(default_factory=list)
    memory: dict[int, bytes] = field(default_factory=dict)
    willing: bool = True
    refused: str | None = None  # why the last step shared nothing

    def __post_init__(self) -> None:
        def fail(what: str, error: Exception) -> None:
            self.failures.append(f"{what}: {error}")

        self.vote = Vote(self.prefixes, self.meeting.gather(self.rank), fail)

    @property
    def chunk(self) -> int:
        return self.prefixes.pool.chunk_tokens

    def names_of(self, request: int) -> Names:
        return names_of(self.running[request], self.chunk)

    def given(self) -> tuple[list[Names], list[int]]:
        return [self.names_of(request) for request in range(len(self.running))], [1] * len(self.running)

    def step(self, tokens: Sequence[int], each: int | None = None) -> SpreadPlan | None:
        decided = self.vote.decide(self.given if self.willing else None, tokens, each or max(tokens))
        plan, self.refused = (None, decided) if isinstance(decided, str) else (decided, None)
        self.prefixes.begin(plan)
        if plan is not None:
            for piece in self.prefixes.pieces():
                prompt = self.names_of(piece.request)
                for chunk in piece.chunks:
                    assert prompt[chunk.index] == chunk.node
                    self.memory[chunk.id] = chunk.node
                self.prefixes.expanded(piece)
        return plan


def together(ranks: Sequence[Rank], each: int | None = None) -> list[SpreadPlan | None]:
    """A step of all; `each`: rows that every rank has, by default as many as the one with the most."""
    tokens = [len(rank.running) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as threads:
        plans = list(threads.map(lambda rank: rank.step(tokens, each), ranks))
    check(ranks, plans)
    return plans


def without_ids(segments: Sequence[Segment]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(segment.rows, segment.start, segment.end) for segment in segments]


def check(ranks: Sequence[Rank], plans: Sequence[SpreadPlan | None]) -> None:
    """All ranks share the same; what rows share are tokens that they have, in chunks that hold them on every rank; and
    what the ranks' own plans say is a part of that."""
    assert len({rank.refused for rank in ranks}) == 1
    if any(plan is None for plan in plans):
        assert plans == [None] * len(plans)
        return
    first = plans[0]
    assert all(without_ids(plan.segments) == without_ids(first.segments) for plan in plans)
    shared: dict[int, int] = {}
    for segment in first.segments:
        assert len(segment.rows) > 1
        for row in segment.rows:
            assert shared.get(row, 0) == segment.start, "segments of a row adjoin"
            shared[row] = segment.end
    for rank, plan in zip(ranks, plans, strict=True):
        for segment in plan.segments:
            for row in segment.rows:
                of, index = divmod(row, plan.each)
                names = ranks[of].names_of(index)
                stored = [rank.memory[chunk] for chunk in segment.chunks]
                assert stored == list(names[segment.start // rank.chunk : segment.end // rank.chunk])
        lens = [shared.get(rank.rank * plan.each + row, 0) for row in range(len(rank.running))]
        assert list(plan.mine.prefix_lens) == lens


def make(count: int, **arguments: int) -> list[Rank]:
    meeting = Meeting(count)
    return [Rank(rank, meeting, prefixes(rank, count, **arguments)) for rank in range(count)]


SYSTEM, OTHER = tuple(range(4 * CHUNK)), tuple(range(100, 100 + 3 * CHUNK))


@pytest.mark.parametrize("seed", range(4))
def test_ranks_agree_whatever_each_does(seed: int) -> None:
    """Requests join and leave, on ranks whose memory differs; ranks are idle, fail, are flushed and find a prefix
    wrong, alone. Prompts share beginnings and diverge anywhere."""
    rng = random.Random(seed)
    meeting = Meeting(3)
    ranks = [Rank(rank, meeting, prefixes(rank, 3, chunks=rng.choice([3, 6, 40]))) for rank in range(3)]
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


def test_a_prefix_is_spread_when_every_rank_has_it() -> None:
    """One request on each of two ranks is enough. It stays spread when it has left one of them."""
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
    assert together(ranks)[0].segments == ()
    ranks[1].running = [SYSTEM]
    lens = [max((each.end for each in together(ranks)[1].segments), default=0) for _ in range(4)]
    assert lens == [0, 0, 2 * CHUNK, 4 * CHUNK]
    ranks = make(2)
    for rank in ranks:
        rank.running = [SYSTEM]
    together(ranks)
    ranks[1].prefixes.forget()  # and what it tells stays the same
    assert [bool(together(ranks)[0].segments) for _ in range(3)] == [False, False, True]


def test_a_report_is_made_where_something_has_changed() -> None:
    (rank,) = make(1)
    rank.running = [SYSTEM, SYSTEM]
    while not together([rank])[0].segments:
        pass
    together([rank])
    paths, rows = rank.given()
    first = rank.prefixes.report(paths, rows)
    assert rank.prefixes.report([*paths], [*rows]) is first
    for changed in ((paths[:1], rows[:1]), (paths, [2, 1]), ([paths[0], paths[1][:1]], rows)):
        assert rank.prefixes.report(*changed) != first
    again = rank.prefixes.report(paths, rows)
    rank.prefixes.distrust([paths[0][1]])
    assert rank.prefixes.report(paths, rows) != again == first


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
            patched.setattr(ranks[1].prefixes, name, broken)
            assert together(ranks) == [None, None]
        assert together(ranks)[0].segments
    assert len(ranks[1].failures) == 2 and not ranks[0].failures
    ranks[0].willing = False
    assert together(ranks) == [None, None]
    ranks[0].willing, ranks[0].running = True, [SYSTEM, SYSTEM]
    tokens = [1, len(ranks[1].running)]  # as SGLang says, and not what the rank tells
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda rank: rank.step(tokens), ranks)) == [None, None]


def test_few_requests_on_many_ranks_share_by_cost() -> None:
    """Eight ranks with 32 requests each, of 26,000 tokens: the cost model has all of them attend together, where so
    few share nothing on a rank of its own."""
    meeting = Meeting(8)
    prompt = tuple(range(26_000))
    ranks = []
    for rank in range(8):
        found = prefixes(rank, 8, mode="auto", per_step=1 << 15, chunk=256)
        ranks.append(Rank(rank, meeting, found, [prompt] * 32))
    alone = CostModel(ModelDims.from_json("deepseek-v3"), 128, GpuRates.from_json("h200"))
    assert alone.smallest_profitable_group(26_000) > 32
    plan = [together(ranks)[3] for _ in range(3)][-1]
    assert without_ids(plan.segments) == [(tuple(range(8 * 32)), 0, 16_384)]  # what memory holds
    assert plan.mine.prefix_lens == (16_384,) * 32


def test_reports_travel_as_integers() -> None:
    paths, held = [names_of(SYSTEM, CHUNK), names_of(SYSTEM + OTHER, CHUNK), ()], names_of(OTHER, CHUNK)
    report = Report.of(paths, [1, 3, 1], held)
    assert len(report.names) == 7 and report.deepest == (3, 6, -1) and set(report.held) == set(held)
    assert Report.from_words([*report.words(), 0, 0]) == report
    long = names_of(tuple(range(3 * MOST_NAMES)), 1)
    cut = Report.of([long, names_of(OTHER, CHUNK), long], [1, 1, 1], [])
    assert len(cut.names) == MOST_NAMES and cut.deepest == (MOST_NAMES - 1, -1, MOST_NAMES - 1)
