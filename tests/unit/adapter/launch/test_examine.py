"""Launch commands (examined.py), and what is found in them.

test_recipes.py has many more, and what it expects is what the newest SGLang says; here it is what all releases say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from examined import EXPECTED, examined_once

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import examine, launch_line


@pytest.mark.parametrize("more", EXPECTED, ids=lambda more: more.strip() or "as it is")
def test_a_launch_command(more: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = examined_once(tmp_path_factory)["found"][more]
    assert (found["outcome"], found["findings"], found["settings"]) == EXPECTED[more]


@pytest.fixture
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return examined_once(tmp_path_factory)["found"]


@pytest.mark.parametrize(
    ("name", "outcome", "codes", "said"),
    [
        ("0.4.3", "refused", ["SGLang is too old"], "v0.4.3 has SGLang 0.4.3, and 0.5.17 to 0.5.23 are supported: use"),
        ("0.5.10-cu126", "refused", ["SGLang is too old"], "has SGLang 0.5.10, and 0.5.17 to 0.5.23 are supported"),
        ("0.5.30", "cannot tell", ["SGLang is newer"], "has SGLang 0.5.30, and 0.5.17 to 0.5.23 are supported (newer)"),
        (
            "another's image",
            "cannot tell",
            ["SGLang is newer"],
            "supported (if that is its release): run doctor in the",
        ),
        (
            "ROCm",
            "refused",
            ["ROCm"],
            "--attention-backend aiter, --device=/dev/kfd, rocm/sgl-dev:v0.5.23-rocm700-mi35x",
        ),
        ("ROCm by a variable", "refused", ["ROCm"], "SGLANG_USE_AITER is for AMD GPUs (ROCm)"),
        ("trtllm_mla", "refused", ["Blackwell"], "--attention-backend trtllm_mla is for Blackwell GPUs"),
        ("flashinfer_trtllm", "refused", ["Blackwell"], "--moe-runner-backend flashinfer_trtllm is for Blackwell GPUs"),
        ("NVFP4", "refused", ["Blackwell"] * 2, "--quantization modelopt_fp4 is for Blackwell GPUs"),
        ("NPU", "refused", ["accelerator"], "--device npu, --attention-backend ascend are for other accelerators"),
        (
            *("placeholders", "cannot tell", ["placeholder"]),
            "--nnodes $(LWS_GROUP_SIZE), --node-rank $(LWS_WORKER_INDEX): give the values",
        ),
        (
            "a placeholder for a model",
            "cannot tell",
            ["placeholder"],
            "--model-path {{ .Values.model }}, --tp <TP>: give",
        ),
    ],
)
def test_what_is_not_for_this_machine_or_not_whole(
    name: str, outcome: str, codes: list[str], said: str, found: dict[str, Any]
) -> None:
    assert (found[name]["outcome"], found[name]["codes"]) == (outcome, codes)
    assert said in found[name]["findings"][0]
    assert found[name]["tested"] is None


def test_a_release_between_those_that_were_tested(found: dict[str, Any]) -> None:
    assert found["0.5.21"]["outcome"] == "works"
    assert f"has SGLang 0.5.21, which was not tested; examined with {contract.line()}" in found["0.5.21"]["elsewhere"]


def test_that_decode_gains_nothing_with_dp_attention(found: dict[str, Any]) -> None:
    """Report it only if prefixes are not sharded and ranks have many heads."""
    cases = ("DP attention, not sharded", "DP attention, few heads", "DP attention", "")
    assert [found[name]["outcome"] for name in cases] == ["works"] * 4
    caveats = [found[name]["caveat"] for name in cases]
    assert caveats[0].startswith("decode gains nothing: with DP attention") and caveats[1:] == [None] * 3


def test_fp8_weights_of_mistral_large_3(found: dict[str, Any]) -> None:
    assert (found["Mistral Large 3"]["outcome"], found["Mistral Large 3"]["findings"]) == ("works", [])


def test_models_that_a_configuration_file_names(tmp_path: Path) -> None:
    """Models that the line names come before those of the file, as in SGLang."""
    file = tmp_path / "server.yaml"

    def named(text: str, *more: str) -> tuple[list[str], dict[str, str]]:
        file.write_text(text)
        line = launch_line.read(["python", "-m", "sglang.launch_server", "--config", str(file), *more])
        return examine._models_of(line), examine._in_config(line)

    both = "model-path: a/b\nspeculative_draft_model_path: c/d\nspeculative-algorithm: EAGLE\ntp: 8\n"
    assert named(both) == (["a/b", "c/d"], {"--model-path": "a/b", "--speculative-draft-model-path": "c/d"})
    assert named(both, "--model", "e/f") == (["e/f", "c/d"], {"--speculative-draft-model-path": "c/d"})
    for nothing in ("", "- a list", "model-path: [", "model-path: 1"):
        assert named(nothing) == ([], {})
    file.unlink()
    line = launch_line.read(["python", "-m", "sglang.launch_server", "--config", str(file)])
    assert examine._models_of(line) == []
