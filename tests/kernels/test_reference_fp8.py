"""The low-precision references: right where nothing is rounded, bounded where something is, defined at the extremes.

Bounds of absorb_fp8: queries and weights are rounded to e4m3, half a step of which is at most 6 % of a value, and less
than half of that in the mean; keys are compared as stored.
"""

from __future__ import annotations

import math

import pytest
import torch

from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference.fp8 import absorb_fp8, keys_of_rows, round_keys
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout, dequantize, quantize

NAN = float("nan")
CONFIGURATIONS = ("per_token", "snapmla", "rope_too", "fixed", "per_tensor", "per_block")
LAYOUT = LatentRowLayout(64, 16)
SCALE = 80**-0.5


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def exact(q_absorbed, q_rope, latent, rope, visible=None) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.absorb in float64, the same rows for every token."""
    tokens, n = len(q_absorbed), len(latent)
    rows = torch.cat([latent, rope], dim=-1).expand(tokens, n, -1)
    visible = torch.full((tokens,), n) if visible is None else visible
    return reference.absorb(q_absorbed.double(), q_rope.double(), rows.double(), visible, SCALE)


def assert_close(actual, expected, rel_l2: float, lse_error: float) -> None:
    found = reference.errors(actual[0], expected[0])
    assert found.rel_l2 < rel_l2, found
    torch.testing.assert_close(actual[1].double(), expected[1], rtol=0, atol=lse_error)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
def test_absorb_fp8_follows_the_stored_rows(n: int) -> None:
    rows = quantize(randn(n, 64), randn(n, 16))
    queries = randn(3, 4, 64, seed=1), randn(3, 4, 16, seed=2)
    actual = absorb_fp8(*queries, keys_of_rows(rows, LAYOUT), SCALE)
    assert_close(actual, exact(*queries, *dequantize(rows, LAYOUT)), rel_l2=0.04, lse_error=0.1)


def test_keys_of_stored_rows_are_those_of_the_configuration() -> None:
    latent, rope = randn(70, 64), randn(70, 16)
    stored, rounded = keys_of_rows(quantize(latent, rope), LAYOUT), round_keys(latent, rope)
    assert all(torch.equal(a, b) for a, b in zip(vars(stored).values(), vars(rounded).values(), strict=True))


def test_each_token_sees_its_keys_and_reads_no_other() -> None:
    rows = quantize(randn(130, 64), randn(130, 16))
    visible = torch.tensor([0, 100, 101])
    expected = exact(randn(3, 2, 64), randn(3, 2, 16), *dequantize(rows, LAYOUT), visible)
    rows[101:] = 0x7F
    LAYOUT.scale(rows)[101:] = NAN
    out, lse = absorb_fp8(randn(3, 2, 64), randn(3, 2, 16), keys_of_rows(rows, LAYOUT), SCALE, visible)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    assert_close((out[1:], lse[1:]), (expected[0][1:], expected[1][1:]), rel_l2=0.04, lse_error=0.1)


def test_rows_of_zeros_have_equal_weights() -> None:
    keys = keys_of_rows(quantize(torch.zeros(200, 64), torch.zeros(200, 16)), LAYOUT)
    out, lse = absorb_fp8(randn(1, 2, 64), randn(1, 2, 16), keys, SCALE)
    assert (out == 0).all()
    torch.testing.assert_close(lse, torch.full((1, 2), math.log(200)))


@pytest.mark.parametrize("descending", [False, True])
def test_scales_of_weights_may_differ_by_any_factor(descending: bool) -> None:
    """Blocks whose scores differ by thousands of nats, with rows of 1e-6 to 1e6: the hazard of appendix C."""
    n = 10 * 64
    size = torch.logspace(-6, 6, n)[torch.randperm(n, generator=torch.Generator().manual_seed(0))]
    rope = torch.zeros(n, 16)
    rope[:, 0] = torch.linspace(0, 10_000, n).flip(0) if descending else torch.linspace(0, 10_000, n)
    rows = quantize(size[:, None] * randn(n, 64), rope)
    q_rope = torch.zeros(2, 3, 16)
    q_rope[..., 0] = 5.0
    queries = 1e-9 * randn(2, 3, 64), q_rope
    actual = absorb_fp8(*queries, keys_of_rows(rows, LAYOUT), SCALE)
    assert actual[0].isfinite().all()
    assert_close(actual, exact(*queries, *dequantize(rows, LAYOUT)), rel_l2=0.04, lse_error=30)  # lse near 5,590


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_configuration_is_near_the_truth_on_tame_data(configuration) -> None:
    latent, rope = randn(300, 64), randn(300, 16)
    queries = randn(2, 4, 64, seed=1), randn(2, 4, 16, seed=2)
    actual = absorb_fp8(*queries, round_keys(latent, rope, configuration), SCALE)
    assert_close(actual, exact(*queries, latent, rope), rel_l2=0.06, lse_error=0.1)


def test_only_the_content_scale_of_each_token_keeps_small_tokens_and_large_rotary_parts() -> None:
    latent = torch.logspace(-12, 2, 128)[:, None] * randn(128, 64)
    rope = 100 * randn(128, 16)
    errors = {}
    for configuration in CONFIGURATIONS:
        keys = round_keys(latent, rope, configuration)
        content = keys.content * keys.scale[:, None]
        errors[configuration] = [
            ((content - latent).norm(dim=1) / latent.norm(dim=1)).amax().item(),
            ((keys.rope * keys.scale[:, None] - rope).norm() / rope.norm()).item(),
        ]
    assert errors["per_token"][0] < 0.04 and errors["snapmla"][0] < 0.04
    assert all(errors[other][0] > 0.1 for other in CONFIGURATIONS[2:])
    assert errors["per_token"][1] < errors["snapmla"][1]  # rounded to BF16 once, and not twice
    assert all((error > 0.02) == (name == "rope_too") for name, (_, error) in errors.items())
