"""FP8 latent rows: the bytes, what the reference makes of extreme rows, and the kernels that write and read them.

The kernels run in Triton's interpreter, with torch's conversions (the interpreter's own truncate to BF16 and get the
subnormals and the NaN of e4m3 wrong), and must give the reference's bits. Every byte of the pool outside the slots,
and every element between the rows of inputs and results, is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang_mla_ext.kernels.absorb.quantize_query import quantize_query
from sglang_mla_ext.kernels.constants import FP8_MAX
from sglang_mla_ext.kernels.storage.append_latent import append_latent
from sglang_mla_ext.kernels.storage.fetch_latent import fetch_latent
from sglang_mla_ext.kernels.storage.join_parts import join_parts
from sglang_mla_ext.kernels.storage.latent_rows import (
    SCALE_FLOOR,
    LatentRowLayout,
    dequantize,
    divide,
    quantize,
    row_scale,
)

NAN, INF = float("nan"), float("inf")
POISON = 0x7F  # NaN in e4m3; four of them are a huge float32, two a huge BF16, and 0x7FFF is NaN
BF16_MAX = torch.finfo(torch.bfloat16).max
LAYOUT = LatentRowLayout()


def poisoned_pool(slots: int, layout: LatentRowLayout) -> torch.Tensor:
    """`[slots, row_bytes]`: NaN in every part, a pattern in the padding."""
    pool = torch.full((slots, layout.row_bytes), POISON, dtype=torch.uint8)
    layout.scale(pool).fill_(NAN)
    layout.rope(pool).fill_(NAN)
    return pool


def padded(values: torch.Tensor, padding: int) -> torch.Tensor:
    """The same values in rows that are `padding` elements longer, NaN."""
    return torch.nn.functional.pad(values, (0, padding), value=NAN)[..., : values.shape[-1]]


@dataclass(frozen=True)
class Case:
    n: int
    rank: int = 512
    rope: int = 64
    dtype: torch.dtype = torch.float32
    padding: int = 0  # between rows of inputs and results
    slots_dtype: torch.dtype = torch.int64
    skipped: int = 0  # rows whose slot is negative

    def __str__(self) -> str:
        return f"n{self.n}-r{self.rank}-dr{self.rope}-{str(self.dtype)[6:]}-pad{self.padding}-skip{self.skipped}"


def cases():
    for n in (0, 1, 17, 300):
        yield Case(n)
        yield Case(n, dtype=torch.bfloat16, padding=8, slots_dtype=torch.int32, skipped=n // 5)
    yield Case(17, rank=48, rope=16, padding=3)  # not a power of two
    yield Case(17, rank=16, rope=8, dtype=torch.bfloat16, skipped=17)


class Problem:
    """Inputs of a case, seeded: tokens of very different sizes, and every extreme row that the layout speaks of."""

    def __init__(self, case: Case) -> None:
        self.case, self.layout = case, LatentRowLayout(case.rank, case.rope)
        generator = torch.Generator().manual_seed(case.n)
        size = 10 ** (6 * torch.rand(case.n, 1, generator=generator) - 3)  # [n, 1], 1e-3 to 1e3
        latent = size * torch.randn(case.n, case.rank, generator=generator)
        rope = 100 * torch.randn(case.n, case.rope, generator=generator)
        for row, (first, first_rope) in enumerate(EXTREMES[: case.n // 2]):
            latent[row], rope[row] = 0.0, 0.0
            latent[row, 1::3], latent[row, 0], rope[row, 0] = 1e-6, first, first_rope
        self.latent, self.rope = (padded(x.to(case.dtype), case.padding) for x in (latent, rope))
        pool_slots = case.n + 40
        self.slots = torch.randperm(pool_slots, generator=generator)[: case.n].to(case.slots_dtype)
        self.slots[: case.skipped] = -1
        self.kept = self.slots >= 0
        self.pool = poisoned_pool(pool_slots, self.layout)


EXTREMES = ((0.0, 0.0), (BF16_MAX, 1.0), (1e-40, 0.0), (1.0, BF16_MAX), (NAN, 1.0), (1.0, INF), (-INF, NAN), (0.0, 5.0))


def test_a_row_of_deepseek_v3_is_656_bytes() -> None:
    assert (LAYOUT.scale_offset, LAYOUT.rope_offset, LAYOUT.row_bytes) == (512, 528, 656)
    rows = torch.arange(656).to(torch.uint8)[None]
    assert LAYOUT.content(rows).view(torch.uint8).tolist() == [[i % 256 for i in range(512)]]
    assert LAYOUT.scale(rows).item() == torch.tensor([0, 1, 2, 3], dtype=torch.uint8).view(torch.float32).item()
    assert LAYOUT.rope(rows).view(torch.uint8).tolist() == [[i % 256 for i in range(528, 656)]]


@pytest.mark.parametrize(("rank", "rope"), [(0, 64), (500, 64), (512, 0), (512, 4)])
def test_parts_start_at_16_bytes(rank: int, rope: int) -> None:
    with pytest.raises(ValueError, match="multiple of"):
        LatentRowLayout(rank, rope)


@pytest.mark.parametrize("n", [0, 1, 17, 300])
def test_rows_are_read_back_within_the_precision_of_their_formats(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    size = 10 ** (8 * torch.rand(n, 1, generator=generator) - 4)
    latent, rope = (size * torch.randn(n, d, generator=generator) for d in (512, 64))
    actual, actual_rope = dequantize(quantize(latent, rope))
    # e4m3 rounds to 4 bits, and below 2^-6 (times the scale) to multiples of 2^-9; BF16 to 8 bits; 1e-6: float32.
    scale = row_scale(latent, rope)[:, None]
    assert ((actual - latent).abs() <= torch.maximum(latent.abs() / 16, scale * 2**-10) * (1 + 1e-6)).all()
    assert ((actual_rope - rope).abs() <= rope.abs() / 256 * (1 + 1e-6)).all()


def test_zeros_are_read_back_as_zeros() -> None:
    rows = quantize(torch.zeros(2, 512), torch.zeros(2, 64))
    assert LAYOUT.scale(rows).tolist() == [SCALE_FLOOR] * 2
    assert all((part == 0).all() for part in dequantize(rows))


def test_zero_content_beside_a_rotary_part_keeps_it() -> None:
    rope = torch.linspace(-1000, 1000, 64)[None]
    latent, actual = dequantize(quantize(torch.zeros(1, 512), rope))
    assert (latent == 0).all()
    torch.testing.assert_close(actual, rope, rtol=2**-8, atol=0)


def test_denormals_become_zero() -> None:
    latent = torch.full((1, 512), 1e-40)
    assert all((part == 0).all() for part in dequantize(quantize(latent, torch.full((1, 64), 0.0))))


def test_one_huge_outlier_keeps_everything_finite() -> None:
    latent, rope = torch.ones(1, 512), torch.ones(1, 64)
    latent[0, 3] = BF16_MAX
    actual, actual_rope = dequantize(quantize(latent, rope))
    assert actual.isfinite().all() and actual_rope.isfinite().all()
    assert actual[0, 3] == FP8_MAX * 2.0**119  # saturated: the next power of two would be infinite
    assert actual[0].count_nonzero() == 1
    torch.testing.assert_close(actual_rope, rope, rtol=2**-8, atol=0)


@pytest.mark.parametrize("largest", [1.0, 1000.0, BF16_MAX])
@pytest.mark.parametrize("content", [0.0, 1e-30, 1.0])
def test_the_divided_rotary_part_overflows_neither_bf16_nor_a_sum_of_products(largest: float, content: float) -> None:
    parts = divide(torch.full((1, 512), content), torch.full((1, 64), largest))
    stored = parts[2].float()
    assert (stored <= 2.0**60).all()
    assert (stored @ stored.T + FP8_MAX**2 * 512).isfinite().all()
    assert parts[1].item() >= SCALE_FLOOR


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["latent", "rope"])
def test_a_row_with_a_nan_or_an_infinity_is_nan_and_no_other(bad: float, where: str) -> None:
    latent, rope = torch.randn(3, 512, generator=torch.Generator().manual_seed(0)), torch.ones(3, 64)
    expected = dequantize(quantize(latent, rope))
    dict(latent=latent, rope=rope)[where][1, 7] = bad
    rows = quantize(latent, rope)
    assert LAYOUT.scale(rows).isnan().tolist() == [False, True, False]
    assert (LAYOUT.content(rows)[1].float() == 0).all() and (LAYOUT.rope(rows)[1] == 0).all()
    for actual, of_others in zip(dequantize(rows), expected, strict=True):
        assert actual[1].isnan().all()
        assert torch.equal(actual[[0, 2]], of_others[[0, 2]])


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_append_writes_the_bytes_of_the_reference_and_no_other(case: Case) -> None:
    problem = Problem(case)
    expected = problem.pool.clone()
    slots, layout = problem.slots[problem.kept].long(), problem.layout
    rows = quantize(problem.latent[problem.kept], problem.rope[problem.kept])
    parts = (slice(0, layout.rope_offset - 12), slice(layout.rope_offset, None))  # all but the padding
    for part in parts:
        expected[slots, part] = rows[:, part]
    append_latent(problem.latent, problem.rope, problem.slots, problem.pool)
    assert torch.equal(problem.pool, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_append_keeps_the_rotary_part_of_rows_without_content(dtype: torch.dtype) -> None:
    """Without the floor their scale would be zero, and their rotary part divided by it NaN or infinite."""
    rope = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.0], [1.0], [1e-6], [3e4]])
    rope, latent = rope.to(dtype), torch.zeros(4, 512, dtype=dtype)
    pool, slots = poisoned_pool(6, LAYOUT), torch.tensor([3, 0, 5, 1])
    append_latent(latent, rope, slots, pool)
    scales = LAYOUT.scale(pool)[slots]
    assert torch.equal(scales, row_scale(latent, rope)) and scales[:3].tolist()[0::2] == [SCALE_FLOOR] * 2
    latent_read, rope_read = dequantize(pool[slots])
    assert (latent_read == 0).all() and torch.equal(rope_read, rope.bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_fetch_reads_its_rows_and_no_other(case: Case, dtype: torch.dtype) -> None:
    problem, layout = Problem(case), LatentRowLayout(case.rank, case.rope)
    rows = quantize(problem.latent, problem.rope)
    problem.pool[problem.slots[problem.kept].long()] = rows[problem.kept]
    results = [padded(torch.full((case.n, d), -7.0, dtype=dtype), case.padding) for d in (case.rank, case.rope)]
    fetch_latent(problem.pool, problem.slots, *results)
    for actual, expected in zip(results, dequantize(rows, layout), strict=True):
        expected = expected.to(dtype)
        expected[~problem.kept] = -7.0
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.nan_to_num(1.0), expected.nan_to_num(1.0))


def test_scales_are_powers_of_two_and_as_small_as_they_can_be() -> None:
    latent, rope = torch.zeros(6, 512), torch.zeros(6, 64)
    latent[:, 0] = torch.tensor([448.0, 448.5, 449.0, 896.0, 224.0, 1e-3])
    assert row_scale(latent, rope).tolist() == [1.0, 2.0, 2.0, 2.0, 0.5, 2.0**-18]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_is_read_and_written_again_means_the_same(dtype: torch.dtype) -> None:
    problem = Problem(Case(300, dtype=dtype))
    finite = problem.latent.isfinite().all(1) & problem.rope.isfinite().all(1)
    read = dequantize(quantize(problem.latent[finite], problem.rope[finite]))
    assert torch.equal(read[1].to(dtype), problem.rope[finite]) == (dtype == torch.bfloat16)  # not rounded again
    again = dequantize(quantize(*(part.to(dtype) for part in read)))
    assert all(torch.equal(a, b) for a, b in zip(read, again, strict=True))


@pytest.mark.parametrize("change", ["dtype", "shape", "slots", "pool", "stride"])
def test_wrong_arguments_are_refused(change: str) -> None:
    latent, rope, slots = torch.zeros(3, 512), torch.zeros(3, 64), torch.arange(3)
    pool = torch.zeros(5, 656, dtype=torch.uint8)
    match change:
        case "dtype":
            latent = latent.half()
        case "shape":
            rope = rope[:2]
        case "slots":
            slots = slots.short()
        case "pool":
            pool = pool[:, :640]
        case "stride":
            latent = torch.zeros(512, 3).T
    with pytest.raises(ValueError, match="must be"):
        append_latent(latent, rope, slots, pool)
    with pytest.raises(ValueError, match="must be"):
        fetch_latent(pool, slots, latent, rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "rank"), [(0, 4, 512), (1, 1, 512), (17, 5, 48), (3, 16, 512)])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1)], ids=str)  # of the axes in memory
def test_queries_are_rounded_like_rows(tokens: int, heads: int, rank: int, dtype: torch.dtype, order) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def strided(last: int) -> torch.Tensor:
        values = 3 * torch.randn(tokens, heads, last, generator=generator)
        inverse = torch.tensor(order).argsort().tolist()
        return padded(values.to(dtype).permute(order).contiguous(), 5).permute(inverse)

    q_absorbed, q_rope = strided(rank), strided(64)
    if tokens > 2:
        q_absorbed[1, 0], q_absorbed[2, 0, 3] = 0.0, NAN
    expected = divide(q_absorbed, q_rope)
    results = [torch.full_like(part, NAN) for part in expected]
    quantize_query(q_absorbed, q_rope, *results)
    for actual, of_reference in zip(results, expected, strict=True):
        assert torch.equal(actual.contiguous().view(torch.uint8), of_reference.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # the interpreter has no BF16 of its own
@pytest.mark.parametrize(
    ("tokens", "heads", "out_heads", "rank"),
    [(0, 4, 4, 512), (1, 1, 8, 512), (17, 5, 5, 48), (17, 5, 8, 48), (3, 16, 16, 512)],
)
@pytest.mark.parametrize("heads_first", [False, True])
def test_parts_of_queries_are_joined(
    tokens: int, heads: int, out_heads: int, rank: int, dtype: torch.dtype, heads_first: bool
) -> None:
    """As SGLang hands them over: the content has the heads before the tokens, the rotary part lies in a wider query.
    Heads that only fill up a strip are 0."""
    generator = torch.Generator().manual_seed(tokens)
    content = torch.randn(heads, tokens, rank, generator=generator).to(dtype).transpose(0, 1)
    content = content if heads_first else padded(content.contiguous(), 3)
    rope = padded(torch.randn(tokens, heads, 64, generator=generator).to(dtype), 128)
    memory = torch.full((tokens * out_heads * (rank + 64) + 1000,), NAN, dtype=dtype)
    out = memory[: tokens * out_heads * (rank + 64)].view(tokens, out_heads, rank + 64)
    join_parts(content, rope, out)
    assert torch.equal(out[:, :heads], torch.cat([content, rope], dim=-1)) and not out[:, heads:].any()
    assert memory[out.numel() :].isnan().all()


@pytest.mark.parametrize("change", ["dtype", "shape", "stride", "out"])
def test_wrong_parts_are_refused(change: str) -> None:
    content, rope, out = torch.zeros(3, 4, 512), torch.zeros(3, 4, 64), torch.zeros(3, 4, 576)
    match change:
        case "dtype":
            rope = rope.half()
        case "shape":
            rope = rope[:, :3]
        case "stride":
            content = torch.zeros(512, 4, 3).permute(2, 1, 0)
        case "out":
            out = torch.zeros(4, 3, 576).transpose(0, 1)
    with pytest.raises(ValueError, match="must be"):
        join_parts(content, rope, out)
