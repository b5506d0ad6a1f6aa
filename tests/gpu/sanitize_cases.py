"""Every kernel once on a small case, checked against the reference: what scripts/sanitize.sh runs under each tool.

    python tests/gpu/sanitize_cases.py [WORD ...]    only the cases whose name contains one of the words

Inputs are made and results checked on the CPU, so that little but the kernels runs on the GPU. Few programs share the
work, so that each goes through several items and key tiles: what one leaves behind, the next must not meet. Bounds, in
relative L2: 4e-3 where something is rounded to BF16; 6e-2 where queries and weights are rounded to FP8 (some 2.6 % of
each), or rows, queries and weights; 2e-3 for sums that fall on the other side of a rounding step. Every byte that no
kernel may read is NaN.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial

import torch
from sanitize_absorb import absorb_error, absorb_fp8_error, rows_error

from sglang_mla_ext.kernels.absorb.paged_fp8 import TritonAbsorbFP8
from sglang_mla_ext.kernels.dispatch import make_hopper_absorb_fp8
from sglang_mla_ext.kernels.naive import sm90_naive, triton_naive
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expand_prefix import expand_prefix
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, FP8, FP8_MAX, ExpandedBuffers, scale_bounds
from sglang_mla_ext.kernels.watch import Watch, Watched
from sglang_mla_ext.segment import Mode, Segment

DEVICE = "cuda"
HEADS, RANK, DN, DR, DV = 2, 512, 128, 64, 128
SCALE = (DN + DR) ** -0.5
PREFIX, CHUNKS = 300, 5
NUM_CTAS = 3
E4M3_NAN = 0x7F


@dataclass(frozen=True)
class Case:
    name: str
    check: Callable[[], float]  # runs the kernels and returns the error
    bound: float


def cases() -> Iterator[Case]:
    for dtype, dtype_name in ((torch.bfloat16, "bf16"), (FP8, "fp8")):
        for portable in (False, True):
            for groups in ((5,), (5, 70)):  # one for each tile
                name = f"naive {'portable' if portable else 'hopper'} {dtype_name} {sum(groups)} rows, merge"
                bound = 6e-2 if dtype == FP8 and not portable else 4e-3
                yield Case(name, partial(attention_error, dtype, portable, groups), bound)
        yield Case(f"expand {dtype_name}", partial(expansion_error, dtype), 2e-3)
    for heads in (16, 128):
        yield Case(f"absorb bf16 {heads} heads, merge", partial(absorb_error, DEVICE, heads), 4e-3)
        for kind, name in ((make_hopper_absorb_fp8, "hopper"), (TritonAbsorbFP8, "portable")):
            for queries in (1, 2):  # two tokens of 16 heads are in a tile of 64 rows, one has a tile of its own kernel
                check = partial(absorb_fp8_error, DEVICE, kind, heads, queries=queries)
                yield Case(f"absorb fp8 {name} {heads} heads x {queries}, merge", check, 6e-2)
    yield Case(
        "absorb fp8 hopper 8 heads x 2, merge", partial(absorb_fp8_error, DEVICE, make_hopper_absorb_fp8, 8, 2), 6e-2
    )
    for queries in (4, 5):  # of 16 heads: a tile, and one more for the fifth
        yield Case(f"absorb bf16 16 heads x {queries}, merge", partial(absorb_error, DEVICE, 16, queries), 4e-3)
        check = partial(absorb_fp8_error, DEVICE, make_hopper_absorb_fp8, 16, queries)
        yield Case(f"absorb fp8 hopper 16 heads x {queries}, merge", check, 6e-2)
    yield Case("portable fp8 rows", partial(rows_error, DEVICE), 1e-9)


def allocate(dtype: torch.dtype) -> ExpandedBuffers:
    """One layer on the CPU, NaN everywhere."""
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR)
    buffers = ExpandedBuffers.allocate(layers=1, chunks=CHUNKS, heads=HEADS, dtype=dtype, device="cpu", **sizes)
    for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
        tensor.view(torch.uint8).fill_(E4M3_NAN if tensor.dtype == FP8 else 0xFF)
    return buffers


def moved(buffers: ExpandedBuffers, device: str) -> ExpandedBuffers:
    return ExpandedBuffers(**{field.name: getattr(buffers, field.name).to(device) for field in fields(buffers)})


def attention_error(dtype: torch.dtype, portable: bool, sizes: tuple[int, ...]) -> float:
    """Attention of groups over a prefix of 300 tokens each, merged with tails, of which the first row has none."""
    buffers, groups, first = allocate(dtype), [], 0
    if dtype == FP8:
        buffers.k_scale.fill_(16 / FP8_MAX)
        buffers.v_scale.fill_(12 / FP8_MAX)
    for i, size in enumerate(sizes):
        chunks = (2 * i + 2, 2 * i + 1)
        for chunk, n in zip(chunks, (CHUNK_TOKENS, PREFIX - CHUNK_TOKENS), strict=True):
            keys = torch.randn(n, HEADS, DN), torch.randn(n, HEADS, DV), torch.randn(n, DR)
            buffers.write(0, chunk, 0, *(tensor.bfloat16() for tensor in keys))
        groups.append(Segment(tuple(range(first, first + size)), 0, PREFIX, Mode.NAIVE, chunks))
        first += size
    query = torch.randn(first, HEADS, DN + DR).bfloat16()
    q_nope, q_rope = query[..., :DN], query[..., DN:]  # [T, H, dn], [T, H, dr]
    tail_out = torch.randn(first, HEADS, DV).bfloat16()  # [T, H, dv]
    tail_lse = torch.randn(first, HEADS) + 3  # [T, H]: the prefix weighs more
    tail_out[0], tail_lse[0] = torch.nan, -torch.inf

    shared_out, shared_lse = torch.zeros(tail_out.shape), torch.zeros(tail_lse.shape)
    for group in groups:
        rows = list(group.rows)
        k_nope, v, k_rope = buffers.read(0, group.chunks, PREFIX)
        shared_out[rows], shared_lse[rows] = reference.naive(q_nope[rows], q_rope[rows], k_nope, k_rope, v, SCALE)
    expected, expected_lse = reference.merge(shared_out, shared_lse, tail_out, tail_lse)

    on_device = query.to(DEVICE)
    attention = TritonSharedAttention(
        moved(buffers, DEVICE),
        max_rows=first,
        heads=HEADS,
        num_ctas=NUM_CTAS,
        kernel=triton_naive if portable else sm90_naive,
    )
    attention.plan(groups)
    attention.run(0, on_device[..., :DN], on_device[..., DN:], SCALE)
    out, lse = tail_out.to(DEVICE), tail_lse.to(DEVICE)
    watch = Watch(max_rows=first, heads=HEADS, columns=RANK + DR, dv=DV, dtype=torch.bfloat16, device=DEVICE)
    watch.set_target(0, 0)
    absorbed = torch.randn(first, HEADS, RANK).bfloat16().to(DEVICE)
    attention.merge(out, lse, out, lse, watched=Watched(watch, 0, absorbed, on_device[..., DN:]))
    assert torch.equal(watch.out, out) and torch.equal(watch.query[..., :RANK], absorbed)
    assert (lse.cpu() - expected_lse).abs().max() < (5e-2 if dtype == FP8 and not portable else 1e-3)
    return reference.errors(out.cpu(), expected).rel_l2


def expansion_error(dtype: torch.dtype) -> float:
    """Latent rows of a prefix of 300 tokens, expanded in two pieces."""
    latent_rows = torch.randn(PREFIX + 40, RANK + DR).bfloat16()
    slots = torch.randperm(len(latent_rows))[:PREFIX]
    weight = (torch.randn(HEADS, DN + DV, RANK) / RANK**0.5).bfloat16()
    chunks, buffers = [3, 1], allocate(dtype)
    if dtype == FP8:
        buffers.k_scale[0], buffers.v_scale[0] = scale_bounds(weight[:, :DN]), scale_bounds(weight[:, DN:])
    on_device = moved(buffers, DEVICE)
    weight_on_device, table = weight.to(DEVICE), torch.tensor(chunks, dtype=torch.int32, device=DEVICE)
    rows_on_device, slots_on_device = latent_rows.to(DEVICE), slots.to(DEVICE)
    for first, last in ((0, 100), (100, PREFIX)):
        piece, w_k, w_v = slots_on_device[first:last], weight_on_device[:, :DN], weight_on_device[:, DN:]
        expand_prefix(rows_on_device, piece, w_k, w_v, on_device, 0, table, first)

    rows = latent_rows[slots]
    product = torch.einsum("nr,hdr->nhd", rows[:, :RANK].float(), weight.float())
    for i, chunk in enumerate(chunks):
        tokens = slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS)
        buffers.write(0, chunk, 0, product[tokens, :, :DN], product[tokens, :, DN:], rows[tokens, RANK:])
    actual = moved(on_device, "cpu").read(0, chunks, PREFIX)
    expected = buffers.read(0, chunks, PREFIX)
    return max(reference.errors(*pair).rel_l2 for pair in zip(actual, expected, strict=True))


def main(words: list[str]) -> None:
    chosen = [case for case in cases() if not words or any(word in case.name for word in words)]
    if not chosen:
        sys.exit(f"no case has one of these words in its name: {', '.join(words)}")
    for case in chosen:
        torch.manual_seed(0)
        error = case.check()
        print(f"{case.name}: rel_l2 {error:.1e}", flush=True)
        assert error < case.bound, f"{case.name}: {error} is not below {case.bound}"


if __name__ == "__main__":
    main(sys.argv[1:])
