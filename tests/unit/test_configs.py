"""The configurations that are shipped, and how they are read."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from sglang_mla_ext import configs
from sglang_mla_ext.configs import config_names, device_words, gpu_config_of, read_config, read_config_or_file


def test_the_module_and_the_data_folder_share_a_name():
    assert Path(configs.__file__).name == "configs.py"
    assert (files("sglang_mla_ext") / "configs" / "gpus" / "h200.json").is_file()


def test_names():
    assert {"h100", "h200", "cpu"} <= set(config_names("gpus"))
    assert "deepseek-v3" in config_names("checkpoints")
    assert config_names("workloads") == [
        *("agent_sessions", "agents", "burst", "churn", "four_prompts", "gsm8k", "mixed", "mmlu", "nested"),
        *("short_answers", "simpleqa", "system_prompts"),
    ]


def test_workloads():
    assert read_config("workloads", "system_prompts")["tokens"] == {"A": 26472, "B": 7069, "C": 4759}
    for name in ("mmlu", "gsm8k", "simpleqa"):
        for lengths in read_config("workloads", name)["models"].values():
            for kind in ("prompt_tokens", "generated_tokens"):
                quantiles = list(lengths[kind]["quantiles"].values())
                assert quantiles == sorted(quantiles)
                assert quantiles[0] <= lengths[kind]["mean"] <= quantiles[-1]


def test_unknown_configuration_lists_the_known_ones():
    with pytest.raises(ValueError, match="deepseek-v3"):
        read_config("checkpoints", "deepseek-v9")
    with pytest.raises(ValueError, match="deepseek-v3"):
        read_config_or_file("checkpoints", "deepseek-v9")


def test_a_name_or_a_file(tmp_path):
    file = tmp_path / "h200.json"
    file.write_text(json.dumps({"name": "another"}))
    assert read_config_or_file("gpus", file) == read_config_or_file("gpus", str(file)) == {"name": "another"}
    assert read_config_or_file("gpus", "h200") == read_config("gpus", "h200")
    with pytest.raises(OSError):
        read_config_or_file("gpus", tmp_path / "absent.json")


def test_devices_by_whole_words():
    assert device_words("NVIDIA H100 80GB-HBM3") == ["nvidia", "h100", "80gb", "hbm3"]
    assert [gpu_config_of(name) for name in ("NVIDIA H200", "NVIDIA H20", "cpu")] == ["h200", "h20", "cpu"]
    # A card of the same name with more memory is another one.
    assert [gpu_config_of(name) for name in ("NVIDIA H20-3e", "h20-141gb", "H20 96GB")] == ["h20-3e", "h20-3e", "h20"]
    assert gpu_config_of("NVIDIA B300") is None
