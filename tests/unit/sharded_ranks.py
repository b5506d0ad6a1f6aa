"""Ranks that shard prefixes, in threads that meet where they exchange something."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.planner import Planner
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.sharded.member import Member
from sglang_mla_ext.prefix.sharded.names import Names, chunk_names
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.reports import Reports
from sglang_mla_ext.prefix.sharded.vote import Vote
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.reasons import NotSharded
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


def member_of(
    rank: int,
    ranks: int,
    chunks: int = 64,
    mode: str = "naive",
    per_step: int = 8,
    chunk: int = CHUNK,
    min_prefix_len: int = CHUNK,
    gpu: str = "h200",
) -> tuple[Sharing, Reports, Member]:
    cost = CostModel(ModelDims.of("deepseek-v3"), 128, GpuRates.from_json(gpu), ranks=ranks)
    options = HybridMLAOptions(min_prefix_len=min_prefix_len, mode=mode, expand_tokens_per_step=per_step)
    pool, counters = ExpandedPool(chunks, chunk), Counters()
    planner = Planner(options, cost, Capacity(256, 2 * 64 * ranks), chunk, counters)
    reports = Reports(pool, lambda names: names, per_step // chunk)
    sharing = Sharing(reports, pool, planner, None, counters, shortest=1)
    return sharing, reports, Member(sharing, reports, rank)


@dataclass
class Rank:
    """One scheduler. `memory` is what stands in each chunk on its device: the name that was expanded there."""

    rank: int
    meeting: Meeting
    parts: tuple[Sharing, Reports, Member]
    running: list[tuple[int, ...]] = field(default_factory=list)  # prompts
    failures: list[str] = field(default_factory=list)
    memory: dict[int, bytes] = field(default_factory=dict)
    willing: bool = True
    refused: NotSharded | None = None  # why the last step shared nothing

    def __post_init__(self) -> None:
        self.prefixes, self.reports, self.member = self.parts
        self.prefixes.expansion._expander = self
        self.vote = Vote(self.member)

    def fail(self, what: str, error: Exception) -> None:
        self.failures.append(f"{what}: {error}")

    @property
    def chunk(self) -> int:
        return self.prefixes.pool.chunk_tokens

    def names_of(self, request: int) -> Names:
        return names_of(self.running[request], self.chunk)

    def given(self) -> tuple[list[Names], list[int]]:
        return [self.names_of(request) for request in range(len(self.running))], [1] * len(self.running)

    def expand(self, node: bytes, node_end: int, start: int, end: int, chunks: Sequence[int]) -> None:
        prompt = self.names_of(self.reports.holder(node))
        of_chunks = prompt[start // self.chunk : end // self.chunk]
        assert of_chunks[-1] == node and node_end == end
        self.memory.update(zip(chunks, of_chunks, strict=True))

    def step(self, tokens: Sequence[int], each: int | None = None) -> ShardedPlan | None:
        given = self.given if self.willing else None
        gather = self.meeting.gather(self.rank)
        decided = self.vote.hold(given, tokens, each or max(tokens), gather, self.fail)
        plan, self.refused = (None, decided) if isinstance(decided, NotSharded) else (decided, None)
        self.member.begin(plan)
        if plan is not None:
            self.member.expand()
        return plan


def together(ranks: Sequence[Rank], each: int | None = None) -> list[ShardedPlan | None]:
    """A step of all; `each`: rows that every rank has, by default as many as the one with the most."""
    tokens = [len(rank.running) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as threads:
        plans = list(threads.map(lambda rank: rank.step(tokens, each), ranks))
    check(ranks, plans)
    return plans


def without_ids(segments: Sequence[Segment]) -> list[tuple[tuple[int, ...], int, int]]:
    return [(segment.rows, segment.start, segment.end) for segment in segments]


def check(ranks: Sequence[Rank], plans: Sequence[ShardedPlan | None]) -> None:
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


def make(count: int, **arguments: Any) -> list[Rank]:
    meeting = Meeting(count)
    return [Rank(rank, meeting, member_of(rank, count, **arguments)) for rank in range(count)]


SYSTEM, OTHER = tuple(range(4 * CHUNK)), tuple(range(100, 100 + 3 * CHUNK))
