"""What stands in for SGLang's functions that need a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_mla_ext.adapter.cpu import host_cache
from sglang_mla_ext.adapter.cpu.dp_attention import around_copy
from sglang_mla_ext.adapter.cpu.missing_ops import (
    around_allocate_bitmask,
    around_apply_mask,
    around_zero_experts,
)


def test_zero_experts_give_their_input() -> None:
    """The others keep their place and weight, and no token has an expert twice, which SGLang would count once."""
    torch.manual_seed(0)
    tokens, experts, zeros, k = 9, 16, 8, 6
    hidden = torch.randn(tokens, 5)
    indices = torch.stack([torch.randperm(experts + zeros)[:k] for _ in range(tokens)]).int()
    indices[0], indices[1] = torch.arange(k), torch.arange(experts, experts + k)  # none of them, nothing else
    scales = torch.rand(tokens, k)
    before, weights = indices.clone(), scales.clone()
    out = around_zero_experts(lambda: None, indices, scales, experts, "identity", hidden)
    is_zero = before >= experts
    assert torch.allclose(out, hidden * (weights * is_zero).sum(1, keepdim=True))
    assert torch.equal(scales, weights * ~is_zero) and torch.equal(indices[~is_zero], before[~is_zero])
    assert indices.max() < experts
    assert all(len(set(row)) == k for row in indices.tolist())


def test_torchvision_imports_in_a_process_that_is_not_ours() -> None:
    """As all of SGLang's need, `python -m sglang.bench_serving` too."""
    subprocess.run([sys.executable, "-c", "import torchvision.io"], check=True)


def test_tokens_that_a_grammar_forbids() -> None:
    """Those whose bit is not set, in rows of their own; a vocabulary ends inside of a word of 32 bits."""
    mask = around_allocate_bitmask(lambda: None, 40, 3)
    assert mask.shape == (3, 2) and (mask == -1).all()
    mask[1, 0], mask[2, 1] = 0b101, 0
    logits = torch.ones(3, 40)
    around_apply_mask(lambda: None, None, logits, mask)
    allowed = [sorted(row.isfinite().nonzero().flatten().tolist()) for row in logits]
    assert allowed == [[*range(40)], [0, 2, *range(32, 40)], [*range(32)]]


def test_no_token() -> None:
    nothing = torch.empty(0, 6, dtype=torch.int32), torch.empty(0, 6)
    assert around_zero_experts(lambda: None, *nothing, 16, "identity", torch.empty(0, 5)).shape == (0, 5)


@pytest.mark.parametrize(("begin", "tokens"), [(0, 3), (3, 2), (5, 0)])
def test_tokens_of_a_rank_among_all(begin: int, tokens: int) -> None:
    """Its batch may be padded, which goes nowhere and is written by nobody."""
    everybody, own = torch.arange(10.0).view(5, 2), torch.full((4, 2), -1.0)
    offset, count = torch.tensor(begin), torch.tensor(tokens)
    around_copy(lambda: None, own, everybody, 0, offset, count, True)
    assert torch.equal(own[:tokens], everybody[begin : begin + tokens]) and (own[tokens:] == -1).all()
    there = torch.zeros(5, 2)
    around_copy(lambda: None, there, own, 0, offset, count, False)
    assert torch.equal(there[begin : begin + tokens], own[:tokens]) and int((there != 0).any(1).sum()) <= tokens


def test_rows_to_pages_on_the_host_and_back() -> None:
    layers, page = [torch.randn(12, 1, 5) for _ in range(3)], 4
    pages = torch.zeros(3, 3, page, 1, 5)
    there, here = torch.tensor([8, 9, 10, 11, 0]), torch.tensor([1, 2, 3, 5, 7])
    host_cache.copy_to_pages(layers, [pages], here, there, page)
    assert torch.equal(pages[2, 1], layers[1][[1, 2, 3, 5]]) and not pages[1].any()
    back = torch.zeros(12, 1, 5)
    host_cache.copy_from_pages([pages], [back], there, here + 1, 2, page)
    assert torch.equal(back[here + 1], layers[2][here])
