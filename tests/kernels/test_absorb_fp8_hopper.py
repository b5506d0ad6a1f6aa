"""The FP8 absorb kernels for Hopper without a GPU: their own source run in torch (gluon_in_torch.py), as
HopperAbsorbFP8 calls them, against reference_fp8.absorb_fp8.

The order of bytes in registers is not part of that: functions that move them are replaced by what they mean, and
tests/gpu covers them. Everything that no kernel may read is NaN, as in test_absorb_fp8.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_in_torch import Descriptor, Place, Pointer, Program
from test_absorb_fp8 import LAYOUT, NAN, SOFTMAX_SCALE, Case, Problem, assert_close
from torch import Tensor

from sglang_mla_ext.kernels import merge
from sglang_mla_ext.kernels.absorb import sm90_fp8_absorb, sm90_fp8_few_heads
from sglang_mla_ext.kernels.absorb.items import ITEM_BEGIN
from sglang_mla_ext.kernels.absorb.paged_fp8 import HopperAbsorbFP8, TritonAbsorbFP8
from sglang_mla_ext.kernels.absorb.schedule import AbsorbCapacity
from sglang_mla_ext.kernels.absorb.sm90_parts import fp8_consumers, fp8_query, fp8_tiles, work_items
from sglang_mla_ext.kernels.absorb.sm90_parts import query as query_copies
from sglang_mla_ext.kernels.constants import LOG2E
from sglang_mla_ext.kernels.dispatch import absorb_fp8_bytes, make_absorb_fp8, make_hopper_absorb_fp8
from sglang_mla_ext.kernels.storage.expanded import to_fp8

# Weights that fall on the other side of a rounding step, because blocks come in another order.
BOUND = 2e-3

ODD_LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 320, 599)
COMMON = [work_items, fp8_tiles, query_copies, fp8_query]


def _clear_behind(pairs: Place, first: int, valid: int) -> None:
    rows, per_block = pairs.memory, pairs.memory.shape[2]
    rows[valid:, first // per_block : (first + 256) // per_block] = 0


BYTES: dict[str, Any] = {
    "scales_of_keys": lambda scale_s, slot, KEYS, LAYOUT: scale_s.index(slot).load()[:, 0],
    "log2_of_power": torch.log2,
    "inverse_of_power": torch.reciprocal,
    "clear_behind": _clear_behind,
    "values_tile": lambda pairs, first, PERMUTE, OPERAND: pairs.load()[:, first : first + 64].T,
    "_by_dim": lambda acc, N: acc.T,
    "_by_position": lambda weights_t, N: weights_t.float().T,
    "_pack": lambda weights: to_fp8(weights).float(),
    "magnitudes": lambda values: values.bfloat16().view(torch.int16) & 0x7FFF,
    "number": lambda bits: bits.view(torch.float32),
    "to_e4m3": to_fp8,
}
"""What functions that move or convert bytes mean, with keys and dims in their own order."""


class InTorch:
    """Takes the place of both kernels' `run`."""

    def __init__(self, seed: int, faults: dict[str, Any]) -> None:
        self.seed = seed
        self.changes = {name: lambda *_, function=function: function for name, function in BYTES.items()} | faults

    def hopper(self, *arguments: Any, causal: bool = True, **options: Any) -> None:
        modules = [*COMMON, fp8_consumers, sm90_fp8_absorb]
        capacity = arguments[5]
        queries = capacity.query_tokens if causal else 1
        constants = dict(SLOTS=sm90_fp8_absorb.SLOTS, HEADS=capacity.query_heads, QUERY_TOKENS=queries)
        self._run(modules, "absorb_fp8_hopper_kernel", constants, *arguments, **options)

    def few(self, *arguments: Any, **options: Any) -> None:
        capacity = arguments[5]
        constants = dict(N=capacity.tile_rows, HEADS=capacity.query_heads, QUERY_TOKENS=capacity.query_tokens)
        self._run([*COMMON, sm90_fp8_few_heads], "absorb_fp8_few_heads_kernel", constants, *arguments, **options)

    def _run(
        self,
        modules: list[Any],
        kernel: str,
        constants: dict[str, int],
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        work: Tensor,
        page_table: Tensor,
        capacity: AbsorbCapacity,
        partial_out: Tensor,
        partial_lse2: Tensor,
        softmax_scale: float,
    ) -> None:
        results, query = (partial_out, partial_lse2), (q_absorbed, q_rope)
        sm90_fp8_absorb.launch_arguments(*query, pool, work, page_table, capacity, *results, softmax_scale)
        scales = LAYOUT.scale(pool)[:, None].expand(-1, 4)
        table = page_table.as_strided([page_table.shape[0] * page_table.stride(0)], [1])
        for index in range(capacity.programs):
            program = Program(modules, index, capacity.programs, self.seed, self.changes)
            program.run(
                kernel,
                *(Descriptor(query_copies.for_tma(q), [1, capacity.strip_rows, 64], 2) for q in query),
                Descriptor(LAYOUT.content(pool).float(), [64, 512], 1),
                Descriptor(LAYOUT.rope(pool).float(), [64, 64], 2),
                Descriptor(scales, [64, 4], 4),
                Pointer(work),
                Pointer(table),
                Pointer(partial_out.view(-1)),
                Pointer(partial_lse2.view(-1)),
                softmax_scale * LOG2E,
                *constants.values(),
            )


