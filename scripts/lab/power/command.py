"""Run kernels back to back and report whether the GPU's power limits them.

    python scripts/study.py power --out benchmarks/results/power.jsonl

Every line of the output is one kernel, whose CUDA graph ran for `--seconds` without a pause or a flush of L2:
the median time of a call, its operations per second, and the share of the matrix units' cycles that its products take.
Only useful products count: neither padding rows nor scores that are computed twice (with few heads). Clock,
power and the reason for the clock's limit are one sample of nvidia-smi, taken after half of the time; the calls go on
until it arrives. DeepSeek-V3's dimensions; decode over private tokens as in bench_decode.py, the
shared part as in bench_attention.py.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from bench.cases import DN, DR, DV, LATENT, Case
from bench.ceilings import PRODUCT_SIDE, matrix_product
from bench.decode import FLASHMLA, FP8Cache, ours, parse_case
from bench.records import write_record
from bench.rivals import RIVALS
from bench.shared import shared_attention
from bench.timing import attempt, back_to_back, captured, free_memory, settled
from rich.console import Console
from rich.table import Table

from sglang_mla_ext.kernels.dispatch import make_hopper_absorb_fp8
from sglang_mla_ext.kernels.naive.tiles import Tile

app = typer.Typer(add_completion=False)

FP8_MACS_PER_CYCLE, BITS16_MACS_PER_CYCLE = 4096, 2048  # of one Hopper multiprocessor, dense
DECODE_CASES = ("128x8192x128", "64x16384x128", "128x8192x16")
SHARED_PREFIX, SHARED_HEADS, SHARED_BATCHES = 26472, 128, (128, 512)
SHARED_TILES = (
    ("fp8", Tile(block_rows=64, block_keys=128, num_stages=2, ctas_per_sm=2)),
    ("fp8", Tile(block_rows=128, block_keys=128, num_stages=4)),
    ("bf16", Tile(block_rows=128, block_keys=128, num_stages=2)),
)
CLOCK_LIMITS = {  # what holds a clock down, by the bit of nvidia-smi's event reasons
    0x2: "settings",
    0x4: "power",
    0x8: "hardware",
    0x20: "heat",
    0x40: "heat in hardware",
    0x80: "power brake",
}
ANSWER_S = 10  # a query that takes longer has failed


class Macs(NamedTuple):
    """Multiply-adds on the matrix units, by the width of their operands."""

    fp8: int
    bits16: int

    def times(self, count: int) -> Macs:
        return Macs(self.fp8 * count, self.bits16 * count)

    @property
    def cycles(self) -> float:
        """Cycles of one multiprocessor at its full rate."""
        return self.fp8 / FP8_MACS_PER_CYCLE + self.bits16 / BITS16_MACS_PER_CYCLE


# Of one head of a row and one key.
FLASHMLA_MACS = {"bf16": Macs(0, 2 * LATENT + DR), "fp8": Macs(2 * LATENT + DR, 0)}
ABSORB_MACS = Macs(2 * LATENT, DR)
NAIVE_MACS = {"bf16": Macs(0, DN + DR + DV), "fp8": Macs(DN + DV, DR)}


class Load(NamedTuple):
    """The GPU at work; None for what is not known."""

    mhz: float | None = None  # of the multiprocessors
    watts: float | None = None  # of the board
    clock_limits: list[str] | None = None  # of `CLOCK_LIMITS`


class Kernel(NamedTuple):
    """What is run, and what its record says."""

    impl: str
    part: str
    label: str
    case: dict[str, Any]
    macs: Macs  # of a call
    make: Callable[[], Callable[[], Any]]


def products() -> Iterator[Kernel]:
    """Large matrix products: what the GPU does at best."""
    for dtype, macs in (("bf16", Macs(0, 1)), ("fp8", Macs(1, 0))):
        case = dict(m=PRODUCT_SIDE, n=PRODUCT_SIDE, k=PRODUCT_SIDE, dtype=dtype)
        label, make = f"{PRODUCT_SIDE}^3, {dtype}", partial(matrix_product, dtype)
        yield Kernel("torch", "product", label, case, macs.times(PRODUCT_SIDE**3), make)


def our_decode(case: Case) -> Callable[[], None]:
    """Decode over an FP8 cache of random rows."""
    return ours(case, FP8Cache(case), make_hopper_absorb_fp8)[0]


def decode_kernels(spec: str) -> Iterator[Kernel]:
    """Decode over private tokens: FlashMLA, and ours as a server runs it."""
    case = parse_case(spec)
    count = case.batch * case.tail * case.heads
    for name in FLASHMLA:
        rival = RIVALS[name]
        macs = FLASHMLA_MACS[rival.dtype].times(count)
        yield Kernel(name, rival.part, spec, case.fields(rival.dtype), macs, partial(rival.make, case))
    macs = ABSORB_MACS.times(count)
    yield Kernel("hybrid_mla", "all", spec, case.fields("fp8"), macs, partial(our_decode, case))


def shared_part(case: Case, dtype: str, tile: Tile) -> Callable[[], None]:
    """The shared part of a case."""
    return shared_attention(case, dtype, tile)[1]


def shared_kernels(batch: int) -> Iterator[Kernel]:
    """Attention of so many requests over one shared prefix, with several tiles."""
    case = Case(SHARED_PREFIX, 0, SHARED_HEADS, (batch,))
    for dtype, tile in SHARED_TILES:
        fields = case.fields(dtype) | {"tile": asdict(tile)}
        label = f"{batch} on {SHARED_PREFIX}, {dtype}, {tile.block_rows} rows"
        macs = NAIVE_MACS[dtype].times(batch * SHARED_PREFIX * SHARED_HEADS)
        yield Kernel("hybrid_mla", "naive", label, fields, macs, partial(shared_part, case, dtype, tile))


def kernels() -> Iterator[Kernel]:
    """All that is run."""
    yield from products()
    for spec in DECODE_CASES:
        yield from decode_kernels(spec)
    for batch in SHARED_BATCHES:
        yield from shared_kernels(batch)


def gpu_id(device: int, visible: str | None) -> str:
    """What nvidia-smi calls one of torch's devices; visible: the variable CUDA_VISIBLE_DEVICES, whose entries, numbers
    or UUIDs, nvidia-smi takes too."""
    return visible.split(",")[device].strip() if visible else str(device)


def ask(gpu: str) -> subprocess.Popen[str] | None:
    """Start one query of clock and power; None if there is no nvidia-smi. Never poll in a loop: that can overload a
    machine."""
    # Not power.draw: that is the mean of the last second, which begins before the kernel's time does.
    fields = "--query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active"
    command = ["nvidia-smi", fields, "--format=csv,noheader,nounits", "-i", gpu]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return None


def answer(query: subprocess.Popen[str] | None) -> Load:
    """What a query found; nothing if it failed or has not ended."""
    if query is None:
        return Load()
    if query.poll() is None:
        query.kill()
        return Load()
    found = query.communicate()[0]
    return parse_load(found) if query.returncode == 0 else Load()


def parse_load(line: str) -> Load:
    """Read nvidia-smi's line: `1485, 698.71, 0x0000000000000004`; nothing if a value is missing."""
    try:
        mhz, watts, reasons = line.split(",")
        limits = [name for bit, name in CLOCK_LIMITS.items() if int(reasons, 16) & bit]
        return Load(float(mhz), float(watts), limits)
    except ValueError:
        return Load()


