"""Launch commands, recipes and small models, examined with the installed SGLang's own arguments for a Hopper GPU that
is not there: by one process for all tests of a run. Run as a program, this file is that process.

Neither the network nor the number of GPUs matters. With another SGLang than the newest neither recipes nor `VARIED` are
examined.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.recipes import recipes, words
from fork_server import environment_without_sglangs
from once import once_in_a_run

from sglang_mla_ext.adapter.compat import contract, installed

IS_NEWEST = contract.line() == list(contract.SUPPORTED)[-1]
"""Of the releases that are supported."""
V3 = "--model-path deepseek-ai/DeepSeek-V3 --tp 8 "
IN_GRAPHS = installed.shares_in_prefill_graphs
PAGES, GRAPHS = ["--page-size 64"], [] if IN_GRAPHS else ["--disable-prefill-cuda-graph"]
SET = PAGES + GRAPHS
DRAFT_BACKEND = "fa3" if IN_GRAPHS else "flashmla"
DRAFTS = "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4 "

EXPECTED: dict[str, tuple[str, list[str], list[str]]] = {
    "": ("works", [], SET),
    "--page-size 1": ("works with a change", ["hybrid_mla needs --page-size 64, not 1; remove the flag."], GRAPHS),
    "--prefill-attention-backend fa3": ("works", [], [*PAGES, "--disable-prefill-cuda-graph"]),
    "--enable-lroa": ("refused", ["SGLang does not know --enable-lroa: did you mean --enable-lora?"], []),
    DRAFTS + "--speculative-eagle-topk 1": (
        "works",
        [],
        [*PAGES, f"--speculative-draft-attention-backend {DRAFT_BACKEND}", *GRAPHS],
    ),
    "--enable-lora": ("refused", ["--enable-lora is not supported yet: remove it."], []),
}
"""By what is added to a line: the outcome, what was found, and what is set by itself."""

VARIED = {
    "older": "--page-size 1 --enable-deepep-moe --speculative-algorithm EAGLE --speculative-num-draft-tokens 16 "
    "--speculative-num-steps 15 --speculative-eagle-topk 1",
    "tree": "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 4 "
    "--speculative-num-draft-tokens 8",
    "formats": "--dtype half --kv-cache-dtype fp8_e5m2 --disable-chunked-prefix-cache",
    "prefill": "--kv-cache-dtype fp8_e4m3 --decode-attention-backend hybrid_mla --prefill-attention-backend fa3 "
    "--cuda-graph-backend-prefill breakable",
    "by phase": "--attention-backend flashmla --prefill-attention-backend fa3 --speculative-algorithm EAGLE",
    "too much memory": "--hybrid-mla-prefix-memory-gb=200",
    "an image": "--hybrid-mla-dp-routing prefix --enable-dp-attention --dp 8",
    "nonsense": "--no-such-flag",
    "sglang's": "--tp 6 --enable-dp-attention --dp 4",
    "option": "--hybrid-mla-min-prefix-len 0",
}
"""What is added to a line, by name: of the newest release alone."""

IN_IMAGE = "docker run --gpus all {} python3 -m sglang.launch_server " + V3
WHOLE = {
    **{tag: IN_IMAGE.format(f"lmsysorg/sglang:v{tag}") for tag in ("0.4.3", "0.5.10-cu126", "0.5.30", "0.5.21")},
    "another's image": IN_IMAGE.format("a.b/our/sglang-app:0.1.0"),
    "ROCm": "docker run --device=/dev/kfd --device=/dev/dri rocm/sgl-dev:v0.5.23-rocm700-mi35x "
    f"python3 -m sglang.launch_server {V3} --attention-backend aiter",
    "ROCm by a variable": f"SGLANG_USE_AITER=1 python3 -m sglang.launch_server {V3}",
    "trtllm_mla": f"{V3} --attention-backend trtllm_mla",
    "flashinfer_trtllm": f"{V3} --moe-runner-backend flashinfer_trtllm",
    "NVFP4": "--model-path nvidia/DeepSeek-R1-0528-NVFP4-v2 --tp 8 --quantization modelopt_fp4",
    "NPU": f"{V3} --device npu --attention-backend ascend",
    "placeholders": f"{V3} --nnodes '$(LWS_GROUP_SIZE)' --node-rank '$(LWS_WORKER_INDEX)' --api-key '$KEY'",
    "a placeholder for a model": "--model-path '{{ .Values.model }}' --tp '<TP>'",
    "Mistral Large 3": "--model-path mistralai/Mistral-Large-3-675B-Instruct-2512 --tp 8",
    "DP attention": f"{V3} --enable-dp-attention --dp 8",
    "DP attention, not sharded": f"{V3} --enable-dp-attention --dp 8 --hybrid-mla-prefix-sharding off",
    "DP attention, few heads": f"{V3} --tp 16 --enable-dp-attention --dp 2",
}
"""Whole commands, by name: of all releases."""

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "num_hidden_layers": 4,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "torch_dtype": "bfloat16",
}
LINEAR = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "known": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "kimi-linear": {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "linear_attn_config": LINEAR,
        "num_experts": 8,
    },
    "ling": {"architectures": ["BailingMoeV2_5ForCausalLM"], "model_type": "bailing_hybrid", "layer_group_size": 4},
    # What else these have in their configurations does not matter.
    "minicpm": {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "deepseek_v3"},
    "sarvam": {"architectures": ["SarvamMLAForCausalLM"], "model_type": "deepseek_v3"},
    "glm-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
}
"""Small models, by what differs from `SMALL`."""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}
"""Another kind of model."""


def examined_once(factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`found`: fields of `examine.Examined`, by name. `gpu`: whether torch had one before and after. `imported`: what
    was to be left out and is there."""
    return once_in_a_run(factory, "examined", lambda: _examine(factory.mktemp("examined")))


