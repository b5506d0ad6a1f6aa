"""The BF16 absorb kernel for Hopper without a GPU: its own source run in torch (gluon_in_torch.py).

Bound: 4e-3 in relative L2, from rounding weights and outputs to BF16; the lse is not rounded: 1e-5. What no item may
read is NaN.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_in_torch import Descriptor, Pointer, Program
from test_absorb_schedule import ODD_LENGTHS, Case, Work
from torch import Tensor

from sglang_mla_ext.kernels.absorb import sm90_bf16_absorb
from sglang_mla_ext.kernels.absorb.items import ITEM_BEGIN, ITEM_PARTIAL
from sglang_mla_ext.kernels.absorb.schedule import BLOCK_KEYS
from sglang_mla_ext.kernels.absorb.sm90_parts import bf16_consumers, query, work_items
from sglang_mla_ext.kernels.constants import LN2, LOG2E
from sglang_mla_ext.kernels.reference import attention as reference

NAN = float("nan")
LATENT, ROPE = 512, 64
SCALE = 192**-0.5
MODULES = [work_items, query, bf16_consumers, sm90_bf16_absorb]


class Problem:
    """A paged latent cache and queries for a case; BF16 numbers in float32."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.work, generator = case, Work(case), torch.Generator().manual_seed(seed)
        tokens = case.rows * case.queries
        self.q = torch.randn(tokens, case.heads, LATENT + ROPE, generator=generator).bfloat16().float()
        if len(self.work.items):  # an item of an earlier step behind those of this one
            stale = torch.from_numpy(self.work.items[0].copy())
            stale[int(ITEM_PARTIAL)] = (self.work.capacity.max_partial_rows - 1) * self.work.capacity.heads
            behind = self.work.capacity.first_item + self.work.items.size
            self.work.array[behind : behind + len(stale)] = stale
        self.page_table = torch.randperm(self.work.pages, generator=generator)
        self.pages = torch.full((self.work.pages, BLOCK_KEYS, LATENT + ROPE), NAN)
        tails = [(row * self.work.width, length) for row, length in enumerate(case.tails)]
        lengths = [segment.end - segment.start for segment in self.work.segments]
        segments = zip(self.work.first_pages, lengths, strict=True)
        self.keys = {}  # by first page
        for first_page, length in [*tails, *segments]:
            keys = torch.randn(length, LATENT + ROPE, generator=generator).bfloat16().float()
            for at in range(0, length, BLOCK_KEYS):
                page = self.page_table[first_page + at // BLOCK_KEYS]
                self.pages[page, : min(BLOCK_KEYS, length - at)] = keys[at : at + BLOCK_KEYS]
            self.keys[first_page] = keys

    def run(self, seed: int, faults: dict[str, Any] | None = None) -> tuple[Tensor, Tensor]:
        """The kernel's partials, `[P * H, 512]` and `[P * H]`; NaN where nothing was written."""
        capacity = self.work.capacity
        out = torch.full((capacity.max_partial_rows * capacity.heads, LATENT), NAN)
        lse2 = torch.full(out.shape[:1], NAN)
        # Heads first, as SGLang's product leaves absorbed queries.
        content = self.q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1)
        keys, of_query = self.pages.flatten(0, 1), [1, capacity.strip_rows, 64]
        for index in range(capacity.programs):
            program = Program(MODULES, index, capacity.programs, seed, faults or {})
            program.run(
                "absorb_hopper_kernel",
                Descriptor(content, of_query),
                Descriptor(self.q[..., LATENT:], of_query),
                Descriptor(keys, [BLOCK_KEYS, 128]),
                Descriptor(keys, [BLOCK_KEYS, 64]),
                Pointer(self.work.array),
                Pointer(self.page_table),
                Pointer(out.view(-1)),
                Pointer(lse2),
                SCALE * LOG2E,
                capacity.query_heads,
                capacity.query_tokens,
            )
        return out, lse2

    def check(self, out: Tensor, lse2: Tensor) -> None:
        """Every partial that an item names equals the reference, and nothing else was written."""
        array, written = self.work.array, torch.zeros(len(out), dtype=torch.bool)
        for first, n_rows, begin, end, first_page, partial, last, first_row in self.work.items.tolist():
            strip_rows = self.work.capacity.strip_rows
            strips = array[first : first + -(-n_rows // strip_rows)]
            query_rows = (strips[:, None] + torch.arange(strip_rows)).flatten()[:n_rows].long()
            keys = self.keys[first_page][begin:end].double().expand(n_rows, -1, -1)
            q = self.q.view(-1, 1, LATENT + ROPE)[query_rows].double()
            token = (first_row + torch.arange(n_rows)) // self.case.heads
            seen = (end - begin - last * (self.case.queries - 1 - token)).clamp(min=0)
            want, want_lse = reference.absorb(q[..., :LATENT], q[..., LATENT:], keys, seen, SCALE)
            place = slice(partial, partial + n_rows)
            assert reference.errors(out[place], want[:, 0]).rel_l2 < 4e-3
            assert reference.errors(lse2[place] * LN2, want_lse[:, 0]).max_rel < 1e-5
            written[place] = True
        assert lse2[~written].isnan().all() and out[~written].isnan().all()


def kernel_cases() -> Any:
    for heads in (8, 32):
        yield Case(heads, ((9, 200), (2, 64)), ODD_LENGTHS, programs=3)
    yield Case(128, ((3, 200), (1, 64)), ODD_LENGTHS[:10:2], programs=3)
    yield Case(96, ((2, 500),), (1, 130), programs=2)
    yield Case(16, (), (0, 0), programs=1)
    for programs in (2, 3):  # segments alone: behind their items there is nothing
        yield Case(16, ((5, 200),), (0,) * 5, programs=programs)
    for heads, queries in ((16, 4), (8, 7), (16, 5), (24, 3)):
        yield Case(heads, ((3, 200), (2, 64)), ODD_LENGTHS, programs=4, queries=queries)
    yield Case(16, (), (3, 66, 7, 70), programs=2, queries=8)  # the last keys of a tail are in two blocks
    yield Case(32, (), (770, 1), programs=9, queries=4)  # and in one item, where keys are cut


@pytest.mark.parametrize(("seed", "case"), list(enumerate(kernel_cases())), ids=str)
def test_the_kernels_source_in_torch_equals_the_reference(seed: int, case: Case) -> None:
    problem = Problem(case, seed)
    problem.check(*problem.run(seed))


def _changed(**changes: Any) -> Any:
    """A stand-in for mbarrier with some of its operations replaced."""
    return lambda program, barriers: SimpleNamespace(**vars(barriers) | changes)


FAULTS = {
    "nobody waits": {"mbarrier": lambda program, b: _changed(wait=lambda barrier, parity: program.pause())(program, b)},
    "one reader of the weights is not counted": {"mbarrier": _changed(init=lambda barrier, count: barrier.init(1))},
    "the block before the last has no mask": {"seen_by_all": lambda *_: lambda item_ptr, queries: 1 << 30},
    "all tiles of a request have the same mask": {"ITEM_FIRST_ROW": lambda *_: ITEM_BEGIN.value},  # which is 0 here
    "values behind the last key stay": {"_clear_behind": lambda program, stand_in: lambda values, valid: None},
}


def test_a_wrong_kernel_would_be_found_out() -> None:
    problem = Problem(Case(16, ((2, 300),), (130, 0), programs=2, queries=5), seed=0)
    problem.check(*problem.run(0))
    for changes in FAULTS.values():
        with pytest.raises(AssertionError):
            problem.check(*problem.run(0, changes))
