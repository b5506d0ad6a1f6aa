"""How the backend is put together: what is expanded and grouped, from how many rows on, and within which memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_world import EXTEND, HEADS, MAX_REQUESTS, MIB, PAGE, World, plan_pass

from sglang_mla_ext import observe
from sglang_mla_ext.adapter import server
from sglang_mla_ext.adapter.build import assemble, expanding
from sglang_mla_ext.adapter.build import prefill as prefill_parts
from sglang_mla_ext.adapter.launch import sharded_prefixes
from sglang_mla_ext.adapter.ranks.ranks import RanksDifferError
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import rates_for
from sglang_mla_ext.segment import Mode


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, new_tree: Any) -> Any:
    yield World(monkeypatch, new_tree)
    passes.end()


def pool_of(world: World) -> Any:
    return world.steps._prefixes.pool


def fallbacks(world: World) -> list[str]:
    return list(world.steps.counters.fallbacks)


def test_no_memory_is_a_choice_and_too_little_a_fall_back(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.make("gpu", budget_bytes=0, prefix_memory_gb=0.0)
    assert not fallbacks(world) and world.steps.reports.description.startswith("nothing is expanded")
    world.make("gpu", budget_bytes=1, prefix_memory_gb=1e-9)
    assert fallbacks(world) == ["prefix_memory_too_small"]
    assert "--hybrid-mla-prefix-memory-gb is too small" in caplog.text


def test_with_dp_attention_the_log_says_how_far_the_memory_reaches(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.make("gpu")
    assert "of a prompt's" not in caplog.text
    vars(world.runner.server_args).update(enable_dp_attention=True, dp_size=2)
    world.make("gpu")
    assert "--hybrid-mla-prefix-sharding" not in caplog.text  # two of its ranks share heads
    vars(world.runner.server_args).update(tp_size=2)
    world.make("gpu")
    assert "--hybrid-mla-prefix-sharding" not in caplog.text  # by its arguments it is on a CPU
    monkeypatch.setattr(sharded_prefixes, "on_gpu", lambda args: True)
    monkeypatch.setenv("SGLANG_HYBRID_MLA_PREFIX_SHARDING", "off")
    world.make("gpu", prefix_sharding="off")
    assert "--hybrid-mla-prefix-sharding" not in caplog.text  # with few heads it does nothing
    monkeypatch.setattr(sharded_prefixes, "STACKED_HEADS", ())
    world.make("gpu", prefix_sharding="off")
    assert "--hybrid-mla-prefix-sharding auto (one copy for all ranks)" in caplog.text
    chunks = pool_of(world).num_chunks
    assert f"hold {chunks * CHUNK_TOKENS:,} of a prompt's" in caplog.text and f"{HEADS} heads" in caplog.text


def test_ranks_are_compared_before_anything_is_made(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(rules: dict[str, object]) -> None:
        assert rules["mixed tokens in a step"] == 64 and "rates of the GPU" in rules
        raise RanksDifferError("64 on rank 0")

    for name in ("all_ranks_agree", "make_expanding", "take_over"):
        monkeypatch.setattr(assemble, name, lambda *_, **__: pytest.fail("a rank would wait for the others"))
    monkeypatch.setattr(assemble, "check_alike", differ)
    with pytest.raises(RanksDifferError, match="64 on rank 0"):
        world.make("cpu", mixed_tokens=64)


@pytest.mark.parametrize("part", ["attention", "expander"])
def test_kernels_that_do_not_run_leave_plain_absorb(world: World, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """And the memory for expanded prefixes is free again."""
    import gc
    import weakref

    buffers: list[Any] = []

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("does not compile")

    allocate = expanding.ExpandedBuffers.allocate

    def noted(**sizes: Any) -> Any:
        made = allocate(**sizes)
        buffers.append(weakref.ref(made))
        return made

    monkeypatch.setattr(observe.logger, "disabled", True)  # pytest would keep the error, and with it the buffers
    monkeypatch.setattr(expanding.ExpandedBuffers, "allocate", noted)
    monkeypatch.setattr(expanding, {"attention": "make_shared_attention", "expander": "Expander"}[part], fail)
    backend = world.make("gpu")
    assert fallbacks(world) == ["naive_kernels"]
    assert not backend.preparation._requests and pool_of(world).num_chunks == 0
    requests = [world.start("abcd1", 1), world.start("abcd2", 2)]
    assert world.eager_step(requests) < 1e-5
    gc.collect()
    assert buffers[0]() is None


def test_a_rank_expands_its_own_heads(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prefixes that ranks hold together; this one is the second of two."""
    made: list[Any] = []
    make = assemble.make_expanding

    def of_two(runner: Any, layers: Any, cost: CostModel, *args: Any, **more: Any) -> None:
        made.append(make(runner, layers, replace(cost, ranks=2), *args, **more))

    monkeypatch.setattr(assemble, "make_expanding", of_two)
    group = SimpleNamespace(rank_in_group=1, _all_to_all_single=lambda received, sent: received.copy_(sent))
    monkeypatch.setattr(expanding, "tp_group", lambda: group)
    world.make("cpu", prefix_sharding="nccl")
    ((buffers, _, expander),) = made
    assert buffers.heads == HEADS // 2 and expander._heads == slice(HEADS // 2, HEADS)


