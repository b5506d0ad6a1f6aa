"""The plug-in in processes of its own: inert unless asked for, and whole where it is.

plugin_scenarios.py forks a child for each scenario. A child sets its environment, loads SGLang's plug-ins as SGLang
does at start, and reports what it sees.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from examined import LLAMA
from fork_server import ForkServer

from sglang_mla_ext.adapter.build import start
from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.adapter.cpu import stubs
from sglang_mla_ext.adapter.launch import status_routes
from sglang_mla_ext.options import HybridMLAOptions

SCENARIOS = Path(__file__).parents[1].joinpath("plugin_scenarios.py")

LLAMA_DRAFT = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 2048}
"""EAGLE3's drafts are such, without Multi-head Latent Attention."""


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> dict[str, Any]:
    import make_demo_model

    folder = tmp_path_factory.mktemp("plugin")
    make_demo_model.main(folder / "model", config_only=True)
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text(json.dumps(LLAMA_DRAFT))
    (folder / "out").mkdir()
    command = [sys.executable, str(SCENARIOS), str(folder / "model"), str(folder / "out")]
    printed = forks.run(command, folder / "log", timeout_s=300)
    found = {path.stem: json.loads(path.read_text() or "null") for path in (folder / "out").iterdir()}
    assert found and all(found.values()), printed
    return found


def test_not_asked_for_it_changes_nothing_but_the_list_of_choices(scenarios: dict[str, Any]) -> None:
    without, with_it = scenarios["without"], scenarios["not_asked"]
    assert "attention_backend" in without["args"] and without["args"]["attention_backend"] == "'torch_native'"
    assert with_it["args"] == without["args"], "resolved arguments"
    assert with_it["default"] == without["default"], "resolved arguments where SGLang chooses the backend"
    assert with_it["backends"] == without["backends"] and "hybrid_mla" not in with_it["backends"]
    assert with_it["handlers"] == without["handlers"] and "hybrid_mla" not in with_it["handlers"]
    assert with_it["query in parts"] == without["query in parts"] and "hybrid_mla" not in without["query in parts"]
    assert with_it["asked"] is None and not with_it["hooks imported"]
    assert without["hooked"] == []
    prefix = "sglang.srt.server_args.ServerArgs."
    assert with_it["hooked"] == [
        prefix + name for name in sorted((installed.RESOLVED_BY, "add_cli_args", "from_cli_args"))
    ]
    assert sorted([*without["choices"], "hybrid_mla"]) == with_it["choices"]


def test_not_asked_for_it_does_not_look_at_its_own_troubles(scenarios: dict[str, Any]) -> None:
    broken = scenarios["not_asked_but_broken"]
    assert broken["args"] == scenarios["without"]["args"]
    assert broken["asked for"][0] == "ContractError" and "works with 99.0" in broken["asked for"][1]


def test_help_shows_the_flags(scenarios: dict[str, Any]) -> None:
    for name in HybridMLAOptions.__dataclass_fields__:
        assert "--hybrid-mla-" + name.replace("_", "-") in scenarios["help"]
    assert "SGLANG_HYBRID_MLA_MODE" in scenarios["help"]


def test_asked_for_it_tells_the_processes_to_come_until_it_is_not(scenarios: dict[str, Any]) -> None:
    asked = scenarios["asked"]
    assert asked["decode"] == "hybrid_mla"
    assert asked["env"] == {
        "SGLANG_HYBRID_MLA_ASKED": "1",
        "SGLANG_HYBRID_MLA_MODE": "naive",
        "SGLANG_HYBRID_MLA_MIN_PREFIX_LEN": "7",
    }
    assert asked["asked"] is None, "another ServerArgs, for another backend, takes it back"
    assert not asked["hooks imported"], "the launching process installs nothing else"


def test_flags_without_the_backend_are_one_warning(scenarios: dict[str, Any]) -> None:
    flags = "--hybrid-mla-min-prefix-len, --hybrid-mla-mode"
    assert scenarios["flags_in_vain"] == {
        "without flags": [],
        "with flags": [f"{flags}: no effect without --attention-backend hybrid_mla."],
    }


def test_bad_launches_stop_and_leave_nothing_behind(scenarios: dict[str, Any]) -> None:
    bad = scenarios["bad_launches"]
    assert [bad[name][0] for name in ("radix", "prefill", "mode")] == ["Refusal", "Refusal", "OptionError"]
    assert "--disable-radix-cache is not supported yet: remove it." in bad["radix"][1]
    assert "set --decode-attention-backend hybrid_mla" in bad["prefill"][1]
    assert "--hybrid-mla-mode is 'nonsense'" in bad["mode"][1]
    assert bad["asked"] is None