def sustained(function: Callable[[], Any], seconds: float, gpu: str) -> tuple[float, Load]:
    """ms of a call, and the GPU while the calls went on."""
    times, query, asked, begin = [], None, False, time.perf_counter()
    for ms in back_to_back(function):
        times.append(ms)
        elapsed = time.perf_counter() - begin
        if not asked and elapsed >= seconds / 2:
            query, asked = ask(gpu), True
        waiting = query is not None and query.poll() is None and elapsed < seconds + ANSWER_S
        if elapsed >= seconds and not waiting:
            break
    return settled(times), answer(query)


def metrics_of(macs: Macs, ms: float, load: Load, sms: int) -> dict[str, Any]:
    """The values of a record; those that need a clock or a power that is not known are None."""
    cycles = None if load.mhz is None else sms * ms * 1e-3 * load.mhz * 1e6
    return dict(
        ms=ms,
        **load._asdict(),
        joules=None if load.watts is None else load.watts * ms / 1e3,
        tflops=2 * sum(macs) / ms / 1e9,
        matrix_share=macs.cycles / cycles if cycles else None,
    )


def measure_power(kernel: Kernel, seconds: float, gpu: str) -> dict[str, Any]:
    """Metrics of a kernel."""
    function = kernel.make()
    replay = captured(function)
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    metrics = metrics_of(kernel.macs, *sustained(replay, seconds, gpu), sms)
    return metrics | ({"cuda_graph": False} if replay is function else {})


CELLS = ("us", "MHz", "W", "clock held by", "mJ", "TFLOPS", "matrix units")


def cells(metrics: dict[str, Any] | None) -> list[str]:
    """What a table says of a kernel, in the columns `CELLS`; metrics: None if it failed."""
    if not metrics:
        return ["failed", *("" for _ in CELLS[1:])]

    def cell(name: str, form: str = ".0f", factor: float = 1) -> str:
        return "" if metrics[name] is None else f"{metrics[name] * factor:{form}}"

    limits = ", ".join(metrics["clock_limits"] or [])
    rates = [cell("joules", factor=1e3), cell("tflops"), cell("matrix_share", ".0%")]
    return [cell("ms", ".1f", 1e3), cell("mhz"), cell("watts"), limits, *rates]


@app.command()
def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="of each kernel")] = 1.5,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Run kernels back to back: time, clock, power, and the share of the matrix units' cycles."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise typer.BadParameter("needs a Hopper GPU")
    gpu = gpu_id(torch.cuda.current_device(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    table = Table(title=f"kernels back to back, {torch.cuda.get_device_name()}")
    for column in ("what", "case", *CELLS):
        table.add_column(column, justify="right")
    failed = False
    for kernel in kernels():
        name = f"{kernel.impl} {kernel.label}"
        print(name, flush=True)
        metrics = attempt(name, measure_power, kernel, seconds, gpu)
        free_memory()
        failed |= metrics is None and kernel.impl not in FLASHMLA
        if metrics and out is not None:
            write_record(out, bench="power", impl=kernel.impl, case=kernel.case, part=kernel.part, **metrics)
        table.add_row(kernel.impl, kernel.label, *cells(metrics))
    Console(width=140).print(table)
    if failed:
        raise typer.Exit(1)
