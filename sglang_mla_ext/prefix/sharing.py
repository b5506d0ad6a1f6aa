"""The shared prefixes of a running server: what is expanded, and what each pass shares.

One engine for two sources: the radix tree of this server (radix.py), or the reports of all ranks (sharded/). It asks
the source for one snapshot of what the requests of a pass share, and decides everything in the pass on that. All of it
runs on the host, in the scheduler's thread, between two forward passes. It knows neither SGLang nor torch.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.memory.chunks import AllocationRequest, Nodes
from sglang_mla_ext.prefix.memory.coverage import covered_paths
from sglang_mla_ext.prefix.memory.expansion import Expander, Expansion
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.planner.planner import Held, Planned, Planner
from sglang_mla_ext.prefix.segments import SegmentNumbers, ShownSegment, count_alone, shown_segments
from sglang_mla_ext.prefix.tree import SharedTree, Tree
from sglang_mla_ext.rows import Rows

NOTHING = Planned(Plan(0), (), Branches(SharedTree((), (), (), ())))


class Source(Nodes, Protocol):
    """Source of what requests share: the radix tree of this server, or the reports of all ranks.

    Attributes:
        tree: the radix tree whose changes memory follows; None where there is none, or not yet.
    """

    tree: Tree | None

    def shared(
        self, requests: Sequence[Any], *, expanded_of: Collection[int] = (), whole: Collection[int] = ()
    ) -> SharedTree | None:
        """Return what the requests of a pass share, but for what is distrusted; None where that is not known here.

        Args:
            expanded_of: indices of requests of which all that is expanded counts as shared.
            whole: indices of requests of which everything counts as shared, because they have several rows.
        """
        ...

    def reach(self, nodes: Sequence[Hashable], ends: Sequence[int], start: int) -> tuple[int, list[int]]:
        """Return how far consecutive nodes are expanded for a plan, see coverage.covered."""
        ...

    def expanded_lens(self, requests: Sequence[Any], prefix_lens: Sequence[int]) -> list[int]:
        """Return `[requests]` how many of each one's cached tokens are expanded; asked before there is a pass."""
        ...

    def distrust(self, nodes: Collection[Hashable]) -> None:
        """Leave these nodes and what follows them out of what is shared, until they or the server forget."""
        ...

    def idle(self) -> None:
        """Let go of what the last requests needed: none is running."""
        ...

    def forget(self) -> None:
        """Drop what is remembered: the cache was flushed, or the weights changed."""
        ...


class Asked(NamedTuple):
    """Allocation requests, and the nodes of all branches, of which the others are worth nothing any more."""

    requests: Sequence[AllocationRequest] = ()
    shared: Sequence[Sequence[Hashable]] = ()


class Step(NamedTuple):
    """A step as it was planned.

    Attributes:
        held: keeps the nodes that its requests end in.
        places: `[segments]` what each is known by in the display, if not by the node that it ends in.
    """

    planned: Planned = NOTHING
    held: object = None
    places: Sequence[Hashable] | None = None


