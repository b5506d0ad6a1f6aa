"""HybridMLABackend without SGLang's server: what it does when something fails, and what it writes when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext import backend as backend_module
from sglang_mla_ext.backend import MAX_FAILURES, NO_GROUPS, HybridMLABackend
from sglang_mla_ext.kernels.schedule import PrefixGroup
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Group, Plan

HEADS, DN, DR, DV, RANK = 2, 16, 8, 16, 32
MIB = 1 << 20


class Stock:
    def __init__(self, runner: Any) -> None:
        pass


class Backend(HybridMLABackend, Stock):
    pass


class FakeMode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


DECODE, EXTEND = FakeMode("decode"), FakeMode("extend")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make(**options)`: a backend for a model of two layers, on the CPU."""
    layers = [
        SimpleNamespace(
            attn_mqa=SimpleNamespace(layer_id=layer),
            num_local_heads=HEADS,
            num_heads=HEADS,
            kv_lora_rank=RANK,
            qk_nope_head_dim=DN,
            qk_rope_head_dim=DR,
            v_head_dim=DV,
            o_proj=torch.nn.Identity(),
        )
        for layer in range(2)
    ]
    monkeypatch.setattr(backend_module.mla_layer, "attention_layers", lambda runner: layers)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(size=12),
        token_to_kv_pool=None,
        model_config=SimpleNamespace(hidden_size=64, context_len=4096),
        device="cpu",
        dtype=torch.float32,
    )

    def make_one(budget_bytes: int = 4 * MIB, **options: Any) -> Backend:
        return Backend(runner, HybridMLAOptions(**{"mode": "naive", **options}), budget_bytes)

    return make_one


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(rid=str(i), last_node=None, finished=lambda: False) for i in range(count)]


def two_rows() -> tuple[Plan, tuple[PrefixGroup, ...]]:
    group = Group(rows=(0, 2), node="n", start=0, end=300, mode=Mode.NAIVE)
    return Plan(3, (group,)), (PrefixGroup((0, 2), 300, (0, 1)),)


def test_planning_that_fails_falls_back_and_is_given_up(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    calls = []

    def fail(reqs: Any) -> None:
        calls.append(reqs)
        raise RuntimeError("no")

    monkeypatch.setattr(backend.prefixes, "before_decode", fail)
    for _ in range(MAX_FAILURES + 2):
        backend.before_forward(DECODE, requests(3), [])
        assert backend._next is NO_GROUPS
    assert len(calls) == MAX_FAILURES
    assert dict(backend.counters.fallbacks) == {"planning failed: RuntimeError": MAX_FAILURES}


def test_kernels_that_do_not_run_leave_plain_absorb(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(backend_module, "make_prefix_attention", fail)
    backend = make()
    backend.before_forward(DECODE, requests(3), [])
    assert not backend.write_plan(3)
    assert backend.report()["counters"]["fallbacks"] == {"the kernels do not run here: RuntimeError": 1}


@pytest.mark.parametrize(("options", "fallbacks"), [({"budget_bytes": 1000}, 1), ({"mode": "absorb"}, 0)], ids=str)
def test_no_memory_or_mode_absorb_never_expands(make: Any, options: dict[str, Any], fallbacks: int) -> None:
    backend = make(**options)
    assert backend.min_rows is None and not backend.write_plan(3)
    assert sum(backend.counters.fallbacks.values()) == fallbacks
    assert "plain absorb" in backend.describe()


def test_more_rows_than_it_has_room_for(make: Any) -> None:
    backend = make()
    backend.before_forward(DECODE, requests(backend.max_rows + 1), [])
    assert not backend.write_plan(backend.max_rows + 1)
    assert list(backend.counters.fallbacks) == [f"more than {backend.max_rows} requests in a batch"]


def test_the_plan_is_written_once_and_again_for_other_rows(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    written = []
    monkeypatch.setattr(backend._attention, "plan", lambda groups, rows: written.append((len(groups), rows)))
    backend._next = two_rows()
    for rows in (4, 4, 8):
        assert backend.write_plan(rows)
    assert written == [(1, 4), (1, 8)]
    assert backend._prefix_lens.tolist() == [300, 0, 300] + [0] * (backend.max_rows - 3)
    backend._next = NO_GROUPS
    assert backend.write_plan(8)
    assert written[-1] == (0, 8) and not backend._prefix_lens.any()


def test_capturing_a_graph_ignores_the_plan(make: Any) -> None:
    backend = make()
    backend._next = two_rows()
    assert backend.write_plan(4, empty=True)
    assert not backend._written.groups and not backend._prefix_lens.any()


@pytest.mark.parametrize("rows", [1, 13])
def test_rows_outside_of_what_graphs_have_shared_attention_for(make: Any, rows: int) -> None:
    backend = make()
    backend._next = two_rows()
    assert not backend.write_plan(rows)
    assert not backend._written.groups


def test_finished_requests_do_not_take_part_in_prefill(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make()
    seen = []
    monkeypatch.setattr(backend.prefixes, "before_prefill", lambda reqs, running, most: seen.append((reqs, running)))
    running = requests(2)
    running[0].finished = lambda: True
    backend.before_forward(EXTEND, requests(1), running)
    assert seen[0][1] == running[1:]
