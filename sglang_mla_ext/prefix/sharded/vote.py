"""How ranks come to share alike: each says what it has, all decide from what all said, and nobody waits for one that
does not come.

Every rank takes part in every vote, in as many exchanges as the others: how many there are follows from what was said
in them. In most steps nothing has changed since the one before on any rank, and one exchange of three integers tells
that. Otherwise reports follow, and a fingerprint of what each rank made of them: its plan and its allocation requests.
A rank in which something of ours has failed says so in place of a report, and nothing is sharded in that step on any of
them; neither is it where fingerprints differ.

    said = exchange(vote.open(report.said, agreed))       # 64-bit integers of this rank in, those of all ranks out
    decided = vote.compare(said, each)
    if decided is None:
        reports = exchange(vote.report())
        decided = vote.close(plan, exchange([fingerprint]))

Who holds the vote makes the exchanges and the plan; here is only what is said and what follows from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.report import fingerprint
from sglang_mla_ext.reasons import NotSharded

Words = Sequence[int]


class Vote:
    """One rank's side of one vote after the other."""

    def __init__(self) -> None:
        self._plan: ShardedPlan | None = None
        self._plan_of = 0  # fingerprint of all that the plan was made from
        self._known = 0  # the same, of what has been said in this vote
        self._words: array[int] = array("q")
        self._longest = 0

    def open(self, report: tuple[array[int], int] | None, *, agreed: bool) -> Words:
        """Return the first words: the report's fingerprint and length, and what the last plan was made from.

        Args:
            report: see Report.said; None where this rank cannot share now.
            agreed: whether this rank still has what the last plan was made from.
        """
        self._words, mark = report if report is not None else (array("q"), 0)
        return [mark, len(self._words), self._plan_of if agreed else 0]

    def compare(self, said: Sequence[Words], each: int) -> ShardedPlan | NotSharded | None:
        """Return the plan of the vote before, if nothing has changed, or why the step shares nothing; None where
        reports have to be exchanged.

        Args:
            said: first words of all ranks.
            each: rows that every rank has, some of them padding.
        """
        if not all(length for _, length, _ in said):
            return NotSharded.RANK_PAUSED
        self._known = fingerprint([*(mark for mark, _, _ in said), each])
        if self._plan is not None and all(plan_of == self._known for _, _, plan_of in said):
            return self._plan
        self._plan, self._plan_of = None, 0
        self._longest = max(length for _, length, _ in said)
        return None

    def report(self) -> Words:
        """Return the second words: the report, as long as the longest."""
        return self._words + array("q", bytes(8 * (self._longest - len(self._words))))

    def close(self, plan: ShardedPlan | None, made: Sequence[Words]) -> ShardedPlan | NotSharded:
        """Return what the step shares, or why it shares nothing; the same on all ranks.

        Args:
            plan: this rank's; None where it could make none.
            made: the third words of all ranks: a fingerprint of what each made, 0 for none.
        """
        of_all = {of_rank for (of_rank,) in made}
        if plan is None or 0 in of_all:
            return NotSharded.RANK_PAUSED
        if len(of_all) > 1:
            return NotSharded.PLANS_DIFFER
        self._plan, self._plan_of = plan, self._known
        return plan
