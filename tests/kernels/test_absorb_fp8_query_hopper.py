"""The query of the FP8 absorb kernels for Hopper: their own source, run in torch (gluon_in_torch.py), rounds it to the
bits of latent_rows.divide; and TMA reads the layouts of SGLang's tensors without a copy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gluon_in_torch import Program, Shared
from test_absorb_fp8 import NAN, Case, Problem, assert_close
from test_absorb_fp8_hopper import BOUND, BYTES, COMMON, in_torch  # noqa: F401 - a fixture
from torch import Tensor

from sglang_mla_ext.kernels.absorb.schedule import AbsorbCapacity
from sglang_mla_ext.kernels.absorb.sm90_parts.query import for_tma
from sglang_mla_ext.kernels.storage.latent_rows import divide, row_scale

RANK, ROPE = 512, 64
CASES = (
    Case((65, 130, 1), heads=8, num_sms=2),
    Case((65, 130, 1), heads=8, queries=2, num_sms=2),
    Case((65, 130, 1), heads=16, num_sms=2),
    Case((65, 130, 1), heads=24, num_sms=2),
    Case((65, 130, 1), heads=8, queries=3, num_sms=2),
    Case((65, 130, 1), heads=32, queries=2, num_sms=2),
    Case((330, 3), heads=128, queries=2, num_sms=12),  # keys are cut
)


def a_program() -> Program:
    return Program(COMMON, 0, 1, 0, {name: lambda *_, function=function: function for name, function in BYTES.items()})


def rows_of_all_kinds(n: int) -> tuple[Tensor, Tensor]:
    """BF16 `[n, 512]` and `[n, 64]` of all sizes, the first ones peculiar."""
    generator = torch.Generator().manual_seed(n)
    sizes = 2.0 ** (200 * torch.rand(n, 1, generator=generator) - 100)
    content = (sizes * torch.randn(n, RANK, generator=generator)).bfloat16()
    rope = (sizes.sqrt() * torch.randn(n, ROPE, generator=generator)).bfloat16()
    content[0], rope[0] = 0, 0
    content[1, 5] = NAN
    content[2, 511] = -torch.inf
    rope[3, 63] = NAN
    rope[4, 0] = torch.inf
    content[5, 7] = 3.3e38  # saturates
    content[6], rope[6] = 2.0**-130, 2.0**-80
    content[7] = 448.0 * 2.0 ** -(torch.arange(RANK) % 20).float()
    return content, rope


def bits(values: Tensor) -> Tensor:
    """Of float32, with one pattern for all NaN."""
    return values.float().nan_to_num(torch.nan).view(torch.int32).where(~values.isnan(), 0x7FC00000)


def test_scales_are_those_of_the_reference_for_every_number_of_bf16() -> None:
    scales_of_rows = a_program().names["scales_of_rows"]
    magnitudes = torch.arange(1 << 15, dtype=torch.int32)
    values = magnitudes.short().view(torch.bfloat16)[:, None]
    for other in (0.0, 1.0, 1.75, 3e5, 3e38, NAN):
        one = torch.full_like(values, other)
        of_other = torch.full_like(magnitudes, int(one.view(torch.int16)[0]))
        for found, parts in (
            (scales_of_rows(magnitudes, of_other), (values, one)),
            (scales_of_rows(of_other, magnitudes), (one, values)),
        ):
            scale, finite = found
            assert torch.equal(bits(scale.where(finite, NAN)), bits(row_scale(*parts)))


def assert_rounded(content: Tensor, rope: Tensor, found: tuple[Tensor, Tensor, Tensor]) -> None:
    expected = divide(content, rope)
    for ours, theirs in zip(found, (expected[0].float(), expected[2].float(), expected[1]), strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("rows", [8, 16])
def test_few_rows_are_rounded_as_in_the_reference(rows: int) -> None:
    program, (content, rope) = a_program(), rows_of_all_kinds(rows)
    q_s, q_rope_s = Shared([rows, RANK], torch.bfloat16), Shared([rows, ROPE], torch.bfloat16)
    content_s, rounded_rope_s = Shared([rows, RANK], torch.float8_e4m3fn), Shared([rows, ROPE], torch.bfloat16)
    q_s.store(content.view(rows, 8, 64))
    q_rope_s.store(rope)
    q_empty = program.names["gl"].allocate_shared_memory(torch.int64, [1, 1], None).index(0)
    q_empty.init(1)
    scales: list[Tensor] = []

    def role() -> None:
        scales.append(program.names["round_rows"](q_s, q_rope_s, q_empty, content_s, rounded_rope_s, None))

    program.names["kernel"] = lambda: program.names["gl"].warp_specialize([(role, ())], [], [])
    program.run("kernel")
    assert q_empty.passed(0)
    assert_rounded(content, rope, (content_s.load(), rounded_rope_s.load(), scales[0]))


@pytest.mark.parametrize("slot", [0, 2, 3])
def test_a_tile_of_rows_is_rounded_as_in_the_reference(slot: int) -> None:
    """Out of two slots of the ring, the second of which may be its first one."""
    program, (content, rope) = a_program(), rows_of_all_kinds(64)
    ring, rope_s = Shared([4, 64, RANK], torch.float8_e4m3fn), Shared([4, 64, ROPE], torch.bfloat16)
    q_content_s, q_rope_s = Shared([4, 64, 128], torch.float8_e4m3fn), Shared([64, ROPE], torch.bfloat16)
    tiles = ring._reinterpret(torch.bfloat16, [16, 64, 64], None)
    for c, tile in enumerate(content.split(64, dim=1)):
        tiles.index((4 * slot + c) % 16).store(tile)
    rope_s.index(slot).store(rope)
    scale = program.names["round_tiles"](ring, rope_s, slot, q_content_s, q_rope_s, None)
    found = torch.cat([q_content_s.index(panel).load() for panel in range(4)], dim=1)
    assert_rounded(content, rope, (found, q_rope_s.load(), scale))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_in_the_layouts_of_sglang(in_torch: Any, case: Case) -> None:  # noqa: F811
    """The content as SGLang's batched product leaves it, with heads outside; the rotary part out of a wider tensor;
    some heads that are zero or not finite, of which the others know nothing."""
    problem = Problem(case)
    wide = torch.full((*problem.q_rope.shape[:2], 128 + ROPE), NAN, dtype=torch.bfloat16)
    wide[..., 128:] = problem.q_rope
    problem.q_absorbed = problem.q_absorbed.bfloat16().transpose(0, 1).contiguous().transpose(0, 1)
    problem.q_rope = wide[..., 128:]
    assert for_tma(problem.q_absorbed) is problem.q_absorbed and for_tma(problem.q_rope) is problem.q_rope
    problem.q_absorbed[0, 1], problem.q_rope[0, 1] = 0, 0
    expected = problem.expected(exact=False)
    wrong = torch.zeros(problem.q_rope.shape[:2], dtype=torch.bool)
    wrong[0, 0] = wrong[-1, 3] = wrong[-1, -1] = True
    problem.q_absorbed[0, 0, 300], problem.q_rope[-1, 3, 9], problem.q_absorbed[-1, -1, 511] = NAN, torch.inf, NAN
    out, lse = in_torch(problem)
    assert out[wrong].isnan().all() and lse[wrong].isnan().all()
    found = out.where(~wrong[..., None], expected[0].to(out.dtype)), lse.where(~wrong, expected[1].to(lse.dtype))
    assert_close(found, expected, BOUND)


def test_what_tma_cannot_read_is_copied() -> None:
    query = torch.randn(3, 16, 2 * RANK).bfloat16()
    odd = torch.randn(3 * 16 * 516 + 1).bfloat16()
    for readable in (query, query[..., 8:], query[:, ::2], query.transpose(0, 1), query[1:2]):
        assert for_tma(readable) is readable
    for unreadable in (
        query.float(),
        query[..., ::2],
        query[..., 4:],
        query.transpose(0, 2),
        query[:1].expand(3, -1, -1),
        odd[:-1].view(3, 16, 516),
        odd[1:].view(3, 16, 516),
    ):
        copy = for_tma(unreadable)
        assert copy.is_contiguous() and copy.dtype == torch.bfloat16 and copy.data_ptr() % 16 == 0
        assert torch.equal(copy, unreadable.bfloat16())


def test_a_strip_lies_within_a_query_token() -> None:
    for heads, queries, tile_rows, strip_rows in (
        *((128, 1, 64, 64), (96, 1, 64, 32), (48, 1, 64, 16), (24, 1, 64, 8), (16, 1, 16, 16), (8, 1, 8, 8)),
        *((32, 2, 64, 32), (16, 4, 64, 16), (8, 3, 64, 8), (8, 2, 16, 8)),
    ):
        capacity = AbsorbCapacity(4, heads * queries, 132, tile_rows, queries)
        assert (capacity.query_heads, capacity.strip_rows) == (heads, strip_rows)
