"""What a plan wants expanded, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_mla_ext.prefix.branches import Branches, Part
from sglang_mla_ext.prefix.expanded_pool import Want
from sglang_mla_ext.prefix.planner import Ways
from sglang_mla_ext.segment import Mode


def wants_of(ideal: Sequence[Part], branches: Branches, ways: Ways) -> list[Want]:
    """What is worth expanding, the most worthwhile first, and whatever another one continues before that.

    Args:
        ideal: the parts that save most if whatever they need is expanded.
    """
    wants: list[Want] = []
    at_branch: dict[int, int] = {}
    for part in ideal:
        if part.mode is not Mode.NAIVE:
            continue
        branch = branches[part.branch]
        saved = part.gain
        if ways.grouped is not None:
            saved -= max(ways.grouped(branch.rows, part.start, part.end), 0.0)
        worth = saved / (part.end - part.start)
        place = at_branch.get(branches.nearest(part.branch, at_branch), -1)
        if place >= 0 and wants[place].end == part.start:
            worth = min(worth, wants[place].worth)
        else:
            place = -1
        at_branch[part.branch] = len(wants)
        wants.append(Want(branch.nodes, branch.ends, part.start, part.end, worth, place))
    order = sorted(range(len(wants)), key=lambda index: -wants[index].worth)
    position = {index: place for place, index in enumerate(order)} | {-1: -1}
    return [wants[index]._replace(above=position[wants[index].above]) for index in order]
