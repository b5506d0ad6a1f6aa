"""The shared prefixes of a running server: finds them, has them expanded, and says what each decode step does.

Ties the tree, the planner and the expansion together. All of it runs on the host, in the scheduler's thread, between
two forward passes. The tree is a protocol here: the adapter knows SGLang, this folder does not.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.memory.allocation import allocation_requests
from sglang_mla_ext.prefix.memory.expansion import Expander, Expansion
from sglang_mla_ext.prefix.memory.pool import NOT_COVERED, Covered, ExpandedPool
from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Ways, whole
from sglang_mla_ext.prefix.planner.gains import Gains, every_range, no_launch
from sglang_mla_ext.prefix.planner.launches import Launch
from sglang_mla_ext.prefix.planner.plan import Plan, plan_step
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.segments import SegmentNumbers, ShownSegment, count_alone, shown_segments
from sglang_mla_ext.prefix.tree import SharedTree, Tree
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions

Held = tuple[Segment, tuple[Hashable, ...]]
"""A segment of the last decode step, and the nodes of the tree that its tokens are in."""


class _Planned(NamedTuple):
    """A plan, the parts that its segments were made of, the branches that the parts are of, and what keeps the nodes
    that its requests end in."""

    plan: Plan = Plan(0)
    parts: Sequence[Part] = ()
    branches: Branches | None = None
    held: object = None


class SharedPrefixes:
    """See the module."""

    def __init__(
        self,
        options: HybridMLAOptions,
        cost: CostModel,
        pool: ExpandedPool,
        expander: Expander | None,
        counters: Counters,
        *,
        capacity: Capacity,
        naive: bool = True,
        grouped_page: int | None = None,
        decodes: bool = True,
    ) -> None:
        """
        Args:
            expander: None where the pool has no chunks.
            capacity: of a decode step.
            decodes: False for a server that prefills for others.
            naive: whether there is naive attention; without it nothing is expanded.
            grouped_page: grouped absorb takes whole pages of so many tokens; None where there is no grouped absorb.
        """
        self._options, self._cost = options, cost
        self._cost_of_tokens = replace(cost, query_tokens=1)  # in prefill each new token is counted
        self._pool, self._counters = pool, counters
        self._expansion = Expansion(pool, expander, counters, options.min_prefix_len)
        self._capacity, self._naive, self._grouped_page = capacity, naive, grouped_page
        self._decodes = decodes
        self._tree: Tree | None = None
        self._planned = _Planned()  # of the last decode step, or pass that rides
        self._shown = _Planned()  # of the last decode step
        self._distrusted: set[Hashable] = set()
        self._planned_for: tuple[int, Hashable] | None = None
        self._numbers = SegmentNumbers()

    @property
    def plan(self) -> Plan:
        """The plan of the last decode step."""
        return self._shown.plan

    @property
    def pool(self) -> ExpandedPool:
        return self._pool

    @property
    def tokens_without_memory(self) -> int:
        """That were worth expanding when last looked at, and for which there was no memory."""
        return self._expansion.tokens_without_memory

    @property
    def latent_bytes(self) -> int:
        """Of a token in all layers, as plain absorb reads it for each request."""
        return self._cost.latent_row_bytes * self._cost.dims.num_layers

    def shown_segments(self) -> list[ShownSegment]:
        """The tree that the last decode step shared, and what is expanded besides; changes nothing."""
        plan, parts, branches, held = self._shown
        ends = [branches[part.branch].nodes[-1] for part in parts]
        running: dict[Hashable, int] = {}
        if self._tree is not None and branches is not None:
            running = {node: branch.requests for branch in branches for node in branch.nodes}
            count_alone(running, self._tree.ends(held), self._tree)
        return shown_segments(plan.segments, ends, self._pool, self._tree, self._numbers, running)

    def held(self) -> list[Held]:
        """What the requests of the last decode step, or pass that rides, shared."""
        found = []
        plan, parts, branches, _ = self._planned
        for segment, part in zip(plan.segments, parts, strict=True):
            reached, ends = branches.nodes_of(part)
            begins = (branches[part.first].start, *ends)
            ranges = zip(reached, begins, ends, strict=False)
            nodes = tuple(node for node, begin, end in ranges if begin < part.end and end > part.start)
            found.append((segment, nodes))
        return found

    def distrust(self, nodes: Collection[Hashable]) -> None:
        """Share the tokens of these nodes and what follows them no more, until the cache is flushed or they have left
        it. Of a node that is split later, the upper part is trusted again."""
        self._distrusted |= set(nodes)
        self._counters.evictions += self._pool.drop(nodes)
        self._planned_for = None

    def attach(self, tree: Tree) -> None:
        """Give it the tree, which SGLang builds after the attention backend."""
        self._tree = tree

    def before_prefill(self, reqs: Sequence[Any], running: Sequence[Any], affordable: int = 0) -> None:
        """Start or continue expanding what the requests of a prefill step share among themselves and with others.

        Args:
            reqs: requests of the step.
            running: requests that are decoding, or have been prefilled for a server that decodes.
            affordable: tokens that SGLang would expand for this step alone. So many may be expanded at once for those
                of `reqs` that share them, where there is room: that takes no longer, and serves the step itself.
        """
        if self._tree is None:
            return
        tree = self._shared([*running, *reqs])
        branches = Branches(tree)
        if not self._decodes:
            self._expand_for_prefills(branches, len(running), affordable)
            return
        ways, launch = self._ways(branches)
        self._expand_for(self._ideal(branches, ways, launch)[0], branches, ways, self._options.expand_tokens_per_step)
        if affordable:
            branches = Branches(replace(tree, deepest=[-1] * len(running) + list(tree.deepest[len(running) :])))
            ways = replace(ways, naive=every_range, grouped=None)
            wants = allocation_requests(self._ideal(branches, ways, no_launch)[0], branches, ways)
            self._expansion.expand_in_free_memory(wants, self._tree, affordable)

    def plan_prefill(
        self, reqs: Sequence[Any], prefix_lens: Sequence[int], new_tokens: Sequence[int], *, always: bool
    ) -> Plan:
        """What a prefill step can attend to in expanded form: of each request's cached prefix one segment at most, from
        the first token on.

        Args:
            prefix_lens: `[requests]` tokens of each request that are cached.
            new_tokens: `[requests]` tokens of each request that the step computes.
            always: use whatever is expanded; otherwise only where it saves time over plain absorb.
        """
        if self._tree is None or not self._pool.used_chunks:
            return Plan(len(reqs))
        requests: dict[Covered, list[int]] = {}
        for request, ((tokens, chunks), prefix_len) in enumerate(zip(self._covered(reqs), prefix_lens, strict=True)):
            tokens = min(tokens, prefix_len)
            if tokens >= self._options.min_prefix_len:
                requests.setdefault((tokens, chunks), []).append(request)
        gains = self._gains(self._cost_of_tokens)
        if gains.naive is None and not always:
            return Plan(len(reqs))

        def pays(tokens: int, members: Sequence[int]) -> bool:
            rows = sum(new_tokens[request] for request in members)
            return gains.naive(rows, 0, tokens) > gains.launch(Mode.NAIVE, rows)

        return Plan(
            len(reqs),
            tuple(
                Segment(tuple(members), 0, tokens, Mode.NAIVE, chunks)
                for (tokens, chunks), members in requests.items()
                if always or pays(tokens, members)
            ),
        )

    def plan_decode(self, reqs: Sequence[Any]) -> Plan:
        """Plan a decode step; an unchanged plan is the same object.

        Args:
            reqs: requests of the step, in the order of the batch.
        """
        if self._tree is None:
            return Plan(len(reqs))
        state = self._tree.state(reqs)
        if (self._pool.version, state) != self._planned_for or self._expansion.under_way or self._pool.waiting:
            self._make_plan(Branches(self._shared(reqs)))
            self._planned = self._planned._replace(held=self._tree.hold(reqs))
            self._planned_for = (self._pool.version, state)
        self._shown = self._planned
        return self._planned.plan

    def plan_rows(self, reqs: Sequence[Any], rows: Rows, prefix_lens: Sequence[int], *, mixed: bool = False) -> Plan:
        """Plan a step in which new tokens ride: requests have any number of rows, so even one alone shares its cached
        tokens among them. Nothing is expanded for it.

        Args:
            reqs: requests of the step, in the order of the batch.
            rows: of each, one for each of its new tokens.
            prefix_lens: `[requests]` tokens of each request that are cached.
            mixed: some of the requests decode, so that it is a decode step.
        Raises:
            RuntimeError: a plan has tokens that are not cached yet, which rows before theirs must not see.
        """
        if self._tree is None:
            return Plan(len(reqs))
        several = {request for request, count in enumerate(rows.lens) if count > 1}
        branches = Branches(self._shared(reqs, several), rows)
        ways, launch = self._ways(branches)
        self._set_plan(None, branches, ways, launch)
        self._planned, self._planned_for = self._planned._replace(held=self._tree.hold(reqs)), None
        plan = self._planned.plan
        if any(covered > cached for covered, cached in zip(plan.prefix_lens, prefix_lens, strict=True)):
            raise RuntimeError("a planned prefix is longer than what is cached")
        if mixed:
            self._shown = self._planned
        return plan

    def expanded_lens(self, reqs: Sequence[Any], prefix_lens: Sequence[int]) -> list[int]:
        """`[requests]` how many of each request's cached tokens are expanded, from the first one on.

        Args:
            prefix_lens: `[requests]` tokens of each request that are cached.
        """
        if self._tree is None or not self._pool.used_chunks:
            return [0] * len(reqs)
        return [min(tokens, cached) for (tokens, _), cached in zip(self._covered(reqs), prefix_lens, strict=True)]

    def idle(self) -> None:
        """No request is running. What is expanded stays while its nodes are in the tree."""
        if self._tree is not None:
            self._counters.evictions += self._pool.follow(self._tree)
            self._forgive_what_left()
        self._clear_plan()

    def forget(self) -> None:
        """Drop everything: the cache was flushed, or the weights changed."""
        self._counters.evictions += self._pool.drop_all()
        self._distrusted.clear()
        self._clear_plan()

    def _clear_plan(self) -> None:
        self._planned = self._shown = _Planned()
        self._planned_for = None
        if self._tree is not None:
            self._tree.forget()
        self._expansion.tokens_without_memory = 0

    # ---- what is worth sharing

    def _shared(self, reqs: Sequence[Any], whole: Collection[int] = ()) -> SharedTree:
        """Bring the pool up to date with the tree, some of whose changes are seen only when it is asked what requests
        share; and that, without what is not trusted."""
        tree = self._tree.shared(reqs, whole=whole)
        self._counters.evictions += self._pool.follow(self._tree)
        if not tree.complete:
            self._counters.fall_back("the tree is too deep to be searched in one step")
        if self._distrusted:
            self._forgive_what_left()
            tree = tree.without(self._distrusted)
        return tree

    def _covered(self, reqs: Sequence[Any]) -> list[Covered]:
        """`[requests]` how far the path of each is expanded."""
        tree = self._tree.shared(reqs, also=self._pool.nodes)
        version = self._pool.version
        self._counters.evictions += self._pool.follow(self._tree)
        if self._pool.version != version:  # chunks have other owners, or none
            tree = self._tree.shared(reqs, also=self._pool.nodes)
        covered = self._pool.covered_paths(tree)
        return [covered[node] if node >= 0 else NOT_COVERED for node in tree.deepest]

    def _forgive_what_left(self) -> None:
        """A handle keeps its node, and with it the whole tree that it was in."""
        self._distrusted = {node for node in self._distrusted if self._tree.is_attached(node)}

    def _gains(self, cost: CostModel, step_tokens: int = 0) -> Gains:
        ways = {"naive": self._naive, "grouped": self._grouped_page is not None}
        return Gains.of(self._options, cost, step_tokens=step_tokens, **ways)

    def _ways(self, branches: Branches) -> tuple[Ways, Launch]:
        gains = self._gains(self._cost, branches.tokens)
        page, shortest = self._grouped_page or 1, self._options.min_prefix_len
        return Ways(gains.naive, gains.grouped, self._pool.chunk_tokens, page, shortest), gains.launch

    def _ideal(self, branches: Branches, ways: Ways, launch: Launch) -> tuple[list[Part], int]:
        """The parts that save most if whatever they need is expanded, and how many more a step has no room for."""
        return plan_step(branches, ways, whole(branches), launch, self._capacity)

    def _make_plan(self, branches: Branches) -> None:
        ways, launch = self._ways(branches)
        ideal = self._ideal(branches, ways, launch)
        self._expand_for(ideal[0], branches, ways, self._options.expand_tokens_per_step)
        self._set_plan(ideal, branches, ways, launch)

    def _set_plan(self, ideal: tuple[list[Part], int] | None, branches: Branches, ways: Ways, launch: Launch) -> None:
        """Make the plan of the ideal parts, or of others where they want more than is expanded.

        Args:
            ideal: and how many were dropped; None where nothing was expanded for it.
        """

        @functools.cache
        def covered(index: int) -> tuple[int, list[int]]:
            branch = branches[index]
            return self._pool.covered(branch.nodes, branch.ends, branch.start)

        def covered_of(part: Part) -> tuple[int, list[int]]:
            if part.first == part.branch:
                return covered(part.branch)
            return self._pool.covered(*branches.nodes_of(part), part.start)

        def chunks(part: Part) -> tuple[int, ...]:
            if part.mode is not Mode.NAIVE:
                return ()
            return tuple(covered_of(part)[1][: -(-(part.end - part.start) // self._pool.chunk_tokens)])

        if ideal is None or any(part.mode is Mode.NAIVE and part.end > covered_of(part)[0] for part in ideal[0]):
            ideal = plan_step(branches, ways, lambda index: covered(index)[0], launch, self._capacity)
        parts, dropped = ideal
        if dropped:
            self._counters.fall_back("more groups than a step has room for")
        plan = Plan(branches.requests, tuple(branches.segment(part, chunks(part)) for part in parts))
        self._planned = _Planned(plan, parts, branches)

    def _expand_for_prefills(self, branches: Branches, others: int, affordable: int) -> None:
        """Expand for a step, and for those like it, what its requests share among themselves and with the first
        `others` rows. All memory is for this, and goes to what most of them share."""
        most = affordable or (self._options.expand_tokens_per_step if self._options.mode == "naive" else 0)
        if not most:
            return
        ways = replace(self._ways(branches)[0], naive=every_range, grouped=None)
        parts = [
            part for part in self._ideal(branches, ways, no_launch)[0] if branches.last_request(part.branch) >= others
        ]
        self._expand_for(parts, branches, ways, most)

    def _expand_for(self, ideal: Sequence[Part], branches: Branches, ways: Ways, most: int) -> None:
        """Give memory to what is worth expanding, and expand `most` tokens more of it."""
        wants = allocation_requests(ideal, branches, ways)
        self._expansion.expand(wants, self._tree, (branch.nodes for branch in branches), most)
