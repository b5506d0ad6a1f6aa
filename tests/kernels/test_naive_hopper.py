"""The naive kernel for Hopper without a GPU: its own source run in torch (gluon_in_torch.py), on a real plan.

Bounds. BF16: 4e-3 in relative L2, from rounding the weights; the lse is not rounded: 1e-4. FP8 is compared with queries
rounded as the kernel rounds them, so the weights are again the only other rounding of the output: e4m3 keeps 3 bits,
3e-2; the lse sums unrounded weights, but the rotary query is rounded once more, to BF16: 1e-2. What no item may read is
NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_in_torch import Descriptor, Pointer, Program, edited
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sglang_mla_ext.kernels.constants import FP8, FP8_MAX, LN2
from sglang_mla_ext.kernels.naive import sm90_naive
from sglang_mla_ext.kernels.naive.sm90_parts import consumers
from sglang_mla_ext.kernels.naive.tiles import Tile
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.naive.triton_naive import launch_arguments
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.segment import Mode, Segment

NAN = float("nan")
DN, DR, DV = 128, 64, 64  # not all alike, so that none passes for another
SCALE = (DN + DR) ** -0.5
LAYERS, LAYER = 2, 1
ONE, TWO = (Tile(block_rows=rows, block_keys=128, num_stages=2) for rows in (64, 128))
THREE = Tile(block_rows=192, block_keys=64, num_stages=3)


@dataclass(frozen=True)
class Case:
    segments: tuple[tuple[int, int], ...]  # rows and tokens of each
    dtype: torch.dtype
    tile: Tile = ONE
    programs: int = 3
    heads: int = 2
    nested: bool = False  # the rows of a segment are also in all segments before it
    dn: int = DN
    dv: int = DV

    @property
    def rows(self) -> int:
        return (max if self.nested else sum)(rows for rows, _ in self.segments) + 1  # one is alone

    def __str__(self) -> str:
        segments = "+".join(f"{rows}x{tokens}" for rows, tokens in self.segments) + "-nested" * self.nested
        dtype = "fp8" if self.dtype == FP8 else "bf16"
        dtype += f"-{self.dn}+{self.dv}" * (self.dn != DN)
        return f"{segments}-{dtype}-{self.tile.block_rows}rows-{self.tile.num_stages}stages-{self.programs}programs"


class InTorch:
    """Takes the place of the kernel's module."""

    LayerKeys, tiles_of = sm90_naive.LayerKeys, staticmethod(sm90_naive.tiles_of)

    def __init__(self, seed: int, modules: list[Any]) -> None:
        self.seed, self.modules = seed, modules

    def run(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        keys: sm90_naive.LayerKeys,
        work: Tensor,
        capacity: Any,
        partial_out: Tensor,
        partial_lse2: Tensor,
        *,
        softmax_scale: float,
        num_ctas: int,
        tile: Tile,
        slot: int,
    ) -> None:
        arguments = launch_arguments(
            q_nope, q_rope, keys, work, capacity, partial_out, partial_lse2, softmax_scale, torch.bfloat16
        )
        bytes_moved = {name: lambda *_: lambda values: values for name in ("_bits_of", "_fp8_of")}
        options = sm90_naive.launch_options(tile)
        constants = [options[name] for name in ("CONSUMERS", "STAGES", "CONSUMER_REGISTERS", "PRODUCER_REGISTERS")]
        for index in range(num_ctas):
            program = Program(self.modules, index, num_ctas, self.seed, bytes_moved)
            program.run(
                "naive_prefix_hopper_kernel",
                *map(_stand_in, arguments),
                keys.k_nope.shape[1],
                *constants,
                slot,
            )


def _stand_in(argument: Any) -> Any:
    """A descriptor for Triton's, and for a tensor a pointer to its first element; what follows it can be reached."""
    if isinstance(argument, TensorDescriptor):
        base = argument.base
        return Descriptor(base, argument.block_shape, base.element_size(), base.dtype)
    if not isinstance(argument, Tensor):
        return argument
    behind = argument.untyped_storage().nbytes() // argument.element_size() - argument.storage_offset()
    return Pointer(argument.as_strided([behind], [1]))


