"""The expansion of latent rows into keys and values on random data: the fused kernel, and the same in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench.cases import DN, DR, DV, LATENT, PAGE_TOKENS
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
    """The kernel of kernels/storage/expand_prefix.py, on a whole prefix."""
    w_k, w_v = weight.split([DN, DV], dim=1)
    table = torch.arange(buffers.chunks, dtype=torch.int32, device=weight.device)  # [chunks]
    return lambda: expand_prefix(latent_rows, slots, w_k, w_v, buffers, 0, table, 0)


def unfused(latent_rows: Tensor, slots: Tensor, weight: Tensor, buffers: ExpandedBuffers) -> Callable[[], None]:
    """The same in torch: a gather, one product, and copies into the layout of the buffers.

    It writes up to 15 tokens past the last slot, because FP8 values are permuted in blocks of 16.
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
