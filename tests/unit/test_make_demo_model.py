"""The random checkpoints for tests and benchmarks."""

from __future__ import annotations

import torch
from demo_model.checkpoint import BLOCK, Settings, in_fp8_blocks, model_config


def test_fp8_blocks_mean_the_weights_they_come_from() -> None:
    """Also where a matrix does not end with a block; what is no projection stays as it is."""
    torch.manual_seed(0)
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    weight = torch.randn(576, 200, dtype=torch.bfloat16) * torch.logspace(-3, 3, 200)
    found = in_fp8_blocks({name: weight.to(torch.bfloat16), "model.norm.weight": torch.ones(3)})
    assert set(found) == {name, f"{name}_scale_inv", "model.norm.weight"}
    assert found[name].dtype == torch.float8_e4m3fn
    scale = found[f"{name}_scale_inv"]
    assert scale.shape == (5, 2)
    means = found[name].float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:576, :200]
    assert (means - weight).norm() / weight.norm() < 0.04


def test_config_says_what_is_in_blocks() -> None:
    sizes = dict(layers=1, heads=2, hidden=128, intermediate=256, q_lora_rank=64, vocab=512, max_positions=4096, seed=0)
    assert "quantization_config" not in model_config(Settings(**sizes, config_only=True))
    config = model_config(Settings(**sizes, config_only=True, fp8_blocks=True))
    assert config["quantization_config"]["weight_block_size"] == [BLOCK, BLOCK]
