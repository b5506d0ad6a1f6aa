"""What the next forward pass does, decided on the host: which rows share what, and what prefill attends to.

SGLang's scheduler tells of a pass through hooks.py before it runs. A failure here never stops the pass: it is counted,
what is expanded is forgotten, and sharing pauses for a while. Where even that fails, it is owed: it is tried again
before each pass, and until then nothing is shared.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.step.prefill import PrefillPlan
from sglang_mla_ext.adapter.step.relay import relay
from sglang_mla_ext.kernels.absorb.schedule import LatentSegment
from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.observe import Counters, report, segment_entry
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Plan
from sglang_mla_ext.prefix.shared_prefixes import ExpandedGroup, SharedPrefixes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_mla_ext.adapter.compat.installed import TreeView
    from sglang_mla_ext.adapter.step.expander import Expander
    from sglang_mla_ext.adapter.step.shadow import ShadowCheck

logger = logging.getLogger(__name__)

MAX_ROWS = 1024
"""Rows, which are query tokens, of one run of the attention: fills the GPU, and bounds the partial results' memory.
Batches with more decode by plain absorb; prefill takes as many runs as it needs."""

KEPT_ERRORS = 4096
"""Errors of the shadow check that wait for the metrics."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 1 << 16
"""Forward passes without sharing after a failure; twice as many after every further one that comes before a decode step
with groups has gone through."""