def merge_many_heads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the merge for 64 heads of a row and not for each: the interpreter takes as long for either."""
    shape = lambda rows, heads, dv: merge.Shape(min(64, 1 << (heads - 1).bit_length()), merge.FIRSTS, 1)  # noqa: E731
    monkeypatch.setattr(merge, "shape_for", shape)


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`in_torch(problem, seed, faults, **options)`: attention by HopperAbsorbFP8; with a list of lengths, of several
    steps."""

    def run(
        problem: Problem,
        seed: int = 0,
        faults: dict[str, Any] | None = None,
        steps: tuple[tuple[int, ...], ...] = (),
        own_output: bool = True,
    ) -> tuple[Tensor, Tensor]:
        stand_in, case = InTorch(seed, faults or {}), problem.case
        monkeypatch.setattr(sm90_fp8_absorb, "run", stand_in.hopper)
        monkeypatch.setattr(sm90_fp8_few_heads, "run", stand_in.few)
        merge_many_heads_at_once(monkeypatch)
        sizes: dict[str, Any] = dict(max_requests=len(case.lens) + 2, heads=case.heads, query_tokens=case.queries)
        absorb = make_hopper_absorb_fp8(**sizes, device="cpu", num_sms=case.num_sms)
        absorb._partial_out = absorb._partial_out.float().fill_(NAN)  # so that rounding them hides nothing
        absorb._partial_lse2.fill_(NAN)
        out, lse = torch.full(problem.q_absorbed.shape, NAN), torch.full(problem.q_absorbed.shape[:2], NAN)
        if own_output:
            out = absorb.output(len(out), out.dtype)
            assert out.data_ptr() == absorb._partial_out.data_ptr()
        for lens in (*steps, case.lens):
            step, pool = torch.tensor(lens, dtype=torch.int32), problem.pool.clone()
            for row, n in enumerate(lens):  # what this step may not read
                table = problem.table[row].long().repeat_interleave(case.page_size)
                behind = table[n : case.lens[row]] * case.page_size + torch.arange(n, case.lens[row]) % case.page_size
                pool[behind] = 0x7F
                LAYOUT.scale(pool)[behind], LAYOUT.rope(pool)[behind] = NAN, NAN
            absorb.begin_step(step, problem.table)
            query = problem.q_absorbed, problem.q_rope
            absorb.run(*query, pool, problem.table, step, SOFTMAX_SCALE, out, lse)
        return out, lse

    return run


