"""Vote of ranks, so that they share alike: each reports what it has, all decide from all reports, and nobody waits for
a rank that does not come.

Every rank takes part in every vote, in as many exchanges as the others: how many there are follows from what was said
in them. In most steps nothing has changed since the one before on any rank, and one exchange of four integers tells
that. Otherwise reports follow, and a fingerprint of what each rank made of them: its plan and its allocation requests.
A rank in which something of ours has failed says so in place of a report, and nothing is sharded in that step on any of
them; neither is it where fingerprints differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sglang_mla_ext.prefix.sharded.member import Member
from sglang_mla_ext.prefix.sharded.names import Names
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.report import Report, fingerprint
from sglang_mla_ext.reasons import Fallback, NotSharded

Words = Sequence[int]

Gather = Callable[[Words], Sequence[Words]]
"""`gather(mine)`: the integers of all ranks, in their order; each gives as many. Every rank calls it."""


class Vote:
    """Votes of one rank, one after the other."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._plan: ShardedPlan | None = None
        self._plan_of = 0  # fingerprint of all that the plan was made from

    def hold(
        self,
        given: Callable[[], tuple[Sequence[Names], Sequence[int]]] | None,
        tokens: Sequence[int],
        each: int,
        gather: Gather,
        fail: Callable[[Fallback, Exception], None],
    ) -> ShardedPlan | NotSharded:
        """Return what a step shares, or why it shares nothing; the same on all ranks, each of which calls this.

        Args:
            given: names of each prompt's chunks, and rows of each, of this rank's requests of the step; None where this
                rank cannot share now.
            tokens: `[ranks]` rows of each in the step, as all ranks know them.
            each: rows that every rank has, some of them padding.
            fail: is told what has failed here.
        """
        member = self._member
        words, mark = array("q"), 0
        if given is not None:
            try:
                words, mark = member.report(*given()).said
            except Exception as error:
                fail(Fallback.REPORT_SHARED, error)
        # The report's fingerprint and length, what the last plan was made from, if this rank still has that, and how
        # often everything was forgotten.
        mine = [mark, len(words), self._plan_of if member.has_agreed else 0, member.forgotten]
        marks, lengths, plans_of, forgotten = zip(*gather(mine), strict=True)
        member.forget_as_often_as(max(forgotten))
        if len(set(forgotten)) > 1 or not all(lengths):
            return NotSharded.RANK_PAUSED
        known = fingerprint([*marks, each])
        if self._plan is not None and all(plan_of == known for plan_of in plans_of):
            return self._plan
        self._plan, self._plan_of = None, 0
        plan, made, of_all = None, 0, gather(words + array("q", bytes(8 * (max(lengths) - len(words)))))
        try:
            reports = [Report.from_words(of_rank) for of_rank in of_all]
            rows = [sum(report.rows) for report in reports]
            if rows != list(tokens):
                raise RuntimeError(f"ranks have {list(tokens)} rows and tell of {rows}")
            plan = member.agree(reports, each)
            made = member.fingerprint_of(plan) or 1
        except Exception as error:
            fail(Fallback.AGREE_SHARED, error)
            plan, made = None, 0
        fingerprints = {of_rank for (of_rank,) in gather([made])}
        if plan is None or 0 in fingerprints:
            return NotSharded.RANK_PAUSED
        if len(fingerprints) > 1:
            return NotSharded.PLANS_DIFFER
        self._plan, self._plan_of = plan, known
        return plan
