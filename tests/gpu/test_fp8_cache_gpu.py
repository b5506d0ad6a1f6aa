"""The FP8 latent cache on a GPU: rows written and read, and decode over them, against plain torch.

Bound of decode: the kernel's error against float64 is at most 1.1 times that of a torch emulation with e4m3 weights.
Whatever no kernel may read is NaN. Run with `pytest tests/gpu -m gpu -s`: each case prints both errors.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.kernels.absorb.paged_fp8 import TritonAbsorbFP8
from sglang_mla_ext.kernels.dispatch import append_rows, fetch_rows
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.storage.expanded import FP8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout, dequantize, quantize

pytestmark = pytest.mark.gpu

LAYOUT, RANK, DR, PAGE = LatentRowLayout(), 512, 64, 64
SCALE = 192**-0.5
DEVICE = "cuda"
LSE_BOUND = 2.5e-2
"""Hopper's FP8 product of 512 elements adds 32 at a time and keeps 13 bits behind the largest term: up to 16 · 2^-13 of
the largest partial sum is lost, and scores here reach 10."""


class Cache:
    """A pool of NaN and in it, in random pages, the rows of each request."""

    def __init__(self, lens: tuple[int, ...], page_size: int = PAGE, mean: float = 0.0) -> None:
        pages = [-(-n // page_size) for n in lens]
        order = torch.randperm(sum(pages) + 3, device=DEVICE).int()
        self.pool = torch.full((len(order) * page_size, LAYOUT.row_bytes), 0x7F, dtype=torch.uint8, device=DEVICE)
        LAYOUT.scale(self.pool).fill_(torch.nan)
        LAYOUT.rope(self.pool).fill_(torch.nan)
        self.table = torch.full((len(lens), max(pages) + 1), 1 << 30, dtype=torch.int32, device=DEVICE)
        self.lens, self.rows = torch.tensor(lens, dtype=torch.int32, device=DEVICE), []
        for request, (n, count) in enumerate(zip(lens, pages, strict=True)):
            self.table[request, :count], order = order[:count], order[count:]
            slots = self.table[request, :count].long().repeat_interleave(page_size)[:n] * page_size
            slots = slots + torch.arange(n, device=DEVICE) % page_size
            latent = (torch.randn(n, RANK, device=DEVICE) + mean).bfloat16()
            rope = 3 * torch.randn(n, DR, device=DEVICE)
            append_rows(latent, rope.bfloat16(), slots, self.pool)
            self.rows.append(self.pool[slots])

    def exact(self, q_absorbed: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """Attention in float64 to what is stored."""
        outs = []
        for request, rows in enumerate(self.rows):
            keys = torch.cat(dequantize(rows), dim=-1)[None].double()
            query = q_absorbed[request, None].double(), q_rope[request, None].double()
            outs.append(reference.absorb(*query, keys, self.lens[request, None], SCALE)[0])
        return torch.cat(outs)

    def emulated(self, q_absorbed: torch.Tensor, q_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = []
        for request, rows in enumerate(self.rows):
            query = q_absorbed[request, None], q_rope[request, None]
            parts.append(reference_fp8.absorb_fp8(*query, reference_fp8.keys_of_rows(rows), SCALE))
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def queries(requests: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(requests, heads, d, device=DEVICE).bfloat16() for d in (RANK, DR))  # type: ignore[return-value]


def run(
    absorb: TritonAbsorbFP8, cache: Cache, q: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(q[0], torch.nan, dtype=torch.float32)
    lse = torch.full(q[0].shape[:2], torch.nan, device=DEVICE)
    absorb.run(*q, cache.pool, cache.table, cache.lens, SCALE, out, lse)
    return out, lse


@pytest.mark.parametrize(
    ("lens", "heads", "page_size"),
    [
        ((1, 64, 0, 65, 4759), 16, 64),
        ((26472,), 128, 64),  # keys are cut
        ((26472,) * 3 + (3000,) * 280, 128, 64),  # keys are not: the longest sum of one program
        ((333, 90), 8, 1),
    ],
    ids=["uneven", "long", "many", "tokens"],
)
def test_error_is_that_of_the_rounding(lens: tuple[int, ...], heads: int, page_size: int) -> None:
    torch.manual_seed(0)
    cache, q = Cache(lens, page_size, mean=0.5), queries(len(lens), heads)
    sizes: dict[str, Any] = dict(max_requests=len(lens), heads=heads, device=DEVICE, page_size=page_size)
    absorb = TritonAbsorbFP8(**sizes)
    out, lse = run(absorb, cache, q)
    exact, (emulated, emulated_lse) = cache.exact(*q), cache.emulated(*q)
    ours, theirs = (reference.errors(result, exact).rel_l2 for result in (out, emulated))
    print(f"splits {absorb.splits(len(lens))}: relative L2 error {ours:.5f}, of the emulation {theirs:.5f}")
    assert ours <= 1.1 * theirs
    torch.testing.assert_close(lse, emulated_lse, rtol=0, atol=LSE_BOUND)


def test_a_graph_follows_other_lengths_and_pages() -> None:
    torch.manual_seed(0)
    first, second = Cache((500, 3, 64)), Cache((64, 700, 1))
    absorb = TritonAbsorbFP8(max_requests=4, heads=16, device=DEVICE)
    q = queries(3, 16)
    out, lse = torch.empty(3, 16, RANK, device=DEVICE), torch.empty(3, 16, device=DEVICE)
    pool = torch.cat([first.pool, second.pool])
    width = max(first.table.shape[1], second.table.shape[1])
    table = torch.zeros(3, width, dtype=torch.int32, device=DEVICE)
    lens = torch.zeros(3, dtype=torch.int32, device=DEVICE)

    def take(cache: Cache, first_page: int) -> None:
        table[:, : cache.table.shape[1]] = cache.table + first_page
        lens.copy_(cache.lens)

    take(first, 0)
    absorb.run(*q, pool, table, lens, SCALE, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        absorb.run(*q, pool, table, lens, SCALE, out, lse)
    for cache, first_page in ((second, len(first.pool) // PAGE), (first, 0)):
        take(cache, first_page)
        graph.replay()
        expected = run(absorb, cache, q)
        assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
def test_the_pool_writes_and_reads_as_on_a_cpu(slots_dtype: torch.dtype) -> None:
    from sglang_mla_ext.adapter.latent.pool import LatentPool

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(kv_lora_rank=RANK, qk_rope_head_dim=DR, layer_num=2)
    pool = LatentPool(640, page_size=PAGE, dtype=FP8, device=DEVICE, enable_memory_saver=False, **sizes)
    layer, slots = SimpleNamespace(layer_id=1), torch.randperm(640, device=DEVICE)[:300].to(slots_dtype)
    rows = torch.randn(300, 1, RANK + DR, device=DEVICE).bfloat16()
    rows[::7] *= 1e-3
    pool.set_kv_buffer(layer, slots, rows, rows[..., :RANK])
    expected = quantize(rows[:, 0, :RANK].cpu(), rows[:, 0, RANK:].cpu())
    written = pool.rows(1)[slots.long()].cpu()
    for part in (slice(0, 516), slice(528, None)):
        assert torch.equal(written[:, part], expected[:, part])
    for actual, meant in zip(pool.get_mla_kv_buffer(layer, slots), dequantize(expected), strict=True):
        assert torch.equal(actual[:, 0].cpu(), meant.bfloat16())
    out = torch.empty(300, RANK + DR, dtype=torch.bfloat16, device=DEVICE)
    pool.fetch(1, slots, out)
    assert torch.equal(out.cpu(), torch.cat(dequantize(expected), dim=-1).bfloat16())
    latent, rope = torch.empty(300, RANK, device=DEVICE), torch.empty(300, DR, device=DEVICE)
    fetch_rows(pool.rows(1), slots, latent, rope)
    assert torch.equal(latent.cpu(), dequantize(expected)[0])
