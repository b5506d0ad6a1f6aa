"""Grouped absorb over FP8 rows without a GPU: both kernels' own source run in torch (gluon_in_torch.py); the schedule
of the tails, the query's rounding and the merges in Triton's interpreter.

Expected is what the kernels round, in torch: reference_fp8.absorb_fp8 over all keys of a row, because prefixes end with
a block; and attention in float64 to the rows as they are read back. Rows that nobody may read, partials of earlier
launches and entries of the page table that nobody wrote are NaN or point nowhere.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_absorb_fp8 import LAYOUT, NAN, SOFTMAX_SCALE, assert_close, converts_like_a_gpu  # noqa: F401
from test_absorb_fp8_hopper import BOUND, InTorch
from test_grouped_absorb import module  # noqa: F401 - a fixture
from test_latent_rows import poisoned_pool

from sglang_mla_ext.kernels.absorb import sm90_fp8_absorb as absorb_fp8_hopper
from sglang_mla_ext.kernels.absorb import sm90_fp8_few_heads as absorb_fp8_few_heads
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.storage.latent_rows import dequantize, quantize
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Group, Plan, Stacking

RANK, ROPE, PAGE = 512, 64, 64
MAX_ROWS, MAX_TOKENS = 20, 800
ODD_TAILS = (0, 1, 63, 64, 65, 130)
# Rounding of weights to e4m3.
EXACT_BOUND = 0.02
NOWHERE = 1 << 30

Result = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def fp8(module: Any) -> Iterator[Any]:  # noqa: F811
    """`kernels.absorb.grouped_fp8`, over the grouped_absorb of the fixture `module`."""
    name = "sglang_mla_ext.kernels.absorb.grouped_fp8"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    del sys.modules[name]


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = InTorch(seed=0, faults={})
    monkeypatch.setattr(absorb_fp8_hopper, "run", stand_in.hopper)
    monkeypatch.setattr(absorb_fp8_few_heads, "run", stand_in.few)


class Problem:
    """An FP8 cache in pages, and requests of which some begin with the same pages; seeded."""

    def __init__(self, heads: int, groups: Sequence[tuple[int, int]], tails: Sequence[int], seed: int = 0) -> None:
        """
        Args:
            groups: rows and tokens of the prefix of each; whose rows those are is drawn.
            tails: tokens of each row of the step.
        """
        generator = torch.Generator().manual_seed(seed + len(tails))
        rows, order = len(tails), torch.randperm(len(tails), generator=generator).tolist()
        self.groups, self.prefixes = [], {}  # the prefix of each row that has one
        needed = sum(end for _, end in groups) // PAGE + sum(-(-tail // PAGE) for tail in tails)
        self.free = torch.randperm(needed + 2, generator=generator).tolist()  # two pages are nobody's
        self.pool = poisoned_pool((needed + 2) * PAGE, LAYOUT)
        self.req_to_token = torch.full((MAX_ROWS + 5, MAX_TOKENS), NOWHERE, dtype=torch.int32)
        self.pool_indices = torch.randperm(MAX_ROWS + 5, generator=generator)[:rows]
        self.prefix_lens = torch.zeros(MAX_ROWS, dtype=torch.int32)
        for size, end in groups:
            members, order = tuple(sorted(order[:size])), order[size:]
            self.groups.append(Group(members, None, 0, end, Mode.GROUPED_ABSORB))
            self.prefix_lens[list(members)] = end
            self.prefixes |= dict.fromkeys(members, self._write(end, generator))
        for row, tail in enumerate(tails):
            slots = torch.cat([self.prefixes.get(row, torch.zeros(0, dtype=torch.long)), self._write(tail, generator)])
            self.req_to_token[self.pool_indices[row], : len(slots)] = slots.int()
        self.seq_lens = torch.tensor(tails, dtype=torch.long) + self.prefix_lens[:rows]
        self.q = torch.randn(rows, heads, RANK + ROPE, generator=generator).bfloat16().float()  # what the kernels read

    def _write(self, tokens: int, generator: torch.Generator) -> torch.Tensor:
        """Give so many tokens pages and rows; their slots."""
        pages = torch.tensor([self.free.pop() for _ in range(-(-tokens // PAGE))], dtype=torch.long)
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:tokens]
        sizes = 10 ** (2 * torch.rand(tokens, 1, generator=generator) - 1)
        latent = sizes * torch.randn(tokens, RANK, generator=generator)
        rows = quantize(latent, torch.randn(tokens, ROPE, generator=generator))
        for part in (slice(0, LAYOUT.rope_offset - 12), slice(LAYOUT.rope_offset, None)):  # all but the padding
            self.pool[slots, part] = rows[:, part]
        return slots

    def shorten(self) -> None:
        """Take the last token of each tail away: nobody may read it any more."""
        longer = self.seq_lens > self.prefix_lens[: len(self.seq_lens)]
        self.seq_lens = self.seq_lens - longer.long()
        gone = self.req_to_token[self.pool_indices[longer], self.seq_lens[longer]].long()
        self.pool[gone] = 0x7F
        LAYOUT.scale(self.pool)[gone], LAYOUT.rope(self.pool)[gone] = NAN, NAN

    def run(self, grouped: Any) -> Result:
        grouped.prepare(self.req_to_token, self.pool_indices, self.seq_lens, self.prefix_lens)
        grouped._partial_out.fill_(NAN)
        grouped._partial_lse2.fill_(NAN)
        return grouped.run(self.q, self.pool, SOFTMAX_SCALE)

    def expected(self, exact: bool) -> Result:
        """Attention to the rows as they are read back, in float64; or where not exact, in FP8's steps."""
        parts = []
        for row, length in enumerate(self.seq_lens.tolist()):
            rows = self.pool[self.req_to_token[self.pool_indices[row], :length].long()]
            q = self.q[row : row + 1]
            if exact:
                parts.append(self._attend(q, rows))
            else:
                keys = reference_fp8.keys_of_rows(rows)
                parts.append(reference_fp8.absorb_fp8(q[..., :RANK], q[..., RANK:], keys, SOFTMAX_SCALE))
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)

    def _attend(self, q: torch.Tensor, rows: torch.Tensor) -> Result:
        """Of the rounded query `[1, H, RANK + ROPE]`: rounding that is not the kernels'."""
        rounded = torch.cat(dequantize(quantize(q[0, :, :RANK], q[0, :, RANK:])), dim=-1)[None].double()
        keys = torch.cat(dequantize(rows), dim=-1)[None].double()
        return reference.absorb(
            rounded[..., :RANK], rounded[..., RANK:], keys, torch.tensor([len(rows)]), SOFTMAX_SCALE
        )

    def check(self, actual: Result) -> None:
        steps, exact = self.expected(exact=False), self.expected(exact=True)
        for row in range(len(self.q)):  # each for itself: outputs over few keys are larger
            ours = tuple(part[row : row + 1] for part in actual)
            assert_close(ours, tuple(part[row : row + 1] for part in steps), BOUND)
            assert_close(ours, tuple(part[row : row + 1] for part in exact), EXACT_BOUND)


