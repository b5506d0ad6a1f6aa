"""Room in the static buffers of a step, and the choice that saves the most within it.

Where there is too little room it has a price, which is raised until the choice fits: parts are joined to those below
them, or left out. The last of the room goes to single parts.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.choice import NOTHING, Choice, Chooser, Prices
from sglang_mla_ext.prefix.planner.covers import FEW, GROUPED, NAIVE
from sglang_mla_ext.prefix.planner.launches import Launch, launch_cost, launched_rows, slope_prices
from sglang_mla_ext.segment import Mode

ROUNDS = 5
"""Prices that are tried at most, for a few branches; many are limited at once."""

TRIES = 16
"""Attempts to join two parts, on average for each part."""


@dataclass(frozen=True)
class Capacity:
    """Capacity of the static buffers of a step.

    Attributes:
        segments: number of segments.
        rows: of all segments together, where a row counts once for each segment that it is in.
    """

    segments: int
    rows: int


def fits(parts: Sequence[Part], branches: Branches, capacity: Capacity) -> bool:
    """Return whether there is room for all of these parts."""
    return len(parts) <= capacity.segments and rows_of(parts, branches) <= capacity.rows


def rows_of(parts: Sequence[Part], branches: Branches) -> int:
    """Rows of all parts together."""
    return sum(branches[part.branch].rows for part in parts)


def best_with_room(
    choosers: Callable[[int], Chooser], modes: int, unlimited: Choice, launch: Launch, capacity: Capacity
) -> list[Part]:
    """Return the parts that save the most of those that fit.

    Args:
        choosers, modes: see `best_choice`; unlimited: what it found, which does not fit.
    """
    prices = slope_prices(unlimited.rows, launch)
    used = sum(mode for mode, rows in unlimited.rows.items() if rows)
    best, most = _priced(choosers(used), unlimited, prices, launch, capacity)
    for others in (NAIVE, GROUPED):
        if others & modes and others != used and len(choosers(used).branches) <= FEW:
            chooser = choosers(others)
            found = _priced(chooser, chooser.choose(prices), prices, launch, capacity)
            best, most = max((best, most), found, key=lambda each: each[1])
    return best


def _priced(
    chooser: Chooser, unlimited: Choice, prices: Prices, launch: Launch, capacity: Capacity
) -> tuple[list[Part], float]:
    """Return the parts that save the most of those that fit, and what they save with launches paid.

    Args:
        unlimited: what saves the most if there is room for everything.
        prices: of rows for which ways are launched.
    """
    branches = chooser.branches
    per_part, per_row = _weights(unlimited.parts, branches, capacity)
    room = per_part * capacity.segments + per_row * capacity.rows

    def worth(choice: Choice) -> tuple[float, float]:
        """Return a choice's saving with launches paid but without the prices of room, and the room that it takes."""
        launched = choice.rows[NAIVE] * prices.naive + choice.rows[GROUPED] * prices.grouped
        return choice.gain - launched, per_part * len(choice.parts) + per_row * rows_of(choice.parts, branches)

    best: list[Part] = []
    most = 0.0
    above, within = unlimited, NOTHING
    for left in range(ROUNDS if len(branches) <= FEW else 0, -1, -1):
        parts = limit_parts(above.parts, capacity, chooser)
        saves = sum(part.gain for part in parts) - launch_cost(launched_rows(parts, branches), launch)
        if saves > most:
            best, most = parts, saves
        (gain, taken), (less, fewer) = worth(above), worth(within)
        if taken <= room or not left:
            break
        price = (gain - less) / (taken - fewer)
        choice = chooser.choose(prices._replace(part=price * per_part, part_row=price * per_row))
        if choice.priced <= (gain - price * taken) + 1e-12:
            break
        if worth(choice)[1] > room:
            above = choice
        else:
            within = choice
    saves = within.gain - launch_cost(within.rows, launch)
    return (list(within.parts), saves) if saves > most else (best, most)


def _weights(parts: Sequence[Part], branches: Branches, capacity: Capacity) -> tuple[float, float]:
    """Return the shares of the room that a part and a row of one take; 0 for what there is enough of."""
    segments = 1 / max(capacity.segments, 1) if len(parts) > capacity.segments else 0.0
    rows = 1 / max(capacity.rows, 1) if rows_of(parts, branches) > capacity.rows else 0.0
    return segments, rows


def limit_parts(parts: Sequence[Part], capacity: Capacity, chooser: Chooser) -> list[Part]:
    """Make parts fit, each time by what costs least for the room that it frees: a part that no other follows is
    dropped, or a part is joined to all that follow it. What was dropped and fits in the end is taken back. Parts keep
    their order."""
    if fits(parts, chooser.branches, capacity):
        return list(parts)
    fitting = _Fitting(parts, capacity, chooser)
    least, finish = math.inf, (0, -1)
    steps = 0
    while fitting.over:
        if len(parts) <= FEW:
            loss, index = fitting.finish()
            if loss < least:
                least, finish = loss, (steps, index)
        fitting.reduce()
        steps += 1
    if least < fitting.lost:
        fitting = _Fitting(parts, capacity, chooser)
        for _ in range(finish[0]):
            fitting.reduce()
        fitting.remove(finish[1])
    return fitting.rest()