def few_head_cases() -> Any:
    yield Case((129, 1, 2, 0, 64), heads=8, queries=2, num_sms=3)  # one key for two query tokens: the first sees none
    yield Case((700, 65), heads=8, queries=2, num_sms=9)  # keys are cut
    for heads in (8, 16):
        yield Case(ODD_LENGTHS, heads=heads, num_sms=3)
    yield Case((0, 0), heads=16)
    yield Case((1,), heads=8)
    yield Case((1025, 1), heads=16, num_sms=6)  # keys are cut
    yield Case((300, 90), heads=16, outlier=True, num_sms=2)


def many_head_cases() -> Any:
    yield Case((65, 128, 1), heads=128, queries=2, num_sms=4)
    yield Case((129, 1, 2, 0, 64, 400), heads=32, queries=2, num_sms=3)  # two query tokens in a tile
    yield Case((700, 65), heads=8, queries=3, num_sms=9)  # three, and keys are cut
    for heads, queries in ((16, 4), (8, 7), (16, 5), (32, 3), (64, 2), (24, 3)):  # some in several tiles
        yield Case((129, 1, 2, 66), heads=heads, queries=queries, num_sms=4)
    yield Case((3, 7, 70, 130), heads=16, queries=8, num_sms=3)  # the last keys are in two blocks
    yield Case((386,), heads=128, queries=3, num_sms=13)  # and in one item, where keys are cut
    yield Case(ODD_LENGTHS, heads=32, num_sms=3)
    for heads in (64, 128, 24):
        yield Case(ODD_LENGTHS[::2] if heads < 100 else ODD_LENGTHS[1::3], heads=heads, num_sms=3)
    yield Case((0, 0), heads=64)
    yield Case((1025, 1), heads=64, num_sms=6)  # keys are cut
    yield Case((300, 90), heads=128, outlier=True, num_sms=2)


@pytest.mark.parametrize(("seed", "case"), list(enumerate([*few_head_cases(), *many_head_cases()])), ids=str)
def test_the_kernels_source_in_torch_equals_the_reference(in_torch: Any, seed: int, case: Case) -> None:
    problem = Problem(case)
    # Results come about where they are wanted, and with every other case elsewhere.
    assert_close(in_torch(problem, seed, own_output=seed % 2 == 0), problem.expected(exact=False), BOUND)


@pytest.mark.parametrize("heads", [16, 64])
def test_a_later_step_has_other_lengths(in_torch: Any, heads: int) -> None:
    problem = Problem(Case((130, 65, 0, 400), heads=heads, num_sms=4))
    found = in_torch(problem, steps=((129, 64, 0, 1), (1, 0, 0, 399)))
    assert_close(found, problem.expected(exact=False), BOUND)


def _changed(**changes: Any) -> Any:
    """A stand-in for mbarrier with some of its operations replaced."""
    return lambda program, barriers: SimpleNamespace(**vars(barriers) | changes)


FAULTS: dict[str, Any] = {
    "nobody waits": {"mbarrier": lambda program, b: _changed(wait=lambda barrier, parity: program.pause())(program, b)},
    "one reader is not counted": {"mbarrier": _changed(init=lambda barrier, count: barrier.init(1))},
    "values behind the last key stay": {"clear_behind": lambda *_: lambda *_: None},
    "the ring has no phases": {"next_slot": lambda *_: lambda slot, phase, slots: ((slot + 1) % slots, 0)},
}


@pytest.mark.parametrize("heads", [16, 64])
def test_a_wrong_kernel_would_be_found_out(in_torch: Any, heads: int) -> None:
    problem = Problem(Case((500, 130, 0), heads=heads))
    expected = problem.expected(exact=False)
    assert_close(in_torch(problem), expected, BOUND)
    for changes in FAULTS.values():
        with pytest.raises(AssertionError):
            assert_close(in_torch(problem, faults=changes), expected, BOUND)


@pytest.mark.parametrize(("heads", "queries"), [(8, 2), (16, 5)])
def test_a_wrong_mask_would_be_found_out(in_torch: Any, heads: int, queries: int) -> None:
    """The fields that it depends on read another one, which is 0, or the blocks that it concerns are not known."""
    problem = Problem(Case((130, 65), heads=heads, queries=queries, num_sms=2))
    assert_close(in_torch(problem), problem.expected(exact=False), BOUND)
    faults: dict[str, Any] = {"ITEM_LAST": lambda *_: ITEM_BEGIN.value}
    if heads * queries > 64:
        faults |= {"ITEM_FIRST_ROW": lambda *_: ITEM_BEGIN.value, "seen_by_all": lambda *_: lambda *_: 1 << 30}
    for name, fault in faults.items():
        with pytest.raises(AssertionError):
            assert_close(in_torch(problem, faults={name: fault}), problem.expected(exact=False), BOUND)


