"""Launch commands in Kubernetes manifests and compose files, in scripts of containers, and beside `docker run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sglang_mla_ext.adapter.launch import hardware, launch_line
from sglang_mla_ext.adapter.launch.launch_line import LaunchLine, LaunchLineError, read, text

ARGUMENTS = ["--model-path", "a/b", "--tp", "8"]
IMAGE = "lmsysorg/sglang:v0.5.23"

KUBERNETES = f"""
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      initContainers:
        - {{name: wait, image: busybox, command: [sh, -c, "sleep 1"]}}
      containers:
        - name: sglang
          image: {IMAGE}
          command: [python3, -m, sglang.launch_server]
          args: ["--model-path", "a/b", "--tp", 8]
          env:
            - {{name: SGLANG_A, value: "1"}}
            - name: HF_TOKEN
              valueFrom: {{secretKeyRef: {{name: hf, key: token}}}}
---
kind: Service
"""
COMPOSE = f"""
services:
  proxy: {{image: nginx, command: nginx -g off}}
  sglang:
    image: {IMAGE}
    entrypoint: python3 -m sglang.launch_server
    command: >
      --model-path a/b
      --tp 8
    environment: [SGLANG_A=1, HF_TOKEN]
"""


@pytest.mark.parametrize("manifest", [KUBERNETES, COMPOSE], ids=["kubernetes", "compose"])
def test_a_manifest_or_its_path(manifest: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(manifest)
    expected = LaunchLine({"SGLANG_A": "1"}, ARGUMENTS, IMAGE)
    assert read([manifest]) == read([str(path)]) == expected


@pytest.mark.parametrize(
    "piece",
    [
        '["python3", "-m", "sglang.launch_server", "--model-path", "a/b", "--tp", "8"]',
        '["--model-path", "a/b", "--tp", "8"]',
        '"args": ["--model-path", "a/b", "--tp", "8"]',
        "args:\n- --model-path\n- a/b\n- --tp\n- '8'\n",
        "- --model-path\n- a/b\n- --tp\n- 8\n",
        'command: ["/bin/bash", "-c"]\nargs: ["exec python3 -m sglang.launch_server --model-path a/b --tp 8"]',
        "command: python3 -m sglang.launch_server --model-path a/b --tp 8",
        "command: [sh, -c]\nargs:\n- |\n  set -e;\n  sglang serve \\\n    --model-path a/b \\\n    --tp 8\n",
    ],
)
def test_a_piece_of_one(piece: str) -> None:
    assert read([piece]) == LaunchLine({}, ARGUMENTS)


def test_several_launches_are_not_chosen_from() -> None:
    both = yaml.safe_dump([{"args": [*ARGUMENTS, "--disaggregation-mode", role]} for role in ("prefill", "decode")])
    with pytest.raises(LaunchLineError, match="2 launches in it: give one container's"):
        read([both])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["python3", "-m", "dynamo.sglang", *ARGUMENTS], "paste SGLang's alone"),
        (["[python3,", "-m,", "sglang.launch_server,", "--tp,", "8]"], "in single quotes"),
        (["services: {a: {image: b}}"], "no launch of SGLang"),
        (["a: &a {b: *a}"], "no launch of SGLang"),  # in itself
        (["[" * 2000], "no launch of SGLang"),
        (["python -m sglang.launch_server --model-path 'a/b"], "No closing quotation"),
        (['command: "sglang serve \'a/b"'], "No closing quotation"),
        (["docker", "run", "image", "sh", "-c", "sglang serve 'a/b"], "No closing quotation"),
    ],
)
def test_what_cannot_be_read_says_what_to_paste(words: list[str], said: str) -> None:
    with pytest.raises(LaunchLineError) as error:
        read(words)
    assert said in str(error.value) and "\n" not in str(error.value)


DOCKER = (
    "docker run --gpus all --mount type=bind,src=/m,dst=/m -v ~/.cache:/root -e A=1 -e HF_TOKEN=hf_x --env=B=2 "
    f"{IMAGE} python3 -m sglang.launch_server"
)


def test_what_docker_has_stays() -> None:
    line = read([f"{DOCKER} --model-path a/b --tp 8"])
    assert (line.environment, line.image) == ({"A": "1", "HF_TOKEN": "hf_x", "B": "2"}, IMAGE)
    shown = "'HF_TOKEN=***'"
    assert text(line) == f"{DOCKER.replace('HF_TOKEN=hf_x', shown)} --model-path a/b --tp 8"
    changed = line._replace(environment={"B": "2"}, arguments=["--tp", "16"])
    assert text(changed) == f"{DOCKER.replace('-e A=1 -e HF_TOKEN=hf_x ', '')} --tp 16"


def test_a_script_in_a_container_stays() -> None:
    outer = f"docker run {IMAGE} sh -c"
    inner = "export A=1; pip install /wheels/*.whl && exec python3 -m sglang.launch_server"
    line = read([f"{outer} '{inner} --model-path a/b --tp 8 | tee log'"])
    assert (line.environment, line.arguments, line.image) == ({"A": "1"}, ARGUMENTS, IMAGE)
    assert text(line) == f"{outer} '{inner.replace(';', ' ;')} --model-path a/b --tp 8'"


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *((name, True) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY")),
        *((name, True) for name in ("DB_PASSWORD", "api_key", "HFTOKEN", "MY_SECRET", "GH_PAT")),
        *((name, False) for name in ("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "TOKENIZERS_PARALLELISM")),
        *((name, False) for name in ("NCCL_DEBUG", "KEYBOARD", "PATH", "SGLANG_ENABLE_SPEC_V2")),
    ],
)
def test_values_of_secrets_are_not_shown(name: str, secret: bool) -> None:
    for command in (f"{name}=s3cr3t sglang serve a/b", f"docker run -e {name}=s3cr3t {IMAGE} sglang serve a/b"):
        line = read([command])
        assert line.environment == {name: "s3cr3t"}, "it is examined with it"
        assert ("s3cr3t" not in text(line)) is secret and name in text(line)


def test_keys_among_arguments_and_addresses_are_not_shown() -> None:
    line = LaunchLine({"http_proxy": "http://me:s3cr3t@host:80"}, ["--api-key", "s3cr3t", "--admin-api-key=s3cr3t"])
    assert text(line) == (
        "http_proxy='http://me:***@host:80' python -m sglang.launch_server --api-key '***' '--admin-api-key=***'"
    )
    kept = ["--speculative-token-map", "a/map", "--ssl-keyfile", "k"]
    assert text(LaunchLine({}, kept)).endswith(" ".join(kept))


@pytest.mark.parametrize(
    ("image", "version", "own"),
    [
        ("lmsysorg/sglang:v0.4.3-cu125", "0.4.3", True),
        ("docker.io/lmsysorg/sglang:v0.5.17.post1", "0.5.17.post1", True),
        ("registry:5000/our/sglang-app:1.2.3", "1.2.3", False),
        ("lmsysorg/sglang:latest", None, True),
    ],
)
def test_images(image: str, version: str | None, own: bool) -> None:
    assert read(["docker", "run", image, "sglang", "serve", "a/b"]).image == image
    assert (launch_line.version_in(image), launch_line.is_sglangs(image)) == (version, own)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json-model-override-args", '{"rope_parameters": {"factor": 1.0}}'],
        ["--api-key", "$KEY"],
        ["--chat-template", "</think><|im_end|>"],
        ["--served-model-name", "a<b"],
    ],
)
def test_what_is_no_placeholder(arguments: list[str]) -> None:
    assert launch_line.placeholders(arguments) == []


def test_placeholders_are_named_with_their_flags() -> None:
    arguments = [
        "--tp",
        "${TP}",
        "--host=$HOST",
        "--nnodes",
        "{{ .n }}",
        "--dist-init-addr",
        "<IP>:20000",
        "--port",
        "1",
    ]
    assert launch_line.placeholders(arguments) == [
        *("--tp ${TP}", "--host $HOST", "--nnodes {{ .n }}", "--dist-init-addr <IP>:20000")
    ]


@pytest.mark.parametrize(
    "command",
    [
        "sglang serve deepseek-ai/DeepSeek-R1 --tp 8 --moe-runner-backend flashinfer_mxfp4 --attention-backend fa3",
        "docker run --gpus all lmsysorg/sglang:v0.5.23-cu129 sglang serve moonshotai/Kimi-K3 --kv-cache-dtype fp8_e4m3",
        "sglang serve a/DeepSeek-V3-0324 --fp4-gemm-backend marlin --quantization fp8 --device cuda",
    ],
)
def test_commands_for_hopper_gpus(command: str) -> None:
    assert hardware.findings(read([command])) == []


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("docker run lmsysorg/sglang:v0.5.23-rocm700-mi30x sglang serve a/b", "ROCm"),
        ("docker run --device /dev/kfd a/sglang:x sglang serve a/b", "ROCm"),
        ("sglang serve a/b --moe-a2a-backend mori", "ROCm"),
        ("docker run lmsysorg/sglang:v0.5.23-cu129-b200 sglang serve a/b", "Blackwell"),
        ("sglang serve a/b --fp4-gemm-backend flashinfer_trtllm", "Blackwell"),
        ("sglang serve a/b --prefill-attention-backend trtllm_mla", "Blackwell"),
        ("sglang serve a/b --kv-cache-dtype fp4_e2m1", "Blackwell"),
        ("sglang serve amd/DeepSeek-R1-MXFP4-Preview", "Blackwell"),
        ("docker run lmsysorg/sglang:main-cann8.3-npu sglang serve a/b", "accelerator"),
    ],
)
def test_commands_for_others(command: str, code: str) -> None:
    assert [found.code for found in hardware.findings(read([command]))] == [code]
