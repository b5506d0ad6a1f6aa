"""What sharing a prefix saves, as the mode option wants it judged: the planner's `Gain` functions.

In mode `auto` a gain is the cost model's difference in seconds per layer. The forcing modes replace it by a function
that takes every group, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_mla_ext.prefix.cost_model import CostModel, Mode
from sglang_mla_ext.prefix.planner import Gain

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions


def every_group(group_size: int, tokens: int) -> float:
    """The gain of a mode that is forced: every group is taken, larger and longer ones first."""
    return float((group_size - 1) * tokens)


def no_group(group_size: int, tokens: int) -> float:
    """The gain of a mode that is not available: no group is taken."""
    return 0.0


def gain_of(options: HybridMLAOptions, cost: CostModel) -> Gain:
    """What naive attention saves over plain absorb.

    With `auto` the cost model says, with `naive` every group pays, and with the other modes none does.
    """
    if not options.may_expand:
        return no_group
    if options.mode == "naive":
        return every_group
    return lambda group_size, tokens: (
        cost.seconds(Mode.ABSORB, group_size, tokens) - cost.seconds(Mode.NAIVE, group_size, tokens)
    )


class Gains(NamedTuple):
    """What each way to attend to a shared prefix saves.

    Attributes:
        naive: naive over plain absorb, for a prefix that is expanded already.
        grouped: grouped absorb over plain absorb; None where grouped absorb is not available.
        expand: naive over the best way that needs no expansion: what expanding would bring.
    """

    naive: Gain
    grouped: Gain | None
    expand: Gain

    @classmethod
    def of(cls, options: HybridMLAOptions, cost: CostModel, *, naive: bool, grouped: bool) -> Gains:
        """
        Args:
            naive, grouped: whether this server has naive attention and grouped absorb; the mode option may rule them
                out all the same.
        """
        over_absorb = gain_of(options, cost) if naive else no_group
        if not grouped or not options.may_group:
            return cls(over_absorb, None, over_absorb)
        if options.mode == "grouped_absorb":
            return cls(no_group, every_group, no_group)

        def grouped_gain(group_size: int, tokens: int) -> float:
            return cost.seconds(Mode.ABSORB, group_size, tokens) - cost.seconds(Mode.GROUPED_ABSORB, group_size, tokens)

        def expand_gain(group_size: int, tokens: int) -> float:
            return over_absorb(group_size, tokens) - max(grouped_gain(group_size, tokens), 0.0)

        return cls(over_absorb, grouped_gain, expand_gain if naive else no_group)