def test_ranks_are_chosen_where_it_is_asked_for(scenarios: dict[str, Any]) -> None:
    found = scenarios["dp_routing"]
    assert found["refused"][0] == "Refusal" and "needs --tokenizer-worker-num 1" in found["refused"][1]
    assert found["more"] == ["sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"]


def test_the_launching_process_adds_the_status_page(scenarios: dict[str, Any]) -> None:
    """By hooks on what is given the server's app."""
    hooked = {*scenarios["asked"]["hooked"]} - {*scenarios["not_asked"]["hooked"]}
    assert hooked == {status_routes.WITH_KEY, status_routes.WITHOUT_KEY}
    assert hooked <= {*scenarios["worker"]["contract"]}


def test_speculation_is_resolved_as_sglang_does_it(scenarios: dict[str, Any]) -> None:
    """What is looked at is what SGLang makes of the arguments: it may change the number of drafts."""
    found, of_draft = scenarios["speculation"], "fa3" if installed.shares_in_prefill_graphs else "flashmla"
    assert found["nextn"] == ["EAGLE", 4, of_draft] and found["two steps"] == ["EAGLE", 3, of_draft]
    assert found["another draft"] == ["EAGLE3", 4, "flashinfer"] and found["without"] == 1
    assert "--speculative-num-draft-tokens 9 is not supported: use 2 to 8" in found["many steps"]
    assert "--speculative-adaptive is not supported yet" in found["adaptive"]
    assert found["tree"][0] == "Refusal" and "--speculative-eagle-topk 4 is not supported: use 1." in found["tree"][1]


def test_a_worker_has_the_backend_and_all_hooks(scenarios: dict[str, Any]) -> None:
    worker, without = scenarios["worker"], scenarios["without"]
    assert worker["backends"] == {
        **without["backends"],
        "hybrid_mla": "sglang_mla_ext.adapter.build.start.create_backend",
    }
    assert worker["handlers"]["hybrid_mla"] == "sglang_mla_ext.adapter.step.layer.forward_method"
    assert worker["query in parts"] == [*without["query in parts"], "hybrid_mla"]
    others = {name: handler for name, handler in worker["handlers"].items() if name in without["handlers"]}
    # The CPU launcher lets torch_native serve MLA models, whichever backend is asked for.
    assert {name for name in others if others[name] != without["handlers"][name]} <= {"torch_native"}
    assert set(worker["ours"]) <= set(worker["hooked"])
    assert worker["features"].items() <= worker["table"].items(), "the table has the contract's features"
    torch_native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    assert f"{torch_native}._run_sdpa_forward_extend" in worker["hooked"] or not stubs.needed()


def test_every_hook_is_in_the_contract(scenarios: dict[str, Any]) -> None:
    worker = scenarios["worker"]
    assert set(worker["hooked"]) <= set(worker["contract"])
    assert worker["differences while hooked"] == []


def test_a_worker_does_without_what_only_others_hook(scenarios: dict[str, Any]) -> None:
    found = scenarios["other_features_gone"]
    assert not {*found["hooked"]} & {*found["renamed"]}
    assert {*scenarios["worker"]["hooked"]} - {*found["hooked"]} <= {*found["renamed"]}
    assert not [error for error in found["errors"] if "Failed to apply hooks" in error]
    assert "before it sized its KV cache" in found["refusals"]["plain"], "its hooks are in place"
    assert "start_loading_of_old" in found["refusals"]["host cache"], "it is refused by name"


def test_the_backend_is_not_built_without_its_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "hooked", {})
    with pytest.raises(contract.ContractError, match=r"hooks are not in place: all of them\..*SGLANG_PLUGINS"):
        start.create_backend(None)
    monkeypatch.setattr(start, "hooked", {"sglang.some.target": Feature.BASE})
    with pytest.raises(contract.ContractError, match=r"hooks are not in place: sglang\.some\.target\."):
        start.create_backend(None)


@pytest.mark.parametrize("variable", ["SGLANG_ENABLE_UNIFIED_RADIX_TREE", "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"])
def test_a_variable_is_named_where_sglang_takes_another_tree_by_it(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    from sglang.srt.mem_cache import registry

    monkeypatch.setenv(variable, "1")
    read = f"if envs.{variable}.get()" in inspect.getsource(registry)
    assert installed.other_trees() == [variable] * read