class Sharing:
    """See the module.

    Attributes:
        asked: of the last step, where memory for it is still to be given.
        shown: the last decode step.
    """

    def __init__(
        self,
        source: Source,
        pool: ExpandedPool,
        planner: Planner,
        expander: Expander | None,
        counters: Counters,
        *,
        decodes: bool = True,
        shortest: int | None = None,
    ) -> None:
        """
        Args:
            expander: None where the pool has no chunks.
            decodes: False for a server that prefills for others.
            shortest: tokens that a prefix must have memory for to be expanded; by default those of the shortest prefix
                that is shared.
        """
        self.source, self.pool, self.planner, self._counters = source, pool, planner, counters
        shortest = planner.options.min_prefix_len if shortest is None else shortest
        self.expansion = Expansion(pool, source, expander, counters, shortest)
        self.asked = Asked()
        self.shown = Step()
        self._decodes = decodes
        self._last = Step()  # decode step, or pass with new tokens in it
        self._planned_for: tuple[int, Hashable] | None = None
        self._numbers = SegmentNumbers()

    @property
    def plan(self) -> Plan:
        """The plan of the last decode step."""
        return self.shown.planned.plan

    # ---- a pass

    def before_prefill(
        self, reqs: Sequence[Any], running: Sequence[Any], affordable: int = 0, *, rows: Rows | None = None
    ) -> SharedTree | None:
        """Start or continue expanding what the requests of a prefill step share among themselves and with others.

        Args:
            reqs: requests of the step.
            running: requests that are decoding, or have been prefilled for a server that decodes.
            affordable: tokens that SGLang would expand for this step alone. So many may be expanded at once for those
                of `reqs` that share them, where there is room: that takes no longer, and serves the step itself.
            rows: of `reqs`, where the step is mixed.
        Returns:
            What `reqs` share, for the other decisions of the pass.
        """
        first = len(running)
        several = () if rows is None else [first + request for request in _several(rows)]
        expanded_of = range(first, first + len(reqs)) if rows is None else ()
        tree = self.source.shared([*running, *reqs], expanded_of=expanded_of, whole=several)
        if tree is None:
            return None
        branches = Branches(tree)
        of_step, shared = tree.from_request(first), [branch.nodes for branch in branches]
        per_step = self.planner.options.expand_tokens_per_step
        if not self._decodes:
            # All memory is for prefill. It goes to what most requests share, of what those of this step have a part in.
            most = affordable or (per_step if self.planner.options.mode == "naive" else 0)
            if most:
                of = self.planner.prefill_candidates(branches)
                best = self.planner.best(of).parts
                parts = [part for part in best if max(branches.requests_of(part.branch)) >= first]
                self.expansion.allot(self.planner.asked(of, parts), shared)
                self.expansion.expand(most)
            return of_step
        of = self.planner.candidates(branches)
        self.expansion.allot(self.planner.asked(of, self.planner.best(of).parts), shared)
        self.expansion.expand(per_step)
        if affordable:
            of = self.planner.prefill_candidates(Branches(of_step))
            asked = self.planner.asked(of, self.planner.best(of).parts)
            self.expansion.expand_in_free_memory(asked, affordable)
        return of_step

    def plan_prefill(
        self,
        reqs: Sequence[Any],
        prefix_lens: Sequence[int],
        new_tokens: Sequence[int],
        *,
        always: bool,
        shared: SharedTree | None = None,
    ) -> Plan:
        """Plan a prefill step, see Planner.plan_prefill.

        Args:
            shared: what `before_prefill` returned for the pass, if it was asked.
        """
        if not self.pool.used_chunks:
            return Plan(len(reqs))
        tree = shared if shared is not None else self.source.shared(reqs, expanded_of=range(len(reqs)))
        if tree is None:
            return Plan(len(reqs))
        return self.planner.plan_prefill(covered_paths(self.pool, tree), prefix_lens, new_tokens, always=always)

    def plan_decode(self, reqs: Sequence[Any]) -> Plan:
        """Plan a decode step; an unchanged plan is the same object.

        Args:
            reqs: requests of the step, in the order of the batch.
        """
        if (tree := self.source.tree) is None:
            return Plan(len(reqs))
        state = tree.state(reqs)
        if (self.pool.version, state) != self._planned_for or self.expansion.under_way or self.pool.waiting:
            shared = self.source.shared(reqs)
            assert shared is not None, "a tree knows what its requests share"
            self._last = Step(self.plan_shared(shared), tree.hold(reqs))
            self._planned_for = (self.pool.version, state)
        self.shown = self._last
        return self.plan

    def plan_rows(
        self,
        reqs: Sequence[Any],
        rows: Rows,
        prefix_lens: Sequence[int],
        *,
        mixed: bool = False,
        shared: SharedTree | None = None,
    ) -> Plan:
        """Plan a step in which new tokens are rows: requests have any number of rows, so even one alone shares its
        cached tokens among them. Nothing is expanded for it.

        Args:
            reqs: requests of the step, in the order of the batch.
            rows: of each, one for each of its new tokens.
            prefix_lens: `[requests]` tokens of each request that are cached.
            mixed: some of the requests decode, so that it is a decode step.
            shared: what `before_prefill` returned for the pass, if it was asked.
        Raises:
            RuntimeError: a plan has tokens that are not cached yet, which rows before theirs must not see.
        """
        if (tree := self.source.tree) is None:
            return Plan(len(reqs))
        if shared is None:
            shared = self.source.shared(reqs, whole=_several(rows))
            assert shared is not None, "a tree knows what its requests share"
        of = self.planner.candidates(Branches(shared, rows))
        planned = self.planner.plan(of, None, self.source.reach)
        self._last, self._planned_for = Step(planned, tree.hold(reqs)), None
        if any(covered > cached for covered, cached in zip(planned.plan.prefix_lens, prefix_lens, strict=True)):
            raise RuntimeError("a planned prefix is longer than what is cached")
        if mixed:
            self.shown = self._last
        return planned.plan

    def plan_shared(self, shared: SharedTree, rows: Rows | None = None) -> Planned:
        """Plan a decode step on what its requests share, and ask for memory for what would save more. Where there is a
        tree, that is given and expanded at once; ranks first tell each other what they give away (sharded/).

        Args:
            rows: of the requests, where they differ.
        """
        of = self.planner.candidates(Branches(shared, rows))
        ideal = self.planner.best(of)
        asked = Asked(self.planner.asked(of, ideal.parts), [branch.nodes for branch in of.branches])
        if self.source.tree is None:
            self.asked = asked
        else:
            self.expansion.allot(*asked)
            self.expansion.expand(self.planner.options.expand_tokens_per_step)
        return self.planner.plan(of, ideal, self.source.reach)

    # ---- what is known of it

    def held(self) -> list[Held]:
        """Return what the requests of the last decode step, or pass with new tokens in it, shared."""
        return self._last.planned.held()

    def shown_segments(self) -> list[ShownSegment]:
        """Return what the last decode step shared, and what is expanded besides; changes nothing."""
        (plan, parts, branches), held, ends = self.shown
        if ends is None:
            ends = [branches[part.branch].nodes[-1] for part in parts]
        running: dict[Hashable, int] = {}
        if (tree := self.source.tree) is not None and self.shown.held is not None:
            running = {node: branch.requests for branch in branches for node in branch.nodes}
            count_alone(running, tree.ends(held), tree)
        return shown_segments(plan.segments, ends, self.pool, tree, self._numbers, running)

    def show(self, step: Step) -> None:
        """Take another one for the last step: what ranks agreed on is planned by all of them together."""
        self.shown = self._last = step
        self._planned_for = None

    # ---- what changes

    def distrust(self, nodes: Collection[Hashable]) -> None:
        """Share the tokens of these nodes and what follows them no more, until the cache is flushed or they have left
        it."""
        self.source.distrust(nodes)
        self._counters.evictions += self.pool.drop(nodes)
        self._planned_for = None

    def idle(self) -> None:
        """Forget the last step: no request is running. What is expanded stays while its nodes are known."""
        self.source.idle()
        if self.source.tree is not None:  # other ranks may still run some
            self.expansion.tokens_without_memory = 0
        self.show(Step())

    def forget(self) -> None:
        """Drop everything: the cache was flushed, or the weights changed."""
        self._counters.evictions += self.pool.drop(self.pool.nodes)
        self.source.forget()
        self.expansion.forget()
        self.asked = Asked()
        self.show(Step())


def _several(rows: Rows) -> set[int]:
    """Return the requests with several rows."""
    return {request for request, count in enumerate(rows.lens) if count > 1}
