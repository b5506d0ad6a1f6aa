"""What sharing saves, as the mode option wants it judged: the planner's `Gain` functions.

In mode `auto` a gain is the cost model's difference in seconds per layer. The forcing modes replace it by a function
that takes every range, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_mla_ext.prefix.cost_model import CostModel, Mode
from sglang_mla_ext.prefix.planner import Gain

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions


def every_range(rows: int, start: int, end: int) -> float:
    """The gain of a mode that is forced: every range is taken, larger and longer ones first."""
    return float((rows - 1) * (end - start))


class Gains(NamedTuple):
    """What each way to attend to a range of shared tokens saves over plain absorb; None where there is no such way."""

    naive: Gain | None
    grouped: Gain | None

    @classmethod
    def of(
        cls, options: HybridMLAOptions, cost: CostModel, *, naive: bool, grouped: bool, step_tokens: int = 0
    ) -> Gains:
        """
        Args:
            naive, grouped: whether this server has naive attention and grouped absorb; the mode option may rule them
                out all the same.
            step_tokens: distinct tokens that all groups of the step share.
        """

        def over_absorb(mode: Mode) -> Gain:
            def gain(rows: int, start: int, end: int) -> float:
                tokens = end - start
                saved = cost.work_seconds(Mode.ABSORB, rows, tokens, step_tokens)
                saved -= cost.work_seconds(mode, rows, tokens)
                if start:
                    return saved - cost.segment_seconds(mode, rows)
                # A row's first group: with the overheads of the launches, of which there are fewer without it.
                return saved + cost.overhead_seconds(Mode.ABSORB, rows) - cost.overhead_seconds(mode, rows)

            return gain

        forced = {"naive": Mode.NAIVE, "grouped_absorb": Mode.GROUPED_ABSORB}.get(options.mode)
        may = {Mode.NAIVE: naive and options.may_expand, Mode.GROUPED_ABSORB: grouped and options.may_group}
        return cls(
            *(
                None if not may[mode] else every_range if mode is forced else over_absorb(mode)
                for mode in (Mode.NAIVE, Mode.GROUPED_ABSORB)
            )
        )