def _examine(folder: Path) -> dict[str, Any]:
    for name, config in [*((name, {**SMALL, **config}) for name, config in CONFIGS.items()), ("other model", LLAMA)]:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    env = {**environment_without_sglangs(sys.path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-W", "ignore", __file__, str(folder)]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout)


def main(folder: Path) -> None:
    import torch

    from sglang_mla_ext.adapter.launch import examine, launch_line
    from sglang_mla_ext.adapter.launch.import_stubs import PACKAGES, stub_imports

    found = {}
    before = torch.cuda.is_available()
    with stub_imports(), examine.examiner() as examined:
        for more in EXPECTED:
            found[more] = examined(launch_line.read(f"python -m sglang.launch_server {V3}{more}".split()))
        for name in (*CONFIGS, "other model"):
            found[name] = examined(launch_line.read(["--model-path", str(folder / name), "--tp", "4"]))
        for recipe in recipes() if IS_NEWEST else ():
            found[recipe["name"]] = examined(launch_line.read(words(recipe)))
        for name, line in VARIED.items() if IS_NEWEST else ():
            launcher = "docker run -e A=1 lmsysorg/sglang:v0.5.20-cu129 sglang serve" if name == "an image" else ""
            found[name] = examined(launch_line.read([f"{launcher} {V3}{line}"]))
        for name, command in WHOLE.items():
            found[name] = examined(launch_line.read([command]))
        found["not known"] = examined(launch_line.read(["--model-path", "no/such-model"]))
    after = torch.cuda.is_available()
    fields = {
        name: {
            **one._asdict(),
            "run": str(one.tested),
            "findings": [finding.text for finding in one.findings],
            "codes": [finding.code for finding in one.findings],
            "refusals": [each.text for each in one.findings if each.remedy is None],
        }
        for name, one in found.items()
    }
    imported = [name for name in PACKAGES if name in sys.modules]
    json.dump({"found": fields, "gpu": [before, after], "imported": imported}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
