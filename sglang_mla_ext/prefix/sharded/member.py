"""One rank's part in sharded prefixes: what it reports to the others, and what all of them decide alike.

    member.report(paths, rows)     # before a step; given to all ranks
    plan = member.agree(reports)   # of all ranks: alike on all of them, but for the ids of chunks
    member.begin(plan)             # what the step shares
    member.expand()                # in the step, and for later ones: the next report says what was

What a step shares every rank has expanded, and has said so before. So memory may differ from rank to rank, and one that
has dropped a chunk says that before it writes over it: memory for what was asked for with a plan is given with the next
report.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_mla_ext.prefix.planner.planner import Planned
from sglang_mla_ext.prefix.sharded.agreement import Agreement
from sglang_mla_ext.prefix.sharded.names import Names
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.report import Report
from sglang_mla_ext.prefix.sharded.reports import Reports
from sglang_mla_ext.prefix.sharing import Sharing, Step


class Member:
    """See the module."""

    def __init__(self, sharing: Sharing, reports: Reports, rank: int) -> None:
        """
        Args:
            sharing: whose source the reports are, with room for the steps of all ranks.
            rank: this one.
        """
        self._sharing, self._reports, self.rank = sharing, reports, rank
        self._planned: Planned | None = None  # of the last agreement
        self._settled = True  # whether memory is given to what was asked for, and all of that is expanded

    def report(self, paths: Sequence[Names], rows: Sequence[int]) -> Report:
        """Return what this rank tells the others. Memory for what the last step asked for is given first: what is
        dropped for it, no step from now on has.

        Args:
            paths: `[requests]` names of the chunks of each prompt whose latent rows are there.
            rows: `[requests]` of each in the step.
        """
        self._reports.begin(paths)
        if not self._settled and self.has_agreed:
            expansion = self._sharing.expansion
            expansion.allot(*self._sharing.asked)
            self._settled = not (expansion.under_way or self._sharing.pool.waiting)
        return self._reports.report(rows)

    def agree(self, reports: Sequence[Report], each: int) -> ShardedPlan:
        """Return what the step shares, from the reports of all ranks.

        Args:
            each: rows that every rank has, some of them padding.
        """
        agreement = Agreement.of(reports, self._sharing.pool.chunk_tokens)
        self._reports.agreement = agreement
        rows = agreement.rows_of_all(self._sharing.planner.cost.query_tokens)
        self._planned = self._sharing.plan_shared(agreement.tree, rows)
        self._settled = False
        return ShardedPlan.of(self._planned, agreement, self.rank, each)

    def fingerprint_of(self, plan: ShardedPlan) -> int:
        """See ShardedPlan.fingerprint: of a plan of the last agreement, with what was asked for with that."""
        return plan.fingerprint(self._sharing.asked.requests)

    @property
    def asks_for_nothing(self) -> bool:
        """Return whether the last agreement found nothing worth sharing; the same on all ranks of one fingerprint."""
        return not self._sharing.asked.requests

    @property
    def has_agreed(self) -> bool:
        """Return whether there is an agreement on what all ranks asked for; False once everything is forgotten."""
        return self._reports.agreement is not None

    @property
    def forgotten(self) -> int:
        """Return how often this rank has forgotten everything."""
        return self._reports.forgotten

    def forget_as_often_as(self, times: int) -> None:
        """Forget everything if another rank has done so more often: after a failure, or a flush that came to it alone.
        With what one rank kept, and two prompts of nearly equal worth, each rank could hold another one of them for
        good, and none would be shared."""
        if self.forgotten < times:
            self._sharing.forget()
            self._reports.forgotten = times

    def begin(self, plan: ShardedPlan | None) -> None:
        """Take note of what the step that comes shares, which is of the last agreement."""
        if plan is None or self._planned is None:
            self._sharing.show(Step())
            return
        if plan.mine is self._sharing.plan:
            return
        parts = [self._planned.parts[index] for index in plan.own]
        pool, size = self._sharing.pool, self._sharing.pool.chunk_tokens
        last = [(plan.names[index][-1], part.end // size - 1) for index, part in zip(plan.own, parts, strict=True)]
        chunks = [pool.chunk(*place) for place in last]
        self._sharing.show(Step(Planned(plan.mine, parts, self._planned.branches), places=chunks))

    def expand(self) -> None:
        """Expand what ranks asked for, before a step."""
        self._sharing.expansion.expand(self._sharing.planner.options.expand_tokens_per_step)
