"""Decide on the host what the next forward pass does: which rows share what, and what prefill attends to.

session.py tells of a pass before it runs. A failure here never stops the pass: it is counted,
what is expanded is forgotten, and sharing pauses for a while. Where even that fails, it is owed: it is tried again
before each pass, and until then nothing is shared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
from sglang_mla_ext.adapter.step.passes import NOTHING_SHARED, Kind, Pass, passes
from sglang_mla_ext.adapter.step.reports import Reports
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.pass_costs import PassCosts
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.radix import RadixSource
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.rows import Rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_mla_ext.adapter.compat.tree_view import TreeView
    from sglang_mla_ext.adapter.prefill.expander import Expander
    from sglang_mla_ext.adapter.prefill.transient import TransientExpansion
    from sglang_mla_ext.adapter.ranks.prompts import Beginnings
    from sglang_mla_ext.adapter.ranks.sharded import ShardedSteps
    from sglang_mla_ext.adapter.step.shadow import ShadowCheck

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 64, 1 << 16
"""Forward passes without sharing after a failure; twice as many after every further one that comes before a decode step
with groups has gone through."""


@dataclass(frozen=True)
class PrefillSharing:
    """Settings and functions of prefill that planning needs, where our backend does prefill.

    Attributes:
        make_plan: `(plan, rows) -> PrefillPlan | None`, see PrefillPlan.make.
        affordable: `(prefix_lens) -> tokens` that SGLang itself would expand for a step.
        can_finish: `(prefix_lens, covered) -> bool`, whether the stock backend can attend to what the expanded parts
            leave, and give its lse.
        transient: expansion for a pass alone; None where there is none. It expands where SGLang would, and with
            `always` in any case.
        absorbs: all passes run by absorb and share without CUDA graphs, see prefill_graph.py.
        costs: of passes in prefill graphs and outside of them; None where there are no such graphs.
    """

    make_plan: Callable[..., PrefillPlan | None]
    affordable: Callable[[Sequence[int]], int]
    can_finish: Callable[[Sequence[int], Sequence[int]], bool]
    transient: TransientExpansion | None = None
    always: bool = False
    absorbs: bool = False
    costs: PassCosts | None = None

    def plan(
        self,
        step: Pass,
        reqs: Sequence[Req],
        prefix_lens: Sequence[int],
        new_tokens: Sequence[int],
        affordable: int,
        prefixes: Sharing,
        shared: SharedTree | None,
    ) -> PrefillPlan | None:
        """Return what a prefill pass attends to in expanded form; arguments are those of `Steps.plan_pass`.

        Args:
            affordable: what the function of this name returned. shared: what the requests share, where that is known.
        """
        costs, transient = self.costs, None
        plan = prefixes.plan_prefill(reqs, prefix_lens, new_tokens, always=affordable > 0, shared=shared)
        if self.transient is not None and (affordable or self.always or costs is not None):
            pays = costs.pays_alone if costs is not None else None
            # The one row of a request that decodes never gains as much as it takes to expand keys for this pass alone,
            # unless the rows of all of them would be fetched from an FP8 cache, each with what they share.
            new, lens = len(reqs) - step.decoding, prefix_lens
            if costs is None or not costs.fetches_many(prefix_lens, plan.prefix_lens, new_tokens):
                lens = [*prefix_lens[:new], *plan.prefix_lens[new:]]
            transient = self.transient.plan(
                reqs, lens, plan.prefix_lens, step.rows, always=self.always, pays=pays, shared=shared
            )
        ends = plan.prefix_lens if transient is None else transient.ends
        if costs is not None:
            made = transient.expanded_tokens if transient is not None else 0
            of_pass = prefix_lens, ends, new_tokens, made
            step.leaves_graph = not step.decoding and costs.eager(*of_pass) < costs.in_graph(*of_pass)
        if (costs is None or step.leaves_graph) and not self.can_finish(prefix_lens, ends):
            return None
        return self.make_plan(plan, step.rows, transient)


class Steps:
    """Plans every forward pass of one scheduler process.

    Attributes:
        reports: what it says of itself.
        shadow: None where nothing is checked.
        sharded: None where this rank holds its prefixes alone.
        plain_graphs: whether decode graphs are also captured without shared attention (graph_variants.py).
        beginnings: of prompts, by which ranks that divide the heads select among these graphs; None elsewhere.
        coming: requests of the pass that begins, whether or not anything could be planned for it.
        query_tokens: of a request in a step that shares; more than one where drafts are verified.
        pause: forward passes until something is shared again.
    """

    def __init__(
        self,
        prefixes: Sharing,
        expander: Expander | None,
        counters: Counters,
        *,
        shares: bool,
        prefill: PrefillSharing | None,
        max_requests: int,
        reports: Reports,
        query_tokens: int = 1,
    ) -> None:
        """
        Args:
            expander: None where nothing is expanded.
            shares: whether decode steps can share anything.
            prefill: None where prefill is another backend's, whose lse may be in another base.
            max_requests: of a step that shares.
            query_tokens: see Steps.
        """
        self.counters, self.reports = counters, reports
        self._prefixes, self._expander = prefixes, expander
        self._shares, self._prefill = shares, prefill
        self._transient = prefill.transient if prefill is not None else None
        self._max_requests, self.query_tokens = max_requests, query_tokens
        self.pause = 0
        self._next_pause = FIRST_PAUSE
        self._reached = False  # whether a plan that shares something has reached the device since the last pass
        self._stale = False  # whether what is expanded is still to be forgotten
        self._clear_memory: Callable[[], None] | None = None  # still to be called
        self.shadow: ShadowCheck | None = None
        self.sharded: ShardedSteps | None = None
        self.plain_graphs = False
        self.beginnings: Beginnings | None = None
        self.coming: Sequence[Req] = ()

    def attach(self, tree: TreeView) -> None:
        """Give it the tree, which SGLang builds after the attention backend."""
        if self.sharded is None:  # otherwise ranks tell each other what they share
            source = self._prefixes.source
            assert isinstance(source, RadixSource), "what requests share is known from the tree"
            source.tree = tree
            if self._expander is not None:
                self._expander.attach(tree)
        if self._transient is not None:
            self._transient.attach(tree)

    def shares_now(self) -> bool:
        """Return whether the pass that begins shares anything, or on ranks that divide the heads may share something;
        the same on all ranks that compute together. What it raises has to end the server: the other ranks may replay
        another graph, and with that all results would be wrong."""
        if self.sharded is not None:  # also where this rank's part could not begin: the others wait in the exchange
            return self.sharded.agreed
        if self.beginnings is None:
            return bool(passes.now.plan.segments)
        # New tokens of one request alone share what is cached of it.
        return passes.now.mixed or self.beginnings.some_are_alike(self.coming)

    def plan_pass(
        self,
        step: Pass,
        reqs: Sequence[Req],
        running: Sequence[Req],
        prefix_lens: Sequence[int] = (),
        new_tokens: Sequence[int] = (),
    ) -> None:
        """Plan a forward pass: expand what is worth it, and say which requests share what.

        Args:
            step: the pass, which admission.py chose. A decode step of a server that verifies drafts shares nothing:
                what is planned is for its verify steps.
            reqs: requests of the pass, in the order of its rows.
            running: requests that are decoding, whether or not they take part in this pass.
            prefix_lens: `[requests]` tokens that are cached; new_tokens: `[requests]` tokens to compute; in prefill.
        """
        begin = time.perf_counter()  # for a metric; ranks must decide alike, so nothing may depend on it
        if self._reached:
            self._reached, self._next_pause = False, FIRST_PAUSE
        kind, verifies, step.reqs = step.kind, step.kind is Kind.VERIFY, reqs
        step.absorbs |= kind is Kind.PREFILL and self._prefill is not None and self._prefill.absorbs
        if step.sharded is not None:
            self.counters.steps_sharded += 1
        repaired = self._repair()
        if self.pause:
            self.pause -= 1
        elif repaired and kind is not Kind.OTHER:
            try:
                if self.shadow is not None:
                    self.shadow.judge()
                if kind is Kind.PREFILL:
                    prefill = self._prefill
                    expanded = prefix_lens[: len(reqs) - step.decoding]  # by SGLang, which absorbs those that decode
                    affordable = prefill.affordable(expanded) if prefill is not None else 0
                    shared = self._expand_before(reqs, running, affordable)
                    if prefill is not None:
                        of_pass = reqs, prefix_lens, new_tokens, affordable
                        step.prefill = prefill.plan(step, *of_pass, self._prefixes, shared)
                elif self.sharded is not None:
                    pass  # what it shares, ranks have agreed on
                elif step.mixed:
                    step.plan = self._plan_mixed(step, reqs, running, prefix_lens)
                elif self._shares and verifies == (self.query_tokens > 1):
                    step.plan = self._plan_step(reqs)
            except Exception as error:
                self.fail(Fallback.PLAN_PASS, error)
        if kind.is_step and not step.mixed:  # a mixed pass is counted when it has come to its end (session.py)
            self.counters.count_step(step.plan, verifies=verifies)
        self.counters.count_pass(time.perf_counter() - begin)

    def fail(self, what: Fallback, error: BaseException, clear_memory: Callable[[], None] | None = None) -> None:
        """Handle a failure of ours: forget what is expanded, and plan nothing for a while.

        Args:
            what: has failed.
            clear_memory: has to be called before our buffers are used again.
        """
        logged = self.counters.fall_back(what, error)
        self._clear_memory = clear_memory or self._clear_memory
        passes.now.share_nothing()
        self._stale, self._reached = True, False
        self._repair()
        self.pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        if logged:
            logger.warning("hybrid_mla: %s, plain absorb for the next %d forward passes", what.value, self.pause)

    def _repair(self) -> bool:
        """Make up for what is owed since a failure; return whether nothing is owed any more. Scales are among it,
        whether or not the weights have changed."""
        try:
            if self._clear_memory is not None:
                self._clear_memory()
                self._clear_memory = None
            if self._stale:
                self.weights_change()
                self._stale = False
        except Exception as error:
            self.counters.fall_back(Fallback.REPAIR, error)
        return not self._stale and not self.has_lost_memory

    @property
    def has_lost_memory(self) -> bool:
        """Return whether a failure left our buffers with undefined contents: they may not be used until cleared."""
        return self._clear_memory is not None

    def succeed(self) -> None:
        """Record that a plan that shares something has reached the device. If the pass goes through, too, the next
        failure is the first one again."""
        self._reached = True

    def idle(self) -> None:
        """Forget what the last requests shared: none is running."""
        passes.now.share_nothing()
        self.coming = ()
        self._prefixes.idle()
        if self._transient is not None:
            self._transient.forget()

    def forget(self) -> None:
        """Drop everything that is expanded, as when the cache was flushed."""
        passes.now.share_nothing()
        self._prefixes.forget()
        if self._transient is not None:
            self._transient.forget()
        if self.shadow is not None:
            self.shadow.forget()

    def weights_change(self) -> None:
        """Drop what depends on the weights, which are about to change."""
        self.forget()
        if self._expander is not None:
            self._expander.weights_changed()

    def can_share(self) -> bool:
        """Return whether the next pass may share anything."""
        return not self.pause and not self._stale and not self.has_lost_memory

    def _plan_step(self, reqs: Sequence[Req]) -> Plan:
        if len(reqs) > self._max_requests:
            self.counters.fall_back(Fallback.MORE_REQUESTS, most=self._max_requests)
            return NOTHING_SHARED
        plan = self._prefixes.plan_decode(reqs)
        return plan if plan.segments else NOTHING_SHARED  # one object, which stays on the device

    def _plan_mixed(self, step: Pass, reqs: Sequence[Req], running: Sequence[Req], prefix_lens: Sequence[int]) -> Plan:
        if not self._shares:
            return NOTHING_SHARED
        rows = step.rows.units(self.query_tokens if step.kind is Kind.VERIFY else 1)
        shared = self._expand_before(reqs, running, rows=rows)
        plan = self._prefixes.plan_rows(reqs, rows, prefix_lens, mixed=step.decoding > 0, shared=shared)
        return plan if plan.segments else NOTHING_SHARED

    def _expand_before(
        self, reqs: Sequence[Req], running: Sequence[Req], affordable: int = 0, rows: Rows | None = None
    ) -> SharedTree | None:
        """Expand what new requests share among themselves and with those that are decoding.

        Returns:
            what new requests share; None where nothing is expanded, or there are too many.
        """
        if self._expander is None:
            return None
        # SGLang runs a decode batch as a prefill where another rank prefills: its requests are running ones, too.
        of_pass = set(map(id, reqs))
        running = [req for req in running if not req.finished() and id(req) not in of_pass]
        if len(reqs) + len(running) > self._max_requests:
            running = []  # so many will share no decode step; those of this one may share it
        if len(reqs) <= self._max_requests:
            return self._prefixes.before_prefill(reqs, running, affordable, rows=rows)
        self.counters.fall_back(Fallback.MORE_REQUESTS, most=self._max_requests)
        return None