class Problem:
    """Inputs of a case, seeded; whatever no item may read is NaN."""

    def __init__(self, case: Case) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(case.rows)
        rows, heads, chunks_of = case.rows, case.heads, [-(-tokens // CHUNK_TOKENS) for _, tokens in case.segments]
        order = torch.randperm(rows, generator=generator).tolist()
        ids = torch.randperm(sum(chunks_of) + 1, generator=generator).tolist()
        dn, dv = case.dn, case.dv
        sizes = dict(qk_nope_head_dim=dn, v_head_dim=dv, qk_rope_head_dim=DR, heads=heads)
        self.buffers = ExpandedBuffers.allocate(layers=LAYERS, chunks=len(ids), dtype=case.dtype, device="cpu", **sizes)
        nan = torch.tensor(NAN).to(case.dtype)
        for tensor in (self.buffers.k_nope, self.buffers.v_t):
            tensor.copy_(nan.expand(tensor.shape))
        self.buffers.k_rope.fill_(NAN)
        if case.dtype == FP8:
            scales = torch.rand(2, heads, generator=generator) / 50 + 0.01
            self.buffers.k_scale[LAYER], self.buffers.v_scale[LAYER] = scales
        self.segments = []
        for (size, tokens), n_chunks in zip(case.segments, chunks_of, strict=True):
            members, order = tuple(order[:size]), order if case.nested else order[size:]
            chunks, ids = tuple(ids[:n_chunks]), ids[n_chunks:]
            self.segments.append(Segment(members, 0, tokens, Mode.NAIVE, chunks))
            k_nope, v = (torch.randn(tokens, heads, dim, generator=generator) for dim in (dn, dv))
            k_rope = torch.randn(tokens, DR, generator=generator)
            for i, chunk in enumerate(chunks):
                of = slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS)
                self.buffers.write(LAYER, chunk, 0, k_nope[of], v[of], k_rope[of])
        # Both parts of the query in one tensor, with padding around heads and rows, as a model has them.
        query = torch.full((rows, heads + 1, dn + DR + 8), NAN, dtype=torch.bfloat16)
        query[:, :heads, : dn + DR] = torch.randn(rows, heads, dn + DR, generator=generator)
        self.q_nope, self.q_rope = query[:, :heads, :dn], query[:, :heads, dn : dn + DR]

    def expected(self) -> tuple[Tensor, Tensor]:
        """Float64: `out [T, H, dv]`, `lse [T, H]`."""
        q_nope, q_rope = self.q_nope.double(), self.q_rope.double()
        if self.case.dtype == FP8:  # what the kernel makes of the content query
            scale = self.q_nope.float().abs().amax(-1, keepdim=True).clamp_min(1e-8) / FP8_MAX
            q_nope = ((self.q_nope.float() / scale).to(FP8).float() * scale).double()
        out = torch.zeros(self.case.rows, self.case.heads, self.case.dv, dtype=torch.float64)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
        for segment in self.segments:
            rows = list(segment.rows)
            k_nope, v, k_rope = self.buffers.read(LAYER, segment.chunks, segment.tokens)
            part = reference.naive(q_nope[rows], q_rope[rows], k_nope, k_rope, v, SCALE)
            out[rows], lse[rows] = reference.merge(out[rows], lse[rows], *part)
        return out, lse

    def run(self, seed: int = 0, modules: tuple[Any, ...] = (consumers, sm90_naive)) -> tuple[Tensor, Tensor]:
        case = self.case
        attention = TritonSharedAttention(
            self.buffers,
            max_rows=case.rows + 2,
            heads=case.heads,
            kernel=InTorch(seed, list(modules)),
            tiles=[case.tile],
            num_ctas=case.programs,
            segments_per_row=len(case.segments) if case.nested else 1,
        )
        attention._partial_out.fill_(NAN)
        attention._partial_lse2.fill_(NAN)
        attention.plan(self.segments)
        attention.run(LAYER, self.q_nope, self.q_rope, SCALE)
        table = attention._capacity.table_of(attention._work)
        out, lse = torch.zeros(case.rows, case.heads, case.dv), torch.full((case.rows, case.heads), -torch.inf)
        for row in range(case.rows):
            if places := table.of_row(row):
                part_lse = attention._partial_lse2[places] * LN2  # [partials, H]
                lse[row] = part_lse.logsumexp(0)
                out[row] = ((part_lse - lse[row]).exp()[..., None] * attention._partial_out[places]).sum(0)
        return out, lse

    def check(self, out: Tensor, lse: Tensor) -> None:
        bound, lse_bound = (3e-2, 1e-2) if self.case.dtype == FP8 else (4e-3, 1e-4)
        expected, expected_lse = self.expected()
        shared = expected_lse > -torch.inf
        assert torch.equal(lse > -torch.inf, shared) and not out[~shared].any() and not lse.isnan().any()
        found = reference.errors(out, expected)
        assert found.rel_l2 < bound and (lse - expected_lse)[shared].abs().max() < lse_bound, found


def cases() -> Any:
    for dtype in (torch.bfloat16, FP8):
        yield Case(((3, 1), (1, 127), (2, 128), (5, 129)), dtype)
        yield Case(((64, 641),), dtype, programs=2)  # keys are split between programs
        yield Case(((65, 300), (2, 513)), dtype, TWO)  # the second consumer has one row, then none
        yield Case(((128, 257), (100, 70)), dtype, TWO, programs=2)
        yield Case(((192, 129), (130, 70), (40, 200)), dtype, THREE, programs=2)
        yield Case(((7, 512), (5, 256), (2, 77)), dtype, nested=True)  # rows in one, two and three segments
    yield Case(((66, 1000),), FP8, Tile(block_rows=128, block_keys=128, num_stages=4), programs=1)
    yield Case(((20, 300),), FP8, Tile(block_rows=64, block_keys=64, num_stages=2, ctas_per_sm=2), programs=1)
    for tile, rows in zip(sm90_naive.WIDE_TILES, (20, 70), strict=True):  # GLM-4.7-Flash's heads
        yield Case(((rows, 300),), torch.bfloat16, tile, heads=5, dn=192, dv=256)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_kernels_source_in_torch_equals_the_reference(case: Case) -> None:
    problem = Problem(case)
    problem.check(*problem.run(seed=len(str(case)) % 2))


def test_every_order_of_the_roles_gives_the_same() -> None:
    problem = Problem(Case(((65, 1000),), torch.bfloat16, TWO, programs=1, heads=1))
    first = problem.run(seed=0)
    for seed in (1, 2, 3):
        assert all(map(torch.equal, first, problem.run(seed)))


BOTH = (torch.bfloat16, FP8)
FAULTS = {
    "the mask is one key too long": (consumers, "key < kv_end", "key <= kv_end", BOTH),
    "the mask is one key too short": (consumers, "key < kv_end", "key + 1 < kv_end", BOTH),
    "values are cleared one key too late, BF16": (consumers, "position < valid", "position <= valid", BOTH[:1]),
    "values are cleared one key too late, FP8": (consumers, "order < valid", "order <= valid", BOTH[1:]),
    "values are cleared in the order of tokens": (
        consumers,
        "inside + order < valid",
        "inside < valid - inside",
        BOTH[1:],
    ),
    "the chunk is that of the tile before": (sm90_naive, "gl.maximum(tile - 1, first_tile)", "tile", BOTH),
    "keys are those of another head": (sm90_naive, "block * CHUNK + token", "(block ^ 1) * CHUNK + token", BOTH),
    "the producer knows no phases": (sm90_naive, "((position // STAGES) & 1) ^ 1", "1", BOTH),
    "consumers know no phases": (consumers, "(position // STAGES) & 1", "0", BOTH),
    "keys are not given back": (consumers, "mbarrier.arrive(ring.k_empty.index(stage))", "pass", BOTH),
    "values are given back before the product is done": (
        consumers,
        "mbarrier.wait(ring.v_full.index(v_stage), v_phase)",
        "mbarrier.wait(ring.v_full.index(v_stage), v_phase); mbarrier.arrive(ring.v_empty.index(v_stage))",
        BOTH,
    ),
    "one consumer gives keys back for both": (
        sm90_naive,
        "k_empty.index(i), count=CONSUMERS",
        "k_empty.index(i), count=1",
        BOTH,
    ),
    "the sum is not rescaled": (consumers, "row_sum * rescale", "row_sum", BOTH),
    "the output is not rescaled": (consumers, "acc * gl.convert_layout(rescale, OUT_ROWS)[:, None]", "acc", BOTH),
    "the scale of keys is left out": (
        consumers,
        "q_scale * (k_scale * scales.softmax_log2e)",
        "q_scale * scales.softmax_log2e",
        BOTH[1:],
    ),
    "the scale of values is left out": (consumers, "v_scale, partial_row", "1.0, partial_row", BOTH[1:]),
    "weights stay in the order of keys": (consumers, ".permute([0, 1, 3, 2, 4])", "", BOTH[1:]),
    "lse2 keeps the headroom of the weights": (
        consumers,
        "row_max2 - LOG2_FP8_MAX, OUT_ROWS",
        "row_max2, OUT_ROWS",
        BOTH[1:],
    ),
    "rows of the second half are those of the first": (consumers, "rows = first + gl.arange", "rows = gl.arange", BOTH),
}


@pytest.fixture(scope="module")
def right() -> dict[torch.dtype, Problem]:
    """Four items of two consumers on one program, with several chunks and an odd end, that the right kernel solves."""
    problems = {dtype: Problem(Case(((67, 700),), dtype, TWO, programs=1)) for dtype in BOTH}
    for problem in problems.values():
        problem.check(*problem.run())
    return problems


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_would_be_found_out(right: dict[torch.dtype, Problem], tmp_path: Path, fault: str) -> None:
    module, old, new, dtypes = FAULTS[fault]
    wrong = edited(module, tmp_path, old, new)
    # A changed consumer must also be the one that the kernel's own module names.
    modules = (sm90_naive, wrong) if module is consumers else (consumers, wrong)
    for dtype in dtypes:
        with pytest.raises(AssertionError):
            right[dtype].check(*right[dtype].run(modules=modules))
