"""Prefill attention on a CPU: SGLang's results for the new tokens, and no work for the cached ones."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sglang_mla_ext.adapter.cpu import extend

SLOTS, DIM, V_DIM = 2048, 24, 16


@dataclass(frozen=True)
class Case:
    cached: tuple[int, ...]
    new: tuple[int, ...]
    heads: int = 4
    key_heads: int = 1
    padding: int = 0  # rows that no request has

    def arguments(self) -> tuple[Any, ...]:
        """Tokens that a request does not have are NaN in the pool."""
        torch.manual_seed(0)
        tokens = [sum(lens) for lens in zip(self.cached, self.new, strict=True)]
        slots = torch.randperm(SLOTS)
        table = torch.full((len(tokens) + 1, max(tokens)), int(slots[-1]), dtype=torch.int32)
        pool, begin = torch.full((SLOTS, self.key_heads, DIM), torch.nan), 0
        for row, count in enumerate(tokens, 1):
            table[row, :count] = slots[begin : begin + count]
            pool[slots[begin : begin + count]] = torch.randn(count, self.key_heads, DIM)
            begin += count
        rows = sum(self.new) + self.padding
        query, output = torch.randn(rows, self.heads, DIM), torch.full((rows, self.heads, V_DIM), -7.0)
        requests = torch.arange(1, len(tokens) + 1)
        lens = (torch.tensor(each) for each in (tokens, self.cached, self.new))
        return query, output, pool, pool[..., :V_DIM], table, requests, *lens


CASES = [
    Case((956, 0, 7), (10, 5, 1)),
    Case((0,), (300,)),
    Case((129, 1), (256, 129), heads=2, key_heads=2, padding=3),
    Case((0, 31), (0, 1), heads=6, key_heads=3),
]


def sglangs(*arguments: Any, **how: Any) -> torch.Tensor:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    return Backend._run_sdpa_forward_extend(Backend, *arguments, **how)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_new_tokens_attend_as_sglangs_do(case: Case) -> None:
    how: dict[str, Any] = dict(scaling=0.3, enable_gqa=case.heads != case.key_heads, causal=True)
    expected = sglangs(*case.arguments(), **how)
    actual = extend.around_extend(pytest.fail, None, *case.arguments(), **how)
    new = sum(case.new)
    torch.testing.assert_close(actual[:new], expected[:new], rtol=1e-5, atol=1e-6)
    assert (actual[new:] == -7.0).all(), "rows of no request are left as they are"


def test_cached_tokens_cost_keys_and_no_rows() -> None:
    """Two multiply-adds a row, key, head and dimension; SGLang has 97 times as many rows here."""
    case = Case((960,), (10,))

    def flops(function: Any, *first: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            function(*first, *case.arguments(), scaling=0.3, enable_gqa=True, causal=True)
        return int(counter.get_total_flops())

    needed = 2 * 10 * 970 * case.heads * (DIM + V_DIM)
    assert needed <= flops(extend.around_extend, None, None) <= 1.01 * needed
    assert flops(sglangs) > 90 * needed


@pytest.mark.parametrize("how", [{"causal": False}, {"causal": True, "sliding_window_size": 8}])
def test_other_attention_is_sglangs(how: dict[str, Any]) -> None:
    case = Case((6, 0), (4, 9))
    how = {"scaling": 0.3, "enable_gqa": True, **how}
    actual = extend.around_extend(lambda backend, *arguments: sglangs(*arguments), None, *case.arguments(), **how)
    assert torch.equal(actual, sglangs(*case.arguments(), **how))


def test_a_long_prompt_is_not_one_matrix() -> None:
    """So many rows at a time, each to the keys that they see: half of the multiply-adds of all rows and keys."""
    new = 8 * extend.ROWS
    case = Case((0,), (new,))
    with FlopCounterMode(display=False) as counter:
        extend.around_extend(pytest.fail, None, *case.arguments(), scaling=0.3, enable_gqa=True, causal=True)
    seen = sum(extend.ROWS * end for end in itertools.accumulate([extend.ROWS] * 8))
    assert counter.get_total_flops() == 2 * seen * case.heads * (DIM + V_DIM)
