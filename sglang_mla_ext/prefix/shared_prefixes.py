"""The shared prefixes of a running server: finds them, has them expanded, and says what each decode step does.

Ties the tree, the planner, the pool and the expander together. All of it runs on the host, in the scheduler's
thread, between two forward passes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.cost_model import CostModel, Mode
from sglang_mla_ext.prefix.expanded_pool import ExpandedPool, Expansion
from sglang_mla_ext.prefix.planner import Gain, Group, Path, PathNode, Plan, Stacking, limit_entries, plan_groups

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_mla_ext.adapter.expander import Expander
    from sglang_mla_ext.adapter.versions.tree_view import TreeView
    from sglang_mla_ext.options import HybridMLAOptions

logger = logging.getLogger(__name__)


class ExpandedPart(NamedTuple):
    """The first `tokens` tokens of a prefix, expanded in these chunks."""

    tokens: int
    chunks: tuple[int, ...]


NOTHING_EXPANDED = ExpandedPart(0, ())


def every_group(group_size: int, tokens: int) -> float:
    """The gain of a mode that takes every group, larger and longer ones first."""
    return float((group_size - 1) * tokens)


def no_group(group_size: int, tokens: int) -> float:
    """The gain of a way that is not to be taken."""
    return 0.0


def gain_of(options: HybridMLAOptions, cost: CostModel) -> Gain:
    """What naive attention saves over plain absorb, as the mode option wants it judged.

    `auto` asks the cost model. `naive` takes every group. The other modes take none.
    """
    if not options.may_expand:
        return no_group
    if options.mode == "naive":
        return every_group
    return lambda group_size, tokens: (
        cost.seconds(Mode.ABSORB, group_size, tokens) - cost.seconds(Mode.NAIVE, group_size, tokens)
    )


class Gains(NamedTuple):
    """What the ways to attend to a shared prefix save, as the mode option wants it judged.

    Attributes:
        naive: over plain absorb, of a prefix that is expanded.
        grouped: grouped absorb over plain absorb; None where there is no grouped absorb.
        expand: naive over the best way without an expansion: what expanding would bring.
    """

    naive: Gain
    grouped: Gain | None
    expand: Gain

    @classmethod
    def of(cls, options: HybridMLAOptions, cost: CostModel, *, naive: bool, grouped: bool) -> Gains:
        """
        Args:
            naive, grouped: whether the ways can be taken here, if the mode lets them.
        """
        over_absorb = gain_of(options, cost) if naive else no_group
        if not grouped or not options.may_group:
            return cls(over_absorb, None, over_absorb)
        if options.mode == "grouped_absorb":
            return cls(no_group, every_group, no_group)

        def grouped_gain(group_size: int, tokens: int) -> float:
            return cost.seconds(Mode.ABSORB, group_size, tokens) - cost.seconds(Mode.GROUPED_ABSORB, group_size, tokens)

        def expand_gain(group_size: int, tokens: int) -> float:
            return over_absorb(group_size, tokens) - max(grouped_gain(group_size, tokens), 0.0)

        return cls(over_absorb, grouped_gain, expand_gain if naive else no_group)


class SharedPrefixes:
    """See the module."""

    def __init__(
        self,
        options: HybridMLAOptions,
        cost: CostModel,
        pool: ExpandedPool,
        expander: Expander,
        counters: Counters,
        *,
        naive: bool = True,
        stacking: Stacking | None = None,
    ) -> None:
        """
        Args:
            naive: whether there is naive attention; without it nothing is expanded.
            stacking: how grouped absorb takes rows; None where there is none.
        """
        self._options = options
        self._gains = Gains.of(options, cost, naive=naive, grouped=stacking is not None)
        self._stacking = stacking or Stacking()
        self._pool = pool
        self._expander = expander
        self._counters = counters
        self._tree: TreeView | None = None
        self._plan = Plan(0)
        self._groups: tuple[ExpandedSegment, ...] = ()
        self._plan_key: tuple[object, ...] = ()
        self._plan_nodes: list[object] = []
        self._expanding = False
        self._announced = False

    @property
    def plan(self) -> Plan:
        """The plan of the last decode step."""
        return self._plan

    @property
    def pool(self) -> ExpandedPool:
        return self._pool

    def attach(self, tree: TreeView) -> None:
        """Give it the tree, which SGLang builds after the attention backend."""
        self._tree = tree

    def before_prefill(self, reqs: Sequence[Req], running: Sequence[Req], affordable: int = 0) -> None:
        """Start or continue expanding what the requests of a prefill step share among themselves and with others.

        Args:
            reqs: requests of the step.
            running: requests that are decoding.
            affordable: tokens that SGLang would expand for this step alone. So many may be expanded at once for those
                of `reqs` that share them, where there is room: that takes no longer, and serves the step itself.
        """
        if self._tree is None:
            return
        self.release_unheld()
        paths = self._tree.paths([*running, *reqs])
        self._expand_for(paths)
        if affordable:
            shared = self._wanted(paths[len(running) :], every_group)
            self._expanding |= self._expand(shared, affordable, optional=True)

    def expanded_parts(
        self, reqs: Sequence[Req], prefix_lens: Sequence[int], new_tokens: Sequence[int], *, always: bool
    ) -> list[ExpandedPart]:
        """What a prefill step can attend to in expanded form, for each request.

        Args:
            prefix_lens: `[requests]` tokens of each request that are cached.
            new_tokens: `[requests]` tokens of each request that the step computes.
            always: use whatever is expanded; otherwise only where it saves time over plain absorb.
        """
        if self._tree is None:
            return [NOTHING_EXPANDED] * len(reqs)
        covered = self._pool.lookup(self._tree.path)
        parts = []
        rows: Counter[ExpandedPart] = Counter()
        for path, prefix_len, count in zip(self._tree.paths(reqs), prefix_lens, new_tokens, strict=True):
            tokens, expansion = max(
                (covered[step.node] for step in path if step.node in covered),
                key=lambda found: found[0],
                default=(0, None),
            )
            tokens = min(tokens, prefix_len)
            if expansion is None or tokens < self._options.min_prefix_len:
                parts.append(NOTHING_EXPANDED)
                continue
            parts.append(ExpandedPart(tokens, tuple(expansion.chunks)))
            rows[parts[-1]] += count
        if always:
            return parts
        return [part if self._gains.naive(rows[part], part.tokens) > 0 else NOTHING_EXPANDED for part in parts]

    def before_decode(self, reqs: Sequence[Req]) -> tuple[Plan, tuple[ExpandedSegment, ...]]:
        """Plan a decode step.

        Args:
            reqs: requests of the step, in the order of the batch's rows.
        Returns:
            the plan, and of its groups the naive ones with the chunks that hold their prefix.
        """
        if self._tree is None:
            return Plan(len(reqs)), ()
        key = (self._pool.version, *((req.rid, id(req.last_node)) for req in reqs))
        if key != self._plan_key or self._expanding:
            self.release_unheld()
            paths = self._tree.paths(reqs)
            self._expand_for(paths)
            self._make_plan(paths)
            # Holding the nodes keeps their ids from being given to other objects.
            self._plan_nodes = [req.last_node for req in reqs]
            self._plan_key = (self._pool.version, *key[1:])
        return self._plan, self._groups

    def release_unheld(self) -> None:
        """Drop what no running request holds any more."""
        if self._tree is not None and self._pool.expansions:
            self._counters.evictions += self._pool.release_unheld(self._tree.path, self._tree.is_held)

    def idle(self) -> None:
        """No request is running."""
        self.release_unheld()
        self._clear_plan()

    def forget(self) -> None:
        """Drop everything: the cache was flushed, or the weights changed."""
        self._counters.evictions += self._pool.drop_all()
        self._clear_plan()

    def _clear_plan(self) -> None:
        self._plan, self._groups, self._plan_key, self._plan_nodes = Plan(0), (), (), []

    def _make_plan(self, paths: Sequence[Path]) -> None:
        covered = self._pool.lookup(self._tree.path)

        def usable(step: PathNode) -> int:
            return covered[step.node][0] if step.node in covered else 0

        plan = plan_groups(
            paths,
            self._gains.naive,
            min_prefix_len=self._options.min_prefix_len,
            usable=usable,
            grouped_gain=self._gains.grouped,
            page_size=self._stacking.page_size,
        )
        if self._gains.grouped is not None:
            plan = limit_entries(plan, self._gains.grouped, self._stacking)
        self._plan = plan
        self._groups = tuple(
            ExpandedSegment(rows=group.rows, tokens=group.end, chunks=tuple(covered[group.node][1].chunks))
            for group in plan.of_mode(Mode.NAIVE)
        )

    def _expand_for(self, paths: Sequence[Path]) -> None:
        """Make room for what requests with these paths share, and advance its expansion."""
        wanted = self._wanted(paths, self._gains.expand)
        self._make_room(wanted)
        self._expanding = self._expand(wanted, self._options.expand_tokens_per_step)

    def _wanted(self, paths: Sequence[Path], gain: Gain) -> list[Group]:
        """What requests with these paths share and is worth expanding, most worthwhile first."""
        groups = plan_groups(paths, gain, min_prefix_len=self._options.min_prefix_len).groups
        return sorted(groups, key=lambda group: (-gain(len(group.rows), group.end) / group.end, group.rows))

    def _expand(self, wanted: Sequence[Group], most: int, *, optional: bool = False) -> bool:
        """Advance expansions by at most `most` tokens in all; whether any was. One that is not optional and finds no
        memory is counted."""
        left = most
        for group in wanted:
            path = self._tree.path(group.node)
            minimum = min(self._options.min_prefix_len, group.end)
            expansion = self._pool.reserve(path, group.end, self._tree.path, minimum=minimum)
            if expansion is None:
                if not optional:
                    self._counters.fall_back("prefix memory full")
            elif not expansion.complete and left > 0:
                left -= self._advance(expansion, left)
        return left < most

    def _make_room(self, wanted: Sequence[Group]) -> None:
        """Where memory is short, drop expansions that serve none of the wanted groups."""
        paths = [self._tree.path(group.node) for group in wanted]
        needed = sum(
            group.end - self._pool.coverage(path, group.end, self._tree.path)[0]
            for group, path in zip(wanted, paths, strict=True)
        )
        if self._pool.free_tokens >= needed:
            return
        nodes = {step.node for path in paths for step in path}
        for expansion in list(self._pool.expansions):
            if not any(step.node in nodes for step in self._tree.path(expansion.anchor)):
                self._pool.drop(expansion)
                self._counters.evictions += 1

    def _advance(self, expansion: Expansion, most: int) -> int:
        count = min(most, expansion.target - expansion.done)
        slots = self._tree.slots(expansion.anchor, expansion.done, expansion.done + count)
        self._expander.expand(slots, expansion.chunks, expansion.done)
        self._pool.advance(expansion, count)
        if expansion.complete:
            self._counters.expansions += not expansion.counted
            self._counters.extensions += expansion.counted  # it was complete, and then a longer part became worth it
            expansion.counted = True
            log = logger.debug if self._announced else logger.info
            log("hybrid_mla: expanded a shared prefix of %d tokens (%d chunks)", expansion.done, len(expansion.chunks))
            self._announced = True
        return count
