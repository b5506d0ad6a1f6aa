"""The attention that the demo model and its drafting layer are trained with, on a GPU."""

from __future__ import annotations

import pytest
import torch
from lab.training.network import attend, packed_mask

pytestmark = pytest.mark.gpu

HEADS, KEY, VALUE, TOKENS = 4, 192, 128, 384


@pytest.mark.parametrize("steps", [1, 3])
def test_packed_attention_equals_the_plain_one(steps: int) -> None:
    """Forward and backward, over documents of different lengths, in the first step of a draft and in a later one."""
    generator = torch.Generator("cuda").manual_seed(0)
    positions = torch.cat([torch.arange(size) for size in (100, 1, 283)])
    *drawn, grad = (
        torch.randn((1, HEADS, *shape), generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((TOKENS, KEY), (steps * TOKENS, KEY), (steps * TOKENS, VALUE), (TOKENS, VALUE))
    )
    results = []
    for device in ("cpu", "cuda"):
        inputs = [x.to(device, copy=True).requires_grad_() for x in drawn]
        mask = packed_mask(positions.to(device), steps)
        out = attend(torch.nn.Identity(), *inputs, mask, KEY**-0.5)[0].transpose(1, 2)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(device))])
    for expected, found in zip(*results, strict=True):  # two BF16 kernels differ by about 0.005
        assert (expected.float() - found.cpu().float()).norm() <= 0.02 * expected.float().norm()
