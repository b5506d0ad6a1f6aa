"""HybridMLABackend without SGLang's server: what it does when something fails, and what it writes when."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter import backend as backend_module
from sglang_mla_ext.adapter.backend import FIRST_PAUSE, NO_GROUPS, HybridMLABackend
from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.kernels.storage.expanded import FP8
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.cost_model import CostModel, Mode, rates_for
from sglang_mla_ext.prefix.planner import Group, Plan, Stacking

HEADS, DN, DR, DV, RANK = 2, 16, 8, 16, 32
MIB = 1 << 20


class Stock:
    def __init__(self, runner: Any) -> None:
        pass


class Backend(HybridMLABackend, Stock):
    pass


class Grouping(Backend):
    """With grouped absorb, which writes down the plans that it gets."""

    def _make_grouped(self, runner: Any) -> Stacking | None:
        self.plans: list[tuple[int, int]] = []
        self._grouped_bytes = MIB
        return Stacking(64, 4)

    def _write_grouped(self, plan: Plan, rows: int) -> None:
        self.plans.append((len(plan.of_mode(Mode.GROUPED_ABSORB)), rows))


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

    def make_one(
        budget_bytes: int = 4 * MIB,
        kind: type[Backend] = Backend,
        prefill: str = "hybrid_mla",
        cache: torch.dtype = torch.float32,
        **options: Any,
    ) -> Backend:
        runner.kv_cache_dtype = cache
        runner.server_args = SimpleNamespace(get_attention_backends=lambda: (prefill, "hybrid_mla"))
        return kind(runner, HybridMLAOptions(**{"mode": "naive", **options}), budget_bytes)

    return make_one


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(rid=str(i), last_node=None, finished=lambda: False) for i in range(count)]


def two_rows() -> tuple[Plan, tuple[ExpandedSegment, ...]]:
    group = Group(rows=(0, 2), node="n", start=0, end=300, mode=Mode.NAIVE)
    return Plan(3, (group,)), (ExpandedSegment((0, 2), 300, (0, 1)),)


def test_planning_that_fails_falls_back_and_is_tried_again_later(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause, twice as long after every further failure; after a success the first pause is short again."""
    backend = make()
    fails, calls, passes = True, [], 0

    def plan(reqs: Any) -> tuple[Plan, tuple[ExpandedSegment, ...]]:
        calls.append(passes)
        if fails:
            raise RuntimeError("no")
        return two_rows()

    monkeypatch.setattr(backend.prefixes, "before_decode", plan)
    while passes < 4 * FIRST_PAUSE:
        backend.before_forward(DECODE, requests(3), [])
        assert backend._next is NO_GROUPS
        passes += 1
    assert calls == [0, FIRST_PAUSE + 1, 3 * FIRST_PAUSE + 2]
    assert dict(backend.counters.fallbacks) == {"planning failed: RuntimeError": 3}

    fails = False
    while backend._next is NO_GROUPS:
        backend.before_forward(DECODE, requests(3), [])
    backend.write_plan(3)
    calls.clear()
    fails, passes = True, 0
    while passes < FIRST_PAUSE + 2:
        backend.before_forward(DECODE, requests(3), [])
        passes += 1
    assert calls == [0, FIRST_PAUSE + 1]


