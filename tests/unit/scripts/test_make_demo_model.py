"""The random checkpoints for tests and benchmarks."""

from __future__ import annotations

import torch
from demo_model.checkpoint import BLOCK, Settings, in_fp8_blocks, model_config, weights
from known import Known, known_config, known_weights


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


def test_architectures() -> None:
    """DeepSeek-V2-Lite's queries, V3's experts; with neither, a seed's weights are what they were."""
    sizes = dict(layers=2, heads=2, hidden=64, intermediate=96, vocab=512, max_positions=4096, seed=0, config_only=True)
    plain, lite = Settings(**sizes, q_lora_rank=32), Settings(**sizes, q_lora_rank=0)
    experts = Settings(**sizes, q_lora_rank=32, experts=True)
    assert (
        model_config(lite)["architectures"] == ["DeepseekV2ForCausalLM"] and model_config(lite)["q_lora_rank"] is None
    )
    assert model_config(experts)["first_k_dense_replace"] == 1 and model_config(plain)["first_k_dense_replace"] == 2
    names = {name.removeprefix("model.layers.1.") for name in weights(lite) if name.startswith("model.layers.1.")}
    assert "self_attn.q_proj.weight" in names and not any("q_a" in name or "q_b" in name for name in names)
    found = weights(experts)
    assert found["model.layers.0.mlp.up_proj.weight"].shape == (96, 64)
    assert found["model.layers.1.mlp.experts.7.up_proj.weight"].shape == (64, 64)
    assert not any("enorm" in name for name in found)
    assert weights(plain)["model.layers.0.self_attn.q_b_proj.weight"][0, :3].tolist() == [
        0.404296875,
        0.177734375,
        -0.404296875,
    ]


def test_a_layer_that_drafts_has_the_names_that_sglang_loads() -> None:
    """Behind the others, which stay as they are. SGLang drops whatever it has no parameter for, and misses nothing."""
    sizes = dict(layers=2, heads=2, hidden=64, intermediate=96, q_lora_rank=32, vocab=512, max_positions=4096, seed=0)
    without, found = (weights(Settings(**sizes, config_only=False, nextn=nextn)) for nextn in (False, True))
    prefix = "model.layers.2."
    assert {name for name in set(found) - set(without)} == {name for name in found if name.startswith(prefix)}
    assert all(torch.equal(found[name], without[name]) for name in without if name.startswith("model.layers.1."))
    drafts = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    assert drafts["eh_proj.weight"].shape == (64, 128) and drafts["mlp.gate.weight"].shape == (8, 64)
    assert drafts["mlp.gate.e_score_correction_bias"].dtype == torch.float32
    attention = {name.removeprefix("model.layers.1.") for name in found if name.startswith("model.layers.1.self_attn")}
    assert attention <= set(drafts)
    assert {"enorm.weight", "hnorm.weight", "shared_head.norm.weight"} <= set(drafts)
    assert sum(name.startswith("mlp.experts.") for name in drafts) == 24
    assert sum(name.startswith("mlp.shared_experts.") for name in drafts) == 3
    assert model_config(Settings(**sizes, config_only=True, nextn=True))["num_nextn_predict_layers"] == 1
    in_blocks = in_fp8_blocks(found)
    assert in_blocks[f"{prefix}eh_proj.weight"].dtype == torch.bfloat16
    assert in_blocks[f"{prefix}mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_known_models() -> None:
    """Their own configurations but for sizes; LongCat-Flash has two attentions and two MLPs beside its experts."""
    kimi = Known("kimi-k2", hidden=32, intermediate=48, q_lora_rank=16, vocab=512)
    config = known_config(kimi)
    assert (config["model_type"], config["num_attention_heads"], config["n_routed_experts"]) == ("kimi_k2", 64, 384)
    assert config["hidden_size"] == 32 and "num_layers" not in config and "quantization_config" not in config
    found = known_weights(kimi)
    assert "model.layers.0.mlp.up_proj.weight" in found and "model.layers.1.mlp.up_proj.weight" not in found
    assert found["model.layers.1.mlp.gate.weight"].shape == (384, 32)
    assert "model.layers.1.mlp.experts.383.down_proj.weight" in found
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in found
    longcat = Known("longcat-flash", hidden=32, intermediate=48, q_lora_rank=16, vocab=512, heads=2)
    assert known_config(longcat)["num_layers"] == 2 and known_config(longcat)["num_attention_heads"] == 2
    found = known_weights(longcat)
    for layer in range(2):
        for half in range(2):
            assert found[f"model.layers.{layer}.self_attn.{half}.kv_b_proj.weight"].shape == (2 * 256, 512)
            assert found[f"model.layers.{layer}.mlps.{half}.up_proj.weight"].shape == (48, 32)
        assert found[f"model.layers.{layer}.mlp.router.classifier.weight"].shape == (512 + 256, 32)
        assert f"model.layers.{layer}.mlp.experts.511.up_proj.weight" in found
    assert not any("shared_experts" in name for name in found)
