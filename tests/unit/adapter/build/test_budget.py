"""What is taken out of SGLang's memory covers, in every mode, what is allocated later."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from decode_world import World
from doubles import MIB, server_args

from sglang_mla_ext.adapter import server as server_module
from sglang_mla_ext.adapter.build import budget, model
from sglang_mla_ext.adapter.latent.protocol import LatentSizes
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.adapter.step.shadow import ShadowCheck
from sglang_mla_ext.kernels import dispatch
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.options import HybridMLAOptions, OptionError
from sglang_mla_ext.prefix.planner.gpu_rates import rates_for
from sglang_mla_ext.segment import Mode

GIB = 1 << 30


def options(**given: Any) -> HybridMLAOptions:
    return HybridMLAOptions(**given)


# ---- how much is taken


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, 4064),
        ({"prefix_memory_gb": 0.0}, 4064),  # what prefill expands for itself is beside it
        ({"prefix_memory_gb": 14.0}, 4064),
        ({"prefix_memory_gb": 1.0}, 2032),
        ({"prefix_memory_gb": 0.2}, 1024),
    ],
    ids=str,
)
def test_a_small_memory_holds_prefixes_beside_a_calls_partial_results(given: dict[str, Any], rows: int) -> None:
    server = SimpleNamespace(options=options(**given), prefill=SimpleNamespace(tokens=8192))
    assert budget.call_rows(server, SimpleNamespace(heads=64, first=SimpleNamespace(v_head_dim=128))) == rows


@pytest.mark.parametrize(
    ("given", "buffers", "taken"),
    [
        ({"prefix_memory_gb": 3.0}, GIB, 3 * GIB),
        ({"prefix_memory_gb": 0.5}, GIB, GIB),
        ({"prefix_memory_gb": 0.0}, GIB, GIB),
        ({"prefix_memory_gb": 0.0}, 0, 0),
        ({"mode": "grouped_absorb"}, GIB, GIB),
        ({"mode": "grouped_absorb", "prefix_memory_gb": 3.0}, GIB, GIB),
        ({"mode": "absorb"}, GIB, GIB),
        ({"mode": "absorb"}, 0, 0),
    ],
    ids=str,
)
def test_the_budget_is_what_is_asked_for_and_covers_the_buffers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, given: dict[str, Any], buffers: int, taken: int
) -> None:
    monkeypatch.setattr(budget, "buffer_bytes", lambda *args: buffers)
    with caplog.at_level(logging.WARNING):
        assert budget.reserve(40 * GIB, None, options(**given)) == taken
    warned = [record.getMessage() for record in caplog.records]
    assert bool(warned) == (given == {"prefix_memory_gb": 0.5})
    if warned:
        assert "--hybrid-mla-prefix-memory-gb 0.5 does not cover" in warned[0] and "1.000 GiB are taken" in warned[0]


@pytest.mark.parametrize(
    ("given", "heads", "gib"),
    [
        ({}, 16, 10),  # 20,000 tokens
        ({}, 128, 0),  # 2,700: with DP attention
        ({"prefix_dtype": "fp8_e4m3"}, 64, 10),  # 10,000
        ({"mode": "naive"}, 128, 10),
        ({"mode": "absorb"}, 16, None),
        ({"prefix_memory_gb": 3.0}, 128, 3),
    ],
    ids=str,
)
def test_the_default_is_a_quarter_or_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpu: None, given: Any, heads: int, gib: Any
) -> None:
    server = configurator(monkeypatch, heads, BF16)
    with caplog.at_level(logging.WARNING):
        found = budget.with_default(40 * GIB, server, options(**given))
    assert found.prefix_memory_gb == gib and found.may_expand == bool(gib)
    warned = [record.getMessage() for record in caplog.records]
    assert bool(warned) == (gib == 0)
    assert gib != 0 or ("25 % of the 40.0 GiB" in warned[0] and "hold 2678 tokens of 3.82 MiB" in warned[0]), warned


@pytest.mark.parametrize(
    ("available", "given", "ranks", "tokens", "gib"),
    [
        (40, {"prefix_sharding": "off"}, 8, 8192, 0),
        (40, {}, 8, 8192, 10),  # sharded: an eighth of a prompt on each rank
        (10, {}, 8, 0, 0),  # a twentieth is too little
        (40, {}, 1, 0, 0),
        (40, {"mode": "absorb"}, 8, 0, None),
        (40, {"prefill_expand_tokens": 0, "prefix_sharding": "off"}, 8, 0, 0),
        (40, {"prefix_memory_gb": 0.0}, 8, 0, 0),
        (40, {"prefix_memory_gb": 2.0}, 8, 0, 2),
        (40, {"prefix_memory_gb": 6.0}, 8, 8192, 6),
        (160, {"prefix_sharding": "off"}, 8, 8192, 40),  # beside the share
    ],
    ids=str,
)
def test_what_prefill_expands_for_itself_by_default(
    monkeypatch: pytest.MonkeyPatch, gpu: None, available: int, given: Any, ranks: int, tokens: int, gib: float | None
) -> None:
    monkeypatch.setattr(dispatch, "multiprocessors", lambda device: 132)
    server = configurator(monkeypatch, 128, BF16)
    model.attention_layers(server)[0].kv_b_proj = SimpleNamespace(weight=None)
    server.server_args = server_args(
        device="cuda",
        enable_dp_attention=ranks > 1,
        dp_size=ranks,
        tp_size=ranks,
        attn_dp_size=ranks,
        enable_hierarchical_cache=False,
    )
    server.server_args.get_model_config().hf_config.num_attention_heads = 128
    found = budget.with_default(available * GIB, server, options(**given))
    taken = budget.transient_bytes(*model.described(server, options()), tokens)
    assert found.transient_tokens == tokens and (not tokens or 0.5 < taken / GIB < 1)
    beside = taken / GIB * (gib in (10, 40))
    assert found.prefix_memory_gb == (gib and pytest.approx(gib + beside))
    assert not gib or budget.prefix_bytes(found) == int(found.prefix_memory_gb * GIB)


def test_a_budget_that_leaves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "buffer_bytes", lambda *args: 2 * GIB)
    with pytest.raises(
        OptionError, match=r"prefix-memory-gb 40 leaves nothing of the 40.00 GiB .*: lower it, or raise"
    ):
        budget.reserve(40 * GIB, None, options(prefix_memory_gb=40.0))
    for given in ({"mode": "absorb"}, {"prefix_memory_gb": 0.5}):
        with pytest.raises(OptionError, match=r"own buffers \(2.00 GiB\) leaves nothing .*: raise --mem-fraction"):
            budget.reserve(2 * GIB, None, options(**given))


# ---- how much the buffers take


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked of an H200, and FlashMLA's module."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "NVIDIA H200")
    monkeypatch.setattr(budget, "multiprocessors", lambda device: 132)
    flash_mla: Any = ModuleType("sgl_kernel.flash_mla")
    flash_mla.flash_mla_with_kvcache = flash_mla.get_mla_metadata = None
    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        monkeypatch.setitem(sys.modules, name, flash_mla)
    loaded = sys.modules.pop("sglang_mla_ext.adapter.latent.flashmla", None)
    yield
    sys.modules.pop("sglang_mla_ext.adapter.latent.flashmla", None)
    if loaded is not None:
        sys.modules["sglang_mla_ext.adapter.latent.flashmla"] = loaded


def configurator(monkeypatch: pytest.MonkeyPatch, heads: int, cache: torch.dtype, context_len: int = 1 << 17) -> Any:
    dims = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    layer = SimpleNamespace(num_local_heads=heads, **dims)
    monkeypatch.setattr(model, "attention_layers", lambda configurator: [layer] * 61)
    return SimpleNamespace(
        device="cuda",
        kv_cache_dtype=cache,
        model_dtype=torch.bfloat16,
        model_config=SimpleNamespace(context_len=context_len),
        resolve_max_num_reqs=lambda token_capacity: min(4096, token_capacity),
        server_args=server_args(device="cuda"),
    )


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("given", "heads", "cache", "mib"),
    [
        ({"mode": "absorb"}, 16, BF16, range(0, 1)),
        ({"mode": "absorb"}, 16, FP8, range(40, 90)),  # page tables of 4,096 requests, and partials
        ({"mode": "absorb"}, 128, FP8, range(150, 250)),
        ({"mode": "grouped_absorb"}, 16, BF16, range(60, 120)),
        ({"mode": "grouped_absorb"}, 128, BF16, range(8, 16)),  # not stacked: page tables for FlashMLA
        ({"mode": "grouped_absorb"}, 16, FP8, range(120, 200)),
        ({"mode": "naive"}, 16, BF16, range(8, 16)),
        ({"mode": "auto", "prefix_memory_gb": 0.0}, 16, BF16, range(60, 120)),
        ({"mode": "naive", "prefix_memory_gb": 0.0}, 16, BF16, range(0, 1)),
        ({"mode": "naive", "prefix_memory_gb": 0.0}, 16, FP8, range(40, 90)),
    ],
    ids=str,
)
def test_buffers_are_counted_in_every_mode(
    monkeypatch: pytest.MonkeyPatch, gpu: None, given: dict[str, Any], heads: int, cache: torch.dtype, mib: range
) -> None:
    taken = budget.buffer_bytes(configurator(monkeypatch, heads, cache), options(**given))
    assert taken // MIB in mib
    assert taken == 0 or taken < budget.buffer_bytes(configurator(monkeypatch, heads, cache, 1 << 20), options(**given))


@pytest.mark.parametrize("cache", [BF16, FP8], ids=str)
def test_verify_steps_have_the_rows_of_their_requests_and_no_more_tables(
    monkeypatch: pytest.MonkeyPatch, gpu: None, cache: torch.dtype
) -> None:
    """With 128 heads nothing is stacked. Four tokens of 48 requests need page tables for 48; 1,024 rows are those of
    256 requests, where otherwise they are of as many as there are."""
    found: list[LatentSizes] = []
    kind = budget.latent_kind(cache == FP8)
    monkeypatch.setattr(
        budget,
        "latent_kind",
        lambda fp8: SimpleNamespace(
            workspace_bytes_for=lambda sizes, programs: found.append(sizes) or kind.workspace_bytes_for(sizes, programs)
        ),
    )
    taken = {}
    for requests, queries in ((48, 1), (48, 4), (4096, 4)):
        server = configurator(monkeypatch, 128, cache)
        server.resolve_max_num_reqs = lambda token_capacity, requests=requests: requests
        if queries > 1:
            server.server_args = server_args(
                device="cuda", speculative_algorithm="EAGLE", speculative_num_draft_tokens=queries
            )
        taken[requests, queries] = budget.buffer_bytes(server, options(mode="naive", mixed_tokens=0))
    assert [(sizes.max_rows, sizes.sharing_requests) for sizes in found] == [(48, 48), (192, 48), (1024, 256)]
    assert [sizes.max_tokens - (1 << 17) for sizes in found] == [0, 8, 8]
    tables = 48 * (1 << 17) // 64 * 4
    assert taken[48, 1] <= taken[48, 4] < taken[4096, 4]
    assert cache == FP8 or taken[48, 4] < 1.1 * tables


def test_auto_counts_grouped_absorb_where_it_was_timed(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    asked = options(prefix_memory_gb=0.0)
    assert budget.buffer_bytes(configurator(monkeypatch, 16, BF16), asked)
    rates = rates_for("NVIDIA H200")
    mode = replace(rates.modes[Mode.GROUPED_ABSORB], measured=False)
    untimed = replace(rates, modes={**rates.modes, Mode.GROUPED_ABSORB: mode})
    monkeypatch.setattr(server_module, "rates_for", lambda name: untimed)
    assert budget.buffer_bytes(configurator(monkeypatch, 16, BF16), asked) == 0


def test_a_limit_on_running_requests_limits_the_buffers(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    taken = {}
    for requests in (1, 100, 4096):
        server = configurator(monkeypatch, 16, FP8)
        server.resolve_max_num_reqs = lambda token_capacity, requests=requests: requests
        taken[requests] = budget.buffer_bytes(server, options(mode="grouped_absorb"))
    assert 0 < taken[1] < taken[100] < taken[4096]


def test_the_shadow_checks_copies_are_counted(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    server = configurator(monkeypatch, 16, FP8)
    plain, checked = (budget.buffer_bytes(server, options(verify_interval=each)) for each in (0, 10))
    (layer, *_) = model.attention_layers(server)
    assert checked - plain == ShadowCheck.workspace_bytes_for(layer, BF16, 1) > 64 * 16 * 1088 * 2


@pytest.mark.parametrize("given", [{}, {"mode": "naive", "prefix_memory_gb": 0.0}], ids=str)
def test_what_prefill_expands_for_itself_is_counted(monkeypatch: pytest.MonkeyPatch, gpu: None, given: Any) -> None:
    """8,192 tokens of a layer, and the attention to them; nothing in a mode that never expands."""
    monkeypatch.setattr(dispatch, "multiprocessors", lambda device: 132)
    server = configurator(monkeypatch, 128, BF16)
    model.attention_layers(server)[0].kv_b_proj = SimpleNamespace(weight=None)
    plain, expanding = (budget.buffer_bytes(server, options(prefill_expand_tokens=n, **given)) for n in (0, 8192))
    assert 8192 * (128 * 256 + 64) * 2 < expanding - plain < 1 << 30
    absorbing = {"mode": "absorb", "prefill_expand_tokens": 8192}
    assert budget.buffer_bytes(server, options(**absorbing)) == budget.buffer_bytes(server, options(mode="absorb"))


# ---- what is allocated


def storages(things: Iterable[object]) -> dict[int, int]:
    """Bytes of the storages of all tensors among these objects, by address."""
    found = {}
    for thing in things:
        if issubclass(type(thing), torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.fixture
def kept() -> Iterator[Callable[[], int]]:
    """Bytes of the tensors that are there now and were not there at the first call, which says 0."""
    before: dict[int, int] = {}

    def kept() -> int:
        if before:
            gc.collect()
            return sum(size for address, size in storages(gc.get_objects()).items() if address not in before)
        before.update(storages(gc.get_objects()))
        gc.freeze()  # later calls look at later objects only
        return 0

    yield kept
    gc.unfreeze()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, new_tree: Any, request: pytest.FixtureRequest) -> Iterator[World]:
    yield World(monkeypatch, new_tree, fp8=getattr(request, "param", False))
    passes.end()


@pytest.mark.parametrize("world", [False, True], indirect=True, ids=["float32", "fp8"])
@pytest.mark.parametrize(
    ("grouped", "queries"),
    [(False, 1), (True, 1), (False, 4), (True, 4)],
    ids=["tails", "grouped", "tails of four tokens", "grouped of four tokens"],
)
def test_the_latent_part_allocates_no_more_than_it_says_beforehand(
    world: World, monkeypatch: pytest.MonkeyPatch, kept: Callable[[], int], grouped: bool, queries: int
) -> None:
    """Its buffers are the real ones; kernels do not run."""
    world.make("gpu", grouped=grouped, budget_bytes=0, prefix_memory_gb=0.0)
    latent, heads = world.latent, world.layers[0].num_local_heads
    module = sys.modules[type(latent).__module__]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=9))

    def grouped_absorb(make: Any) -> Any:
        def made(req_to_token: Any, cache: Any, *, on_failure: Any, layout: Any = None, **sizes: Any) -> Any:
            sizes = {"dtype": torch.float32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, **sizes}
            return make(device="cpu", programs=9, **sizes)

        return made

    def absorb_fp8(pool: Any, *, dtype: Any, on_failure: Any, **sizes: Any) -> Any:
        return dispatch.TritonAbsorbFP8(device="cpu", num_sms=9, **sizes)

    makers = {
        "make_grouped_absorb": grouped_absorb(dispatch.HopperGroupedAbsorb),
        "make_grouped_absorb_fp8": grouped_absorb(dispatch.make_hopper_grouped_absorb_fp8),
        "make_absorb_fp8": absorb_fp8,
    }
    for name, make in makers.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, make)
    sizes = LatentSizes(
        heads=heads,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        dtype=torch.float32,
        grouped=grouped,
        max_rows=12,
        max_requests=64,
        max_tokens=1000,
        query_tokens=queries,
    )
    fresh = world._build.stock_and_latent(None, None, sizes, SimpleNamespace(fall_back=print))[1]
    assert fresh.workspace_bytes == kept() == 0
    fresh.allocate()
    assert (fresh.grouped_page is not None) == grouped
    assert 0 < kept() == fresh.workspace_bytes <= type(fresh).workspace_bytes_for(sizes, 9)
    assert type(fresh).workspace_bytes_for(sizes, 9) < 1.1 * fresh.workspace_bytes + 4096


@pytest.mark.parametrize("world", [False, True], indirect=True, ids=["float32", "fp8"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("mode", ["auto", "naive", "grouped_absorb", "absorb"])
def test_what_is_kept_is_inside_the_budget(world: World, kept: Callable[[], int], kind: str, mode: str) -> None:
    asked = 16 * MIB + 12345
    kept()
    world.make(kind, mode=mode, budget_bytes=asked)
    used, expands = kept(), world.backend._shared is not None
    assert expands == (mode in ("auto", "naive"))
    assert used <= world.steps.reports.report()["budget_bytes"] == asked
    # The rest is for what expansion needs while it runs, and for what doubles of kernels say that they take.
    assert used > asked - 6 * MIB if expands else used < MIB


@pytest.mark.parametrize("world", [False, True], indirect=True, ids=["float32", "fp8"])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_what_prefill_expands_for_itself_is_inside_the_budget(world: World, kept: Callable[[], int], kind: str) -> None:
    asked = 24 * MIB
    kept()
    world.make(kind, mode="auto", budget_bytes=asked, prefill_expand_tokens=256)
    assert asked - 14 * MIB < kept() <= asked and world.steps._prefill.transient is not None
    assert world.backend._shared is not None


@pytest.mark.parametrize("short", [1, MIB])
def test_a_budget_below_the_least_names_it(world: World, short: int, caplog: pytest.LogCaptureFixture) -> None:
    """With that much there is one chunk."""
    world.make("cpu", budget_bytes=short)
    assert dict(world.steps.counters.fallbacks) == {"prefix_memory_too_small": 1}
    least = float(caplog.text.split("set at least ")[1].split()[0])
    world.make("cpu", budget_bytes=int(least * 1.001 * GIB))
    assert world.steps._prefixes.pool.num_chunks == 1 and not world.steps.counters.fallbacks
    world.make("cpu", budget_bytes=int(least * 0.99 * GIB))
    assert world.steps._prefixes.pool.num_chunks == 0