def make(fp8: Any, heads: int, programs: int = 4) -> Any:
    grouped = fp8.HopperGroupedAbsorbFP8(
        Stacking(PAGE, 64 // heads),
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        dtype=torch.float32,  # so that rounding of partials hides nothing
        device="cpu",
        programs=programs,
    )
    grouped._table.fill_(NOWHERE)
    return grouped


@pytest.mark.parametrize("programs", [1, 7], ids=["whole", "cut"])
@pytest.mark.parametrize(
    ("heads", "groups"),
    [(8, ((9, 192), (1, 64), (2, 128))), (16, ((5, 192), (1, 64), (3, 128))), (32, ((3, 192), (1, 64), (2, 128)))],
    ids=["8", "16", "32"],
)
def test_every_row_attends_to_its_prefix_and_its_tail(fp8: Any, heads: int, groups: Any, programs: int) -> None:
    """One group is more than a tile, others are less; some rows are in none, and tails go round the odd lengths."""
    rows = sum(size for size, _ in groups) + 3
    problem = Problem(heads, groups, (ODD_TAILS * 3)[:rows])
    grouped = make(fp8, heads, programs)
    grouped.plan(problem.groups, rows)
    problem.check(problem.run(grouped))
    assert (int(grouped._group_partials[8 + 3 * MAX_ROWS :].max()) > 1) == (programs > 1), "splits of the prefixes"


@pytest.mark.parametrize(
    ("groups", "tails"),
    [((), ODD_TAILS), ((), (0, 0)), (((3, 128), (2, 64)), (0,) * 5)],
    ids=["no groups", "no keys", "no tails"],
)
def test_steps_that_lack_a_half(fp8: Any, groups: Any, tails: tuple[int, ...]) -> None:
    problem, grouped = Problem(16, groups, tails), make(fp8, 16)
    grouped.plan(problem.groups, len(tails))
    out, lse = problem.run(grouped)
    problem.check((out, lse))
    without = problem.seq_lens == 0
    assert (out[without] == 0).all() and (lse[without] == -torch.inf).all()


def test_an_empty_batch(fp8: Any) -> None:
    grouped = make(fp8, 16)
    grouped.plan([], 0)
    nothing = torch.zeros(0, dtype=torch.long)
    grouped.prepare(torch.zeros(1, 1, dtype=torch.int32), nothing, nothing, torch.zeros(0, dtype=torch.int32))
    out, lse = grouped.run(torch.zeros(0, 16, RANK + ROPE), poisoned_pool(PAGE, LAYOUT), SOFTMAX_SCALE)
    assert out.shape == (0, 16, RANK) and lse.shape == (0, 16)


def test_later_steps_follow_plans_rows_and_lengths(fp8: Any) -> None:
    """Other rows, other groups, none at all, and other tails under one plan: nothing of an earlier step is left, and
    what a captured graph would read stays where it is."""
    grouped = make(fp8, 16)
    tensors = {name: value for name, value in vars(grouped).items() if isinstance(value, torch.Tensor)}
    places = {name: value.data_ptr() for name, value in tensors.items()}
    for groups, tails in (
        (((6, 128), (2, 192)), (130, 1, 64, 0, 65, 63, 128, 2, 200)),
        (((2, 64),), (70, 3)),
        ((), (65, 0, 130, 1)),
        (((1, 64), (3, 128)), (1, 64, 0, 65, 2)),
    ):
        problem = Problem(16, groups, tails)
        grouped.plan(problem.groups, len(tails))
        for _ in range(2):
            problem.check(problem.run(grouped))
            problem.shorten()
    found = {name: value.data_ptr() for name, value in vars(grouped).items() if isinstance(value, torch.Tensor)}
    assert found == places
    assert grouped.workspace_bytes == sum(value.nbytes for value in tensors.values())


@pytest.mark.parametrize("heads", [8, 16, 32])
def test_partials_of_both_lists_have_room_in_the_same_tensors(fp8: Any, heads: int) -> None:
    """As many of either as there can ever be."""
    for programs in (1, 132):
        grouped = make(fp8, heads, programs)
        groups, tails = grouped._capacity, grouped._tail_capacity
        assert tails.max_group_partials == groups.max_group_partials and tails.table == groups.table
        assert len(grouped._partial_out) == groups.max_partial_rows == tails.max_partial_rows
        assert tails.max_partial_rows - tails.max_group_partials == MAX_ROWS + 2 * programs


def test_a_query_that_was_not_planned_is_refused(fp8: Any) -> None:
    grouped = make(fp8, 16)
    grouped.plan([], 8)
    with pytest.raises(ValueError, match="planned for 8 rows of 16 heads"):
        grouped.run(torch.zeros(4, 16, RANK + ROPE), poisoned_pool(PAGE, LAYOUT), SOFTMAX_SCALE)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(absorb_fp8_hopper, "supports", lambda *_: True)


@pytest.fixture
def backend(fp8: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend over the FP8 pool of `problem`, not constructed: with what a grouped step needs."""
    from sglang_mla_ext.adapter.cpu import standins

    if standins.needed():
        monkeypatch.delitem(sys.modules, "sgl_kernel")  # that of `module` has less than SGLang imports
        standins.install()
    for name in ("backend_fp8", "backend_flashmla"):
        monkeypatch.delitem(sys.modules, f"sglang_mla_ext.adapter.{name}", raising=False)
    kind = importlib.import_module("sglang_mla_ext.adapter.backend_fp8").FP8HybridBackend
    problem = Problem(16, ((5, 128), (2, 64)), (130, 1, 64, 0, 65, 63, 2, 3))
    made = kind.__new__(kind)
    made.problem, made._heads, made.options = problem, 16, SimpleNamespace(mode="grouped_absorb")
    made.kv_lora_rank, made.qk_rope_head_dim = RANK, ROPE
    made.max_rows, made.max_context_len, made.min_rows = MAX_ROWS, MAX_TOKENS, 2
    made.req_to_token, made._prefix_lens = problem.req_to_token, torch.zeros(MAX_ROWS, dtype=torch.int32)
    made._layers = [SimpleNamespace(attn_mqa=SimpleNamespace(layer_id=3))]
    made.token_to_kv_pool = SimpleNamespace(rows=lambda layer_id: {3: problem.pool}[layer_id], layout=LAYOUT)
    made._attention, made._grouped_bytes, made._written, made._written_rows = None, 0, Plan(0), 0
    failures: list[str] = []
    made.counters = SimpleNamespace(failures=failures, fall_back=lambda reason, error: failures.append(str(error)))
    made.runner = SimpleNamespace(token_to_kv_pool=made.token_to_kv_pool, dtype=torch.float32)
    yield made
    for name in ("backend_fp8", "backend_flashmla"):
        sys.modules.pop(f"sglang_mla_ext.adapter.{name}", None)


@pytest.mark.usefixtures("on_hopper")
def test_the_backend_attends_to_a_grouped_step(backend: Any) -> None:
    problem, rows = backend.problem, 8
    assert backend._try_grouped(backend.runner) == Stacking(PAGE, 4) and not backend.counters.failures
    assert backend._grouped_bytes == backend._grouped.workspace_bytes > 0
    backend._grouped._table.fill_(NOWHERE)
    batch = SimpleNamespace(
        batch_size=rows,
        forward_mode=SimpleNamespace(is_decode=lambda: True),
        req_pool_indices=problem.pool_indices,
        seq_lens=problem.seq_lens,
    )
    layer = SimpleNamespace(layer_id=3, tp_q_head_num=16, head_dim=RANK + ROPE, scaling=SOFTMAX_SCALE)
    backend._next = Plan(rows, tuple(sorted(problem.groups, key=lambda group: group.rows))), ()
    expected = problem.expected(exact=False)[0].float()
    q_absorbed, q_rope = problem.q.split([RANK, ROPE], dim=-1)
    whole, parts = (problem.q.view(rows, -1), None), (q_absorbed, q_rope)
    for prepare, (q, rope) in (
        (backend.init_forward_metadata, whole),
        (backend.init_forward_metadata_out_graph, parts),
    ):
        prepare(batch)
        out = backend.forward_decode(q, None, None, layer, batch, q_rope=rope)
        assert reference.errors(out.view(rows, 16, RANK), expected).rel_l2 < BOUND


def test_the_backend_says_that_the_kernels_do_not_run_here(backend: Any) -> None:
    assert backend._try_grouped(backend.runner) is None
    assert backend.counters.failures == [
        "grouped absorb does not read an FP8 cache with 16 heads on this device: every step is plain absorb"
    ]
    backend.options.mode = "auto"
    assert backend._make_grouped(backend.runner) is None and backend._grouped_bytes == 0


@pytest.mark.usefixtures("on_hopper")
def test_a_kernel_that_fails_leaves_plain_absorb(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(absorb_fp8_few_heads, "run", fail)
    assert backend._try_grouped(backend.runner) is None and backend._grouped is None
    assert backend.counters.failures == ["out of shared memory"] and backend._grouped_bytes == 0
