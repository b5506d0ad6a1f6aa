"""FP8 expanded prefixes on a Hopper GPU: the naive kernels against the same rounding steps in torch, and the expansion.

Bound: a kernel's error against float64 is at most 1.1 times that of its torch emulation; any excess is a bug and not
FP8. The kernel for Hopper rounds queries and weights to FP8 too, the one for any GPU only reads what is stored in FP8.
Whatever no kernel may read is NaN. Run with `pytest tests/gpu -m gpu -s`: each case prints both errors.
"""

from __future__ import annotations

import pytest
import torch

from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expand_prefix import expand_prefix
from sglang_mla_ext.kernels.storage.expanded import (
    CHUNK_TOKENS,
    FP8,
    FP8_MAX,
    FP8_TOKEN_ORDER,
    ExpandedBuffers,
    scale_bounds,
)
from sglang_mla_ext.segment import Mode, Segment

pytestmark = pytest.mark.gpu

E4M3_NAN = 0x7F
RANK, DN, DR, DV = 512, 128, 64, 128
SCALE = (DN + DR) ** -0.5


def allocate(heads: int, chunks: int, dtype: torch.dtype = FP8) -> ExpandedBuffers:
    """One layer, NaN everywhere."""
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR)
    buffers = ExpandedBuffers.allocate(layers=1, chunks=chunks, heads=heads, dtype=dtype, **sizes)
    for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
        tensor.view(torch.uint8).fill_(E4M3_NAN if tensor.dtype == FP8 else 0xFF)
    return buffers


