"""What a step pays for launching naive attention or grouped absorb, and which parts are not worth that.

A launch takes the longer, the more rows take part, but each further one adds less. So which parts of a plan pay is a
choice of sets; what is dropped here is found by a few passes over the plan, with prices for a row more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang_mla_ext.prefix.branches import Branches, Part
from sglang_mla_ext.segment import Mode

Launch = Callable[[Mode, int], float]
"""`launch(mode, rows)`: what a step pays, in seconds a layer, for attending in this way at all, with so many rows.
It may be negative: rates count the partials of many rows at more than the overhead that was fitted with them."""

NAIVE, GROUPED = 1, 2
"""Ways to attend together, as bits."""


@dataclass(eq=False)
class Launched:
    """A part for whose rows a step launches a way that is not launched for them already.

    Attributes:
        mode: a bit; rows: how many.
        gain: of the part and of those that follow it, but for what they launch more.
        above: index of the one that it follows, -1 for none.
    """

    branch: int
    mode: int
    rows: int
    gain: float
    above: int


def launched_by(parts: Sequence[Part], branches: Branches) -> list[Launched]:
    """What parts launch, parents before children."""
    found: list[Launched] = []
    at_branch: dict[int, tuple[int, int]] = {}  # the last of these on the way to its end, and all modes up to there
    for part in parts:
        mode = NAIVE if part.mode is Mode.NAIVE else GROUPED
        last, modes = at_branch.get(branches.nearest(part.branch, at_branch), (-1, 0))
        if modes & mode:
            found[last].gain += part.gain
        else:
            found.append(Launched(part.branch, mode, branches[part.branch].rows, part.gain, last))
            last = len(found) - 1
        at_branch[part.branch] = last, modes | mode
    return found


def launch_cost(launched: Iterable[Launched], launch: Launch) -> float:
    """What a step pays for all of them, in seconds a layer."""
    naive, grouped = _rows_of_modes(launched)
    return (launch(Mode.NAIVE, naive) if naive else 0.0) + (launch(Mode.GROUPED_ABSORB, grouped) if grouped else 0.0)


def _rows_of_modes(launched: Iterable[Launched]) -> tuple[int, int]:
    naive = grouped = 0
    for each in launched:
        if each.mode == NAIVE:
            naive += each.rows
        else:
            grouped += each.rows
    return naive, grouped


def unpaid(launched: Sequence[Launched], launch: Launch) -> list[Launched]:
    """Those without which, and without what follows them, a step saves more than with all: a launch costs the more, the
    more rows take part, and theirs may cost more than they gain."""
    if len(launched) < 2:
        return []
    naive, grouped = _rows_of_modes(launched)
    most, best = sum(each.gain for each in launched) - launch_cost(launched, launch), []
    # The more rows take part, the less one more costs. So for each number of rows that could be left, with what a row
    # costs there, all that does not pay that is dropped; the best of these is kept.
    while naive > 1 or grouped > 1:
        price = _price(Mode.NAIVE, naive, launch), _price(Mode.GROUPED_ABSORB, grouped, launch)
        kids = [0.0] * len(launched)
        pays = [False] * len(launched)
        for index in range(len(launched) - 1, -1, -1):
            each = launched[index]
            worth = each.gain - price[each.mode == GROUPED] * each.rows + kids[index]
            pays[index] = worth > 0
            if worth > 0 and each.above >= 0:
                kids[each.above] += worth
        left, dropped = [], []
        for index, each in enumerate(launched):
            if each.above >= 0 and not pays[each.above]:
                pays[index] = False
            elif not pays[index]:
                dropped.append(each)
            if pays[index]:
                left.append(each)
        if dropped:
            saved = sum(each.gain for each in left) - launch_cost(left, launch)
            if saved > most:
                most, best = saved, dropped
        naive, grouped = naive // 2, grouped // 2
    return best


def _price(mode: Mode, rows: int, launch: Launch) -> float:
    """What a row more costs a launch of about so many."""
    return (launch(mode, rows) - launch(mode, rows // 2)) / (rows - rows // 2) if rows > 1 else 0.0