@pytest.mark.parametrize(("options", "count"), [({"budget_bytes": 1000}, 1), ({"mode": "absorb"}, 0)], ids=str)
def test_no_memory_or_mode_absorb_never_expands(world: World, options: dict[str, Any], count: int) -> None:
    backend = world.make("gpu", **options)
    assert not backend.preparation._requests and len(fallbacks(world)) == count
    assert "plain absorb" in world.steps.reports.description


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
    world: World, monkeypatch: pytest.MonkeyPatch, cache: torch.dtype, option: str, expected: torch.dtype
) -> None:
    costs: list[CostModel] = []
    make = assemble.make_expanding
    monkeypatch.setattr(assemble, "make_expanding", lambda *args, **rows: costs.append(args[2]) or make(*args, **rows))
    world.runner.kv_cache_dtype = cache
    backend = world.make("gpu", prefix_dtype=option)
    assert backend._shared._buffers.dtype == expected
    assert costs[0].expanded_element_bytes == expected.itemsize
    assert costs[0].latent_element_bytes == (1 if cache == FP8 else 4)


@pytest.mark.parametrize("options", [{"budget_bytes": 1000, "mode": "auto"}, {"mode": "grouped_absorb"}], ids=str)
def test_grouped_absorb_needs_no_memory_for_prefixes(
    world: World, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    smallest = lambda *args, **kwargs: 2  # noqa: E731 - the toy model's groups pay nowhere
    monkeypatch.setattr(break_even, "smallest_profitable_group", smallest)
    seconds = {Mode.ABSORB: 3.0, Mode.GROUPED_ABSORB: 2.0, Mode.NAIVE: 1.0}
    monkeypatch.setattr(CostModel, "token_seconds", lambda self, mode, rows, from_memory: seconds[mode] * rows)
    backend = world.make("gpu", grouped=True, **options)
    assert backend._shared is None and pool_of(world).num_chunks == 0
    requests = [world.start("abcd1", 1), world.start("abcd2", 2), world.start("x", 3)]
    assert world.eager_step(requests) < 1e-5
    assert world.steps.counters.steps_grouped == 1
    assert passes.now.q_nope is None and passes.now.tail_lse is None, "nothing is left for o_proj"
    plan_pass(world.steps, EXTEND, requests, [])
    assert passes.now.prefill is None and not fallbacks(world)[1:]


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize("mode", ["auto", "grouped_absorb"])
def test_grouped_absorb_where_its_kernels_run(
    monkeypatch: pytest.MonkeyPatch, new_tree: Any, mode: str, fp8: bool
) -> None:
    """Where they do not run, every step is plain absorb, and who asked for them is told."""
    world = World(monkeypatch, new_tree, fp8=fp8)
    world.make("gpu", grouped=True, mode=mode)
    assert world.latent.grouped_page == PAGE and not fallbacks(world)
    taken = world.latent.workspace_bytes
    world.make("gpu", grouped=True, runs=False, mode=mode, budget_bytes=0, prefix_memory_gb=0.0)
    assert world.latent.grouped_page is None and not world.backend.preparation._requests
    assert len(fallbacks(world)) == (mode == "grouped_absorb")
    assert taken - world.latent.workspace_bytes >= MIB
    requests = [world.start("abcd1", 1), world.start("abcd2", 2)]
    assert world.eager_step(requests) < (5e-2 if fp8 else 1e-5)


def test_memory_of_the_latent_part_comes_out_of_the_budget(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = {}
    for grouped in (False, True):
        world.make("gpu", grouped=grouped, mode="naive")
        chunks[grouped] = pool_of(world).num_chunks, world.latent.workspace_bytes
    chunk_bytes = world.steps.reports._chunk_bytes
    apart = (chunks[False][0] - chunks[True][0]) * chunk_bytes
    assert abs(apart - (chunks[True][1] - chunks[False][1])) <= chunk_bytes
    assert chunks[True][1] > 2 * MIB


def test_rows_from_which_a_group_can_pay_in_any_mode(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def smallest(cost: CostModel, tokens: int, allowed: Any, limit: int) -> int:
        asked.append(set(allowed))
        return 5

    monkeypatch.setattr(break_even, "smallest_profitable_group", smallest)
    every = {Mode.ABSORB, Mode.GROUPED_ABSORB, Mode.NAIVE}
    for options, allowed in (
        ({"grouped": True}, every),
        ({"grouped": True, "budget_bytes": 1000}, every - {Mode.NAIVE}),
        ({}, every - {Mode.GROUPED_ABSORB}),
    ):
        assert world.make("gpu", mode="auto", **options).preparation._requests == range(5, MAX_REQUESTS + 1)
        assert asked.pop() == allowed
    for mode, rows in (("naive", range(2, 13)), ("grouped_absorb", range(2, 13)), ("absorb", range(0))):
        assert world.make("gpu", grouped=mode == "grouped_absorb", mode=mode).preparation._requests == rows
    assert world.make("gpu", mode="grouped_absorb").preparation._requests == range(0)
    assert fallbacks(world) == ["grouped_absorb_heads"]


def test_auto_takes_grouped_absorb_only_where_its_rates_are_measured(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assumed = rates_for("cpu")
    mode = replace(assumed.modes[Mode.GROUPED_ABSORB], measured=False)
    assumed = replace(assumed, modes={**assumed.modes, Mode.GROUPED_ABSORB: mode})
    assert world.make("cpu", mode="auto")._latent.grouped_page is not None
    assert world.make("cpu", mode="naive")._latent.grouped_page is None
    monkeypatch.setattr(server, "rates_for", lambda name: assumed)
    assert world.make("cpu", mode="auto")._latent.grouped_page is None
    assert world.make("cpu", mode="grouped_absorb")._latent.grouped_page is not None


@pytest.mark.parametrize("prefill", ["hybrid_mla", "flashinfer"])
def test_prefill_of_another_backend_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch, prefill: str) -> None:
    """It gets no plan, but what its requests share is expanded for decode."""
    planned: list[Any] = []
    monkeypatch.setattr(prefill_parts.PrefillPlan, "make", lambda *args, **kwargs: planned.append(args))
    world.runner.server_args.prefill_attention_backend = prefill
    world.make("gpu")
    requests = [world.start("abcd1", 1), world.start("abcd2", 2)]
    plan_pass(world.steps, EXTEND, requests, [], [256, 256], [65, 66])
    assert len(planned) == (prefill == "hybrid_mla")
    assert world.steps.counters.expansions == 1 and not fallbacks(world)
