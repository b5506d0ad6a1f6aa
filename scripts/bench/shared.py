"""Our attention over shared, expanded prefixes on a case of random data: what to time, and its floor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch

from bench.cases import DN, DR, DV, LATENT, SCALE, Case
from bench.rivals import flashmla_tail
from bench.timing import Ceilings
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.tiles import Tile
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.prefix.planner.gpu_rates import rates_for
from sglang_mla_ext.segment import Mode, Segment

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
STORAGE = {"bf16": "bf16", "fp8": "fp8_e4m3"}  # a dtype's name in configs/gpus


def shared_bytes(case: Case, dtype: str) -> int:
    """Bytes of the expanded keys and values of all prefixes of a case; rotary keys are never FP8."""
    per_head = (DN + DV) * DTYPES[dtype].itemsize
    return len(case.sizes) * case.prefix * (case.heads * per_head + DR * 2)


def tail_work(case: Case) -> tuple[int, int]:
    """Operations and bytes of `flashmla_tail`."""
    return case.latent_flops(case.tail_lengths), sum(case.tail_lengths) * (LATENT + DR) * 2


def our_work(case: Case, dtype: str) -> dict[str, tuple[int, int]]:
    """Operations and bytes of keys and values of each part, as of `our_part`; the tails are BF16."""
    naive, tail = (case.shared_flops, shared_bytes(case, dtype)), tail_work(case)
    both = naive[0] + tail[0], naive[1] + tail[1]
    return {"naive": naive, "all": both}


def floor_ms(case: Case, dtype: str, ceilings: Ceilings) -> float:
    """Lower bound of the shared part's time, ms: its bytes at the bandwidth of a copy or its products at the rate of a
    large matrix product, whichever takes longer. With FP8 storage the product with the rotary keys is still BF16."""
    memory = shared_bytes(case, dtype) / ceilings.copy_gbps / 1e6
    bf16_share = 1.0 if dtype == "bf16" else DR / (DN + DR + DV)
    rates = bf16_share / ceilings.bf16_tflops + (1 - bf16_share) / ceilings.fp8_tflops
    return max(memory, case.shared_flops * rates / 1e9)


def random_prefixes(chunks: int, heads: int, dtype: str) -> ExpandedBuffers:
    """Expanded prefixes of one layer, filled with random numbers."""
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=DTYPES[dtype])
    buffers = ExpandedBuffers.allocate(layers=1, chunks=chunks, heads=heads, **sizes)
    for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
        tensor.copy_(torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16))
    return buffers


def shared_attention(
    case: Case, dtype: str, tile: Tile | None = None, cuts: int = 1
) -> tuple[SharedAttention, Callable[[], None]]:
    """Our attention, planned for a case over random prefixes, and a call that runs it.

    Args:
        tile: of the kernel; by default those that a server picks from.
        cuts: segments that each prefix stands in.
    """
    rows, heads = case.batch, case.heads
    chunks = -(-case.prefix // CHUNK_TOKENS)  # of one group
    buffers = random_prefixes(chunks * len(case.sizes), heads, dtype)
    query = torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
    q_nope, q_rope = query[..., :DN], query[..., DN:]  # [B, H, dn], [B, H, dr]

    if tile is None:
        tiles = rates_for(torch.cuda.get_device_name()).naive_tiles.get(STORAGE[dtype], ())
    else:
        tiles = (dataclasses.asdict(tile),)
    sizes = dict(max_rows=rows, heads=heads, segments_per_row=cuts)
    attention = make_shared_attention(buffers, **sizes, device="cuda", tiles=tiles)
    starts = [0, *itertools.accumulate(case.sizes)]
    bounds = [chunks * cut // cuts for cut in range(cuts)] + [chunks]
    groups = [
        Segment(
            tuple(range(start, end)),
            0,
            min(last * CHUNK_TOKENS, case.prefix) - first * CHUNK_TOKENS,
            Mode.NAIVE,
            tuple(range(index * chunks + first, index * chunks + last)),
        )
        for index, (start, end) in enumerate(itertools.pairwise(starts))
        for first, last in itertools.pairwise(bounds)
    ]
    attention.plan(groups, rows)

    def run() -> None:
        attention.run(0, q_nope, q_rope, SCALE)

    return attention, run


def our_part(case: Case, dtype: str, part: str, tile: Tile | None = None) -> Callable[[], Any]:
    """Return a call of our kernels: of the shared part (`naive`), or of `all`, which is FlashMLA over the tails, the
    shared part, and the merge."""
    attention, run = shared_attention(case, dtype, tile)
    if part == "naive":
        return run
    tail = flashmla_tail(case)
    out = torch.randn(case.batch, case.heads, DV, device="cuda", dtype=torch.bfloat16)  # [B, H, dv], merged in place

    def run_all() -> None:
        _, lse = tail()  # [B, H, 1]
        run()
        attention.merge(out, lse.squeeze(-1), out)

    return run_all
