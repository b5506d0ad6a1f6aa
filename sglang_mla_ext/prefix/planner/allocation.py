"""Allocation requests: the ranges that a plan would have expanded, and the time that a token of each saves."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_mla_ext.prefix.memory.chunks import AllocationRequest
from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.covers import Ways
from sglang_mla_ext.segment import Mode


def allocation_requests(ideal: Sequence[Part], branches: Branches, ways: Ways) -> list[AllocationRequest]:
    """Return requests for all that is worth expanding, the most worthwhile first, and each behind the one that it
    continues.

    Args:
        ideal: the parts that save most if whatever they need is expanded.
    """
    asked: list[AllocationRequest] = []
    at_branch: dict[int, int] = {}
    for part in ideal:
        if part.mode is not Mode.NAIVE:
            continue
        saved = part.gain
        if ways.grouped is not None:
            saved -= max(ways.grouped(branches[part.branch].rows, part.start, part.end), 0.0)
        worth = saved / (part.end - part.start)
        start = part.start
        for index in branches.path(part):
            branch = branches[index]
            end = part.end if index == part.branch else min(branch.end // ways.chunk * ways.chunk, part.end)
            if end <= start:
                continue
            if (place := at_branch.get(index, -1)) >= 0 and asked[place].start == start:  # others are joined to it, too
                asked[place] = asked[place]._replace(worth=asked[place].worth + worth)
            else:
                above = at_branch.get(branches.nearest(branch.parent, at_branch), -1)
                above = above if above >= 0 and asked[above].end == start else -1
                at_branch[index] = len(asked)
                asked.append(AllocationRequest(branch.nodes, branch.ends, start, end, worth, above))
            start = end
    for place, one in enumerate(asked):
        if one.above >= 0:
            asked[place] = one._replace(worth=min(one.worth, asked[one.above].worth))
    order = sorted(range(len(asked)), key=lambda index: -asked[index].worth)
    position = {index: place for place, index in enumerate(order)} | {-1: -1}
    return [asked[index]._replace(above=position[asked[index].above]) for index in order]
