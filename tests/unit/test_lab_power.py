"""What the study power computes, and what it asks nvidia-smi; nothing is timed here."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LINE = "1485, 698.71, 0x0000000000000004"


@pytest.fixture(scope="module")
def bench():
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("lab.power.command")


# -- arithmetic --------------------------------------------------------------------------------------------------------


def test_cycles_at_the_full_rate(bench):
    """At its boost clock of 1,830 MHz an H100 is sold with 1,979 TFLOPS in FP8 and 989 in BF16."""
    for macs, tflops in ((bench.Macs(1, 0), 1979), (bench.Macs(0, 1), 989)):
        assert 2 * 132 * 1830e6 / macs.cycles / 1e12 == pytest.approx(tflops, rel=1e-3)
    assert bench.Macs(4096, 4096).times(10).cycles == 30


def test_metrics(bench):
    """A product of 8192^3 at the full rate, all of the time: half of the cycles if it takes twice as long."""
    macs = bench.Macs(0, 8192**3)
    full_ms = macs.cycles / (132 * 1500e6) * 1e3
    found = bench.metrics_of(macs, 2 * full_ms, bench.Load(1500.0, 700.0, ["power"]), sms=132)
    assert found["matrix_share"] == pytest.approx(0.5)
    assert found["tflops"] == pytest.approx(2 * 8192**3 / (2 * full_ms * 1e-3) / 1e12)
    assert found["joules"] == pytest.approx(1.4 * full_ms)
    assert (found["ms"], found["mhz"], found["watts"], found["clock_limits"]) == (2 * full_ms, 1500, 700, ["power"])


def test_kernels(bench):
    """Each has a record of its own, and the operations that the other benchmarks count."""
    found = list(bench.kernels())
    assert len({(kernel.impl, str(kernel.case)) for kernel in found}) == len(found) == 2 + 3 * 3 + 2 * 3
    assert len({(kernel.impl, kernel.label) for kernel in found}) == len(found)
    for kernel in found:
        case = kernel.case
        if kernel.part == "product":
            assert sum(kernel.macs) == 8192**3
        elif kernel.part == "all":
            of_case = bench.parse_case(kernel.label)
            assert case == of_case.fields(case["dtype"])
            assert 2 * sum(kernel.macs) == of_case.latent_flops(of_case.lengths)
        else:
            of_case = bench.Case(case["prefix"], 0, case["heads"], (case["batch"],))
            assert 2 * sum(kernel.macs) == of_case.shared_flops


# -- nvidia-smi --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "limits"),
    [
        (LINE, ["power"]),
        ("1485, 698.71, 0x0000000000000000\n", []),
        ("1485, 698.71, 0x0000000000000025", ["power", "heat"]),
    ],
)
def test_the_line_of_nvidia_smi(bench, line, limits):
    assert bench.parse_load(line) == (1485.0, 698.71, limits)


@pytest.fixture
def fake_smi(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Put a program in nvidia-smi's place; it notes its arguments in the file returned, a line for each call."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")

    def write(does: str) -> Path:
        program, log = tmp_path / "nvidia-smi", tmp_path / "calls"
        program.write_text(f'#!/bin/sh\necho "$@" >> {log}\n{does}\n')
        program.chmod(0o755)
        return log

    return write


@pytest.fixture
def calls(bench, monkeypatch) -> list[float]:
    """When calls ended that are said to take 7 ms, then 2 ms each."""
    ended: list[float] = []

    def back_to_back(function: Callable[[], None]) -> Iterator[float]:
        while True:
            time.sleep(0.002)
            ended.append(time.perf_counter())
            yield 7.0 if len(ended) == 1 else 2.0

    monkeypatch.setattr(bench, "back_to_back", back_to_back)
    return ended


def test_one_query_while_the_calls_go_on(bench, fake_smi, calls):
    """It is slow here: the calls go on for longer than they would."""
    log = fake_smi(f"sleep 0.4; echo '{LINE}'")
    assert bench.sustained(lambda: None, 0.1, "3") == (2.0, bench.Load(1485.0, 698.71, ["power"]))
    (arguments,) = log.read_text().splitlines()
    assert arguments.endswith("--format=csv,noheader,nounits -i 3")
    assert calls[-1] - calls[0] >= 0.4
    assert len(calls) > 20


@pytest.mark.parametrize("does", [f"echo '{LINE}'; exit 9", "echo 'No devices were found'", "exec sleep 60"])
def test_a_query_that_fails_says_nothing(bench, fake_smi, calls, monkeypatch, does):
    monkeypatch.setattr(bench, "ANSWER_S", 0.2)
    fake_smi(does)
    assert bench.sustained(lambda: None, 0.05, "0") == (2.0, bench.Load())
