"""Rows of the requests of a batch: a plan is of requests, and a forward pass has rows.

A request has one row in a decode step, as many as it has query tokens in a step that verifies drafts, and any number
where new tokens are computed. The rows of a request follow each other, and so do the requests. Plain Python.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import TypeVar

from sglang_mla_ext.segment import Segment

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Numbers of rows of the requests of a pass.

    Attributes:
        requests: how many there are.
        each: rows of every request; None where they have different numbers.
        counts: `[requests]` rows of each request, 0 allowed; empty where `each` is set.
    """

    requests: int
    each: int | None = 1
    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Sequence[int]) -> Rows:
        """Return the rows of requests, given the number of each."""
        if len(set(counts)) <= 1:
            return cls(len(counts), counts[0] if counts else 1)
        return cls(len(counts), None, tuple(counts))

    @property
    def total(self) -> int:
        """Rows of all requests."""
        return self.requests * self.each if self.each is not None else self._starts[-1]

    @property
    def lens(self) -> tuple[int, ...]:
        """`[requests]` rows of each request."""
        return self.counts if self.each is None else (self.each,) * self.requests

    @cached_property
    def _starts(self) -> list[int]:
        """First row of each request, and behind them the number of rows, `[requests + 1]`; for different numbers of
        rows."""
        return [0, *accumulate(self.counts)]

    def of_request(self, request: int) -> range:
        """The rows of a request."""
        if self.each is not None:
            return range(request * self.each, (request + 1) * self.each)
        return range(self._starts[request], self._starts[request + 1])

    def request_of(self, row: int) -> int:
        """The request that a row is of."""
        return row // self.each if self.each is not None else bisect_right(self._starts, row) - 1

    def by_row(self, segments: Sequence[Segment]) -> Sequence[Segment]:
        """Segments of requests as segments of their rows; those without any row are left out."""
        if self.each == 1:
            return segments
        in_rows = (
            replace(segment, rows=tuple(chain.from_iterable(map(self.of_request, segment.rows))))
            for segment in segments
        )
        return [segment for segment in in_rows if segment.rows]

    def repeat(self, values: Sequence[T]) -> Sequence[T]:
        """Return `[rows]` values for `[requests]` ones, or for those of the first requests alone: each request's for
        all its rows."""
        if self.each == 1:
            return values
        return [value for request, value in enumerate(values) for _ in self.of_request(request)]

    def units(self, query_tokens: int) -> Rows:
        """Return the same rows where `query_tokens` that follow each other count as one, as for kernels that take a
        request's query tokens together.

        Raises:
            ValueError: a request has other rows than whole units.
        """
        if query_tokens == 1:
            return self
        counts = self.counts if self.each is None else (self.each,)
        if any(count % query_tokens for count in counts):
            raise ValueError(
                f"requests of {sorted(set(counts))} rows do not have {query_tokens} or multiples of it each"
            )
        if self.each is not None:
            return replace(self, each=self.each // query_tokens)
        return Rows.of([count // query_tokens for count in counts])

    def padded(self, total: int, each: int = 1) -> Rows:
        """Return these rows with further requests behind them, until there are `total` rows.

        Args:
            each: rows of each that is added.
        Raises:
            ValueError: there are more already, or what is added is no whole request.
        """
        if total == self.total:
            return self
        more, left = divmod(total - self.total, each)
        if more < 0 or left:
            raise ValueError(f"{self.total} rows and requests of {each} each cannot become {total}")
        if self.each == each or not self.requests:
            return Rows(self.requests + more, each)
        return Rows.of([*self.lens, *[each] * more])

    def window(self, start: int, stop: int) -> Rows:
        """The same requests with those of their rows that are in `[start, stop)`, counted from `start`."""
        clipped = (
            min(max(row, start), stop)
            for request in range(self.requests)
            for row in (self.of_request(request).start, self.of_request(request).stop)
        )
        return Rows.of([last - first for first, last in zip(clipped, clipped, strict=True)])