@dataclass(frozen=True)
class StepPlan:
    """What the rows of a decode or verify step share, in the kernels' terms. It holds nothing of SGLang's tree.

    Attributes:
        expanded: attended to by naive attention.
        latent: attended to by grouped absorb.
        tail_starts: `[requests]` where each request's private tail begins.
    """

    expanded: tuple[ExpandedSegment, ...] = ()
    latent: tuple[LatentSegment, ...] = ()
    tail_starts: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is shared."""
        return bool(self.expanded or self.latent)

    @classmethod
    def of(cls, plan: Plan, expanded: Sequence[ExpandedGroup], queries: int = 1) -> StepPlan:
        """
        Args:
            plan: its rows are requests.
            expanded: the plan's naive groups, with their chunks.
            queries: query tokens of each request, which are rows that follow each other.
        """
        if not plan.groups:
            return NOTHING_SHARED

        def rows(requests: Sequence[int]) -> tuple[int, ...]:
            return tuple(request * queries + token for request in requests for token in range(queries))

        return cls(
            tuple(ExpandedSegment(rows(group.rows), group.tokens, group.chunks) for group in expanded),
            tuple(
                LatentSegment(rows(group.rows), group.start, group.end) for group in plan.of_mode(Mode.GROUPED_ABSORB)
            ),
            plan.prefix_lens,
        )


NOTHING_SHARED = StepPlan()


@dataclass(frozen=True)
class PrefillSharing:
    """What planning has to know of prefill, where our backend does it.

    Attributes:
        make_plan: `(parts, new_tokens) -> PrefillPlan | None`, see PrefillPlan.make.
        affordable: `(prefix_lens) -> tokens` that SGLang itself would expand for a step.
        can_finish: `(prefix_lens, covered) -> bool`, whether the stock backend can attend to what the expanded parts
            leave, and give its lse.
    """

    make_plan: Callable[..., PrefillPlan | None]
    affordable: Callable[[Sequence[int]], int]
    can_finish: Callable[[Sequence[int], Sequence[int]], bool]


class Steps:
    """Plans every forward pass of one scheduler process.

    Attributes:
        next: of the decode or verify step that comes next.
        shadow: None where nothing is checked.
        description: what can be shared here, in one line for the log.
    """

    description = ""

    def __init__(
        self,
        prefixes: SharedPrefixes,
        expander: Expander | None,
        counters: Counters,
        *,
        shares: bool,
        prefill: PrefillSharing | None,
        max_requests: int,
        budget_bytes: int,
        chunk_bytes: int,
        queries: int = 1,
    ) -> None:
        """
        Args:
            expander: None where nothing is expanded.
            shares: whether decode steps can share anything.
            prefill: None where prefill is another backend's, whose lse may be in another base.
            max_requests: of a step that shares.
            budget_bytes: device memory for expanded prefixes and our own buffers; chunk_bytes: of one chunk.
            queries: query tokens of a request in a step that shares; more than one where drafts are verified.
        """
        self.counters = counters
        self.next = NOTHING_SHARED
        self._prefixes, self._expander = prefixes, expander
        self._shares, self._prefill = shares, prefill
        self._max_requests, self._queries = max_requests, queries
        self._budget_bytes, self._chunk_bytes = budget_bytes, chunk_bytes
        self._pause = 0  # forward passes to go until the next attempt
        self._next_pause = FIRST_PAUSE
        self._reached = False  # whether a plan that shares something has reached the device since the last pass
        self._stale = False  # whether what is expanded is still to be forgotten
        self._clear_memory: Callable[[], None] | None = None  # still to be called
        self.shadow: ShadowCheck | None = None
        self._shadow_errors: deque[float] = deque(maxlen=KEPT_ERRORS)
        self._planned = Plan(0), NOTHING_SHARED  # the last plan, and what was made of it

    def attach(self, tree: TreeView) -> None:
        """Give it the tree, which SGLang builds after the attention backend."""
        self._prefixes.attach(tree)
        if self._expander is not None:
            self._expander.attach(tree)

    def before_forward(
        self,
        mode: ForwardMode,
        reqs: Sequence[Req],
        running: Sequence[Req],
        prefix_lens: Sequence[int] = (),
        new_tokens: Sequence[int] = (),
    ) -> None:
        """Plan a forward pass: expand what is worth it, and say which rows share what.

        Args:
            mode: a decode step of a server that verifies drafts shares nothing: what is planned is for its verify
                steps.
            reqs: requests of the pass, in the order of its rows.
            running: requests that are decoding, whether or not they take part in this pass.
            prefix_lens: `[requests]` tokens that are cached; new_tokens: `[requests]` tokens to compute; in prefill.
        """
        begin = time.perf_counter()  # for a metric; ranks must decide alike, so nothing may depend on it
        self.next = NOTHING_SHARED
        if self._reached:
            self._reached, self._next_pause = False, FIRST_PAUSE
        relay.clear()
        plan = Plan(0)
        verifies = mode.is_target_verify()
        decodes = mode.is_decode() or verifies
        repaired = self._repair()
        if self._pause:
            self._pause -= 1
        elif repaired and not mode.is_idle():
            try:
                self._judge()
                if decodes:  # SGLang counts a verify step as prefill, too
                    if self._shares and verifies == (self._queries > 1):
                        plan = self._plan_decode(reqs)
                elif mode.is_extend() and self._expander is not None:
                    running = [req for req in running if not req.finished()]
                    relay.prefill = self._plan_prefill(reqs, running, prefix_lens, new_tokens)
                    relay.prefill_lens = prefix_lens
            except Exception as error:
                plan = Plan(0)
                self.fail("planning", error)
        if decodes:
            self.counters.count_step(plan, verifies=verifies)
        self.counters.count_pass(time.perf_counter() - begin)

    def watch_step(self, shares: bool) -> None:
        """A decode or verify step is about to be launched. Raises nothing.

        Args:
            shares: whether it shares anything.
        """
        if self.shadow is not None:
            try:
                self.shadow.begin_step(shares)
            except Exception as error:
                self.fail("the shadow check", error)

    def check_step(self, batch: Any) -> bool:
        """A step has been launched, SGLang's ForwardBatch of which this is; whether what was planned for attention to
        latents was overwritten. Raises nothing."""
        if self.shadow is None:
            return False
        try:
            return self.shadow.end_step(batch)
        except Exception as error:
            self.fail("the shadow check", error)
            return True

    def take_shadow_errors(self) -> list[float]:
        """Errors of rows that the shadow check found since this was last asked."""
        errors = list(self._shadow_errors)
        self._shadow_errors.clear()
        return errors

    def _judge(self) -> None:
        """What the last shadow check has found, when that is known."""
        finding = self.shadow.finding() if self.shadow is not None else None
        if finding is None:
            return
        self.counters.shadow_checks += 1
        self._shadow_errors.extend(finding.errors)
        if not finding.wrong:
            return
        self.counters.shadow_failures += 1
        logger.warning(
            "hybrid_mla: the shadow check found layer %d wrong for %d requests: relative errors up to %.3g, %g is the "
            "bound. No longer shared: %s",
            finding.layer,
            len(finding.wrong),
            max(finding.errors, key=lambda error: (error != error, error)),  # nan is the worst
            finding.bound,
            "; ".join(
                f"tokens [{each.start}, {each.end}) of {len(each.requests)} requests ({each.mode.value})"
                for each in finding.suspects
            )
            or "nothing, the wrong ones shared nothing",
        )
        self._prefixes.distrust(finding.suspects)

    def fail(self, what: str, error: BaseException, clear_memory: Callable[[], None] | None = None) -> None:
        """Something of ours has failed: forget what is expanded, and plan nothing for a while.

        Args:
            what: was being done.
            clear_memory: has to be called before our buffers are used again.
        """
        reason = f"{what} failed: {type(error).__name__}"
        first = reason not in self.counters.fallbacks
        self.counters.fall_back(reason, error)
        self._clear_memory = clear_memory or self._clear_memory
        self.next, self._stale, self._reached = NOTHING_SHARED, True, False
        self._repair()
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        if first:
            logger.warning("hybrid_mla: %s failed, plain absorb for the next %d forward passes", what, self._pause)

    def _repair(self) -> bool:
        """Do what is owed since a failure; whether nothing is owed any more. Scales are among it, whether or not the
        weights have changed."""
        try:
            if self._clear_memory is not None:
                self._clear_memory()
                self._clear_memory = None
            if self._stale:
                self.weights_change()
                self._stale = False
        except Exception as error:
            self.counters.fall_back(f"repairing failed: {type(error).__name__}", error)
        return not self._stale and not self.has_lost_memory

    @property
    def has_lost_memory(self) -> bool:
        """Whether our buffers hold anything at all, and not what was left in them: they may not be used."""
        return self._clear_memory is not None

    def succeed(self) -> None:
        """A plan that shares something has reached the device. If the pass goes through, too, the next failure is the
        first one again."""
        self._reached = True

    def idle(self) -> None:
        """No request is running."""
        self._forget_plans()
        self._prefixes.idle()

    def forget(self) -> None:
        """Drop everything that is expanded, as when the cache was flushed."""
        self._forget_plans()
        self._prefixes.forget()
        if self.shadow is not None:
            self.shadow.forget()

    def weights_change(self) -> None:
        """The model's weights are about to change."""
        self.forget()
        if self._expander is not None:
            self._expander.weights_changed()

    def report(self) -> dict[str, Any]:
        """The `hybrid_mla` entry of `/server_info`."""
        expanded_bytes = self._prefixes.pool.used_chunks * self._chunk_bytes
        without = self._prefixes.tokens_without_memory
        return report(self.counters, self._prefixes.plan, expanded_bytes, self._budget_bytes, without)

    def status(self) -> dict[str, Any]:
        """The entry with the tree of shared segments, for who asks; see status.Rank. It changes nothing."""
        found = self.report()
        found |= {"requests": self._prefixes.plan.num_rows, "pause": self._pause, "description": self.description}
        try:
            found["segments"] = [
                segment_entry(each, self._chunk_bytes, self._prefixes.latent_bytes)
                for each in self._prefixes.segments()
            ]
        except Exception as error:  # what is shared stays so
            self.counters.fall_back(f"showing the tree of shared segments failed: {type(error).__name__}", error)
            found["segments"] = []
        return found

    def _forget_plans(self) -> None:
        """A plan's nodes keep their tree alive."""
        self.next, self._planned = NOTHING_SHARED, (Plan(0), NOTHING_SHARED)
        relay.clear()

    def _plan_decode(self, reqs: Sequence[Req]) -> Plan:
        if len(reqs) > self._max_requests:
            self.counters.fall_back(f"more than {self._max_requests} requests in a batch")
            return Plan(0)
        plan, expanded = self._prefixes.before_decode(reqs)
        if plan is not self._planned[0]:
            self._planned = plan, StepPlan.of(plan, expanded, self._queries)
        self.next = self._planned[1]
        return plan

    def _plan_prefill(
        self, reqs: Sequence[Req], running: Sequence[Req], prefix_lens: Sequence[int], new_tokens: Sequence[int]
    ) -> PrefillPlan | None:
        if self._prefill is None:
            self._prefixes.before_prefill(reqs, running)
            return None
        affordable = self._prefill.affordable(prefix_lens)
        self._prefixes.before_prefill(reqs, running, affordable)
        parts = self._prefixes.expanded_parts(reqs, prefix_lens, new_tokens, always=affordable > 0)
        if not self._prefill.can_finish(prefix_lens, [part.tokens for part in parts]):
            return None
        return self._prefill.make_plan(parts, new_tokens)
