"""Rivals of the benchmarks compute the same thing as each other."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_flashinfer_and_flashmla_agree(heads: int, queries: int, shared: bool) -> None:
    """Over the same cache and queries, which are drawn in the same order after the same seed. Both round to BF16: 4e-3
    of the largest value each."""
    pytest.importorskip("flashinfer")
    pytest.importorskip("flash_mla")
    from bench.cases import Case
    from bench.rivals import flashinfer_mla, flashmla_bf16

    sizes, alone = ((5,), 0) if shared else ((), 5)
    case = Case(1000 if shared else 0, 333, heads, sizes, alone, s_q=queries)
    torch.manual_seed(0)
    expected, _ = flashmla_bf16(case)()  # [B, S, H, 512]
    torch.manual_seed(0)
    out = flashinfer_mla(case)()  # [B * S, H, 512]
    expected = expected.flatten(0, 1).float()
    torch.testing.assert_close(out.float(), expected, rtol=0.0, atol=8e-3 * expected.abs().max().item())
