"""The fast attention that the demo model and its drafting layer are trained with, on a GPU."""

from __future__ import annotations

import pytest
import torch
from lab.training.draft_attention import attend_own_each, attend_own_packed
from lab.training.network import Packed, attend_each, attend_packed

pytestmark = pytest.mark.gpu

HEADS, KEY, VALUE, OWN = 4, 192, 128, 2
SHAPES = [(HEADS, KEY), (HEADS, KEY), (HEADS, VALUE)]


@pytest.mark.parametrize(
    ("fast", "plain", "shapes"),
    [
        (attend_packed, attend_each, SHAPES),
        (attend_own_packed, attend_own_each, [*SHAPES, (OWN, HEADS, KEY), (OWN, HEADS, VALUE)]),
    ],
)
def test_packed_attention_equals_the_plain_one(fast, plain, shapes) -> None:
    """Forward and backward, over documents of different lengths, one of them empty."""
    generator = torch.Generator("cuda").manual_seed(0)
    starts = torch.tensor([0, 100, 101, 384, 384], dtype=torch.int32, device="cuda")
    packed = Packed(starts, starts, starts, 512)
    *drawn, grad = (
        torch.randn((384, *shape), generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in (*shapes, (HEADS, VALUE))
    )
    results = []
    for attend in (plain, fast):
        inputs = [x.clone().requires_grad_() for x in drawn]
        out = attend(*inputs, packed, KEY**-0.5)
        results.append([out, *torch.autograd.grad(out, inputs, grad)])
    for expected, found in zip(*results, strict=True):  # two BF16 kernels differ by about 0.005
        assert (expected.float() - found.float()).norm() <= 0.02 * expected.float().norm()
