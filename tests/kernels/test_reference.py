"""The reference against formulas written out one row and head at a time, and the layout of expanded prefixes."""

from __future__ import annotations

import pytest
import torch

from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers

NAN, INF = float("nan"), float("inf")
B, H, N, DN, DR, DV, R = 3, 4, 11, 8, 4, 6, 10
SCALE = 0.3


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def attend(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row and head: scores `[n]`, values `[n, d]`."""
    weights = scores.exp()
    return weights @ values / weights.sum(), weights.sum().log()


def test_naive_is_softmax_attention() -> None:
    q_nope, q_rope = randn(B, H, DN), randn(B, H, DR)
    k_nope, k_rope, v = randn(N, H, DN), randn(N, DR), randn(N, H, DV)
    out, lse = reference.naive(q_nope, q_rope, k_nope, k_rope, v, SCALE)
    for b in range(B):
        for h in range(H):
            expected = attend((k_nope[:, h] @ q_nope[b, h] + k_rope @ q_rope[b, h]) * SCALE, v[:, h])
            torch.testing.assert_close((out[b, h], lse[b, h]), expected, rtol=1e-12, atol=1e-12)


def test_absorb_reads_no_padding_and_equals_naive_on_the_expansion() -> None:
    w_kc, w_vc = randn(H, DN, R), randn(H, R, DV)
    q_nope, q_rope = randn(B, H, DN), randn(B, H, DR)
    lengths = torch.tensor([N, 0, 5])
    latent_rows = torch.full((B, N, R + DR), NAN, dtype=torch.float64)
    for b, n in enumerate(lengths.tolist()):
        latent_rows[b, :n] = randn(n, R + DR, seed=b)
    q_absorbed = torch.einsum("bhd,hdr->bhr", q_nope, w_kc)
    latent, lse = reference.absorb(q_absorbed, q_rope, latent_rows, lengths, SCALE)
    out = torch.einsum("bhr,hrd->bhd", latent, w_vc)
    assert not latent[1].any() and (lse[1] == -INF).all()
    for b in (0, 2):
        rows = latent_rows[b, : lengths[b]]
        k_nope, v = reference.expand(rows[:, :R], w_kc, w_vc)
        expected = reference.naive(q_nope[b : b + 1], q_rope[b : b + 1], k_nope, rows[:, R:], v, SCALE)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), expected, rtol=1e-12, atol=1e-12)


def test_merge_equals_attention_over_both_parts() -> None:
    scores, v = randn(N, seed=5) * 20, randn(N, H, DV)
    q = torch.ones(1, H, 1, dtype=torch.float64)
    none = torch.zeros(N, 0, dtype=torch.float64)

    def part(keys: slice):
        k_nope = scores[keys, None, None].expand(-1, H, 1)
        return reference.naive(q, torch.zeros(1, H, 0), k_nope, none[keys], v[keys], 1.0)

    merged = reference.merge(*part(slice(0, 4)), *part(slice(4, N)))
    torch.testing.assert_close(merged, part(slice(0, N)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reference.merge(*part(slice(0, 0)), *part(slice(0, N))), part(slice(0, N)))


def test_merge_of_parts_without_keys() -> None:
    out_a, out_b = torch.full((4, 1, 2), NAN), torch.full((4, 1, 2), NAN)
    out_a[0], out_b[1], out_a[3], out_b[3] = 1.0, 2.0, 1.0, 3.0
    lse_a = torch.tensor([[0.5], [-INF], [-INF], [1e4]])
    lse_b = torch.tensor([[-INF], [0.25], [-INF], [1e4]])
    out, lse = reference.merge(out_a, lse_a, out_b, lse_b)
    assert out[:, 0, 0].tolist() == [1.0, 2.0, 0.0, 2.0]
    assert lse[:3, 0].tolist() == [0.5, 0.25, -INF] and lse[3, 0] == pytest.approx(1e4 + 0.6931, abs=1e-2)


@pytest.mark.parametrize(
    ("dtype", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_precision(dtype: torch.dtype, computed: torch.dtype) -> None:
    inputs = [randn(*shape).to(dtype) for shape in ((B, H, DN), (B, H, DR), (N, H, DN), (N, DR), (N, H, DV))]
    out, lse = reference.naive(*inputs, SCALE)
    assert out.dtype == lse.dtype == computed


def test_errors() -> None:
    expected = torch.tensor([3.0, -4.0, -INF])
    assert reference.errors(expected, expected) == reference.Errors(0.0, 0.0, 0.0)
    found = reference.errors(torch.tensor([3.0, -4.5, -INF]), expected)
    assert found.rel_l2 == pytest.approx(0.1) and found.max_rel == pytest.approx(0.125) and 0 < found.cos_dist < 0.01
    for wrong in ([3.0, NAN, -INF], [3.0, -4.0, 0.0], [INF, -4.0, -INF], [3.0, -4.0, INF]):
        assert reference.errors(torch.tensor(wrong), expected).rel_l2 == INF


SIZES = dict(heads=H, qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_buffers_take_as_much_as_is_said_beforehand(dtype: torch.dtype) -> None:
    buffers = ExpandedBuffers.allocate(layers=2, chunks=3, dtype=dtype, device="cpu", **SIZES)
    assert buffers.bytes == 3 * ExpandedBuffers.bytes_per_chunk(layers=2, dtype=dtype, **SIZES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_buffers_hold_what_was_written(dtype: torch.dtype) -> None:
    buffers = ExpandedBuffers.allocate(layers=2, chunks=3, dtype=dtype, device="cpu", **SIZES)
    k_nope, v, k_rope = randn(N, H, DN).to(dtype), randn(N, H, DV).to(dtype), randn(N, DR).to(dtype)
    buffers.write(1, 2, 100, k_nope, v, k_rope)
    tokens = slice(100, 100 + N)
    assert torch.equal(buffers.k_nope[1, 2, :, tokens], k_nope.transpose(0, 1))
    assert torch.equal(buffers.v_t[1, 2, :, :, tokens], v.permute(1, 2, 0))
    assert torch.equal(buffers.k_rope[1, 2, tokens], k_rope)
    written = sum(torch.count_nonzero(t).item() for t in (buffers.k_nope, buffers.v_t, buffers.k_rope))
    assert written == N * (H * (DN + DV) + DR), "something else was written too"


def test_buffers_refuse_what_does_not_fit() -> None:
    buffers = ExpandedBuffers.allocate(layers=1, chunks=1, dtype=torch.float32, device="cpu", **SIZES)
    k_nope, v, k_rope = randn(N, H, DN), randn(N, H, DV), randn(N, DR)
    for arguments, message in (
        ((1, 0, 0, k_nope, v, k_rope), "1 layers"),
        ((0, 1, 0, k_nope, v, k_rope), "1 chunks"),
        ((0, 0, CHUNK_TOKENS - N + 1, k_nope, v, k_rope), "do not fit"),
        ((0, 0, 0, k_nope[:, :3], v, k_rope), "k_nope must be"),
        ((0, 0, 0, k_nope, v[:5], k_rope), "v must be"),
    ):
        with pytest.raises(ValueError, match=message):
            buffers.write(*arguments)
    with pytest.raises(ValueError, match="bfloat16 or float32"):
        ExpandedBuffers.allocate(layers=1, chunks=1, dtype=torch.float16, device="cpu", **SIZES)
    with pytest.raises(ValueError, match="positive"):
        ExpandedBuffers.allocate(layers=1, chunks=0, device="cpu", **SIZES)
