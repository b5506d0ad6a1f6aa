"""The arithmetic of the benchmark of long contexts; its engines are not started here."""

from __future__ import annotations

import pytest
from lab.context import command as bench


@pytest.mark.parametrize(
    ("capacity", "tokens", "most", "expected"),
    [
        (100_000, 16_384, 256, 5),  # a page more than the tokens of each, and a little of the cache to spare
        (100_000, 16_384, 3, 3),
        (16_448, 16_384, 256, 0),
        (2_000_000, 65, 256, 256),
    ],
)
def test_requests_that_fit(capacity: int, tokens: int, most: int, expected: int) -> None:
    found = bench.requests_that_fit(capacity, tokens, most)
    assert found == expected
    assert found * (-(-tokens // 64) * 64) <= capacity


@pytest.mark.parametrize(
    ("spec", "expected"), [("flashmla", ("flashmla", "auto")), ("hybrid_mla:fp8_e4m3", ("hybrid_mla", "fp8_e4m3"))]
)
def test_backend_with_a_cache_dtype(spec: str, expected: tuple[str, str]) -> None:
    assert bench.split_backend(spec) == expected
