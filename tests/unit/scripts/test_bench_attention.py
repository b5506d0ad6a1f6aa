"""The attention benchmark's arithmetic; nothing is timed here."""

from __future__ import annotations

import pytest
from bench.cases import Case, page_table
from bench.rivals import RIVALS


@pytest.fixture(scope="module")
def command():
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("bench_attention")


@pytest.fixture(scope="module")
def shared():
    return pytest.importorskip("bench.ours")


@pytest.fixture(scope="module")
def timing():
    return pytest.importorskip("bench.timing")


def test_floor(shared):
    """Few rows: bytes at the copy's speed. Many: products, of which FP8 does 256 of 320 at its own rate."""
    ceilings = shared.Ceilings(copy_gbps=4000, bf16_tflops=600, fp8_tflops=1200)
    few, many = (Case(1000, 512, 16, (rows,)) for rows in (1, 512))
    assert shared.floor_ms(few, "bf16", ceilings) == pytest.approx(1000 * (16 * 256 + 64) * 2 / 4000e9 * 1e3)
    assert shared.floor_ms(few, "fp8", ceilings) == pytest.approx(1000 * (16 * 256 + 128) / 4000e9 * 1e3)
    macs = 512 * 16 * 1000
    assert shared.floor_ms(many, "bf16", ceilings) == pytest.approx(2 * macs * 320 / 600e12 * 1e3)
    assert shared.floor_ms(many, "fp8", ceilings) == pytest.approx(2 * macs * (64 / 600e12 + 256 / 1200e12) * 1e3)


def test_floor_counts_every_prefix_and_no_row_alone(shared):
    case = Case(1000, 512, 16, (16,) * 8, alone=5)
    one = Case(1000, 512, 16, (128,))
    assert shared.shared_bytes(case, "fp8") == 8 * shared.shared_bytes(one, "fp8")
    assert case.shared_flops == one.shared_flops


def test_cases(command):
    assert len(command.cases_of(None, None, None)) == 12
    assert command.cases_of([7069], [16], None) == [Case(7069, 512, 16, (rows,)) for rows in (128, 512)]
    case = Case(7069, 512, 16, (200,), alone=56)
    assert case.batch == 256
    assert case.fields("fp8")["groups"] == 1


def test_a_sustained_time_is_of_batches_without_the_first_third(timing, monkeypatch):
    """The first batch is one call, later ones as many as take 10 ms. Calls take 5 ms, and from 25 ms on 2 ms."""
    now, waits = [0.0], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            waits.append(self.at)

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call() -> None:
        now[0] += 5.0 if now[0] < 25.0 else 2.0

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0] / 1e3)
    assert timing.sustained_ms(call, 0.03) == 3.5  # the median of 5, 5, 2 and 2
    assert waits == [5.0, 15.0, 25.0, 29.0, 39.0]
    assert timing.sustained_ms(call, 0.0) == 2.0  # one batch in any case


def test_pages_are_shared_within_a_group_only():
    """Two groups of two rows that share a page each, one row alone."""
    table, used = page_table([130, 100, 128, 65, 64], (2, 2), shared_pages=1)
    assert table == [[0, 1, 2], [0, 3, 0], [4, 5, 0], [4, 6, 0], [7, 0, 0]]
    assert used == 8


def test_work_of_the_rivals():
    case = Case(640, 64, 16, (2,))
    assert RIVALS["flashmla_fp8"].work(case) == (2 * 16 * 2 * 704 * 1088, (10 + 2) * 64 * 576)
    naive = case.shared_flops, 2 * 640 * 16 * 320
    assert RIVALS["typhoon_parts"].work(case) == (naive[0] + 2 * 16 * 2 * 64 * 1088, naive[1] + 2 * 64 * 576 * 2)
