"""Models that are not known, or that nothing would be shared for, are refused by their configuration, before weights
are loaded (examined.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_limits
from examined import examined_once

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.compat.attention_classes import strange_layers
from sglang_mla_ext.adapter.launch import models


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return examined_once(tmp_path_factory)["found"]


def test_what_is_known_works(examined: dict[str, Any]) -> None:
    assert is_known_to_work(examined["known"])


def is_known_to_work(found: dict[str, Any]) -> bool:
    return (found["outcome"], found["findings"], found["warnings"]) == ("works", [], [])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minicpm", "MiniCPM3ForCausalLM has attention layers of its own (MiniCPM3AttentionMLA)"),
        ("sarvam", "SarvamMLAForCausalLM has attention layers of its own (SarvamMoEMLAAttention)"),
    ],
)
def test_what_is_not_is_refused_by_name(examined: dict[str, Any], name: str, said: str) -> None:
    outcome, (finding,) = examined[name]["outcome"], examined[name]["findings"]
    assert outcome == "refused" and finding.startswith(said)
    assert finding.endswith(": choose another --attention-backend.")


@pytest.mark.parametrize("name", ["kimi-linear", "ling"])
def test_layers_with_linear_attention_work_where_their_tree_is_read(examined: dict[str, Any], name: str) -> None:
    outcome, findings = examined[name]["outcome"], examined[name]["findings"]
    if contract.line() == "0.5.23":
        assert (outcome, findings) == ("works", [])
    else:
        assert outcome == "refused" and "in a tree of another kind (MambaRadixCache)" in findings[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"enable_hierarchical_cache": True, "hicache_mem_layout": "layer_first"},
        {"speculative_algorithm": "EAGLE"},
        {"hicache_storage_backend": "file"},
        test_limits.DECODE_ROLE,
    ],
    ids=str,
)
def test_what_does_not_go_with_linear_layers(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    args = test_limits.server_args(**changes)
    monkeypatch.setattr(models.installed, "model_config", lambda args: SimpleNamespace(), raising=False)
    for linear, count in (object(), 1), (None, 0):
        monkeypatch.setattr(models.installed, "linear_layers", lambda args, linear=linear: linear)
        found = models.beside_linear_layers(args)
        assert [each.code.endswith("with linear layers") for each in found] == [True] * count
        assert (test_limits.server(test_limits.server_args(), on_gpu=False).mixing.obstacle is None) is (linear is None)


@pytest.mark.parametrize(
    "changes",
    [
        test_limits.FP8_CACHE,
        test_limits.HOST_CACHE | {"hicache_mem_layout": "page_first"},
        {"disaggregation_mode": "prefill"},
    ],
    ids=str,
)
def test_what_goes_with_linear_layers(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(models.installed, "linear_layers", lambda args: object())
    assert list(models.beside_linear_layers(test_limits.server_args(**changes))) == []


def test_heads_of_other_sizes_work(examined: dict[str, Any]) -> None:
    assert is_known_to_work(examined["glm-flash"])


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"qk_nope_head_dim": 192, "v_head_dim": 256, "num_attention_heads": 20 * 8}, []),
        ({"v_head_dim": 8, "num_attention_heads": 8}, []),  # grouped absorb
        ({"v_head_dim": 8, "num_attention_heads": 512}, ["sizes"]),
        ({"kv_lora_rank": 256}, ["latent rows"]),  # Mistral Small 4
        ({"qk_rope_head_dim": 96}, ["latent rows"]),
    ],
    ids=str,
)
def test_what_the_kernels_take(changes: dict[str, int], refused: list[str]) -> None:
    args = test_limits.server_args(dims=test_limits.DEEPSEEK | changes)
    found = models._sizes(test_limits.server(args))
    assert [each.code for each in found] == refused


def test_ranks_of_data_parallel_attention_have_more_heads() -> None:
    dims = test_limits.DEEPSEEK | {"qk_nope_head_dim": 40, "num_attention_heads": 48}
    args = test_limits.server_args(dims=dims, enable_dp_attention=True, dp_size=8)
    assert "has 48" in models._sizes(test_limits.server(args))[0].text
    if contract.line() == "0.5.23":
        vars(args).update(enable_dp_attention=False, dp_size=1, attn_dp_size=8)
        assert "has 48" in models._sizes(test_limits.server(args))[0].text


KNOWN = ["DeepseekV2", "DeepseekV3", "Glm4MoeLite", "LongcatFlash", "MistralLarge3"]
STRANGE = {
    "MiniCPM3ForCausalLM": ["MiniCPM3AttentionMLA"],
    "SarvamMLAForCausalLM": ["SarvamMoEMLAAttention"],
}
if contract.line() == "0.5.23":
    STRANGE |= {
        "BailingMoeV3ForCausalLM": ["DsV3MLA"],
        "HYV4ForCausalLM": ["HYV4Attention"],
    }


@pytest.mark.parametrize(
    "architecture",
    [
        *(f"{name}ForCausalLM" for name in KNOWN),
        *("KimiK25ForConditionalGeneration", "KimiVLForConditionalGeneration", "DotsVLMForCausalLM"),
        *("DeepseekVL2ForCausalLM", "PixtralForConditionalGeneration", "NotOfSGLangForCausalLM"),
        # Of classes derived from it.
        *("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration", "BailingMoeV2_5ForCausalLM"),
        "GigaChat35ForCausalLM",
    ],
)
def test_models_of_the_known_layer(architecture: str) -> None:
    """Through the names in the code of their classes; one that SGLang does not have is left to the start."""
    assert strange_layers(architecture) == []


@pytest.mark.parametrize("architecture", STRANGE)
def test_models_of_other_layers(architecture: str) -> None:
    assert strange_layers(architecture) == STRANGE[architecture]


def test_shipped_models_are_known() -> None:
    folder = Path(__file__).parents[4] / "configs" / "checkpoints"
    for file in folder.glob("*.json"):
        (architecture,) = json.loads(file.read_text())["config"]["architectures"]
        assert strange_layers(architecture) == [] or "Eagle3" in architecture, architecture
