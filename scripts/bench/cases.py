"""A decode step of one layer over shared prefixes, in DeepSeek-V3's dimensions, and how its rows share pages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

DN, DR, DV = 128, 64, 128  # per head: key without and with rotation, value
LATENT = 512
SCALE = (DN + DR) ** -0.5
PAGE_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """One decode step of one layer.

    The rows of a group share a prefix, each group its own; every row has a private tail. Rows outside any
    group come last in the batch and have as many tokens as the others.
    """

    prefix: int  # tokens
    tail: int  # tokens
    heads: int  # of this rank
    sizes: tuple[int, ...]  # rows of each group
    alone: int = 0  # rows
    s_q: int = 1  # query tokens of each row
    longest: int = 0  # tokens of the longest row, if they share nothing and are not all as many as `tail`

    @property
    def batch(self) -> int:
        """Rows of the step."""
        return sum(self.sizes) + self.alone

    @property
    def groups(self) -> list[tuple[int, int]]:
        """First row of each group, and the one behind its last."""
        return list(itertools.pairwise([0, *itertools.accumulate(self.sizes)]))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, `[batch]`; if they differ, evenly spaced in their logarithm, in a mixed order."""
        if not self.longest:
            return [self.prefix + self.tail] * self.batch
        tokens = np.geomspace(self.tail, self.longest, self.batch).round().astype(int)
        return np.random.default_rng(0).permutation(tokens).tolist()

    @property
    def tail_lengths(self) -> list[int]:
        """Tokens of each row outside of a shared prefix, `[batch]`; all tokens of a row alone."""
        return [self.tail] * sum(self.sizes) + [self.prefix + self.tail] * self.alone

    @property
    def shared_flops(self) -> int:
        """Operations of the naive form over the shared prefixes."""
        return 2 * self.heads * sum(self.sizes) * self.prefix * (DN + DR + DV)

    def latent_flops(self, lengths: list[int]) -> int:
        """Operations of the absorbed form, for rows of these lengths."""
        return 2 * self.heads * self.s_q * sum(lengths) * (2 * LATENT + DR)

    def fields(self, dtype: str) -> dict[str, Any]:
        """The `case` of a record; dtype: bf16 or fp8."""
        fields = dict(prefix=self.prefix, tail=self.tail, heads=self.heads, batch=self.batch, groups=len(self.sizes))
        fields |= dict(s_q=self.s_q, dtype=dtype)
        return fields | ({"longest": self.longest} if self.longest else {})


def page_table(lengths: list[int], sizes: tuple[int, ...], shared_pages: int) -> tuple[list[list[int]], int]:
    """Pages of each row: the first `shared_pages` are one set for the rows of a group, all others are private.

    Args:
        lengths: `[rows]`, tokens of each row; sizes: rows of each group, the remaining rows share nothing.
    Returns:
        the table, `[rows, pages of the longest row]`, 0 behind a row's last page, and the number of distinct pages.
    """
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    longest = max(counts)
    table, used, row = [], 0, 0
    for size, shared in [
        *((size, shared_pages) for size in sizes),
        *((1, 0) for _ in range(len(lengths) - sum(sizes))),
    ]:
        common = list(range(used, used + shared))
        used += shared
        for count in counts[row : row + size]:
            private = list(range(used, used + count - shared))
            used += len(private)
            table.append(common + private + [0] * (longest - count))
        row += size
    return table, used


def padded(pages: list[list[int]]) -> list[list[int]]:
    """Lists of pages as rows of a table: 0 behind a row's last page."""
    longest = max(map(len, pages))
    return [of_row + [0] * (longest - len(of_row)) for of_row in pages]


def parse_case(spec: str) -> Case:
    """Read `requests x tokens x heads`, or `x query tokens` behind that; tokens may be `shortest - longest`.

    Raises:
        ValueError: it is something else.
    """
    try:
        requests, tokens, heads, *rest = spec.split("x")
        lengths, s_q = [int(length) for length in tokens.split("-")], *map(int, rest or ["1"])
        case = Case(0, lengths[0], int(heads), (), int(requests), s_q=s_q, longest=(*lengths, 0)[1])
        if min(case.batch, case.heads, s_q, *lengths) <= 0 or len(lengths) > 2 or lengths != sorted(lengths):
            raise ValueError
    except ValueError as error:
        raise ValueError(f"a case is REQUESTSxTOKENS[-MOST]xHEADS[xQUERIES], not {spec!r}") from error
    return case
