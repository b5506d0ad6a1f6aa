"""Measure what the GPU does at best: the bandwidth of a copy and the rates of large matrix products, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.timing import time_ms

PRODUCT_SIDE = 8192  # of the matrices that are multiplied for the ceilings


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
