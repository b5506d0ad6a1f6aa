"""Choose covers for all branches so that the most is saved, where rows and parts have prices.

With `gain` of a cover, less the prices of its parts and of the rows that they launch a way for, the most that a branch
and all below it save is

    T(b) = max over covers (gain + Σ max(0, T(children of b)))

where a branch is attended to together with all above it, or is joined to its children. T depends on where the branch
begins and on the ways that are launched for its rows already, so there is one for each of these. One pass from the
leaves finds them all, and one from the roots what they were found with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.covers import GROUPED, NAIVE, Cover, Covers, Ways


class Prices(NamedTuple):
    """Seconds a layer.

    Attributes:
        naive, grouped: of a row for which naive attention or grouped absorb is launched.
        part: of a part; part_row: of each of its rows.
    """

    naive: float = 0.0
    grouped: float = 0.0
    part: float = 0.0
    part_row: float = 0.0


class Choice(NamedTuple):
    """Choice of the parts that a step attends to together, and what they save.

    Attributes:
        parts: parents before children.
        gain: saving of all parts, launches not counted; priced: the same, with all prices paid.
        rows: rows for which each way is launched.
    """

    parts: Sequence[Part]
    gain: float
    priced: float
    rows: dict[int, int]


NOTHING = Choice((), 0.0, 0.0, {NAIVE: 0, GROUPED: 0})

_NONE = -math.inf
_NOTHING = [_NONE] * 4
_AT_ROOT = (0,)
_JOIN = Cover((), 0.0, 0, ends=False, goes_on=True)

_Launched = tuple[tuple[int, tuple[int, ...]], ...]

# By the ways that may be taken and those of a cover: what is launched with the cover, and what it may have been before.
_LAUNCHED: dict[int, dict[int, _Launched]] = {
    NAIVE: {NAIVE: ((NAIVE, (0, NAIVE)),)},
    GROUPED: {GROUPED: ((GROUPED, (0, GROUPED)),)},
    NAIVE | GROUPED: {
        NAIVE: ((NAIVE, (0, NAIVE)), (NAIVE | GROUPED, (GROUPED, NAIVE | GROUPED))),
        GROUPED: ((GROUPED, (0, GROUPED)), (NAIVE | GROUPED, (NAIVE, NAIVE | GROUPED))),
        NAIVE | GROUPED: ((NAIVE | GROUPED, (0, NAIVE, GROUPED, NAIVE | GROUPED)),),
    },
}

_Values = list[list[float]]
"""Savings in seconds a layer, `[beginnings][ways launched]`."""


class Chooser:
    """Chooser among the same covers at different prices.

    Attributes:
        most_rows: the most rows for which a way can be launched.
    """

    def __init__(self, branches: Branches, covers: Sequence[Covers], ways: Ways, modes: int) -> None:
        """
        Args:
            modes: ways that may be taken, as bits.
        """
        self.branches, self._launched = branches, _LAUNCHED[modes]
        self.page = ways.page
        self.gains = ways.naive if modes & NAIVE else None, ways.grouped if modes & GROUPED else None
        self.most_rows = sum(branch.rows for branch in branches if branch.parent < 0)
        self._joins = [of_branch.joins for of_branch in covers]
        self._covers = [of_branch.by_beginning for of_branch in covers]
        if modes != ways.modes:
            self._covers = [
                [[cover for cover in each if not cover.modes & ~modes] for each in of_branch]
                for of_branch in self._covers
            ]

    def choose(self, prices: Prices) -> Choice:
        """Return the choice that saves the most at these prices, even if that is less than nothing."""
        launched, of_part, of_row = self._launched, prices.part, prices.part_row
        launch_prices = 0.0, prices.naive, prices.grouped, prices.naive + prices.grouped
        # Of the children of each branch, see `_together`; the last place is for branches without a parent.
        below: list[_Values | None] = [None] * (len(self._covers) + 1)
        values: list[_Values] = [[]] * len(self._covers)
        picked: list[list[list[Cover]]] = [[]] * len(self._covers)
        for index in range(len(self._covers) - 1, -1, -1):
            branch = self.branches[index]
            rows, parent, kids = branch.rows, branch.parent, below[index]
            part_price = of_part + rows * of_row
            following = kids[0] if kids is not None else _NOTHING
            joined = kids[self._joins[index] :] if kids is not None else []
            of_branch: _Values = []
            picks: list[list[Cover]] = []
            for begin, covers in enumerate(self._covers[index]):
                best, pick = _NOTHING.copy(), [_JOIN, _JOIN, _JOIN, _JOIN]
                for cover in covers:
                    parts, gain, modes, ends, goes_on = cover
                    gain -= len(parts) * part_price
                    states: _Launched = launched[modes] if parent >= 0 else ((modes, _AT_ROOT),)
                    for after, befores in states:
                        value = gain
                        if goes_on and ((further := following[after]) > 0.0 or not ends):
                            value += further
                        for before in befores:
                            if (priced := value - rows * launch_prices[modes & ~before]) > best[before]:
                                best[before], pick[before] = priced, cover
                if begin < len(joined):
                    for before, value in enumerate(joined[begin]):
                        if value > best[before]:
                            best[before], pick[before] = value, _JOIN
                of_branch.append(best)
                picks.append(pick)
            values[index], picked[index] = of_branch, picks
            siblings = below[parent]
            if siblings is None:
                below[parent] = of_branch
            elif parent >= 0:
                below[parent] = _together(siblings, of_branch)
            else:
                below[parent] = [[_sum(siblings[0][0], of_branch[0][0])]]
        return self._traced(values, picked, below)

    def last_part(self, branch: int, start: int) -> Part | None:
        """Return the part of a branch that begins with this token and that no other follows, attended to in the way
        that saves the most; None where there is none."""
        others = [
            cover.parts[0]
            for covers in self._covers[branch]
            for cover in covers
            if cover.ends and len(cover.parts) == 1 and cover.parts[0].start == start
        ]
        return max(others, key=lambda other: other.gain, default=None)

    def _traced(
        self, values: Sequence[_Values], picked: Sequence[list[list[Cover]]], below: Sequence[_Values | None]
    ) -> Choice:
        """Return the choice that the values were found with, traced from the roots down."""
        if (roots := below[-1]) is None or roots[0][0] == _NONE:
            return NOTHING
        parts: list[Part] = []
        gain, rows = 0.0, [0, 0, 0, 0]
        # Of a branch whose children are used: where they begin, what is launched by then, and what they save together.
        at: list[tuple[int, int, float] | None] = [None] * len(below)
        at[-1] = 0, 0, roots[0][0]
        for index, (branch, joins) in enumerate(zip(self.branches, self._joins, strict=True)):
            if (place := at[branch.parent]) is None:
                continue
            begin, launched, together = place
            value = values[index][begin][launched]
            if value < together if together <= 0.0 else value <= 0.0:
                continue
            if together <= 0.0:  # this one alone
                at[branch.parent] = None
            pick = picked[index][begin][launched]
            parts += pick.parts
            gain += pick.gain
            rows[pick.modes & ~launched] += branch.rows
            if pick.goes_on and (kids := below[index]) is not None:
                begin = begin + joins if pick is _JOIN else 0
                launched |= pick.modes
                if (together := kids[begin][launched]) > 0.0 or not pick.ends:
                    at[index] = begin, launched, together
        both = rows[NAIVE | GROUPED]
        return Choice(parts, gain, roots[0][0], {NAIVE: rows[NAIVE] + both, GROUPED: rows[GROUPED] + both})


def _sum(a: float, b: float) -> float:
    """Return the joint saving of children of which at least one is used: of all that save something, or else of the one
    that costs least."""
    return a + b if a > 0.0 and b > 0.0 else a if a > b else b


def _together(values: _Values, others: _Values) -> _Values:
    """Join the values of children, place by place, by `_sum`."""
    return [list(map(_sum, some, more)) for some, more in zip(values, others, strict=True)]
