"""The expansion benchmark: its arithmetic, and that the torch path computes what the kernel must."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, FP8


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("lab.expansion.implementations")


def test_rates(bench):
    assert bench.flops(1000, 16) == 2 * 1000 * 16 * 256 * 512
    found = bench.rates(2.0, 1_000_000, 128, gemm_tflops=64.0)
    assert found["tflops"] == pytest.approx(bench.flops(1_000_000, 128) / 2e-3 / 1e12)
    assert found["gemm_share"] == pytest.approx(found["tflops"] / 64)


def test_slots_are_whole_pages_in_any_order(bench):
    slots = bench.scattered_slots(1000, "cpu")
    assert len(set(slots.tolist())) == 1000
    pages = slots[: 1000 // 64 * 64].view(-1, 64)
    assert torch.equal(pages - pages[:, :1], torch.arange(64).expand_as(pages))
    assert (pages[:, 0] % 64 == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("tokens", [104, 512, 1000])
def test_torch_path_writes_the_layout(bench, dtype, tokens):
    """As the buffers' own `write` does, bit by bit."""
    torch.manual_seed(0)
    heads, rank = 2, bench.LATENT
    weight = (torch.randn(heads, bench.DN + bench.DV, rank) / rank**0.5).bfloat16()
    slots = bench.scattered_slots(tokens, "cpu")
    latent_rows = torch.randn(int(slots.max()) + 1, rank + bench.DR).bfloat16()
    found, expected = (bench.allocate(tokens, weight, dtype) for _ in range(2))
    assert (found.k_scale.max() < 1) == (dtype == FP8)
    bench.unfused(latent_rows, slots, weight, found)()

    rows = latent_rows[slots]
    expanded = torch.nn.functional.linear(rows[:, :rank], weight.flatten(0, 1)).view(tokens, heads, -1)
    for chunk, start in enumerate(range(0, tokens, CHUNK_TOKENS)):
        of_chunk = slice(start, start + CHUNK_TOKENS)
        k_nope, v = expanded[of_chunk].split([bench.DN, bench.DV], dim=-1)
        expected.write(0, chunk, 0, k_nope, v, rows[of_chunk, rank:])
    chunks = range(found.chunks)
    for ours, theirs in zip(found.read(0, chunks, tokens), expected.read(0, chunks, tokens), strict=True):
        assert torch.equal(ours, theirs)
