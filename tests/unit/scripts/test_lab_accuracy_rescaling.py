"""Attention with rescaled accumulators. Bounds: BF16 weights, half a step is at most 0.4 %."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab.accuracy.rescaling import flash, multiply_by_add

from sglang_mla_ext.kernels.reference import attention as reference

NAN = float("nan")
RESCALES = ("multiply", "add", "add_uncompensated", "lattice")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("rescale", RESCALES)
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
@pytest.mark.parametrize(("n", "block_keys"), [(1, 64), (64, 64), (700, 64), (700, 512)])
def test_flash_is_attention_within_the_rounding_of_its_weights(rescale, size: float, n: int, block_keys: int) -> None:
    q, k, v = size * randn(5, 64), size * randn(n, 64, seed=1), randn(n, 32, seed=2)
    truth = torch.softmax(q.double() @ k.double().T, dim=-1) @ v.double()
    in_bf16 = flash(q, k, v, 1.0, rescale=rescale, block_keys=block_keys)
    assert reference.errors(in_bf16, truth).rel_l2 < 4e-3
    if not rescale.startswith("add"):  # whose compensation is approximate
        in_fp32 = flash(q, k, v, 1.0, rescale=rescale, block_keys=block_keys, dtype=torch.float32)
        assert reference.errors(in_fp32, truth).rel_l2 < 1e-5


def test_compensation_keeps_a_weight_of_one_exact() -> None:
    """AMLA's accumulator is exact where one key has all the weight; without its compensation it is not."""
    q, k, v = 8 * randn(16, 64), 8 * randn(256, 64, seed=1), randn(256, 32, seed=2)
    truth = torch.softmax(q.double() @ k.double().T, dim=-1) @ v.double()
    error = {r: reference.errors(flash(q, k, v, 1.0, rescale=r, block_keys=256), truth).rel_l2 for r in RESCALES}
    assert max(error[r] for r in ("multiply", "add", "lattice")) < 1e-5 < 1e-4 < error["add_uncompensated"], error


@given(st.floats(2.0**-126, 2.0**120, width=32), st.sampled_from([-1.0, 1.0]), st.integers(-300, 0))
def test_an_added_integer_multiplies_by_a_power_of_two(value: float, sign: float, exponent: int) -> None:
    expected = sign * math.ldexp(value, exponent)
    actual = multiply_by_add(torch.tensor([[sign * value]]), torch.tensor([[float(exponent)]]), torch.zeros(1, 1))
    assert actual.item() == (expected if abs(expected) >= 2.0**-126 else 0.0)


def test_zeros_subnormals_and_what_is_not_finite() -> None:
    values = torch.tensor([[0.0, -0.0, 1e-40, math.inf, -math.inf, NAN, 2.0**-126, -1.5]])
    moved = multiply_by_add(values, torch.tensor([[-1.0]]), torch.zeros(1, 1))
    assert moved[0, :5].tolist() == [0.0, -0.0, 0.0, math.inf, -math.inf]
    assert moved[0, 5].isnan()
    assert moved[0, 6:].tolist() == [0.0, -0.75]


@given(st.floats(1.0, 2.0, exclude_max=True, width=32), st.floats(-(2.0**-7), 2.0**-7, width=32))
def test_compensation_is_right_within_half_of_itself(value: float, change: float) -> None:
    actual = multiply_by_add(torch.tensor([[value]]), torch.zeros(1, 1), torch.tensor([[change]])).item()
    assert abs(actual - value * (1 + change)) <= 0.5 * abs(change) * value + 2e-7 + change**2