def test_what_does_not_fit_is_refused() -> None:
    sizes: dict[str, Any] = dict(max_requests=2, device="cpu")
    for wrong in (dict(heads=20), dict(heads=16, page_size=32)):
        with pytest.raises(ValueError, match="the kernels for Hopper take"):
            make_hopper_absorb_fp8(**sizes, **wrong)
    absorb = make_hopper_absorb_fp8(**sizes, heads=16)
    q, table = torch.zeros(2, 16, 576), torch.zeros(2, 3, dtype=torch.int32)
    pool, lens = torch.zeros(128, LAYOUT.row_bytes, dtype=torch.uint8), torch.ones(2, dtype=torch.int32)
    arguments = q[..., :512], q[..., 512:], pool, table, lens, 1.0, torch.zeros(2, 16, 512), torch.zeros(2, 16)
    with pytest.raises(ValueError, match="must be those of begin_step"):
        absorb.run(*arguments)


def test_where_a_way_does_not_run_the_other_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, told = torch.zeros(64, LAYOUT.row_bytes, dtype=torch.uint8), []
    sizes: dict[str, Any] = dict(max_requests=2, heads=16, dtype=torch.float32)
    assert isinstance(make_absorb_fp8(pool, **sizes, on_failure=lambda *_: told.append(1)), TritonAbsorbFP8)
    assert not told, "on a CPU there is no other way"
    monkeypatch.setattr(sm90_fp8_absorb, "supports", lambda *_: True)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(sm90_fp8_few_heads, "run", fail)
    failed = make_absorb_fp8(pool, **sizes, on_failure=lambda error: told.append(str(error)))
    assert isinstance(failed, TritonAbsorbFP8)
    assert told == ["out of shared memory"]
    monkeypatch.setattr(sm90_fp8_few_heads, "run", lambda *_, **__: None)
    assert isinstance(make_absorb_fp8(pool, **sizes, on_failure=fail), HopperAbsorbFP8)
    monkeypatch.setattr(sm90_fp8_absorb, "run", lambda *_, **__: None)
    assert isinstance(make_absorb_fp8(pool, **sizes, on_failure=fail, query_tokens=2), HopperAbsorbFP8)  # 32 rows


def test_an_empty_batch() -> None:
    absorb = make_hopper_absorb_fp8(max_requests=2, heads=16, device="cpu")
    for dtype in (torch.bfloat16, torch.float32):
        assert absorb.output(0, dtype).shape == (0, 16, 512)
    absorb.begin_step(torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32))
    q, pool = torch.zeros(0, 16, 576), torch.zeros(64, LAYOUT.row_bytes, dtype=torch.uint8)
    lens, table = torch.zeros(0, dtype=torch.int32), torch.zeros(0, 1, dtype=torch.int32)
    out, lse = absorb.output(0, torch.bfloat16), torch.zeros(0, 16)
    absorb.run(q[..., :512], q[..., 512:], pool, table, lens, 1.0, out, lse)


@pytest.mark.parametrize("queries", [1, 3, 8])
def test_the_workspace_is_bounded_and_known_beforehand(queries: int) -> None:
    sizes: dict[str, Any] = dict(max_requests=1024 // queries, heads=128, query_tokens=queries, num_sms=132)
    absorb = make_hopper_absorb_fp8(**sizes, device="cpu")
    assert absorb.workspace_bytes < 150 << 20
    portable = TritonAbsorbFP8(**sizes, device="cpu")
    most = absorb_fp8_bytes(**sizes, layout=LAYOUT)
    assert most == max(absorb.workspace_bytes, portable.workspace_bytes)
