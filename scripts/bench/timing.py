"""Time a call on the GPU: CUDA graphs, the median with L2 flushed, and calls back to back at the power limit; and what
the GPU does at best."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
from triton.testing import do_bench

BATCH_MS = 10  # of calls back to back per batch; long compared with the host's wait after it
PRODUCT_SIDE = 8192  # of the matrices that are multiplied for the ceilings
FEWEST_CALLS = 5  # that a median is of, however long a call takes


def captured(function: Callable[[], Any]) -> Callable[[], Any]:
    """A CUDA graph of one call, to replay."""
    for _ in range(3):  # compiles, fills in schedules
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()

    def replay(kept: Callable[[], Any] = function) -> None:  # whose tensors must live as long as the graph
        graph.replay()

    return replay


def time_ms(function: Callable[[], Any], rep_ms: int = 100) -> float:
    """Median time of a call in ms, L2 flushed before each, over `rep_ms` ms of calls after 50 ms of warm-up; of a long
    call over about `FEWEST_CALLS`."""
    ms = do_bench(function, warmup=50, rep=rep_ms, return_mode="median")
    if ms * FEWEST_CALLS > rep_ms:
        ms = do_bench(function, warmup=1, rep=FEWEST_CALLS * ms, return_mode="median")
    return ms


def sustained_ms(function: Callable[[], Any], seconds: float) -> float:
    """Median time of a call in ms, back to back for this long, without flushing L2: long enough for the GPU to reach
    its power limit. The first third does not count, in which clock and power are still settling."""
    times: list[float] = []
    calls, stop = 1, time.perf_counter() + seconds
    while not times or time.perf_counter() < stop:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
        calls = max(1, round(BATCH_MS / times[-1]))
    return median(times[len(times) // 3 :])


def attempt(what: str, function: Callable[..., Any], *args: Any) -> Any:
    """The function's result; if it raises, print why and return None."""
    try:
        return function(*args)
    except Exception as error:
        print(f"{what} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return None


def measure(function: Callable[[], Any], rep_ms: int, work: tuple[int, int] | None) -> dict[str, Any]:
    """Metrics of a callable; work: its operations and its bytes of keys and values, for rates."""
    metrics: dict[str, Any] = {"ms": time_ms(captured(function), rep_ms)}
    if work:
        flops, read_bytes = work
        metrics |= dict(tflops=flops / metrics["ms"] / 1e9, gbps=read_bytes / metrics["ms"] / 1e6)
    return metrics


COLUMNS = {"ms": "{ms:.4f}", "TFLOPS": "{tflops:.0f}", "GB/s": "{gbps:.0f}", "of floor": "{floor_share:.0%}"}
"""Columns of a measurement in a table for the console."""


def free_memory() -> None:
    """Release memory that is no longer referenced."""
    gc.collect()
    torch.cuda.empty_cache()


class Ceilings(NamedTuple):
    """Measured bandwidth and rates of the GPU."""

    copy_gbps: float  # bytes read and bytes written
    bf16_tflops: float
    fp8_tflops: float

    def __str__(self) -> str:
        return "copy {:.0f} GB/s, BF16 {:.0f} and FP8 {:.0f} TFLOPS".format(*self)


def matrix_product(dtype: str) -> Callable[[], torch.Tensor]:
    """A product of two matrices of `PRODUCT_SIDE` x `PRODUCT_SIDE`."""
    a, b = (torch.randn(PRODUCT_SIDE, PRODUCT_SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if dtype == "bf16":
        return lambda: a @ b
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)


def measure_ceilings(rep_ms: int = 100) -> Ceilings:
    """Copy 1 GiB, and multiply matrices."""
    source = torch.randint(0, 127, (1 << 30,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_gbps = 2 * source.numel() / time_ms(lambda: target.copy_(source), rep_ms) / 1e6
    bf16_ms, fp8_ms = (time_ms(matrix_product(dtype), rep_ms) for dtype in ("bf16", "fp8"))
    flops = 2 * PRODUCT_SIDE**3
    return Ceilings(copy_gbps, flops / bf16_ms / 1e9, flops / fp8_ms / 1e9)
