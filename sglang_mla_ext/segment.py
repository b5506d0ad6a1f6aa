"""Segment: tokens that several rows attend to together, in one form from the planner to the kernels' work lists.

Plain Python, so that the planner can have it without loading the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Mode(Enum):
    """The ways to attend to a shared prefix."""

    __hash__ = object.__hash__  # a plan asks thousands of times, and an enum's own is Python's

    ABSORB = "absorb"
    GROUPED_ABSORB = "grouped_absorb"
    NAIVE = "naive"


@dataclass(frozen=True)
class Segment:
    """Tokens `[start, end)`, counted from the root of the tree, that all of these rows have in common.

    Attributes:
        rows: ascending, each once. In a plan they are requests; `Rows.by_row` makes rows of a batch of them. The first
            one is the leader: where a table of pages is read, it is the leader's.
        mode: how they are attended to.
        chunks: of naive attention, ids of the chunks that hold the tokens in order, the first token at the start of the
            first chunk; longer than needed is allowed.
    """

    rows: tuple[int, ...]
    start: int
    end: int
    mode: Mode
    chunks: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.end - self.start
