"""The shared prefixes of a running server: finds them, has them expanded, and says what each decode step does.

Ties the tree, the planner, the pool and the expander together. All of it runs on the host, in the scheduler's
thread, between two forward passes. The tree and the expander are protocols here: the adapter knows SGLang and the
kernels, this folder neither.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.cost_model import CostModel, Mode
from sglang_mla_ext.prefix.expanded_pool import ExpandedPool, Expansion
from sglang_mla_ext.prefix.gains import Gains, every_group
from sglang_mla_ext.prefix.planner import Gain, Group, Path, PathNode, Plan, Stacking, limit_entries, plan_groups

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions

logger = logging.getLogger(__name__)


class ExpandedPart(NamedTuple):
    """The first `tokens` tokens of a prefix, expanded in these chunks."""

    tokens: int
    chunks: tuple[int, ...]


NOTHING_EXPANDED = ExpandedPart(0, ())


class ExpandedGroup(NamedTuple):
    """Rows of a batch that attend to the first `tokens` tokens of their prefix, expanded in these chunks."""

    rows: tuple[int, ...]
    tokens: int
    chunks: tuple[int, ...]


class Tree(Protocol):
    """The radix tree of a server, as handles: one for each node, the same one as long as anybody keeps it. Requests are
    the server's own objects, which are only passed through here."""

    def state(self, requests: Sequence[Any]) -> Hashable:
        """Differs where a request, or the node that its cached prefix ends in, is another one. It speaks for the nodes
        only while they exist, so it goes with what `hold` returned."""
        ...

    def hold(self, requests: Sequence[Any]) -> object:
        """Keeps the nodes that requests end in from ceasing to exist, and so their identities from being reused."""
        ...

    def paths(self, requests: Sequence[Any]) -> list[Path]:
        """One path for each request, root first, the root itself left out; empty where nothing is cached yet."""
        ...

    def path(self, node: Hashable) -> Path:
        """The present path that ends in this node."""
        ...

    def is_held(self, node: Any) -> bool:
        """Whether a request holds the node, so that its tokens' slots stay what they are."""
        ...


class Expander(Protocol):
    """Computes keys and values of a prefix."""

    def expand(self, node: Hashable, start: int, end: int, chunks: Sequence[int]) -> None:
        """Expand tokens `[start, end)` of the path that ends in this node, in all layers.

        Args:
            chunks: ids of the chunks that hold the path's tokens from the first one on.
        """
        ...


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
        naive: bool = True,
        stacking: Stacking | None = None,
    ) -> None:
        """
        Args:
            expander: None where the pool has no chunks.
            naive: whether there is naive attention; without it nothing is expanded.
            stacking: how grouped absorb takes rows; None where there is none.
        """
        self._options = options
        self._gains = Gains.of(options, cost, naive=naive, grouped=stacking is not None)
        self._stacking = stacking or Stacking()
        self._pool = pool
        self._expander = expander
        self._counters = counters
        self._tree: Tree | None = None
        self._plan = Plan(0)
        self._groups: tuple[ExpandedGroup, ...] = ()
        self._planned_for: tuple[int, Hashable] | None = None
        self._held: object = None
        self._expanding = False
        self._announced = False

    @property
    def plan(self) -> Plan:
        """The plan of the last decode step."""
        return self._plan

    @property
    def pool(self) -> ExpandedPool:
        return self._pool

    def attach(self, tree: Tree) -> None:
        """Give it the tree, which SGLang builds after the attention backend."""
        self._tree = tree

    def before_prefill(self, reqs: Sequence[Any], running: Sequence[Any], affordable: int = 0) -> None:
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
        self, reqs: Sequence[Any], prefix_lens: Sequence[int], new_tokens: Sequence[int], *, always: bool
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

    def before_decode(self, reqs: Sequence[Any]) -> tuple[Plan, tuple[ExpandedGroup, ...]]:
        """Plan a decode step.

        Args:
            reqs: requests of the step, in the order of the batch's rows.
        Returns:
            the plan, and of its groups the naive ones with the chunks that hold their prefix.
        """
        if self._tree is None:
            return Plan(len(reqs)), ()
        state = self._tree.state(reqs)
        if (self._pool.version, state) != self._planned_for or self._expanding:
            self.release_unheld()
            paths = self._tree.paths(reqs)
            self._expand_for(paths)
            self._make_plan(paths)
            self._held = self._tree.hold(reqs)
            self._planned_for = (self._pool.version, state)
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
        self._plan, self._groups, self._planned_for, self._held = Plan(0), (), None, None

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
            ExpandedGroup(group.rows, group.end, tuple(covered[group.node][1].chunks))
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
        self._expander.expand(expansion.anchor, expansion.done, expansion.done + count, expansion.chunks)
        self._pool.advance(expansion, count)
        if expansion.complete:
            self._counters.expansions += not expansion.counted
            self._counters.extensions += expansion.counted  # it was complete, and then a longer part became worth it
            expansion.counted = True
            log = logger.debug if self._announced else logger.info
            log("hybrid_mla: expanded a shared prefix of %d tokens (%d chunks)", expansion.done, len(expansion.chunks))
            self._announced = True
        return count
