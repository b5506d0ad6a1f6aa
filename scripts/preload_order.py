"""An order in which a kernel's matrix and vector stages repeat so that the busier unit never waits.

One pass of a pipeline is the chain C1 -> V1 -> C2 -> V2 -> ... -> Cn -> Vn of matrix stages (C) and vector stages (V)
of any durations; each kind has a unit of its own, which runs one stage after another. In a steady loop every cycle runs
each stage once, for different passes. A stage that takes the result of the same cycle may have to wait for it; one
that takes that of the cycle before does not, but then one stage more must have run before the loop (the preload count).

    python scripts/preload_order.py 3,2 1,3      # durations of C1, C2 and of V1, V2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import typer


@dataclass(frozen=True)
class Order:
    """What the units run in every cycle, as indices 0 to n - 1 of the pairs.

    The first vector stage takes the matrix stage's result of the cycle before, the others that of their own cycle.
    Every matrix stage takes a result of the cycle before.
    """

    matrix: tuple[int, ...]
    vector: tuple[int, ...]

    @property
    def preload_count(self) -> int:
        """Stages to run before the loop: of the 2n - 1 steps in the chain, those that no cycle makes by itself."""
        followers = len(self.vector) - 1
        return 2 * len(self.matrix) - 1 - followers


def preload_order(matrix: Sequence[float], vector: Sequence[float]) -> Order:
    """An order in which the unit with more to do never waits, with as many stages preloaded as there are pairs.

    Vector stages run in the order m, m + 1, ..., matrix stages one ahead, m + 1, m + 2, ..., m. The vector stage of
    pair m + j needs c(m+1) + ... + c(m+j) to have passed.

    - The vector unit is the busier one: that stage starts after v(m) + ... + v(m+j-1), which is enough if no sum of
      the differences c(i+1) - v(i) from i = m on is above 0.
    - The matrix unit is: all vector stages must end with it; they do if no sum of these differences up to i = m - 1 is
      below 0.

    Both hold, going around, where the sum of the differences before m is greatest.

    Args:
        matrix, vector: durations of the n stages of each kind, any unit.
    Raises:
        ValueError: the numbers of stages differ, or there are none.
    Source: AMLA, theorem 4.1 and appendix B.
    """
    n = len(matrix)
    if n == 0 or len(vector) != n:
        raise ValueError(f"there must be as many vector stages as matrix stages, at least one: {n}, {len(vector)}")
    differences = [matrix[(i + 1) % n] - vector[i] for i in range(n)]
    before = list(accumulate(differences[:-1], initial=0.0))  # the sum before each pair
    first = before.index(max(before))
    order = tuple((first + i) % n for i in range(n))
    return Order(matrix=order[1:] + order[:1], vector=order)


def main(
    matrix: Annotated[str, typer.Argument(help="Durations of the matrix stages, with commas.")],
    vector: Annotated[str, typer.Argument(help="Durations of the vector stages.")],
) -> None:
    """Print the order."""
    order = preload_order(*([float(number) for number in numbers.split(",")] for numbers in (matrix, vector)))
    print("matrix unit:", *(f"C{i + 1}" for i in order.matrix))
    print("vector unit:", *(f"V{i + 1}" for i in order.vector))
    print("stages before the loop:", order.preload_count)


if __name__ == "__main__":
    typer.run(main)
