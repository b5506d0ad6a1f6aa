"""Time the expansion of latent rows into keys and values: the fused kernel beside gather, product and copy in torch.

    python scripts/bench_expansion.py --out benchmarks/results/expansion.jsonl

One layer, DeepSeek-V3's dimensions, latent rows in scattered pages. Every time is the median of a CUDA graph of one
call, L2 flushed before each. The rate to compare with is that of a BF16 product of the same shape in the same run,
which reads contiguous rows and writes BF16.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_attention import DTYPES, attempt, free_memory, measure
from rival_attention import DN, DR, DV, LATENT, PAGE_TOKENS
from tabulate import tabulate
from torch import Tensor

from sglang_mla_ext.kernels.storage.expand_prefix import expand_prefix
from sglang_mla_ext.kernels.storage.expanded import (
    CHUNK_TOKENS,
    FP8,
    FP8_TOKEN_ORDER,
    ExpandedBuffers,
    scale_bounds,
    to_fp8,
)
from sglang_mla_ext.results import write_record


def flops(tokens: int, heads: int) -> int:
    """Operations of the expansion."""
    return 2 * tokens * heads * (DN + DV) * LATENT


def rates(ms: float, tokens: int, heads: int, gemm_tflops: float) -> dict[str, float]:
    """Metrics of a time."""
    tflops = flops(tokens, heads) / ms / 1e9
    return dict(ms=ms, tflops=tflops, gemm_tflops=gemm_tflops, gemm_share=tflops / gemm_tflops)


def scattered_slots(tokens: int, device: str) -> Tensor:
    """`[tokens]` int64: slots of a pool of twice as many, whole pages in random order."""
    pages = torch.randperm(2 * -(-tokens // PAGE_TOKENS), device=device)  # [pages of the pool]
    return (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, device=device)).flatten()[:tokens]


def allocate(tokens: int, weight: Tensor, dtype: torch.dtype) -> ExpandedBuffers:
    """Buffers for a prefix in one layer, in FP8 with the scales of `weight [H, dn + dv, r]`."""
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=dtype, device=weight.device)
    buffers = ExpandedBuffers.allocate(layers=1, chunks=-(-tokens // CHUNK_TOKENS), heads=len(weight), **sizes)
    if dtype == FP8:
        buffers.k_scale[0], buffers.v_scale[0] = (scale_bounds(rows) for rows in weight.split([DN, DV], dim=1))
    return buffers


def fused(latent_rows: Tensor, slots: Tensor, weight: Tensor, buffers: ExpandedBuffers) -> Callable[[], None]:
    """The kernel of kernels/expand_prefix.py, on a whole prefix."""
    w_k, w_v = weight.split([DN, DV], dim=1)
    table = torch.arange(buffers.chunks, dtype=torch.int32, device=weight.device)  # [chunks]
    return lambda: expand_prefix(latent_rows, slots, w_k, w_v, buffers, 0, table, 0)


def unfused(latent_rows: Tensor, slots: Tensor, weight: Tensor, buffers: ExpandedBuffers) -> Callable[[], None]:
    """The same in torch: a gather, one product, and copies into the layout of the buffers.

    It writes up to 15 tokens more than there are slots, because FP8 values are permuted 16 by 16.
    """
    heads, block = buffers.heads, len(FP8_TOKEN_ORDER)
    order = torch.tensor(FP8_TOKEN_ORDER, device=weight.device)  # token of each position
    slots = torch.cat([slots, slots[-1:].expand(-len(slots) % block)])
    n = len(slots)
    full, rest = divmod(n, CHUNK_TOKENS)
    pieces = [(0, full, CHUNK_TOKENS), (full, 1, rest)]  # first chunk, chunks, tokens of each
    fp8 = buffers.dtype == FP8
    # As bytes where they are FP8: torch cannot index FP8 on every device.
    k_buffer, v_buffer = (part.view(torch.uint8) if fp8 else part for part in (buffers.k_nope[0], buffers.v_t[0]))

    def run() -> None:
        rows = latent_rows[slots]  # [n, r + dr]
        expanded = torch.nn.functional.linear(rows[:, :LATENT], weight.flatten(0, 1)).view(n, heads, DN + DV)
        k_nope, v = expanded.split([DN, DV], dim=-1)  # [n, H, dn], [n, H, dv]
        if fp8:
            k_nope = to_fp8(k_nope / buffers.k_scale[0, :, None]).view(torch.uint8)
            v = to_fp8(v / buffers.v_scale[0, :, None]).view(torch.uint8)
            v = v.unflatten(0, (-1, block))[:, order].flatten(0, 1)
        for first, chunks, tokens in pieces:
            if chunks * tokens:
                chunk, start = slice(first, first + chunks), first * CHUNK_TOKENS
                k_piece, v_piece, rope_piece = (
                    part[start : start + chunks * tokens].unflatten(0, (chunks, tokens))
                    for part in (k_nope, v, rows[:, LATENT:])
                )
                k_buffer[chunk, :, :tokens].copy_(k_piece.transpose(1, 2))  # [chunks, H, tokens, dn]
                v_buffer[chunk, ..., :tokens].copy_(v_piece.permute(0, 2, 3, 1))  # [chunks, H, dv, tokens]
                buffers.k_rope[0, chunk, :tokens].copy_(rope_piece)  # [chunks, tokens, dr]

    return run


IMPLEMENTATIONS = {"hybrid_mla": fused, "torch": unfused}


def main(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="tokens expanded by one call (repeatable)")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, help="local heads (repeatable)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp8: the storage (repeatable; both)")] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time the expansion of a prefix in one layer, fused and in torch."""
    if unknown := set(dtype or []) - set(DTYPES):
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, not {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    rows: list[tuple[Any, ...]] = []
    failed = False
    for n_heads, n in itertools.product(heads or [128, 16], tokens or [1024, 4096, 8192, 26472]):
        weight = torch.randn(n_heads, DN + DV, LATENT, device="cuda", dtype=torch.bfloat16) / LATENT**0.5  # [H, d, r]
        slots = scattered_slots(n, "cuda")
        latent_rows = torch.randn(int(slots.max()) + 1, LATENT + DR, device="cuda", dtype=torch.bfloat16)
        a, b = latent_rows[:n, :LATENT].contiguous(), weight.flatten(0, 1).t()  # [n, r], [r, H * d]
        gemm = measure(partial(torch.mm, a, b), rep_ms, (flops(n, n_heads), 0))["tflops"]
        for stored in dict.fromkeys(dtype or DTYPES):
            buffers = allocate(n, weight, DTYPES[stored])
            for impl, make in IMPLEMENTATIONS.items():
                function = make(latent_rows, slots, weight, buffers)
                metrics = attempt(f"{impl} {stored}, {n_heads} heads, {n} tokens", measure, function, rep_ms, None)
                failed |= metrics is None
                if metrics:
                    metrics |= rates(metrics["ms"], n, n_heads, gemm)
                    if out:
                        case = dict(tokens=n, heads=n_heads, dtype=stored)
                        write_record(out, bench="expansion", impl=impl, case=case, **metrics)
                    figures = (f"{metrics['ms'] * 1e3:.1f}", f"{metrics['tflops']:.0f}", f"{metrics['gemm_share']:.0%}")
                    rows.append((n_heads, n, stored, impl, *figures))
            del buffers, function
            free_memory()
    print(tabulate(rows, ("heads", "tokens", "dtype", "what", "us", "TFLOPS", "of GEMM")))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
