"""A server is refused for what it would use of SGLang itself, not for what others would."""

from __future__ import annotations

from typing import Any

import pytest
import test_limits
from packaging.version import Version

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.compat.contract import ContractError
from sglang_mla_ext.adapter.compat.table import Changes, Feature, Table
from sglang_mla_ext.adapter.launch.resolved import asked_for

HERE = contract.table()
"""What is used of the installed release."""
PRODUCTION = asked_for(test_limits.server_args())
USED = {use.feature for use in HERE.uses}
OTHERS = [feature for feature in Feature if feature in USED - PRODUCTION]


def without(*gone: Feature) -> Table:
    """The contract as if the installed release had renamed all that only these features use."""
    return HERE.after(Changes(renamed={use.path: f"{use.path}_of_old" for use in HERE.uses if use.feature in gone}))


@pytest.fixture
def others_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SUPPORTED", {str(contract.installed_version()): without(*OTHERS)})


def test_a_production_server_starts_where_only_others_would_miss_something(others_are_gone: None) -> None:
    assert {Feature.BASE, Feature.GPU} == PRODUCTION
    contract.check(PRODUCTION)
    assert contract.compare(PRODUCTION) == {}


@pytest.mark.parametrize("feature", OTHERS, ids=lambda feature: feature.name)
def test_a_server_that_is_asked_for_more_is_refused_by_name(others_are_gone: None, feature: Feature) -> None:
    with pytest.raises(ContractError) as error:
        contract.check(PRODUCTION | {feature})
    expected = {f"{use.path}_of_old" for use in HERE.uses if use.feature is feature}
    assert expected and {line.split(" ")[0] for line in error.value.differences} == expected


def test_what_was_as_expected_is_not_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    contract.check([Feature.BASE, Feature.STATUS])
    compared: list[Feature] = []
    monkeypatch.setattr(contract, "mismatches", lambda asked: compared.extend(asked) or [])
    contract.check([Feature.BASE, Feature.STATUS, Feature.ROUTING])
    assert compared in ([Feature.ROUTING], [])  # by whoever checked before


def test_every_server_or_some() -> None:
    """Each feature is of use, and nothing that all servers need is a feature's."""
    of = {use.path: use.feature for use in HERE.uses}
    newest = {Feature.PREFILL_GRAPH, Feature.PAIRED, Feature.GRAPH_VARIANTS}
    is_newest = Version(contract.installed_version() or "0") >= Version("0.5.23")
    assert set(of.values()) == set(Feature) - (set() if is_newest else newest)
    for name in ("managers.schedule_batch.Req.last_node", "models.deepseek_v2.DeepseekV2AttentionMLA.o_proj"):
        assert of[f"sglang.srt.{name}"] is Feature.BASE


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, None),
        ({"kv_cache_dtype": "bf16"}, None),
        (test_limits.FP8_CACHE, Feature.FP8),
        (test_limits.EAGLE, Feature.DRAFTS),
        (test_limits.HOST_CACHE, Feature.HOST_CACHE),
        ({"disaggregation_mode": "prefill"}, Feature.DISAGGREGATION),
        (test_limits.DECODE_ROLE, Feature.DISAGGREGATION),
        ({"enable_memory_saver": True}, Feature.MEMORY_SAVER),
    ],
    ids=str,
)
def test_what_is_asked_for(changes: dict[str, Any], more: Feature | None) -> None:
    args = test_limits.server_args(**changes)
    assert asked_for(args) == {*PRODUCTION, *([more] if more else [])}
    assert asked_for(test_limits.on(False, args)) - {more} == {Feature.BASE, Feature.CPU}


def test_hooks_go_where_the_release_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every server needs is named even where it is not there: then there is no start without it."""
    finish, load = "sglang.srt.managers.schedule_batch.Req.finished", "sglang.srt.environ.Envs.get"
    loading = "sglang.srt.managers.cache_controller.HiCacheController.start_loading"
    assert contract.targets([finish, load, loading]) == {
        finish: (finish, Feature.BASE),
        load: (load, Feature.BASE),
        loading: (loading, Feature.HOST_CACHE),
    }
    changed = without(Feature.HOST_CACHE).after(Changes(renamed={finish: "managers.schedule_batch.Req.is_over"}))
    monkeypatch.setattr(contract, "SUPPORTED", {str(contract.installed_version()): changed})
    now = "sglang.srt.managers.schedule_batch.Req.is_over"
    assert contract.targets([finish, loading]) == {finish: (now, Feature.BASE)}