class _Fitting:
    """Parts that are made fewer until they fit.

    Attributes:
        lost: seconds a layer that the parts save less than they did.
    """

    def __init__(self, parts: Sequence[Part], capacity: Capacity, chooser: Chooser) -> None:
        branches = chooser.branches
        self._parts, self._gone = list(parts), [False] * len(parts)
        self._capacity, self._chooser = capacity, chooser
        self._per_part, self._per_row = _weights(parts, branches, capacity)
        self._rows_of = [branches[part.branch].rows for part in parts]
        self._count, self._rows = len(parts), sum(self._rows_of)
        self._above: list[int] = []
        # Of each part: its followers, with what takes their place if it is joined to them; how many cannot take it, and
        # what the others gain less.
        self._followers: list[dict[int, Part | None]] = [{} for _ in parts]
        self._unable, self._lost = [0] * len(parts), [0.0] * len(parts)
        self._dropped: list[int] = []
        self.lost = 0.0
        self._tries = TRIES * len(parts)
        last: dict[int, int] = {}  # of each branch: its last part
        for index, part in enumerate(parts):
            self._above.append(last.get(branches.nearest(part.branch, last), -1))
            last[part.branch] = index
            self._follow(index)
        self._heap: list[tuple[float, int]] = []
        for index in range(len(parts)):
            self._price(index)

    @property
    def over(self) -> bool:
        return self._count > self._capacity.segments or self._rows > self._capacity.rows

    def reduce(self) -> None:
        """Remove the part that costs least for its room."""
        while True:
            cost, place = heapq.heappop(self._heap)
            if self._cost(-place) == cost:
                break
            self._price(-place)
        self.remove(-place)

    def finish(self) -> tuple[float, int]:
        """Return the total loss if one more part is removed so that the others fit, and the index of the part that
        loses least; infinity and -1 if no single part is enough."""
        least = math.inf, -1
        for index in range(len(self._parts)):
            fits = self._count - 1 <= self._capacity.segments
            fits &= self._rows - self._rows_of[index] <= self._capacity.rows
            if fits and not self._gone[index] and not self._unable[index]:
                least = min(least, (self.lost + self._loss(index), index))
        return least

    def remove(self, index: int) -> None:
        """Drop a part, or join it to its followers."""
        above, followers = self._above[index], self._followers[index]
        self.lost += self._loss(index)
        self._count, self._rows = self._count - 1, self._rows - self._rows_of[index]
        self._unfollow(index)
        self._gone[index] = True
        if not followers:
            self._dropped.append(index)
        for follower, longer in followers.items():
            assert longer is not None, "only what all followers can be joined to is removed before them"
            self._parts[follower], self._above[follower] = longer, above
            self._follow(follower)
            self._unable[follower], self._lost[follower] = 0, 0.0
            for further in self._followers[follower]:
                self._follow(further)
            self._price(follower)
        if above >= 0:
            self._price(above)
            for other in self._followers[above] if len(self._followers[above]) == 1 else ():
                self._price(other)

    def rest(self) -> list[Part]:
        """Return the parts that are left, and those that were dropped and for which there is room all the same."""
        for index in reversed(self._dropped):
            above, rows = self._above[index], self._rows + self._rows_of[index]
            fits = self._count < self._capacity.segments and rows <= self._capacity.rows
            if fits and (above < 0 or not self._gone[above]):
                self._gone[index] = False
                self._count, self._rows = self._count + 1, rows
        followed = {above for above, gone in zip(self._above, self._gone, strict=True) if not gone}
        return [
            part if index in followed else self._last(index)
            for index, part in enumerate(self._parts)
            if not self._gone[index]
        ]

    def _follow(self, index: int) -> None:
        if (above := self._above[index]) < 0:
            return
        part = self._parts[index]
        longer = self._followers[above][index] = self._joined(self._parts[above], part, self._rows_of[index])
        if longer is None:
            self._unable[above] += 1
        else:
            self._lost[above] += part.gain - longer.gain

    def _joined(self, above: Part, part: Part, rows: int) -> Part | None:
        """Return one part with the tokens of two, of which the second follows the first; None where there is no way to
        attend to it, or too many joins have been tried."""
        if not self._tries:
            return None
        self._tries -= 1
        naive, grouped = self._chooser.gains
        best = None
        if naive is not None and above.mode is part.mode is Mode.NAIVE:
            gain = naive(rows, above.start, part.end)
            best = part._replace(first=above.first, start=above.start, gain=gain)
        if grouped is not None and part.end % self._chooser.page == 0:
            gain = grouped(rows, above.start, part.end)
            if best is None or gain > best.gain:
                best = Part(part.branch, above.first, above.start, part.end, Mode.GROUPED_ABSORB, gain)
        return best

    def _unfollow(self, index: int) -> None:
        if (above := self._above[index]) < 0:
            return
        longer = self._followers[above].pop(index)
        if longer is None:
            self._unable[above] -= 1
        else:
            self._lost[above] -= self._parts[index].gain - longer.gain

    def _cost(self, index: int) -> float:
        """Return the loss by removing a part, per room that it frees; infinity if it cannot go or frees none."""
        if self._gone[index] or self._unable[index]:
            return math.inf
        room = self._per_part * (self._count > self._capacity.segments)
        room += self._per_row * min(self._rows_of[index], max(self._rows - self._capacity.rows, 0))
        return self._loss(index) / room if room else math.inf

    def _loss(self, index: int) -> float:
        """Return how much less all parts save without this one. The part above may end later if no other follows it."""
        loss, above = self._parts[index].gain + self._lost[index], self._above[index]
        if above >= 0 and not self._followers[index] and len(self._followers[above]) == 1:
            loss -= self._last(above).gain - self._parts[above].gain
        return loss

    def _last(self, index: int) -> Part:
        """Return a part in the form that saves the most if no other follows it."""
        part = self._parts[index]
        last = self._chooser.last_part(part.branch, part.start)
        return last if last is not None and last.gain > part.gain else part

    def _price(self, index: int) -> None:
        if (cost := self._cost(index)) < math.inf:
            heapq.heappush(self._heap, (cost, -index))
