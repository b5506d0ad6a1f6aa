"""Counting device memory, and allocating what may lose its contents."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from test_naive_prefix import SMALL, Case, Problem, assert_equal, run_and_merge

from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.memory import Memory, tensor_bytes
from sglang_mla_ext.kernels.naive.attention import TorchSharedAttention
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.partials import PartialTable


def test_bytes_of_tensors_tables_and_owners_count_once() -> None:
    tensor, table = torch.zeros(3, 5), PartialTable.empty(4, 6, device="cpu")
    assert tensor_bytes(tensor) == tensor_bytes(tensor, tensor) == 60
    assert tensor_bytes(table) == table.nbytes > 0
    owner = SimpleNamespace(one=tensor, same=tensor, table=table, by_key={1: table, 2: torch.zeros(7)}, number=3)
    assert tensor_bytes(owner) == tensor_bytes(owner, tensor) == 60 + table.nbytes + 28
    assert tensor_bytes() == tensor_bytes(SimpleNamespace(host=table.buffer.numpy())) == 0
    assert tensor_bytes(torch.zeros(2, dtype=FP8), torch.zeros(2, 3, device="meta")) == 2 + 24


def test_memory_is_allocated_in_the_region_and_cleared_when_it_comes_back() -> None:
    entered = []

    @contextmanager
    def region() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    memory = Memory(region)
    made = [memory.zeros(4, 3, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.int32, FP8)]
    assert entered == ["in", "out"] * 3
    assert memory.bytes == 12 * (4 + 4 + 1)
    for tensor in made:
        assert not tensor.view(torch.uint8).any()
        tensor.view(torch.uint8).fill_(0xFF)
    memory.clear()
    assert not any(tensor.view(torch.uint8).any() for tensor in made)
    assert entered == ["in", "out"] * 3, "clearing allocates nothing"


def test_memory_is_owned_by_whoever_asked_for_it() -> None:
    memory = Memory()
    first, second = (memory.zeros(8, dtype=torch.float32, device="cpu") for _ in range(2))
    assert memory.bytes == 64
    assert not first.any()
    del first
    gc.collect()
    assert memory.bytes == second.nbytes
    memory.clear()


def test_a_region_is_left_where_there_is_no_memory() -> None:
    left = []

    @contextmanager
    def region() -> Iterator[None]:
        try:
            yield
        finally:
            left.append(True)

    memory = Memory(region)
    with pytest.raises(RuntimeError):
        memory.zeros(1 << 60, dtype=torch.float32, device="cpu")
    assert left == [True] and memory.bytes == 0


def test_sizes_on_no_device_are_not_kept() -> None:
    memory = Memory()
    memory.zeros(5, dtype=torch.float32, device="meta")
    assert memory.bytes == 0
    memory.clear()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_results_and_work_list_may_be_lost_before_a_plan(implementation: str) -> None:
    """As when a server sleeps. A work list that was cleared is empty, so that an empty plan need not be written."""
    memory, problem = Memory(), Problem(Case((2, 3), (300, 70), heads=4))
    sizes = dict(max_rows=5, heads=4, memory=memory)
    if implementation == "triton":
        attention = TritonSharedAttention(problem.buffers, num_ctas=4, **sizes)
        assert memory.bytes == attention.workspace_bytes
    else:
        attention = TorchSharedAttention(problem.buffers, **sizes)
        assert memory.bytes == attention._shared_out.nbytes
    tail = torch.ones(5, 4, SMALL.v), torch.zeros(5, 4)
    for groups in (problem.groups, [], [], problem.groups):
        attention.plan(groups)
        out, _ = run_and_merge(attention, problem, *(problem.no_tail() if groups else tail))
        assert_equal(out, problem.shared()[0] if groups else tail[0], "out")
        for tensor in memory._in_use():
            tensor.view(torch.uint8).fill_(0xFF)
        memory.clear()
