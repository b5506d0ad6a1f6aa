"""Rivals of the benchmarks compute the same thing as each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rival", ["flashinfer_mla", "fa3_bf16"])
def test_agrees_with_flashmla(rival: str, heads: int, queries: int, shared: bool) -> None:
    from bench.rivals import RIVALS

    agree(RIVALS[rival].make, heads, queries, shared)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("queries", [1, 2])
def test_fa3_with_pages_of_a_token(heads: int, queries: int) -> None:
    """SGLang's default."""
    from bench.rivals import fa3_bf16

    agree(lambda case: fa3_bf16(case, page_tokens=1), heads, queries, shared=True)


def agree(make: Callable[[Any], Callable[[], torch.Tensor]], heads: int, queries: int, shared: bool) -> None:
    """Over the same cache and queries, which are drawn in the same order after the same seed. Both round to BF16: 4e-3
    of the largest value each."""
    pytest.importorskip("flash_mla")
    from bench.cases import Case
    from bench.rivals import flashmla_bf16

    sizes, alone = ((5,), 0) if shared else ((), 5)
    case = Case(1000 if shared else 0, 333, heads, sizes, alone, s_q=queries)
    torch.manual_seed(0)
    expected, _ = flashmla_bf16(case)()  # [B, S, H, 512]
    torch.manual_seed(0)
    try:
        rival = make(case)
    except ImportError as error:
        pytest.skip(str(error))
    out = rival()  # [B * S, H, 512]
    expected = expected.flatten(0, 1).float()
    torch.testing.assert_close(out.float(), expected, rtol=0.0, atol=8e-3 * expected.abs().max().item())
