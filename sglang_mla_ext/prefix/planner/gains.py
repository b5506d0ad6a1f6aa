"""Savings by sharing, as the mode option judges them: the planner's `Gain` functions.

In mode `auto` a gain is the cost model's difference in seconds per layer. The forcing modes replace it by a function
that takes every range, or none.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.covers import Gain
from sglang_mla_ext.prefix.planner.launches import Launch
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang_mla_ext.options import HybridMLAOptions


def every_range(rows: int, start: int, end: int) -> float:
    """The gain of a mode that is forced: every range is taken, larger and longer ones first."""
    return float((rows - 1) * (end - start))


def no_launch(mode: Mode, rows: int) -> float:
    """The cost of a launch for modes that are forced."""
    return 0.0


class Gains(NamedTuple):
    """Gain of each way to attend to a range of shared tokens over plain absorb, None where there is no such way; and
    the cost of launching each way that a step uses, see `launches.Launch`."""

    naive: Gain | None
    grouped: Gain | None
    launch: Launch = no_launch

    @classmethod
    def of(
        cls, options: HybridMLAOptions, cost: CostModel, *, naive: bool, grouped: bool, step_tokens: int = 0
    ) -> Gains:
        """
        Args:
            naive, grouped: whether this server has naive attention and grouped absorb; the mode option may rule them
                out all the same.
            step_tokens: distinct tokens that all groups of the step share, which have to fit in the L2 cache together.
        """

        def over_absorb(mode: Mode) -> Gain:
            @functools.cache  # many ranges have the same number of rows
            def of_rows(rows: int, from_memory: bool) -> tuple[float, float]:
                saved = cost.token_seconds(Mode.ABSORB, rows, from_memory)
                return saved - cost.token_seconds(mode, rows, from_memory), cost.segment_seconds(mode, rows)

            def gain(rows: int, start: int, end: int) -> float:
                tokens = end - start
                of_token, of_segment = of_rows(rows, cost.exceeds_l2(max(tokens, step_tokens)))
                return tokens * of_token - of_segment

            return gain

        forced = {"naive": Mode.NAIVE, "grouped_absorb": Mode.GROUPED_ABSORB}.get(options.mode)
        may = {Mode.NAIVE: naive and options.may_expand, Mode.GROUPED_ABSORB: grouped and options.may_group}
        naive_gain, grouped_gain = (
            None if not may[mode] else every_range if mode is forced else over_absorb(mode)
            for mode in (Mode.NAIVE, Mode.GROUPED_ABSORB)
        )
        return cls(naive_gain, grouped_gain, no_launch if forced else cost.launch_seconds)