def test_a_plan_that_cannot_be_written_leaves_plain_absorb(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when memory runs out: the step goes on with an empty plan, and so do those after it."""
    backend = make()
    monkeypatch.setattr(backend.prefixes, "before_decode", lambda reqs: two_rows())
    written, whole = [], backend._attention.plan

    def plan(groups: Any, rows: int) -> None:
        if groups:
            raise MemoryError("no")
        written.append(rows)
        whole(groups, rows)

    monkeypatch.setattr(backend._attention, "plan", plan)
    for _ in range(2):
        backend.before_forward(DECODE, requests(3), [])
        assert backend.write_plan(3)  # the step's graph is the same
        assert not backend._written.groups
        assert not backend._prefix_lens.any()
    assert written == [3]
    assert dict(backend.counters.fallbacks) == {"writing a plan failed: MemoryError": 1}
    assert backend._next_pause == 2 * FIRST_PAUSE


def test_no_memory_is_a_choice_and_too_little_a_fall_back(make: Any) -> None:
    chosen = make(budget_bytes=0, prefix_memory_gb=0.0)
    assert chosen.report()["counters"]["fallbacks"] == {}
    assert chosen.describe().startswith("nothing is expanded")
    (reason,) = make(budget_bytes=1, prefix_memory_gb=1e-9).report()["counters"]["fallbacks"]
    assert reason.endswith("raise --hybrid-mla-prefix-memory-gb")


def test_kernels_that_do_not_run_leave_plain_absorb(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(backend_module, "make_shared_attention", fail)
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


@pytest.mark.parametrize(
    ("cache", "option", "expected"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.float32),  # the model's
        (FP8, "auto", FP8),
        (FP8, "bf16", torch.bfloat16),
        (torch.float32, "fp8_e4m3", FP8),
    ],
    ids=str,
)
def test_prefixes_are_stored_as_the_cache_or_as_asked(
    make: Any, cache: torch.dtype, option: str, expected: torch.dtype
) -> None:
    backend = make(cache=cache, prefix_dtype=option)
    assert backend._buffers.dtype == expected
    assert backend.cost.expanded_element_bytes == expected.itemsize
    assert backend.cost.latent_element_bytes == (1 if cache == FP8 else 4)


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


def test_prefill_of_another_backend_is_left_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no plan, but what its requests share is expanded for decode."""
    planned, expanded = [], []
    monkeypatch.setattr(backend_module.PrefillPlan, "make", lambda *args: planned.append(args))
    monkeypatch.setattr(Backend, "_can_prefill", lambda *args: True)
    for prefill in ("hybrid_mla", "flashinfer"):
        backend = make(prefill=prefill)
        monkeypatch.setattr(backend.prefixes, "before_prefill", lambda *args: expanded.append(args))
        backend.before_forward(EXTEND, requests(2), [], [300, 300], [5, 5])
        assert not backend.counters.fallbacks
    assert len(planned) == 1 and len(expanded) == 2


# -- grouped absorb ----------------------------------------------------------------------------------------------------


def both_kinds() -> tuple[Plan, tuple[ExpandedSegment, ...]]:
    naive = Group(rows=(0, 2), node="n", start=0, end=300, mode=Mode.NAIVE)
    grouped = Group(rows=(1, 3, 4), node="g", start=0, end=128, mode=Mode.GROUPED_ABSORB)
    return Plan(6, (naive, grouped)), (ExpandedSegment((0, 2), 300, (0, 1)),)


@pytest.mark.parametrize("options", [{"budget_bytes": 1000, "mode": "auto"}, {"mode": "grouped_absorb"}], ids=str)
def test_grouped_absorb_needs_no_memory_for_prefixes(
    make: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make(kind=Grouping, **options)
    assert backend._attention is None and backend.prefixes.pool.num_chunks == 0
    backend.min_rows = 2  # the toy model's groups pay nowhere
    asked = []
    plan, _ = both_kinds()
    monkeypatch.setattr(backend.prefixes, "before_decode", lambda reqs: asked.append(reqs) or (plan, ()))
    backend.before_forward(DECODE, requests(6), [])
    backend.before_forward(EXTEND, requests(6), [], [0] * 6, [1] * 6)
    backend.before_forward(DECODE, requests(6), [])
    assert len(asked) == 2 and backend.counters.steps_grouped == 2
    assert backend.write_plan(8) and backend.write_plan(8)
    assert backend.plans == [(1, 8)] and backend._prefix_lens[:6].tolist() == [300, 128, 300, 128, 128, 0]
    backend._hybrid = True
    backend.see_query(torch.zeros(8, HEADS, DN))
    backend.attend_shared(torch.zeros(8, HEADS, DR), torch.zeros(8, HEADS), None)
    assert backend._q_nope is None and not backend.merge_pending, "nothing is left for o_proj"


def test_both_kinds_of_groups_are_written(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = make(kind=Grouping, mode="auto")
    backend.min_rows = 2
    naive: list[Any] = []
    monkeypatch.setattr(backend._attention, "plan", lambda groups, rows: naive.append((groups, rows)))
    backend._next = both_kinds()
    for rows, empty in ((6, True), (6, False), (6, False), (8, False)):
        assert backend.write_plan(rows, empty=empty)
    assert backend.plans == [(0, 6), (1, 6), (1, 8)]
    assert naive == [((), 6), (both_kinds()[1], 6), (both_kinds()[1], 8)]


@pytest.mark.parametrize("way", ["grouped absorb", "plain absorb"])
def test_memory_of_other_ways_comes_out_of_the_budget(make: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    without = make(mode="auto")
    if way == "plain absorb":
        monkeypatch.setattr(HybridMLABackend, "_prepare_decode", lambda self, runner: MIB)
    beside = make(kind=Grouping, mode="auto") if way == "grouped absorb" else make(mode="auto")
    per_chunk = without._bytes_per_chunk
    taken = (without.prefixes.pool.num_chunks - beside.prefixes.pool.num_chunks) * per_chunk
    assert abs(taken - MIB) <= per_chunk


def test_grouped_absorb_takes_no_memory_where_it_is_not_used(make: Any) -> None:
    without = make(mode="auto")
    assert make(kind=Grouping, mode="naive").prefixes.pool.num_chunks == without.prefixes.pool.num_chunks


def test_rows_from_which_a_group_can_pay_in_any_mode(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def smallest(self: CostModel, tokens: int, allowed: Any, limit: int) -> int:
        asked.append(set(allowed))
        return 5

    monkeypatch.setattr(CostModel, "smallest_profitable_group", smallest)
    every = {Mode.ABSORB, Mode.GROUPED_ABSORB, Mode.NAIVE}
    for options, allowed in (
        ({"kind": Grouping}, every),
        ({"kind": Grouping, "budget_bytes": 1000}, every - {Mode.NAIVE}),
        ({}, every - {Mode.GROUPED_ABSORB}),
    ):
        assert make(mode="auto", **options).min_rows == 5 and asked.pop() == allowed
    for mode, rows in (("naive", 2), ("grouped_absorb", 2), ("absorb", None)):
        assert make(kind=Grouping, mode=mode).min_rows == rows
    assert make(mode="grouped_absorb").min_rows is None, "heads that fill a tile: plain absorb"


def test_auto_takes_grouped_absorb_only_where_its_rates_are_measured(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assumed = rates_for("cpu")
    mode = replace(assumed.modes[Mode.GROUPED_ABSORB], measured=False)
    assumed = replace(assumed, modes={**assumed.modes, Mode.GROUPED_ABSORB: mode})
    assert make(kind=Grouping, mode="auto")._stacking is not None
    monkeypatch.setattr(backend_module, "rates_for", lambda name: assumed)
    assert make(kind=Grouping, mode="auto")._stacking is None
    assert make(kind=Grouping, mode="grouped_absorb")._stacking is not None


def test_grouped_absorb_that_does_not_run_is_left_out(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, runner: Any) -> None:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(Grouping, "_make_grouped", fail)
    backend = make(kind=Grouping, mode="grouped_absorb")
    assert backend.min_rows is None and not backend.write_plan(4)
    assert list(backend.counters.fallbacks) == ["grouped absorb does not run here: RuntimeError"]
    assert "plain absorb" in backend.describe()
