"""Decides what a step shares, from what its requests hold in common: the options, costs and room of one server.

    candidates = planner.candidates(branches)
    ideal = planner.best(candidates)                  # if whatever it needs is expanded
    planned = planner.plan(candidates, ideal, reach)  # with what is

The same branches and expansions give the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.memory.chunks import AllocationRequest
from sglang_mla_ext.prefix.memory.coverage import Covered
from sglang_mla_ext.prefix.planner.allocation import allocation_requests
from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Expanded, Ways, whole
from sglang_mla_ext.prefix.planner.gains import Gains, every_range, no_launch
from sglang_mla_ext.prefix.planner.launches import Launch
from sglang_mla_ext.prefix.planner.plan import Chosen, Plan, plan_step
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.segment import Mode, Segment

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions

Held = tuple[Segment, tuple[Hashable, ...]]
"""A segment of a plan, and the nodes that its tokens are in."""

Reach = Callable[[Sequence[Hashable], Sequence[int], int], tuple[int, list[int]]]
"""`reach(nodes, ends, start)`: how far consecutive nodes are expanded, and the chunks; see coverage.covered."""


class Candidates(NamedTuple):
    """Branches that a step could share, the ways to attend to them, and the cost of each way."""

    branches: Branches
    ways: Ways
    launch: Launch


class Planned(NamedTuple):
    """A plan, the parts that its segments were made of, and the branches that the parts are of."""

    plan: Plan
    parts: Sequence[Part]
    branches: Branches

    def held(self) -> list[Held]:
        """Return the segments, and the nodes that their tokens are in."""
        found = []
        for segment, part in zip(self.plan.segments, self.parts, strict=True):
            reached, ends = self.branches.nodes_of(part)
            begins = (self.branches[part.first].start, *ends)
            ranges = zip(reached, begins, ends, strict=False)
            nodes = tuple(node for node, begin, end in ranges if begin < part.end and end > part.start)
            found.append((segment, nodes))
        return found


class Planner:
    """See the module."""

    def __init__(
        self,
        options: HybridMLAOptions,
        cost: CostModel,
        capacity: Capacity,
        chunk_tokens: int,
        counters: Counters,
        *,
        naive: bool = True,
        grouped_page: int | None = None,
    ) -> None:
        """
        Args:
            capacity: of a step.
            chunk_tokens: of a chunk of expanded tokens.
            naive: whether there is naive attention; without it nothing is expanded.
            grouped_page: grouped absorb takes whole pages of so many tokens; None where there is no grouped absorb.
        """
        self.options = options
        self.cost, self._capacity, self._chunk_tokens, self._counters = cost, capacity, chunk_tokens, counters
        self._cost_of_tokens = replace(cost, query_tokens=1)  # in prefill each new token is counted
        self._naive, self._grouped_page = naive, grouped_page

    @property
    def latent_bytes(self) -> int:
        """Bytes of a token in all layers, as plain absorb reads it for each request."""
        return self.cost.latent_row_bytes * self.cost.dims.num_layers

    def candidates(self, branches: Branches) -> Candidates:
        """Return what a decode step could share."""
        gains = self._gains(self.cost, branches.tokens)
        page, shortest = self._grouped_page or 1, self.options.min_prefix_len
        return Candidates(branches, Ways(gains.naive, gains.grouped, self._chunk_tokens, page, shortest), gains.launch)

    def prefill_candidates(self, branches: Branches) -> Candidates:
        """Return what a prefill step could share that expands as much for itself in any case: every range."""
        ways = replace(self.candidates(branches).ways, naive=every_range, grouped=None)
        return Candidates(branches, ways, no_launch)

    def best(self, of: Candidates, expanded: Expanded | None = None) -> Chosen:
        """Return what saves the most.

        Args:
            expanded: how far each branch is; None as if everything were.
        """
        return plan_step(of.branches, of.ways, expanded or whole(of.branches), of.launch, self._capacity)

    def asked(self, of: Candidates, parts: Sequence[Part]) -> list[AllocationRequest]:
        """Return what has to be expanded for these parts."""
        return allocation_requests(parts, of.branches, of.ways)

    def plan(self, of: Candidates, ideal: Chosen | None, reach: Reach) -> Planned:
        """Make the plan of the ideal choice, or of another one where it needs more than is expanded.

        Args:
            ideal: see `best`; None where nothing was expanded for it.
        """
        branches = of.branches

        @functools.cache
        def covered(index: int) -> tuple[int, list[int]]:
            branch = branches[index]
            return reach(branch.nodes, branch.ends, branch.start)

        def covered_of(part: Part) -> tuple[int, list[int]]:
            return covered(part.branch) if part.first == part.branch else reach(*branches.nodes_of(part), part.start)

        def chunks(part: Part) -> tuple[int, ...]:
            if part.mode is not Mode.NAIVE:
                return ()
            return tuple(covered_of(part)[1][: -(-(part.end - part.start) // self._chunk_tokens)])

        if ideal is None or any(part.mode is Mode.NAIVE and part.end > covered_of(part)[0] for part in ideal.parts):
            ideal = self.best(of, lambda index: covered(index)[0])
        if ideal.dropped:
            self._counters.fall_back(Fallback.MORE_GROUPS)
        plan = Plan(branches.requests, tuple(branches.segment(part, chunks(part)) for part in ideal.parts))
        return Planned(plan, ideal.parts, branches)

    def plan_prefill(
        self, covered: Sequence[Covered], prefix_lens: Sequence[int], new_tokens: Sequence[int], *, always: bool
    ) -> Plan:
        """Return what a prefill step can attend to in expanded form: of each request's cached prefix one segment at
        most, from the first token on.

        Args:
            covered: `[requests]` how far the path of each is expanded.
            prefix_lens: `[requests]` tokens of each that are cached; new_tokens: `[requests]` that the step computes.
            always: use whatever is expanded; otherwise only where it saves time over plain absorb.
        """
        requests: dict[Covered, list[int]] = {}
        for request, ((tokens, chunks), prefix_len) in enumerate(zip(covered, prefix_lens, strict=True)):
            tokens = min(tokens, prefix_len)
            if tokens >= self.options.min_prefix_len:
                requests.setdefault((tokens, chunks), []).append(request)
        gains = self._gains(self._cost_of_tokens)

        def pays(tokens: int, members: Sequence[int]) -> bool:
            rows = sum(new_tokens[request] for request in members)
            return gains.naive is not None and gains.naive(rows, 0, tokens) > gains.launch(Mode.NAIVE, rows)

        return Plan(
            len(covered),
            tuple(
                Segment(tuple(members), 0, tokens, Mode.NAIVE, chunks)
                for (tokens, chunks), members in requests.items()
                if always or pays(tokens, members)
            ),
        )

    def _gains(self, cost: CostModel, step_tokens: int = 0) -> Gains:
        ways = {"naive": self._naive, "grouped": self._grouped_page is not None}
        return Gains.of(self.options, cost, step_tokens=step_tokens, **ways)
