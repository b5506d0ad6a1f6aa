"""How ranks come to share alike: each says what it has, all decide from what all said, and nobody waits for one that
does not come.

Every rank takes part in every vote, in as many exchanges as the others: how many there are follows from what was said
in them. In most steps nothing has changed since the one before on any rank, and one exchange of three integers tells
that. Otherwise reports follow, and a fingerprint of what each rank made of them: its plan and its requests for memory.
A rank in which something of ours has failed says so in place of a report, and nothing is spread in that step on any of
them; neither is it where fingerprints differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from sglang_mla_ext.prefix.sharded.names import Names
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.prefixes import SpreadPrefixes
from sglang_mla_ext.prefix.sharded.report import Report, fingerprint

A_RANK_PAUSES = "a rank shares nothing for a while"
PLANS_DIFFER = "plans_differ"

Gather = Callable[[Sequence[int]], Sequence[Sequence[int]]]
"""`gather(mine)`: the integers of all ranks, in their order; each gives as many. Every rank calls it."""

Given = Callable[[], tuple[Sequence[Names], Sequence[int]]]
"""Names of each prompt's chunks, and rows of each, of this rank's requests of the step."""


class Vote:
    """Of one rank."""

    def __init__(self, prefixes: SpreadPrefixes, gather: Gather, fail: Callable[[str, Exception], None]) -> None:
        """
        Args:
            fail: is told what has failed here.
        """
        self._prefixes, self._gather, self._fail = prefixes, gather, fail
        self._plan: ShardedPlan | None = None
        self._plan_of = 0  # fingerprint of all that the plan was made from

    def decide(self, given: Given | None, tokens: Sequence[int], each: int) -> ShardedPlan | str:
        """Return what a step shares, or why it shares nothing; the same on all ranks.

        Args:
            given: None where this rank cannot share now.
            tokens: `[ranks]` rows of each in the step, as all ranks know them.
            each: rows that every rank has, some of them padding.
        """
        words, mark = self._words(given)
        said = self._gather([mark, len(words), self._plan_of if self._prefixes.has_agreed else 0])
        if not all(length for _, length, _ in said):
            return A_RANK_PAUSES
        known = fingerprint([*(mark for mark, _, _ in said), each])
        if self._plan is None or any(plan_of != known for _, _, plan_of in said):
            self._plan, self._plan_of = None, 0
            longest = max(length for _, length, _ in said)
            reports = self._gather(words + array("q", bytes(8 * (longest - len(words)))))
            plan, made = self._agree(reports, tokens, each)
            all_made = {of_rank for (of_rank,) in self._gather([made])}
            if plan is None or 0 in all_made:
                return A_RANK_PAUSES
            if len(all_made) > 1:
                return PLANS_DIFFER
            self._plan, self._plan_of = plan, known
        return self._plan

    def _words(self, given: Given | None) -> tuple[array[int], int]:
        """The report of this rank and its fingerprint; empty where it makes none."""
        if given is None:
            return array("q"), 0
        try:
            return self._prefixes.report(*given()).said
        except Exception as error:
            self._fail("saying what is shared", error)
            return array("q"), 0

    def _agree(
        self, words: Sequence[Sequence[int]], tokens: Sequence[int], each: int
    ) -> tuple[ShardedPlan | None, int]:
        """Return what the step shares by this rank's reckoning, and its fingerprint; 0 where it could make none."""
        try:
            reports = [Report.from_words(of_rank) for of_rank in words]
            rows = [sum(report.rows) for report in reports]
            if rows != list(tokens):
                raise RuntimeError(f"ranks have {list(tokens)} rows and tell of {rows}")
            plan = self._prefixes.agree(reports, each)
            return plan, self._prefixes.fingerprint_of(plan) or 1
        except Exception as error:
            self._fail("agreeing on what is shared", error)
            return None, 0
