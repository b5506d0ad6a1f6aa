"""Counting device memory, and allocating what may lose its contents."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.memory import Memory, tensor_bytes
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
