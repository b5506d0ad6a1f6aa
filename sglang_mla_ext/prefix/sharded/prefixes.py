"""A rank's part in prefixes that are spread over ranks: what it tells the others, what it expands of what all of them
share, and what a step shares.

    prefixes.report(paths, rows)     # before a step; given to all ranks
    plan = prefixes.agree(reports)   # of all ranks: alike on all of them, but for the ids of chunks
    for piece in prefixes.pieces():  # to be expanded; what is, the next report says
        ...
        prefixes.expanded(piece)

Chunks are known by names (names.py), so no tree is asked: neither what is evicted from it nor how its nodes are cut
matters. What a step shares every rank has expanded, and has said so before; so memory may differ from rank to rank, and
one that has dropped a chunk says that before it writes over it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import count
from typing import Any, NamedTuple

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.memory.allocation import allocation_requests
from sglang_mla_ext.prefix.memory.pool import Chunk, ExpandedPool, Want
from sglang_mla_ext.prefix.planner.branches import Part
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Ways, whole
from sglang_mla_ext.prefix.planner.gains import Gains
from sglang_mla_ext.prefix.planner.plan import Plan, plan_step
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.segments import ShownSegment, shown_segments
from sglang_mla_ext.prefix.sharded.agreement import Agreement
from sglang_mla_ext.prefix.sharded.names import Name, Names
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.report import Report
from sglang_mla_ext.segment import Mode, Segment


class Piece(NamedTuple):
    """Consecutive chunks to expand.

    Attributes:
        request: of this rank's last report, that has them.
        chunks: in order.
        completes: whether all of a range that is wanted is expanded with it.
    """

    request: int
    chunks: tuple[Chunk, ...]
    completes: bool = False


class _Chunks:
    """The tree (`prefix.tree.Tree`) as the pool asks for it: nodes are names, of one chunk each. What nobody wants any
    more counts as held by nobody."""

    def __init__(self, chunk_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens

    def length(self, node: Any) -> int:
        return self.chunk_tokens

    def holders(self, node: Any) -> int:
        return 0


class SpreadPrefixes:
    """See the module. Where the adapter asks what a server shares, it stands in the place of SharedPrefixes."""

    def __init__(
        self,
        options: HybridMLAOptions,
        cost: CostModel,
        pool: ExpandedPool,
        counters: Counters,
        *,
        rank: int,
        capacity: Capacity,
    ) -> None:
        """
        Args:
            cost: with as many ranks as there are.
            rank: this one.
            capacity: of a step of all ranks.
        """
        self._options, self._cost, self._pool, self._counters = options, cost, pool, counters
        self._rank, self._capacity = rank, capacity
        self._chunks = _Chunks(pool.chunk_tokens)
        self._paths: Sequence[Names] = ()  # of the last report
        self._report: tuple[Any, Report] | None = None  # what it was made from, and it
        self._held: tuple[int, list[Name]] = -1, []  # version of the pool, and names of what it has expanded
        self._agreement: Agreement | None = None
        self._wants: list[Want] = []
        self._settled = True  # whether memory is given to what is wanted, and all of that is expanded
        self._pieces: list[Piece] = []
        self._distrusted: set[Hashable] = set()
        self._shown: ShardedPlan | None = None
        self._numbers: dict[tuple[Hashable, int], int] = {}
        self._next_number = count(1)
        self.tokens_without_memory = 0
        """That were worth expanding when last looked at, and for which there was no memory on this rank."""

    # ---- before a step

    def report(self, paths: Sequence[Names], rows: Sequence[int]) -> Report:
        """What this rank tells the others; the report of the step before, if it is the same. Memory for what was wanted
        of the last step is given first: what is dropped for it, no step from now on has.

        Args:
            paths: `[requests]` names of the chunks of each prompt whose latent rows are there.
            rows: `[requests]` of each in the step.
        """
        self._paths = [self._trusted(path) for path in paths]
        if not self._settled:
            self._allot()
        held = self._expanded_names()
        # In most steps, where only the same lists are compared.
        if self._report is None or self._report[0] != (self._paths, rows, held):
            self._report = (self._paths, rows, held), Report.of(self._paths, rows, held)
        return self._report[1]

    def agree(self, reports: Sequence[Report], each: int) -> ShardedPlan:
        """What the step shares, from the reports of all ranks.

        Args:
            each: rows that every rank has, some of them padding.
        """
        agreement = Agreement.of(reports, self._pool.chunk_tokens, self._cost.query_tokens)
        branches, everywhere = agreement.branches, agreement.everywhere
        gains = Gains.of(self._options, self._cost, naive=True, grouped=False, step_tokens=branches.tokens)
        ways = Ways(gains.naive, None, self._pool.chunk_tokens, 1, self._options.min_prefix_len)

        def expanded(index: int) -> int:
            reach = 0
            for name, end in zip(branches[index].nodes, branches[index].ends, strict=True):
                if name not in everywhere:
                    break
                reach = end
            return reach

        parts, dropped = plan_step(branches, ways, expanded, gains.launch, self._capacity)
        if dropped:
            self._counters.fall_back("more groups than a step has room for")
        ideal, _ = plan_step(branches, ways, whole(branches), gains.launch, self._capacity)
        plan = self._plan_of(agreement, parts, each)
        self._agreement, self._wants, self._settled = agreement, allocation_requests(ideal, branches, ways), False
        return plan

    def fingerprint_of(self, plan: ShardedPlan) -> int:
        """See ShardedPlan.fingerprint: of a plan of the last agreement, with the requests for memory of that."""
        return plan.fingerprint(self._wants)

    @property
    def wants_nothing(self) -> bool:
        """Whether the last agreement found nothing that is worth sharing; the same on all ranks whose fingerprints
        are."""
        return not self._wants

    @property
    def has_agreed(self) -> bool:
        """Whether it knows what all ranks want; not when everything has been forgotten since."""
        return self._agreement is not None

    def begin(self, plan: ShardedPlan | None) -> None:
        """The step that comes shares this."""
        self._shown = plan

    def pieces(self) -> list[Piece]:
        """What this rank is to expand in the step that comes, once."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def expanded(self, piece: Piece) -> None:
        """A piece has been expanded, before the step."""
        size = self._pool.chunk_tokens
        for chunk in piece.chunks:
            self._pool.fill(chunk, (chunk.index + 1) * size)
        self._counters.expanded_tokens += size * len(piece.chunks)
        self._counters.expansions += piece.completes

    def _trusted(self, path: Names) -> Names:
        if self._distrusted:
            cut = next((at for at, name in enumerate(path) if name in self._distrusted), len(path))
            return path[:cut]
        return path

    def _expanded_names(self) -> list[Name]:
        size, version = self._pool.chunk_tokens, self._pool.version
        if self._held[0] != version:
            names = [chunk.node for chunk in self._pool.chunks() if chunk.filled == (chunk.index + 1) * size]
            self._held = version, names
        return self._held[1]

    def _plan_of(self, agreement: Agreement, parts: Sequence[Part], each: int) -> ShardedPlan:
        branches, size = agreement.branches, self._pool.chunk_tokens
        mine = agreement.requests_of(self._rank)
        of_all, of_mine, own, names = [], [], [], []
        for index, part in enumerate(parts):
            nodes, ends = branches.nodes_of(part)
            in_part = tuple(node for node, end in zip(nodes, ends, strict=True) if part.start < end <= part.end)
            ids = tuple(self._pool.chunk(name, part.start // size + at).id for at, name in enumerate(in_part))
            segment = branches.segment(part, ids)
            rows: list[int] = []
            for rank, of_rank in enumerate(agreement.rows):
                requests = agreement.requests_of(rank)
                for request in segment.rows:
                    if request in requests:
                        rows += (rank * each + row for row in of_rank.of_request(request - requests.start))
            of_all.append(Segment(tuple(rows), part.start, part.end, Mode.NAIVE, ids))
            names.append(in_part)
            if holders := tuple(request - mine.start for request in segment.rows if request in mine):
                of_mine.append(Segment(holders, part.start, part.end, Mode.NAIVE, ids))
                own.append(index)
        return ShardedPlan(Plan(len(mine), tuple(of_mine)), tuple(own), each, tuple(of_all), tuple(names))

    def _allot(self) -> None:
        """Give memory to what all ranks want, and find what of it this rank can expand."""
        branches, size = self._agreement.branches, self._pool.chunk_tokens
        shared = (branch.nodes for branch in branches)
        reached, evicted = self._pool.allot(self._wants, self._chunks, shared)
        self._counters.evictions += evicted
        self.tokens_without_memory = sum(want.end - reach for want, reach in zip(self._wants, reached, strict=True))
        if any(reach == want.start for want, reach in zip(self._wants, reached, strict=True)):
            self._counters.fall_back("prefix memory full")
        left = max(self._options.expand_tokens_per_step // size, 1)
        self._pieces, self._settled = [], not self._pool.waiting
        for want, reach in zip(self._wants, reached, strict=True):
            missing = list(self._pool.missing(want._replace(end=reach)))
            self._settled &= not missing
            taken = 0
            for chunk in missing[:left]:
                if (source := self._source_of(chunk)) is None:
                    break
                last = self._pieces[-1] if taken else None
                if last and last.request == source and last.chunks[-1].index + 1 == chunk.index:
                    self._pieces[-1] = last._replace(chunks=(*last.chunks, chunk))
                else:
                    self._pieces.append(Piece(source, (chunk,)))
                taken += 1
            if taken and taken == len(missing):
                self._pieces[-1] = self._pieces[-1]._replace(completes=True)
            left -= taken

    def _source_of(self, chunk: Chunk) -> int | None:
        """A request of this rank that has the chunk's tokens."""
        return next(
            (
                request
                for request, path in enumerate(self._paths)
                if len(path) > chunk.index and path[chunk.index] == chunk.node
            ),
            None,
        )

    # ---- as SharedPrefixes

    @property
    def plan(self) -> Plan:
        """The plan of the last step, of this rank's requests."""
        return self._shown.mine if self._shown is not None else Plan(0)

    @property
    def pool(self) -> ExpandedPool:
        return self._pool

    @property
    def latent_bytes(self) -> int:
        """See SharedPrefixes."""
        return self._cost.latent_row_bytes * self._cost.dims.num_layers

    def shown_segments(self) -> list[ShownSegment]:
        """What the last step shared, as this rank's requests do."""
        if self._shown is None:
            return []
        segments, ends = self._shown.mine.segments, [names[-1] for names in self._shown.my_names]
        places = [(end, segment.start) for segment, end in zip(segments, ends, strict=True)]
        known, self._numbers = self._numbers, {}
        for place in places:
            self._numbers[place] = known[place] if place in known else next(self._next_number)
        return shown_segments(segments, ends, self._pool, None, lambda end, start, expanded: self._numbers[end, start])

    def held(self) -> list[tuple[Segment, tuple[Hashable, ...]]]:
        """See SharedPrefixes."""
        return list(zip(self._shown.mine.segments, self._shown.my_names, strict=True)) if self._shown else []

    def expanded_lens(self, paths: Sequence[Names], prefix_lens: Sequence[int]) -> list[int]:
        """`[requests]` how many of each request's cached tokens every rank had expanded at the last agreement.

        Args:
            paths: names of each prompt's chunks; prefix_lens: tokens of each that are cached.
        """
        everywhere = self._agreement.everywhere if self._agreement is not None else frozenset()
        size, found = self._pool.chunk_tokens, []
        for path, cached in zip(paths, prefix_lens, strict=True):
            whole_chunks = path[: cached // size]
            reach = next((at for at, name in enumerate(whole_chunks) if name not in everywhere), len(whole_chunks))
            found.append(reach * size)
        return found

    def distrust(self, nodes: Collection[Hashable]) -> None:
        """Share these chunks and what follows them no more, until everything is forgotten."""
        self._distrusted |= set(nodes)
        self._counters.evictions += self._pool.drop(nodes)

    def attach(self, tree: Any) -> None:
        """No tree is needed."""

    def before_prefill(self, reqs: Sequence[Any], running: Sequence[Any], affordable: int = 0) -> None:
        """Nothing is expanded before requests are decoded."""

    def plan_prefill(
        self, reqs: Sequence[Any], prefix_lens: Sequence[int], new_tokens: Sequence[int], *, always: bool
    ) -> Plan:
        """Nothing: this rank has not all heads of what is expanded."""
        return Plan(len(reqs))

    def idle(self) -> None:
        """No request is running here. What is expanded stays, for those of the other ranks."""
        self._shown = None

    def forget(self) -> None:
        """Drop everything: the cache was flushed, or the weights changed."""
        self._counters.evictions += self._pool.drop_all()
        self._distrusted.clear()
        self._numbers.clear()
        self._agreement, self._wants, self._settled, self._pieces, self._shown = None, [], True, [], None
        self.tokens_without_memory = 0
