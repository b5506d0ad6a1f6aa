"""Expansion of latent rows into the buffers, against the reference and against ExpandedBuffers.write.

The kernel runs in Triton's interpreter with float32 inputs. Bounds: float32, 2e-6 in relative L2 and 2e-5 for the
largest error of an element (sums of up to 512 products). FP8 and BF16: the bits are those that `write` gives; where the
float32 sums differ in their last bits across a rounding boundary, one step, in at most one element of 1,000 (near zero,
where steps are smaller than such a difference, 2e-6; the elements are of order one).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang_mla_ext.kernels.constants import FP8, FP8_MAX
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expand_prefix import expand_prefix
from sglang_mla_ext.kernels.storage.expanded import FP8_TOKEN_ORDER, ExpandedBuffers

NAN = float("nan")
LAYERS, LAYER = 2, 1
SENTINEL = 0x5A
DTYPES = (torch.float32, torch.bfloat16, FP8)
MAX_DIFFERENT = 1e-3


@dataclass(frozen=True)
class Case:
    n: int
    start: int = 0
    heads: int = 1
    rank: int = 48
    nope: int = 32
    v: int = 16
    rope: int = 16
    padding: int = 0  # between the rows of the pool
    slots_dtype: torch.dtype = torch.int64
    chunk_ids: tuple[int, ...] = (5, 1, 4, 0, 2)

    def __str__(self) -> str:
        return f"n{self.n}-start{self.start}-h{self.heads}-r{self.rank}-pad{self.padding}"


def cases():
    for n in (1, 255, 256, 257):
        for start in (0, 100, 255):
            heads = 3 if (n + start) % 2 else 1
            yield Case(n, start, heads, padding=8 * (start % 3), slots_dtype=torch.int32 if start else torch.int64)
    yield Case(128, 128, heads=3)
    yield Case(700, 300, heads=3, padding=4)
    yield Case(130, 60, heads=2, rank=512, nope=128, v=128, rope=64)
    yield Case(130, 60, heads=2, rank=64, nope=192, v=256, rope=64)  # GLM-4.7-Flash's heads


class Problem:
    """Inputs of a case, seeded, float32; rows of the pool in no slot, and between rows, are NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, size: float = 1.0) -> None:
        self.case, c = case, case
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        pool_slots = c.n + 40
        self.slots = torch.randperm(pool_slots, generator=generator)[: c.n].to(c.slots_dtype)
        pool = torch.full((pool_slots, c.rank + c.rope + c.padding), NAN)
        self.latent_rows = pool[:, : c.rank + c.rope]
        self.tokens = randn(c.n, c.rank + c.rope)
        self.latent_rows[self.slots.long()] = self.tokens
        weight = randn(c.heads, c.nope + c.v, c.rank) * (size * c.rank**-0.5)  # as one kv_b_proj
        self.w_k, self.w_v = weight[:, : c.nope], weight[:, c.nope :]
        self.chunk_table = torch.tensor(c.chunk_ids, dtype=torch.int32)
        self.scales = 0.01 + 0.02 * torch.rand(2, LAYERS, c.heads, generator=generator)
        self.buffers = self.sentinels(dtype)

    def sentinels(self, dtype: torch.dtype) -> ExpandedBuffers:
        c = self.case
        dims = dict(qk_nope_head_dim=c.nope, v_head_dim=c.v, qk_rope_head_dim=c.rope)
        buffers = ExpandedBuffers.allocate(layers=LAYERS, chunks=6, heads=c.heads, dtype=dtype, device="cpu", **dims)
        for tensor in parts(buffers).values():
            tensor.view(torch.uint8).fill_(SENTINEL)
        if dtype == FP8:
            buffers.k_scale.copy_(self.scales[0])
            buffers.v_scale.copy_(self.scales[1])
        return buffers

    def expand(self) -> ExpandedBuffers:
        expand_prefix(
            self.latent_rows, self.slots, self.w_k, self.w_v, self.buffers, LAYER, self.chunk_table, self.case.start
        )
        return self.buffers

    def reference(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank = self.case.rank
        k_nope, v = reference.expand(self.tokens[:, :rank], self.w_k, self.w_v.transpose(1, 2))
        return k_nope, v, self.tokens[:, rank:]

    def written(self) -> ExpandedBuffers:
        """Buffers that `write` filled with what the reference gives; sentinels elsewhere."""
        buffers, expanded = self.sentinels(self.buffers.dtype), self.reference()
        position = torch.arange(self.case.start, self.case.start + self.case.n)
        for index, chunk in enumerate(self.case.chunk_ids):
            of_chunk = position // CHUNK_TOKENS == index
            if of_chunk.any():
                offset = int(position[of_chunk][0]) % CHUNK_TOKENS
                buffers.write(LAYER, chunk, offset, *(tensor[of_chunk] for tensor in expanded))
        return buffers


def parts(buffers: ExpandedBuffers) -> dict[str, torch.Tensor]:
    return dict(k_nope=buffers.k_nope, v_t=buffers.v_t, k_rope=buffers.k_rope)


def is_written(problem: Problem) -> dict[str, torch.Tensor]:
    """Which elements of the buffers belong to the n tokens, without the help of `write`."""
    mask = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in parts(problem.buffers).items()}
    for token in range(problem.case.start, problem.case.start + problem.case.n):
        chunk, offset = problem.case.chunk_ids[token // CHUNK_TOKENS], token % CHUNK_TOKENS
        position = offset
        if problem.buffers.dtype == FP8:
            position = offset // 16 * 16 + FP8_TOKEN_ORDER.index(offset % 16)
        mask["k_nope"][LAYER, chunk, :, offset] = True
        mask["v_t"][LAYER, chunk, :, :, position] = True
        mask["k_rope"][LAYER, chunk, offset] = True
    return mask


def steps(tensor: torch.Tensor) -> torch.Tensor:
    """Integers that neighbouring values of a BF16 or FP8 tensor differ by one in."""
    bits = tensor.view(torch.uint8 if tensor.dtype == FP8 else torch.int16).int()
    half = 1 << 8 * tensor.element_size() - 1
    bits %= 2 * half
    return torch.where(bits >= half, half - bits, bits)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if actual.dtype == torch.float32:
        found = reference.errors(actual, expected)
        assert found.rel_l2 <= 2e-6 and found.max_rel <= 2e-5, f"{name}: {found}"
        return
    difference = (steps(actual) - steps(expected)).abs()
    far = (difference > 1) & ((actual.float() - expected.float()).abs() > 2e-6)
    assert not far.any(), f"{name}: {difference[far].max()} steps apart"
    assert (difference > 0).float().mean() <= MAX_DIFFERENT, f"{name}: {(difference > 0).sum()} differ"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_expansion(case: Case, dtype: torch.dtype) -> None:
    problem = Problem(case, dtype)
    actual, expected, mask = problem.expand(), problem.written(), is_written(problem)
    for name, tensor in parts(actual).items():
        as_bytes = tensor.view(torch.uint8).view(*tensor.shape, -1)
        assert (as_bytes[~mask[name]] == SENTINEL).all(), f"{name}: bytes of other tokens were written"
        if dtype == FP8 and tensor.dtype == FP8:  # torch cannot index FP8 on every device
            mine, other = (t.view(torch.uint8)[mask[name]].view(FP8) for t in (tensor, parts(expected)[name]))
        else:
            mine, other = tensor[mask[name]], parts(expected)[name][mask[name]]
        if name == "k_rope":
            assert torch.equal(mine, other), "rotary keys are copied"
        else:
            assert_same(mine, other, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_read_gives_the_reference(dtype: torch.dtype) -> None:
    """Bounds: half a step, 2^-9 of an element in BF16 and 2^-4 in FP8, so at most that in relative L2."""
    problem = Problem(Case(300, heads=3), dtype)
    read = problem.expand().read(LAYER, problem.case.chunk_ids, problem.case.n)
    bound = {torch.float32: 2e-6, torch.bfloat16: 2**-9, FP8: 2**-4}[dtype]
    for name, actual, expected in zip(("k_nope", "v", "k_rope"), read, problem.reference(), strict=True):
        assert reference.errors(actual, expected).rel_l2 <= bound, name


def test_fp8_saturates() -> None:
    problem = Problem(Case(40, start=3, heads=3), FP8, size=1000.0)
    actual, mask = problem.expand(), is_written(problem)
    k_nope, v, _ = problem.reference()
    for name, expected in (("k_nope", k_nope), ("v_t", v)):
        values = parts(actual)[name].float()[mask[name]]
        assert values.abs().max() == FP8_MAX and values.isfinite().all()
        assert (values.abs() == FP8_MAX).sum() > 0.9 * expected.numel()


def test_two_calls_fill_a_chunk_like_one() -> None:
    whole = Problem(Case(400, heads=3), FP8)
    expected = {name: t.clone() for name, t in parts(whole.expand()).items()}
    whole.buffers = whole.sentinels(FP8)
    arguments = (whole.w_k, whole.w_v, whole.buffers, LAYER, whole.chunk_table)
    expand_prefix(whole.latent_rows, whole.slots[:171], *arguments, 0)
    expand_prefix(whole.latent_rows, whole.slots[171:], *arguments, 171)
    for name, tensor in parts(whole.buffers).items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name


def test_no_tokens_write_nothing() -> None:
    problem = Problem(Case(0), torch.float32)
    for tensor in parts(problem.expand()).values():
        assert (tensor.view(torch.uint8) == SENTINEL).all()


def test_wrong_arguments_are_refused_with_a_reason() -> None:
    problem = Problem(Case(20, start=500, heads=2), torch.float32)
    rows, slots, w_k, w_v = problem.latent_rows, problem.slots, problem.w_k, problem.w_v
    right = dict(latent_rows=rows, slots=slots, w_k=w_k, w_v=w_v, buffers=problem.buffers, layer=LAYER)
    right |= dict(chunk_table=problem.chunk_table, start=problem.case.start)
    odd_size = Problem(Case(1, nope=24), torch.float32).buffers
    for wrong, message in (
        (dict(latent_rows=rows.half()), "latent_rows must be bfloat16"),
        (dict(latent_rows=rows[:, :-1]), "latent_rows must be"),
        (dict(latent_rows=rows.T.contiguous().T), "last axis of latent_rows"),
        (dict(w_k=w_k[..., :40]), "rank must be"),
        (dict(w_k=w_k[:1]), "w_k must be"),
        (dict(w_v=w_v[:, :8]), "w_v must be"),
        (dict(w_v=w_v.bfloat16()), "w_v is"),
        (dict(w_v=w_v.transpose(1, 2).contiguous().transpose(1, 2)), "w_v must be contiguous"),
        (dict(w_k=torch.zeros(2, 32, 49)[..., 1:]), "aligned to 16 bytes"),
        (dict(slots=slots.float()), "slots must be"),
        (dict(slots=slots[::2]), "slots must be"),
        (dict(slots=slots[None]), "slots must be"),
        (dict(layer=LAYERS), "layer 2"),
        (dict(layer=-1), "layer -1"),
        (dict(start=-1), "start must not be negative"),
        (dict(chunk_table=problem.chunk_table.long()), "chunk_table must be"),
        (dict(chunk_table=problem.chunk_table[:2]), "do not hold 520 tokens"),
        (dict(buffers=odd_size), "qk_nope_head_dim must be a multiple of 16"),
        (dict(slots=slots.to("meta")), "slots is on meta"),
    ):
        with pytest.raises(ValueError, match=message):
            expand_prefix(**(right | wrong))
    for tensor in parts(problem.buffers).values():
        assert (tensor.view(torch.uint8) == SENTINEL).all()
