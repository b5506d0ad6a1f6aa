"""Cost of launching naive attention or grouped absorb in a step, and the choice that saves most with that paid.

A launch takes the longer, the more rows take part, but each further one adds less. So between two numbers of rows it
costs at least what the straight line between them does, and with that line's slope as the price of a row, the best
choice is a bound for all that launch so many. What the bound leaves open is searched by cutting the range in two.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping

from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.choice import NOTHING, Choice, Chooser, Prices
from sglang_mla_ext.prefix.planner.covers import FEW, GROUPED, NAIVE
from sglang_mla_ext.segment import Mode

Launch = Callable[[Mode, int], float]
"""`launch(mode, rows)`: what a step pays, in seconds a layer, for attending in this way at all, with so many rows.
It may be negative: rates count the partials of many rows at more than the overhead that was fitted with them."""

PASSES, PASSES_OF_MANY = 8, 4
"""Choices that are made at most to find the best one, among a few branches and among many."""

NEAR = 1e-4
"""Share of a choice's saving below which more saving is not searched for."""

_MODES = {NAIVE: Mode.NAIVE, GROUPED: Mode.GROUPED_ABSORB}

_Ranges = dict[int, tuple[int, int]]
"""Fewest and most rows for which each way is launched, by way; ways that are not launched are left out."""


def launched_rows(parts: Iterable[Part], branches: Branches) -> dict[int, int]:
    """Rows for which each way is launched: once, however many parts they are in."""
    rows = {NAIVE: 0, GROUPED: 0}
    at_branch: dict[int, int] = {}  # ways that are launched on the way to its end
    for part in parts:
        mode = NAIVE if part.mode is Mode.NAIVE else GROUPED
        launched = at_branch.get(branches.nearest(part.branch, at_branch), 0)
        if not launched & mode:
            rows[mode] += branches[part.branch].rows
        at_branch[part.branch] = launched | mode
    return rows


def launch_cost(rows: Mapping[int, int], launch: Launch) -> float:
    """Return what launches cost a step with so many rows in each way, in seconds a layer."""
    return sum(launch(_MODES[mode], count) for mode, count in rows.items() if count)


def slope_prices(rows: Mapping[int, int], launch: Launch) -> Prices:
    """Return the price of one more row in each way: the slope of its launch's cost from half of these rows to all."""
    slopes = (_line(launch, mode, (max(rows[mode] // 2, 1), rows[mode]))[1] for mode in (NAIVE, GROUPED))
    return Prices(*slopes)


def best_choice(choosers: Callable[[int], Chooser], modes: int, launch: Launch) -> Choice:
    """Return the choice that saves the most with its launches paid.

    Args:
        choosers: make choices with these ways only; modes: ways that there are, all as bits.
    """
    best, most = NOTHING, 0.0
    rows = choosers(modes).most_rows
    everything = {mode: (1, rows) for mode in (NAIVE, GROUPED) if modes & mode}
    pending: list[tuple[float, int, _Ranges]] = [(-math.inf, 0, everything)]
    for number in range(PASSES if len(choosers(modes).branches) <= FEW else PASSES_OF_MANY):
        if not pending or -pending[0][0] <= most * (1 + NEAR):
            break
        _, _, ranges = heapq.heappop(pending)
        lines = {mode: _line(launch, mode, limits) for mode, limits in ranges.items()}
        prices = Prices(*(lines[mode][1] if mode in lines else 0.0 for mode in (NAIVE, GROUPED)))
        choice = choosers(sum(ranges)).choose(prices)
        if (saved := choice.gain - launch_cost(choice.rows, launch)) > most:
            best, most = choice, saved
        further = _halves(ranges, choice.rows, lines, launch)
        if number == 0 and len(ranges) > 1:  # one way of two gains less, but nothing is paid for the other
            further += [{mode: ranges[mode]} for mode in ranges]
        for place, part in enumerate(further):
            bound = choice.priced - sum(lines[mode][0] for mode in part)
            heapq.heappush(pending, (-bound, 4 * number + place, part))
    return best


def _line(launch: Launch, mode: int, limits: tuple[int, int]) -> tuple[float, float]:
    """Return constant and slope of the straight line through a launch's costs with two numbers of rows."""
    few, many = limits
    first = launch(_MODES[mode], few)
    slope = (launch(_MODES[mode], many) - first) / (many - few) if many > few else 0.0
    return first - slope * few, slope


def _halves(
    ranges: _Ranges, rows: Mapping[int, int], lines: Mapping[int, tuple[float, float]], launch: Launch
) -> list[_Ranges]:
    """Cut the ranges in two, where the line is the farthest from the cost of launches for so many rows; return none if
    no range can be cut."""
    widest, cut, mode_of_cut = -math.inf, 0, 0
    for mode, (few, many) in ranges.items():
        if many - few < 2:
            continue
        at = rows[mode]
        if not few < at < many:
            at = math.isqrt(few * many)
            at = min(max(at, few + 1), many - 1)
        constant, slope = lines[mode]
        gap = launch(_MODES[mode], at) - constant - slope * at
        if gap > widest:
            widest, cut, mode_of_cut = gap, at, mode
    if not mode_of_cut:
        return []
    few, many = ranges[mode_of_cut]
    return [{**ranges, mode_of_cut: (few, cut)}, {**ranges, mode_of_cut: (cut, many)}]
