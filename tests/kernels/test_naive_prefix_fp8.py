"""Attention over shared prefixes in FP8 against the reference in float64 over what is stored.

The portable kernel reads e4m3 and rounds nothing to it, so against `buffers.read` its error is that of float32, and
the bounds are those of test_naive_prefix.py. It runs in Triton's interpreter. Scales differ from head to head and
between keys and values; every byte that no token owns is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.naive.tiles import Tile
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.segment import Mode, Segment

NAN = float("nan")
E4M3_NAN = 0x7F
LAYERS, LAYER = 2, 1
SMALL_TILE = Tile(block_rows=16, block_keys=32)


@dataclass(frozen=True)
class Case:
    groups: tuple[int, ...]  # rows of each shared prefix
    prefix: tuple[int, ...]  # tokens of each
    heads: int
    alone: int = 0  # rows in no group
    dims: tuple[int, int, int] = (32, 16, 16)  # dn, dr, dv
    tile: Tile | None = None  # the default tiles
    num_ctas: int = 8

    @property
    def rows(self) -> int:
        return sum(self.groups) + self.alone

    def __str__(self) -> str:
        groups = "+".join(f"{n}x{length}" for n, length in zip(self.groups, self.prefix, strict=True))
        return f"{groups}-alone{self.alone}-h{self.heads}-d{self.dims[0]}-{self.tile.block_keys if self.tile else 64}"


def cases():
    for length in (1, 15, 17, 63, 64, 65, 256, 257):  # ends of 16 tokens, of a tile, of a chunk
        yield Case((2,), (length,), heads=2)
    yield Case((1,), (127,), heads=1, dims=(128, 64, 128))
    yield Case((65,), (301,), heads=2, dims=(128, 64, 128))
    yield Case((1, 2, 3), (700, 1, 255), heads=16, alone=3, num_ctas=40)
    yield Case((2, 64, 1), (33, 511, 600), heads=4, alone=2, num_ctas=24)
    yield Case((17, 16, 15, 1), (95, 300, 32, 129), heads=4, alone=5, tile=SMALL_TILE, num_ctas=40)
    yield Case((3,), (600,), heads=1, num_ctas=264)  # more programs than tiles


class Problem:
    """Inputs of a case, seeded; queries in float32, which the interpreter can multiply."""

    def __init__(self, case: Case) -> None:
        self.case, (dn, dr, dv) = case, case.dims
        self.generator = torch.Generator().manual_seed(case.rows + sum(case.prefix))
        order = torch.randperm(case.rows, generator=self.generator).tolist()
        chunks_of = [-(-n // CHUNK_TOKENS) for n in case.prefix]
        chunk_ids = torch.randperm(sum(chunks_of) + 2, generator=self.generator).tolist()
        sizes = dict(qk_nope_head_dim=dn, v_head_dim=dv, qk_rope_head_dim=dr)
        self.buffers = ExpandedBuffers.allocate(
            layers=LAYERS, chunks=len(chunk_ids), heads=case.heads, dtype=FP8, device="cpu", **sizes
        )
        self.buffers.k_nope.view(torch.uint8).fill_(E4M3_NAN)
        self.buffers.v_t.view(torch.uint8).fill_(E4M3_NAN)
        self.buffers.k_rope.fill_(NAN)
        for scale in (self.buffers.k_scale, self.buffers.v_scale):
            scale.copy_(0.01 + 0.02 * torch.rand(scale.shape, generator=self.generator))
        self.groups = []
        for size, length, n_chunks in zip(case.groups, case.prefix, chunks_of, strict=True):
            rows, order = tuple(order[:size]), order[size:]
            chunks, chunk_ids = tuple(chunk_ids[:n_chunks]), chunk_ids[n_chunks:]
            self.groups.append(Segment(rows, 0, length, Mode.NAIVE, chunks))
            for i, chunk in enumerate(chunks):
                n = min(CHUNK_TOKENS, length - i * CHUNK_TOKENS)
                keys = self.randn(n, case.heads, dn), self.randn(n, case.heads, dv), self.randn(n, dr)
                self.buffers.write(LAYER, chunk, 0, *keys)
        self.q_nope = self.randn(case.rows, case.heads, dn)  # [T, H, dn]
        self.q_rope = self.randn(case.rows, case.heads, dr)  # [T, H, dr]
        self.scale = (dn + dr) ** -0.5

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def attention(self) -> TritonSharedAttention:
        case = self.case
        attention = TritonSharedAttention(
            self.buffers,
            max_rows=case.rows,
            heads=case.heads,
            num_ctas=case.num_ctas,
            tiles=[case.tile] if case.tile else (),
        )
        attention._partial_out.fill_(NAN)
        attention._partial_lse2.fill_(NAN)
        return attention

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Over the stored keys and values, float64: `out [T, H, dv]`, `lse [T, H]`."""
        out = torch.zeros(self.case.rows, self.case.heads, self.case.dims[2], dtype=torch.float64)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
        for group in self.groups:
            rows = list(group.rows)
            k_nope, v, k_rope = self.buffers.read(LAYER, group.chunks, group.tokens)
            q = self.q_nope[rows].double(), self.q_rope[rows].double()
            out[rows], lse[rows] = reference.naive(*q, k_nope, k_rope, v, self.scale)
        return out, lse


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    found = reference.errors(actual, expected)
    assert found.rel_l2 < 2e-6 and found.max_rel < 2e-5 and found.cos_dist < 1e-11, f"{what}: {found}"


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_stored_values_are_all_that_is_rounded(case: Case) -> None:
    problem = Problem(case)
    attention = problem.attention()
    attention.plan(problem.groups)
    attention.run(LAYER, problem.q_nope, problem.q_rope, problem.scale)
    expected_out, expected_lse = problem.expected()
    out, lse = torch.full_like(expected_out, NAN, dtype=torch.float32), torch.full(expected_lse.shape, NAN)
    attention.merge(torch.full_like(out, NAN), torch.full_like(lse, -torch.inf), out, lse)  # no tails
    assert_equal(out, expected_out, "out")
    assert_equal(lse, expected_lse, "lse")


def test_queries_of_another_dtype_are_refused() -> None:
    problem = Problem(Case((2,), (70,), heads=2))
    attention = problem.attention()
    attention.plan(problem.groups)
    with pytest.raises(ValueError, match="expanded prefixes need"):
        attention.run(LAYER, problem.q_nope.half(), problem.q_rope.half(), problem.scale)
