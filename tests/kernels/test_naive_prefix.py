"""Attention over shared prefixes, alone and with tails, against the reference in float64.

The kernels run in float32 in Triton's interpreter. Bound: 2e-6 in relative L2, some ten roundings of float32 over sums
of up to 700 keys; 2e-5 for the largest error of an element; 1e-11 in cosine distance. Prefixes in FP8 are compared with
what is stored: the portable kernel reads e4m3 and rounds nothing to it, so the bounds are the same.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.dispatch import make_shared_attention
from sglang_mla_ext.kernels.naive import triton_naive
from sglang_mla_ext.kernels.naive.attention import TorchSharedAttention
from sglang_mla_ext.kernels.naive.tiles import LARGEST_TILE, Tile
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.segment import Mode, Segment

NAN = float("nan")
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Dims:
    """Head dimensions of a model."""

    nope: int = 128
    rope: int = 64
    v: int = 128
    rank: int = 512

    @property
    def scale(self) -> float:
        return (self.nope + self.rope) ** -0.5


WIDE = Dims(nope=192, v=256)  # GLM-4.7-Flash's
SMALL = Dims(nope=32, rope=16, v=16, rank=48)
DEFAULT_TILE = Tile()
SMALL_TILE = Tile(block_rows=16, block_keys=32)


@dataclass(frozen=True)
class Case:
    groups: tuple[int, ...]  # rows of each shared prefix
    prefix: tuple[int, ...]  # tokens of each
    heads: int
    alone: int = 0  # rows in no group, spread among the others
    unused: int = 0  # rows that the plan could have but the call has not
    nested: bool = False  # the rows of a group are also in all groups before it
    dims: Dims = SMALL
    tile: Tile = DEFAULT_TILE
    num_ctas: int = 8
    dtype: torch.dtype = torch.float32

    @property
    def rows(self) -> int:
        return (max if self.nested else sum)(self.groups) + self.alone

    def __str__(self) -> str:
        groups = "+".join(f"{n}x{length}" for n, length in zip(self.groups, self.prefix, strict=True))
        groups += "-nested" * self.nested + "-fp8" * (self.dtype == FP8)
        return (
            f"{groups}-alone{self.alone}-h{self.heads}-d{self.dims.nope}-{self.tile.block_rows}x{self.tile.block_keys}"
        )


def cases():
    yield Case((3,), (1,), heads=1)
    yield Case((2,), (63,), heads=4, dims=Dims())
    yield Case((2,), (64,), heads=4, dims=Dims(), alone=1)
    yield Case((65,), (65,), heads=2, dims=Dims())
    yield Case((5,), (256,), heads=4)
    yield Case((4,), (257,), heads=16, unused=7)
    yield Case((64,), (700,), heads=4, num_ctas=13)
    yield Case((1, 2, 3), (700, 1, 255), heads=4, alone=3, dims=Dims())
    yield Case((2, 64, 1), (33, 511, 600), heads=4, alone=2, num_ctas=24, unused=2)
    yield Case((17, 16, 15, 1), (95, 300, 32, 129), heads=4, alone=5, tile=SMALL_TILE, num_ctas=40)
    yield Case((33,), (513,), heads=3, tile=SMALL_TILE, num_ctas=16)
    yield Case((4, 3), (70, 130), heads=20, num_ctas=32)
    yield Case((2, 5), (40, 65), heads=40, num_ctas=264, alone=1)
    yield Case((3,), (600,), heads=1, num_ctas=264)
    yield Case((5, 2), (70, 300), heads=5, dims=WIDE, alone=1)
    yield Case((20,), (70,), heads=6, tile=SMALL_TILE, dims=dataclasses.replace(SMALL, nope=48))
    # Rows in three segments, in two, in one and in none, of which some are split.
    yield Case((7, 4, 2), (512, 256, 333), heads=4, nested=True, alone=2, unused=1)
    yield Case((40, 20, 17), (256, 512, 70), heads=3, nested=True, tile=SMALL_TILE, num_ctas=40)
    for length in (1, 15, 17, 63, 64, 65, 256, 257):  # ends of 16 tokens, of a tile, of a chunk
        yield Case((2,), (length,), heads=2, dtype=FP8)
    yield Case((1,), (127,), heads=1, dims=Dims(), dtype=FP8)
    yield Case((65,), (301,), heads=2, dims=Dims(), tile=triton_naive.FP8_TILES[-1], dtype=FP8)
    yield Case((1, 2, 3), (700, 1, 255), heads=16, alone=3, num_ctas=40, dtype=FP8)
    yield Case((2, 64, 1), (33, 511, 600), heads=4, alone=2, num_ctas=24, dtype=FP8)
    yield Case((17, 16, 15, 1), (95, 300, 32, 129), heads=4, alone=5, tile=SMALL_TILE, num_ctas=40, dtype=FP8)
    yield Case((3,), (600,), heads=1, num_ctas=264, dtype=FP8)  # more programs than tiles


class Problem:
    """Inputs of a case, seeded, queries in float32; whatever no kernel may read is NaN. In FP8 scales differ from head
    to head and between keys and values."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case, d = case, case.dims
        self.generator = torch.Generator().manual_seed(seed)
        self.w_kc = self.randn(case.heads, d.nope, d.rank) * d.rank**-0.5  # [H, dn, r]
        self.w_vc = self.randn(case.heads, d.rank, d.v) * d.rank**-0.5  # [H, r, dv]
        self.prefix_latent = [self.randn(n, d.rank + d.rope) for n in case.prefix]  # [prefix_len, r + dr] each
        self.expanded = []  # k_nope [n, H, dn], v [n, H, dv], k_rope [n, dr] of each group

        order = torch.randperm(case.rows, generator=self.generator).tolist()
        chunks_of = [-(-n // CHUNK_TOKENS) for n in case.prefix]
        chunk_ids = torch.randperm(sum(chunks_of) + 2, generator=self.generator).tolist()
        sizes = dict(qk_nope_head_dim=d.nope, v_head_dim=d.v, qk_rope_head_dim=d.rope)
        self.buffers = ExpandedBuffers.allocate(
            layers=LAYERS, chunks=len(chunk_ids), heads=case.heads, dtype=case.dtype, device="cpu", **sizes
        )
        for tensor in (self.buffers.k_nope, self.buffers.v_t, self.buffers.k_rope):
            tensor.copy_(torch.tensor(NAN).to(tensor.dtype).expand(tensor.shape))
        if case.dtype == FP8:
            for scale in (self.buffers.k_scale, self.buffers.v_scale):
                scale.copy_(0.01 + 0.02 * torch.rand(scale.shape, generator=self.generator))
        self.groups = []
        for size, latent, n_chunks in zip(case.groups, self.prefix_latent, chunks_of, strict=True):
            rows, order = tuple(order[:size]), order if case.nested else order[size:]
            chunks, chunk_ids = tuple(chunk_ids[:n_chunks]), chunk_ids[n_chunks:]
            self.groups.append(Segment(rows, 0, len(latent), Mode.NAIVE, chunks))
            k_nope, v = reference.expand(latent[:, : d.rank], self.w_kc, self.w_vc)
            k_rope = latent[:, d.rank :]
            for i, chunk in enumerate(chunks):
                tokens = slice(i * CHUNK_TOKENS, (i + 1) * CHUNK_TOKENS)
                self.buffers.write(LAYER, chunk, 0, k_nope[tokens], v[tokens], k_rope[tokens])
            stored = case.dtype == FP8
            self.expanded.append(self.buffers.read(LAYER, chunks, len(latent)) if stored else (k_nope, v, k_rope))

        # Views with padding between heads and rows, and the two parts of the query in one tensor, as a model has them.
        query = torch.full((case.rows, case.heads + 1, d.nope + d.rope + 8), NAN)
        query[:, : case.heads, : d.nope + d.rope] = self.randn(case.rows, case.heads, d.nope + d.rope)
        self.q_nope = query[:, : case.heads, : d.nope]  # [T, H, dn]
        self.q_rope = query[:, : case.heads, d.nope : d.nope + d.rope]  # [T, H, dr]

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def attention(self, implementation: str) -> TorchSharedAttention | TritonSharedAttention:
        case, max_rows = self.case, self.case.rows + self.case.unused
        nesting = dict(segments_per_row=len(case.groups) if case.nested else 1)
        if implementation == "reference":
            attention = TorchSharedAttention(self.buffers, max_rows=max_rows, heads=case.heads, **nesting)
            attention._shared_out.fill_(NAN)
            return attention
        attention = TritonSharedAttention(
            self.buffers, max_rows=max_rows, heads=case.heads, num_ctas=case.num_ctas, tiles=[case.tile], **nesting
        )
        attention._partial_out.fill_(NAN)
        attention._partial_lse2.fill_(NAN)
        return attention

    def shared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Reference of the shared part alone, float64: `out [T, H, dv]`, `lse [T, H]`."""
        out = torch.zeros(self.case.rows, self.case.heads, self.case.dims.v, dtype=torch.float64)
        lse = torch.full(out.shape[:2], -torch.inf, dtype=torch.float64)
        for group, (k_nope, v, k_rope) in zip(self.groups, self.expanded, strict=True):
            rows = list(group.rows)
            q = self.q_nope[rows].double(), self.q_rope[rows].double()
            part = reference.naive(*q, k_nope, k_rope, v, self.case.dims.scale)
            out[rows], lse[rows] = reference.merge(out[rows], lse[rows], *part)
        return out, lse

    def no_tail(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Empty tails: `tail_out [T, H, dv]` NaN, `tail_lse [T, H]` -inf."""
        shape = (self.case.rows, self.case.heads, self.case.dims.v)
        return torch.full(shape, NAN), torch.full(shape[:2], -torch.inf)


def assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    found = reference.errors(actual, expected)
    assert found.rel_l2 < 2e-6 and found.max_rel < 2e-5 and found.cos_dist < 1e-11, f"{what}: {found}"


def run_and_merge(attention, problem: Problem, tail_out, tail_lse):
    out, lse = torch.full_like(tail_out, NAN), torch.full_like(tail_lse, NAN)
    attention.run(LAYER, problem.q_nope, problem.q_rope, problem.case.dims.scale)
    assert attention.merge(tail_out, tail_lse, out, lse) is out
    return out, lse


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_shared_part_equals_reference(case: Case, implementation: str) -> None:
    problem = Problem(case)
    attention = problem.attention(implementation)
    attention.plan(problem.groups)
    out, lse = run_and_merge(attention, problem, *problem.no_tail())
    expected_out, expected_lse = problem.shared()
    assert_equal(out, expected_out, "out")
    assert_equal(lse, expected_lse, "lse")


def test_queries_of_another_dtype_are_refused() -> None:
    problem = Problem(Case((2,), (70,), heads=2, dtype=FP8))
    attention = problem.attention("triton")
    attention.plan(problem.groups)
    with pytest.raises(ValueError, match="expanded prefixes need"):
        attention.run(LAYER, problem.q_nope.half(), problem.q_rope.half(), 1.0)


@dataclass(frozen=True)
class TailCase(Case):
    tails: tuple[int, ...] = ()  # tokens of each row's own

    def __str__(self) -> str:
        return f"{super().__str__()}-tails{'+'.join(map(str, self.tails))}"


def tail_cases():
    yield TailCase((2,), (300,), heads=4, dims=Dims(), tails=(0, 1))
    yield TailCase((3, 1), (65, 513), heads=4, alone=2, tails=(0, 700, 5, 64, 333, 0))
    yield TailCase((6,), (31,), heads=16, tails=(1, 2, 3, 0, 100, 17), tile=SMALL_TILE)
    yield TailCase((2, 2), (70, 40), heads=24, tails=(7, 0, 1, 30), num_ctas=264)
    yield TailCase((4, 3, 1), (256, 256, 45), heads=4, nested=True, alone=1, tails=(0, 77, 5, 0, 64))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("case", list(tail_cases()), ids=str)
def test_prefix_and_tail_equal_absorb_over_the_whole_sequence(case: TailCase, implementation: str) -> None:
    """Naive over the prefix merged with absorb over the tail = absorb over both = naive over both."""
    problem, d = Problem(case, seed=1), case.dims
    tail_of_row = list(case.tails)
    tail_latent = torch.full((case.rows, max(case.tails), d.rank + d.rope), NAN)
    for row, n in enumerate(tail_of_row):
        tail_latent[row, :n] = problem.randn(n, d.rank + d.rope)
    q_absorbed = torch.einsum("bhd,hdr->bhr", problem.q_nope, problem.w_kc)  # [T, H, r]
    out_latent, tail_lse = reference.absorb(q_absorbed, problem.q_rope, tail_latent, torch.tensor(tail_of_row), d.scale)
    tail_out = torch.einsum("bhr,hrd->bhd", out_latent, problem.w_vc)  # [T, H, dv]

    attention = problem.attention(implementation)
    attention.plan(problem.groups)
    out, lse = run_and_merge(attention, problem, tail_out, tail_lse)

    prefix_of_row = {row: tail_latent[row, :0] for row in range(case.rows)}
    for group, latent in zip(problem.groups, problem.prefix_latent, strict=True):
        prefix_of_row |= {row: torch.cat([prefix_of_row[row], latent]) for row in group.rows}
    for row in range(case.rows):
        whole = torch.cat([prefix_of_row[row], tail_latent[row, : tail_of_row[row]]]).double()
        q_nope, q_rope = problem.q_nope[row : row + 1].double(), problem.q_rope[row : row + 1].double()
        q_latent = torch.einsum("bhd,hdr->bhr", q_nope, problem.w_kc.double())
        latent, row_lse = reference.absorb(q_latent, q_rope, whole[None], torch.tensor([len(whole)]), d.scale)
        row_out = torch.einsum("bhr,hrd->bhd", latent, problem.w_vc.double())
        k_nope, v = reference.expand(whole[:, : d.rank], problem.w_kc, problem.w_vc)
        naive_out, naive_lse = reference.naive(q_nope, q_rope, k_nope, whole[:, d.rank :], v, d.scale)
        assert_equal(naive_out, row_out, f"naive against absorb, out of row {row}")
        assert_equal(naive_lse, row_lse, f"naive against absorb, lse of row {row}")
        assert_equal(out[row : row + 1], row_out, f"out of row {row}")
        assert_equal(lse[row : row + 1], row_lse, f"lse of row {row}")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_empty_plan_leaves_the_tails(implementation: str) -> None:
    problem = Problem(Case((2, 3), (70, 10), heads=4))
    attention = problem.attention(implementation)
    attention.plan([])
    tail_out, tail_lse = problem.randn(5, 4, SMALL.v), problem.randn(5, 4)
    out, lse = run_and_merge(attention, problem, tail_out, tail_lse)
    assert torch.equal(out, tail_out) and torch.equal(lse, tail_lse)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_each_plan_replaces_the_one_before(implementation: str) -> None:
    problem = Problem(Case((2, 3), (300, 70), heads=4))
    attention = problem.attention(implementation)
    expected_out, expected_lse = problem.shared()
    for chosen in ([0, 1], [1], [], [0], [1, 0]):
        groups = [problem.groups[i] for i in chosen]
        attention.plan(groups)
        out, lse = run_and_merge(attention, problem, *problem.no_tail())
        shared = [row for group in groups for row in group.rows]
        others = [row for row in range(5) if row not in shared]
        assert not out[others].any() and (lse[others] == -torch.inf).all()
        if shared:
            assert_equal(out[shared], expected_out[shared], f"out of plan {chosen}")
            assert_equal(lse[shared], expected_lse[shared], f"lse of plan {chosen}")


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_invalid_plan_raises_and_keeps_the_one_before(implementation: str) -> None:
    problem = Problem(Case((2,), (70,), heads=4))
    attention = problem.attention(implementation)
    attention.plan(problem.groups)
    for bad, message in (
        (Segment((0, 2), 0, 70, Mode.NAIVE, (0,)), "rows must be in"),
        (Segment((0, 0), 0, 70, Mode.NAIVE, (0,)), "twice"),
        (Segment((), 0, 70, Mode.NAIVE, (0,)), "no rows"),
        (Segment((0,), 0, 0, Mode.NAIVE, (0,)), "0 tokens"),
        (Segment((0,), 0, 257, Mode.NAIVE, (0,)), "cannot hold"),
        (Segment((0,), 0, 70, Mode.NAIVE, (99,)), "chunk ids"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.plan([bad])
    out, _ = run_and_merge(attention, problem, *problem.no_tail())
    assert_equal(out, problem.shared()[0], "out")


def test_wrong_queries_are_refused_with_a_reason() -> None:
    problem = Problem(Case((2,), (70,), heads=4))
    attention = problem.attention("triton")
    attention.plan(problem.groups)
    q_nope, q_rope = problem.q_nope, problem.q_rope
    for arguments, message in (
        ((q_nope[:, :3], q_rope, 1.0), "q_nope must be"),
        ((q_nope, q_rope[:1], 1.0), "q_rope must be"),
        ((q_nope.double(), q_rope, 1.0), "expanded prefixes need"),
        ((torch.empty(2, SMALL.nope, 4).transpose(1, 2), q_rope, 1.0), "contiguous"),
        ((q_nope, q_rope, 0.0), "softmax_scale"),
    ):
        with pytest.raises(ValueError, match=message):
            attention.run(LAYER, *arguments)


def test_workspace_is_known_beforehand() -> None:
    problem = Problem(Case((2,), (70,), heads=4))
    sizes = dict(max_rows=2, heads=4, v_head_dim=SMALL.v)
    whole = TritonSharedAttention(problem.buffers, max_rows=2, heads=4, num_ctas=8, tiles=[LARGEST_TILE])
    assert whole.workspace_bytes == TritonSharedAttention.workspace_bytes_for(
        **sizes, chunks=problem.buffers.chunks, sm_count=8
    )
    assert problem.attention("reference").workspace_bytes == TorchSharedAttention.workspace_bytes_for(**sizes)
    wide = TritonSharedAttention(problem.buffers, max_rows=2, plan_rows=70, heads=4, num_ctas=8, tiles=[LARGEST_TILE])
    assert (
        whole.workspace_bytes
        < wide.workspace_bytes
        == TritonSharedAttention.workspace_bytes_for(**sizes, plan_rows=70, chunks=problem.buffers.chunks, sm_count=8)
    )
    on_torch = TorchSharedAttention(problem.buffers, max_rows=2, plan_rows=70, heads=4)
    assert on_torch.workspace_bytes == TorchSharedAttention.workspace_bytes_for(**sizes, plan_rows=70)


@pytest.mark.parametrize("kind", [TritonSharedAttention, TorchSharedAttention])
def test_a_prefill_plan_may_have_more_rows_than_a_step(kind: type) -> None:
    """It uses the memory of partials that the step's plan uses, and leaves that plan as it is."""
    problem = Problem(Case((40, 26), (300, 70), heads=2, alone=4))
    options = dict(num_ctas=3) if kind is TritonSharedAttention else {}
    attention = kind(problem.buffers, max_rows=4, plan_rows=70, heads=2, **options)
    attention.try_out(torch.float32)
    few = dataclasses.replace(problem.groups[1], rows=(0, 3))
    attention.plan([few])
    wide = attention.make_plan(problem.groups, 70)
    attention.run(LAYER, problem.q_nope, problem.q_rope, SMALL.scale, wide)
    tail_out, tail_lse = problem.no_tail()
    out, lse = torch.full_like(tail_out, NAN), torch.full_like(tail_lse, NAN)
    attention.merge(tail_out, tail_lse, out, lse, wide)
    expected_out, expected_lse = problem.shared()
    assert_equal(out, expected_out, "out")
    assert_equal(lse, expected_lse, "lse")
    attention.run(LAYER, problem.q_nope[:4], problem.q_rope[:4], SMALL.scale)
    attention.merge(tail_out[:4], tail_lse[:4], out[:4], lse[:4])
    assert torch.isinf(lse[1:3]).all() and torch.isfinite(lse[[0, 3]]).all() and not out[1:3].any()
    with pytest.raises(ValueError, match="row"):
        attention.plan(problem.groups)
    with pytest.raises(ValueError, match="row"):
        attention.make_plan([dataclasses.replace(few, rows=(0, 70))], 71)


def test_tile_follows_the_rows_and_a_wrong_number_is_refused() -> None:
    case = Case((65,), (100,), heads=2, alone=1)
    problem = Problem(case)
    attention = TritonSharedAttention(problem.buffers, max_rows=66, heads=2, num_ctas=4)
    attention.plan(problem.groups, rows=66)
    out, _ = run_and_merge(attention, problem, *problem.no_tail())
    assert_equal(out, problem.shared()[0], "out")
    attention.plan([], rows=64)
    with pytest.raises(ValueError, match="planned for tiles of 64 rows"):
        attention.run(LAYER, problem.q_nope, problem.q_rope, 1.0)


def test_the_plan_picks_among_tiles_that_keep_up() -> None:
    """Batches of one size launch both kernels; the list is for the one that pads less, and the other finds nothing."""
    narrow, wide = Tile(block_rows=16, ctas_per_sm=2), Tile(block_rows=32)
    problem = Problem(Case((16, 20), (300, 70), heads=2))
    sizes = dict(max_rows=36, heads=2, num_ctas=3)
    attention = TritonSharedAttention(problem.buffers, tiles=[narrow, wide], **sizes)
    launched: list[tuple[int, int]] = []

    class Watched:
        LayerKeys, tiles_of = triton_naive.LayerKeys, staticmethod(triton_naive.tiles_of)

        @staticmethod
        def run(*args, tile, slot, **options):
            launched.append((tile.block_rows, int(args[3][slot])))
            triton_naive.run(*args, tile=tile, slot=slot, **options)

    attention._kernel = Watched
    expected, expected_lse = problem.shared()
    for groups, used in ((problem.groups[:1], 16), (problem.groups[1:], 32), (problem.groups, 16), ([], None)):
        attention.plan(groups, rows=36)
        launched.clear()
        out, lse = run_and_merge(attention, problem, *problem.no_tail())
        assert [rows for rows, _ in launched] == [16, 32]
        assert [rows for rows, items in launched if items] == ([used] if used else [])
        rows = [row for group in groups for row in group.rows]
        assert_equal(out[rows], expected[rows], f"out with tiles of {used}")
        assert_equal(lse[rows], expected_lse[rows], f"lse with tiles of {used}")
        made = attention.make_plan(groups, rows=36)
        launched.clear()
        attention.run(LAYER, problem.q_nope, problem.q_rope, 1.0, made)
        assert [rows for rows, _ in launched] == [used or 32]  # what a plan of its own does not need is not launched
    alone = TritonSharedAttention(problem.buffers, tiles=[Tile(block_rows=16), wide], **sizes)
    alone.plan(problem.groups[:1], rows=36)
    assert [tile.block_rows for tile in alone._planned.tiles] == [32]  # one program of 16 rows does not keep up


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_more_segments_than_there_is_room_for_are_an_error(implementation: str) -> None:
    """And the plan before stays. Room is by partial rows: here two for each row, and those for splits."""
    problem = Problem(Case((4, 4, 4), (300, 70, 20), heads=4))
    sizes = dict(max_rows=12, heads=4)
    if implementation == "triton":
        attention = TritonSharedAttention(problem.buffers, num_ctas=1, tiles=[SMALL_TILE], segments_per_row=2, **sizes)
    else:
        attention = TorchSharedAttention(problem.buffers, segments_per_row=2, **sizes)
    attention.plan(problem.groups)
    everybody = [dataclasses.replace(group, rows=tuple(range(12))) for group in problem.groups]
    with pytest.raises(ValueError, match="36 rows need as many partial rows; there is room for"):
        attention.plan(everybody)
    out, _ = run_and_merge(attention, problem, *problem.no_tail())
    assert_equal(out, problem.shared()[0], "out")
    attention.plan(everybody[:2])


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_plan_beside_the_one_that_is_set(implementation: str) -> None:
    problem = Problem(Case((2, 3), (300, 70), heads=4))
    attention = problem.attention(implementation)
    attention.plan(problem.groups[:1])
    other = attention.make_plan(problem.groups[1:], 5)
    expected_out, expected_lse = problem.shared()
    for plan, segment in ((None, problem.groups[0]), (other, problem.groups[1]), (None, problem.groups[0])):
        tail_out, tail_lse = problem.no_tail()
        attention.run(LAYER, problem.q_nope, problem.q_rope, problem.case.dims.scale, plan)
        attention.merge(tail_out, tail_lse, tail_out, tail_lse, plan)
        rows, others = list(segment.rows), [row for row in range(5) if row not in segment.rows]
        assert_equal(tail_out[rows], expected_out[rows], "out")
        assert_equal(tail_lse[rows], expected_lse[rows], "lse")
        assert not tail_out[others].any() and (tail_lse[others] == -torch.inf).all()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_trying_out_runs_every_kernel_of_every_tile(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run`, and `merge` without and with lse, for each tile, for the smallest and largest batch, and for the largest
    that has a plan of its own; then no plan."""
    problem = Problem(Case((2, 3), (70, 10), heads=4, unused=15))
    if implementation == "triton":
        tiles = [SMALL_TILE, dataclasses.replace(SMALL_TILE, block_rows=32)]
        rows = dict(max_rows=20, plan_rows=30)
        attention = TritonSharedAttention(problem.buffers, **rows, heads=4, num_ctas=2, tiles=tiles)
    else:
        attention = problem.attention(implementation)
    attention.plan(problem.groups)
    calls = []
    run, merge = attention.run, attention.merge
    monkeypatch.setattr(attention, "run", lambda layer, q, *rest: (calls.append(("run", len(q))), run(layer, q, *rest)))
    monkeypatch.setattr(
        attention,
        "merge",
        lambda *given, plan: (calls.append((f"merge{len(given) - 3}", len(given[0]))), merge(*given, plan=plan)),
    )
    attention.try_out(torch.float32)
    monkeypatch.undo()
    sizes = {1, 16, 20, 30} if implementation == "triton" else {1}
    assert set(calls) == {(name, rows) for name in ("run", "merge0", "merge1") for rows in sizes}
    tail_out, tail_lse = problem.randn(5, 4, SMALL.v), problem.randn(5, 4)
    if implementation == "reference":
        out, lse = run_and_merge(attention, problem, tail_out, tail_lse)
        assert torch.equal(out, tail_out) and torch.equal(lse, tail_lse)


def test_dispatch_takes_the_reference_without_a_gpu() -> None:
    buffers = Problem(Case((2,), (70,), heads=4)).buffers
    assert isinstance(make_shared_attention(buffers, max_rows=2, heads=4, device="cpu"), TorchSharedAttention)
    with pytest.raises(ValueError, match="heads"):
        make_shared_attention(buffers, max_rows=2, heads=5, device="cpu")
    with pytest.raises(ValueError, match="not on cuda"):
        make_shared_attention(buffers, max_rows=2, heads=4, device="cuda")