def data(distribution: str, n: int, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """`k_nope`, `v`, `k_rope` in BF16, and the size of queries with which scores stay near unit variance."""
    k_nope, v = torch.randn(n, heads, DN, device="cuda"), torch.randn(n, heads, DV, device="cuda")
    k_rope, query_size = torch.randn(n, DR, device="cuda"), 1.0
    if distribution == "wide":  # SnapMLA, figure 3: content within ±10, rotary to ±1,000
        k_nope, v = (10 * (2 * torch.rand_like(t) - 1) for t in (k_nope, v))
        k_rope, query_size = k_rope * 300, 0.01
    elif distribution == "outlier":
        k_nope[n // 3] *= 30
        v[n // 3] *= 30
    return k_nope.bfloat16(), v.bfloat16(), k_rope.bfloat16(), query_size


CASES = [
    ((130,), (4759,), 16),
    ((5, 64, 17, 2), (257, 1000, 300, 1), 8),
    ((1,), (127,), 1),
    ((600,), (515,), 4),
]


@pytest.mark.parametrize("portable", [False, True], ids=["hopper", "portable"])
@pytest.mark.parametrize("distribution", ["normal", "wide", "outlier"])
@pytest.mark.parametrize(("sizes", "lengths", "heads"), CASES, ids=lambda value: str(value).replace(" ", ""))
def test_error_is_that_of_the_rounding(
    distribution: str, sizes: tuple, lengths: tuple, heads: int, portable: bool
) -> None:
    torch.manual_seed(sum(sizes))
    n_chunks = [-(-n // CHUNK_TOKENS) for n in lengths]
    buffers = allocate(heads, sum(n_chunks))
    ids = torch.randperm(sum(n_chunks)).tolist()
    order = torch.randperm(sum(sizes)).tolist()
    kept = [data(distribution, n, heads) for n in lengths]
    buffers.k_scale[0] = max(k.abs().max() for k, _, _, _ in kept) * 4 / FP8_MAX
    buffers.v_scale[0] = max(v.abs().max() for _, v, _, _ in kept) * 4 / FP8_MAX
    query = (torch.randn(sum(sizes), heads, DN + DR, device="cuda") * kept[0][3]).bfloat16()
    q_nope, q_rope = query[..., :DN], query[..., DN:]

    groups = []
    for size, length, chunks, (k_nope, v, k_rope, _) in zip(sizes, lengths, n_chunks, kept, strict=True):
        groups.append(Segment(tuple(order[:size]), 0, length, Mode.NAIVE, tuple(ids[:chunks])))
        order, ids = order[size:], ids[chunks:]
        for i, chunk in enumerate(groups[-1].chunks):
            tokens = slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS)
            buffers.write(0, chunk, 0, k_nope[tokens], v[tokens], k_rope[tokens])

    attention = make_shared_attention(buffers, max_rows=sum(sizes), heads=heads, device="cuda", portable=portable)
    attention.plan(groups)
    results = []
    for _ in range(2):
        attention.run(0, q_nope, q_rope, SCALE)
        out = torch.full((sum(sizes), heads, DV), torch.nan, device="cuda")
        lse = torch.full((sum(sizes), heads), torch.nan, device="cuda")
        attention.merge(torch.zeros_like(out), torch.full_like(lse, -torch.inf), out, lse)
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])

    for group, (k_nope, v, k_rope, _) in zip(groups, kept, strict=True):
        rows = list(group.rows)
        exact, exact_lse = reference.naive(q_nope[rows].double(), q_rope[rows], k_nope, k_rope, v, SCALE)
        stored_k, stored_v, stored_rope = buffers.read(0, group.chunks, group.tokens)
        inputs = q_nope[rows], q_rope[rows], stored_k, stored_rope, stored_v
        if portable:
            emulated, emulated_lse = reference.naive(*inputs, SCALE)
        else:
            emulated, emulated_lse = reference.naive_fp8(*inputs, buffers.k_scale[0], SCALE)
        ours = reference.errors(out[rows], exact).rel_l2
        expected = reference.errors(emulated, exact).rel_l2
        lse_error = (lse[rows] - emulated_lse).abs().max().item()
        print(
            f"\n{distribution} {len(rows)}x{group.tokens}{' portable' * portable}: "
            f"{ours:.4f}, emulated {expected:.4f}, lse {lse_error:.1e}"
        )
        assert ours <= 1.1 * expected + 1e-4
        assert lse_error <= (1e-4 if portable else 1e-3) * max(1.0, exact_lse.abs().max().item())


def test_sums_over_a_long_prefix_are_not_biased() -> None:
    """Hopper's FP8 products cut off what is far behind the largest term of a sum. Where values have a mean, and one
    program adds up all of a long prefix, that would make results too small, which rounding alone does not."""
    torch.manual_seed(0)
    n, rows, heads = 26472, 128, 128  # as many items as multiprocessors: no key range is split
    buffers = allocate(heads, -(-n // CHUNK_TOKENS))
    k_nope, v, k_rope, _ = data("normal", n, heads)
    v = v + 0.5
    buffers.k_scale[0], buffers.v_scale[0] = k_nope.abs().max() / FP8_MAX, v.abs().max() / FP8_MAX
    for chunk in range(buffers.chunks):
        tokens = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
        buffers.write(0, chunk, 0, k_nope[tokens], v[tokens], k_rope[tokens])
    query = torch.randn(rows, heads, DN + DR, device="cuda").bfloat16()
    attention = make_shared_attention(buffers, max_rows=rows, heads=heads, device="cuda")
    attention.plan([Segment(tuple(range(rows)), 0, n, Mode.NAIVE, tuple(range(buffers.chunks)))])
    attention.run(0, query[..., :DN], query[..., DN:], SCALE)
    out = torch.full((rows, heads, DV), torch.nan, device="cuda")
    no_lse = torch.full((rows, heads), -torch.inf, device="cuda")
    attention.merge(torch.zeros_like(out), no_lse, out)
    for head in (0, 77):
        one = slice(head, head + 1)
        exact, _ = reference.naive(
            query[:, one, :DN].double(), query[:, one, DN:], k_nope[:, one], k_rope, v[:, one], SCALE
        )
        share = ((out[:, one] * exact).sum() / exact.square().sum()).item()
        print(f"\nhead {head}: {share:.5f} of the exact result")
        assert abs(share - 1) < 2e-3


def of_no_token(buffers: ExpandedBuffers, chunks: list[int], n: int) -> dict[str, torch.Tensor]:
    """Which elements belong to none of the n tokens of the prefix in `chunks`: masks that broadcast to a layer."""
    free = torch.ones(buffers.chunks, CHUNK_TOKENS, dtype=torch.bool, device=buffers.device)  # by token
    for i, chunk in enumerate(chunks):
        free[chunk, : n - i * CHUNK_TOKENS] = False
    in_v_t = free  # by position
    if buffers.dtype == FP8:
        in_v_t = free.view(buffers.chunks, -1, len(FP8_TOKEN_ORDER))[..., FP8_TOKEN_ORDER].flatten(1)
    return dict(k_nope=free[:, None, :, None], v_t=in_v_t[:, None, None, :], k_rope=free[:, :, None])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16], ids=["fp8", "bf16"])
def test_expansion_equals_product_and_write(dtype: torch.dtype, heads: int) -> None:
    """A prefix in three uneven pieces, into chunks full of NaN, of which nothing but its tokens is touched."""
    torch.manual_seed(heads)
    n, chunks = 1500, [4, 1, 6, 0, 3, 2]
    latent_rows = torch.randn(4000, RANK + DR, device="cuda").bfloat16()
    weight = (torch.randn(heads, DN + DV, RANK, device="cuda") / RANK**0.5).bfloat16()
    w_k, w_v = weight[:, :DN], weight[:, DN:]
    fused, expected = allocate(heads, 7, dtype), allocate(heads, 7, dtype)
    if dtype == FP8:
        for buffers in (fused, expected):
            buffers.k_scale[0], buffers.v_scale[0] = scale_bounds(w_k), scale_bounds(w_v)
    slots = torch.randperm(4000, device="cuda")[:n]
    table = torch.tensor(chunks, dtype=torch.int32, device="cuda")
    for first, last in ((0, 100), (100, 1025), (1025, n)):
        expand_prefix(latent_rows, slots[first:last], w_k, w_v, fused, 0, table, first)
    rows = latent_rows[slots]
    product = torch.einsum("nr,hdr->nhd", rows[:, :RANK].float(), weight.float())
    for i, chunk in enumerate(chunks):
        tokens = slice(i * CHUNK_TOKENS, min((i + 1) * CHUNK_TOKENS, n))
        expected.write(0, chunk, 0, product[tokens, :, :DN], product[tokens, :, DN:], rows[tokens, RANK:])
    for actual, wanted in zip(fused.read(0, chunks, n), expected.read(0, chunks, n), strict=True):
        assert reference.errors(actual, wanted).rel_l2 < 2e-3  # a few sums fall on the other side of a rounding step
    for name, untouched in of_no_token(fused, chunks, n).items():
        tensor = getattr(fused, name)[0]
        as_bytes = tensor.view(torch.uint8).view(*tensor.shape, -1)
        nan = E4M3_NAN if tensor.dtype == FP8 else 0xFF
        assert (~untouched[..., None] | (as_bytes == nan)).all(), f"{name}: bytes of no token were written"
