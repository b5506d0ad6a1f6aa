"""The cases and the floor of decode attention over private tokens; nothing is timed here."""

from __future__ import annotations

import pytest
from bench.cases import parse_case


@pytest.fixture(scope="module")
def command():
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("bench_decode")


@pytest.fixture(scope="module")
def ours():
    return pytest.importorskip("bench.ours")


def test_a_case_is_requests_tokens_and_heads(command):
    case = parse_case("128x8192x16")
    assert (case.batch, case.tail, case.heads, case.prefix) == (128, 8192, 16, 0)
    assert case.fields("fp8")["groups"] == 0
    assert len({parse_case(spec) for spec in command.DEFAULT_GRID}) == len(command.DEFAULT_GRID)


def test_query_tokens_and_lengths_that_differ():
    case = parse_case("5x100-1600x16x2")
    assert sorted(case.lengths) == [100, 200, 400, 800, 1600] != case.lengths
    assert case.lengths == parse_case("5x100-1600x64").lengths, "a case has the same lengths every time"
    fields = case.fields("fp8")
    assert (fields["tail"], fields["longest"], fields["s_q"]) == (100, 1600, 2)
    assert case.latent_flops(case.lengths) == 2 * 2 * 16 * 3100 * 1088


@pytest.mark.parametrize(
    "spec", ["128x8192", "0x1x16", "ax1x16", "1x1x-8", "", "1x9-3x8", "1x1-2-3x8", "1x1x8x0", "1x1x8x1x1"]
)
def test_anything_else_is_refused(spec):
    with pytest.raises(ValueError, match="a case is"):
        parse_case(spec)


def test_the_floor_is_reading_the_rows_or_the_products(ours):
    ceilings = ours.Ceilings(copy_gbps=4000.0, bf16_tflops=500.0, fp8_tflops=1000.0)
    few, many = parse_case("128x8192x16"), parse_case("128x8192x128")
    rows = 128 * 8192
    assert ours.floor_ms(few, "fp8", ceilings) == pytest.approx(rows * 656 / 4000e9 * 1e3)
    products = 2 * rows * 128 * (1024 / 1000e12 + 64 / 500e12) * 1e3
    assert ours.floor_ms(many, "fp8", ceilings) == pytest.approx(products)
