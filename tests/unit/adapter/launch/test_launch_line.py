"""Launch commands as people write them, and what is changed in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import test_limits

from sglang_mla_ext.adapter.compat.findings import Finding
from sglang_mla_ext.adapter.launch import checkpoints, launch_line, limits
from sglang_mla_ext.adapter.launch.launch_line import LaunchLine, LaunchLineError, read, value_of, with_backend, without
from sglang_mla_ext.adapter.launch.remedies import REMEDIES, apply, in_words, said_by_sglang

ARGUMENTS = ["--model-path", "a/b", "--tp", "8"]


@pytest.mark.parametrize(
    "command",
    [
        "python -m sglang.launch_server --model-path a/b --tp 8",
        "python3 -m sglang_mla_ext.launch_server --model-path a/b --tp 8",
        "sglang serve --model-path a/b --tp 8",
        "/opt/bin/sglang serve a/b --tp 8",
        "--model-path a/b --tp 8",
        "nohup python -m sglang.launch_server --model-path a/b --tp 8 > server.log 2>&1 &",
        "python -m sglang.launch_server --model-path a/b --tp 8 2>&1",
        "python -m sglang.launch_server --model-path a/b --tp 8 | tee log",
        "docker run --gpus all -p 30000:30000 image python3 -m sglang.launch_server --model-path a/b --tp 8",
        "python -m sglang.launch_server \\\n  --model-path a/b \\\n  --tp 8",
    ],
)
def test_what_is_launched(command: str) -> None:
    """As one word; where the shell has made words of it, they are the same but for its own."""
    assert read([command])._replace(container=()) == LaunchLine({}, ARGUMENTS)
    if "\n" not in command:
        assert read(command.split()) == read([command])


def test_the_environment_in_front() -> None:
    environment = {"SGLANG_A": "1", "B": "x=y z", "C": ""}
    line = LaunchLine(environment, [*ARGUMENTS, "--json", '{"a": 1}'])
    assert read(["SGLANG_A=1", "B=x=y z", "C=", "python", "-m", "sglang.launch_server", *line.arguments]) == line
    assert read(["SGLANG_A=1", "B=x=y z", "C=", *line.arguments]) == line
    in_docker = read(["docker", "run", "-e", "B=x=y z", "image", "sglang", "serve", *ARGUMENTS])
    assert in_docker.environment == {"B": "x=y z"}
    assert read([launch_line.text(line)]) == line
    # Values are not taken for variables.
    assert read(["--a", "B=1"]).environment == {}


def test_a_long_command_that_ends_like_a_path() -> None:
    """A file system refuses to look for a name of this length."""
    arguments = ["--model-path", "a", "--served-model-name", "a" * 300, "--init-expert-location", "experts.json"]
    assert read([" ".join(["sglang serve", *arguments])]) == LaunchLine({}, arguments)


def test_a_date_that_there_is_not() -> None:
    """YAML refuses it with an error of its own kind."""
    assert read(["created: 2026-13-01\ncommand: sglang serve a/b"]) == LaunchLine({}, ["--model-path", "a/b"])


@pytest.mark.parametrize("command", [[], ["echo", "hello"], ["vllm serve a/b"], ["A=1"], ["python", "-m", "pip"]])
def test_what_launches_something_else(command: list[str]) -> None:
    with pytest.raises(LaunchLineError, match="no launch of SGLang"):
        read(command)


def test_values() -> None:
    arguments = ["--a", "1", "--b=2=3", "--c", "--d", "4", "5", "--a", "6"]
    found = [value_of(arguments, *flags) for flags in (["--a"], ["--b"], ["--x"], ["--x", "--d"])]
    assert found == ["6", "2=3", None, "4"]
    assert value_of(["--a"], "--a") is None
    assert without(arguments, ["--a", "--b", "--d"]) == ["--c"]
    assert without(arguments, ["--c"]) == [word for word in arguments if word != "--c"]


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ([], ["--attention-backend", "hybrid_mla"]),
        (["--attention-backend", "fa3"], ["--attention-backend", "hybrid_mla"]),
        (
            ["--attention-backend=fa3", "--prefill-attention-backend", "fa3", "--decode-attention-backend=flashmla"],
            ["--prefill-attention-backend", "fa3", "--attention-backend", "hybrid_mla"],
        ),
        *(
            (own, own)
            for own in (
                ["--attention-backend", "hybrid_mla"],
                ["--decode-attention-backend=hybrid_mla", "--prefill-attention-backend", "fa3"],
            )
        ),
    ],
    ids=str,
)
def test_our_backend_in_place_of_others(given: list[str], becomes: list[str]) -> None:
    assert with_backend([*ARGUMENTS, *given]) == [*ARGUMENTS, *becomes]


def refused(**changes: object) -> Finding:
    """The last finding."""
    args = test_limits.server_args(**changes)
    with pytest.raises(limits.Refusal) as error:
        limits.set_defaults(args)
        test_limits.check(args, test_limits.HOPPER)
    assert str(error.value).splitlines()[-1].strip() == error.value.findings[-1].text
    return error.value.findings[-1]


@pytest.mark.usefixtures("any_release")
@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"dtype": "half"},
        {"backends": ("hybrid_mla", "fa3")},
        {"backends": ("trtllm_mla", "hybrid_mla")},
        {"kv_cache_dtype": "nvfp4"},
        {**test_limits.FP8_CACHE, "backends": ("fa3", "hybrid_mla")},
        {**test_limits.FP8_CACHE, "flashinfer_mla_disable_ragged": True},
        {**test_limits.EAGLE, "speculative_eagle_topk": 4},
        {**test_limits.EAGLE, "speculative_num_draft_tokens": 16},
        {**test_limits.EAGLE, "speculative_draft_attention_backend": "hybrid_mla"},
        {"disable_radix_cache": True},
        {"disaggregation_mode": "decode"},
        {"disaggregation_mode": "prefill", "backends": ("fa3", "hybrid_mla")},
        {"enable_two_batch_overlap": True},
        {"architecture": "LongcatFlashForCausalLM", "rotation": False},
    ],
    ids=str,
)
def test_what_a_server_can_do_without(changes: dict[str, object]) -> None:
    assert refused(**changes).remedy is not None


@pytest.mark.parametrize(
    "changes",
    [
        {"mla": False},
        {"index_topk": 2048},
        {"enable_lora": True},
        {"pp_size": 2},
        {"dcp_size": 2},
        {"attn_cp_size": 2},
        {**test_limits.FP8_CACHE, "enable_hierarchical_cache": True, "hicache_storage_backend": "hf3fs"},
        {**test_limits.EAGLE, "disaggregation_mode": "decode"},
        {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "mori"},
        {"enable_lmcache": True},
        {"enable_deterministic_inference": True},
        {"speculative_algorithm": "NGRAM"},
    ],
    ids=str,
)
def test_what_a_deployment_is_for_is_not_given_up(changes: dict[str, object]) -> None:
    assert refused(**changes).remedy is None


def unknown(said: str) -> str:
    """The code of what SGLang's parser says."""
    (found,) = said_by_sglang(f"usage: ...\nlaunch_server.py: error: {said}\n")
    return found.code


@pytest.mark.parametrize(
    ("code", "line", "changed", "text"),
    [
        (
            unknown("unrecognized arguments: --enable-ep-moe"),
            ["--tp=16", "--enable-ep-moe", "--port", "1"],
            ["--tp=16", "--port", "1", "--ep-size", "16"],
            "--ep-size 16 in place of --enable-ep-moe",
        ),
        (
            unknown("ambiguous option: --speculative-draft could match --speculative-draft-model-path, --specu"),
            ["--speculative-draft", "a/b"],
            ["--speculative-draft-model-path", "a/b"],
            "--speculative-draft-model-path a/b in place of --speculative-draft a/b",
        ),
        ("float16", [], ["--dtype", "bfloat16"], "with --dtype bfloat16"),
        ("--page-size", ["--page-size=1"], ["--page-size", "64"], "--page-size 64 in place of --page-size 1"),
        ("--disable-radix-cache", ["--disable-radix-cache"], [], "without --disable-radix-cache"),
        (
            "prefill backend",
            ["--prefill-attention-backend", "trtllm_mla", "--attention-backend", "hybrid_mla"],
            ["--attention-backend", "hybrid_mla"],
            "without --prefill-attention-backend trtllm_mla",
        ),
    ],
)
def test_a_change(code: str, line: list[str], changed: list[str], text: str) -> None:
    remedy = REMEDIES[code]
    assert apply(remedy, LaunchLine({"A": "1"}, line)) == LaunchLine({"A": "1"}, changed)
    assert in_words(remedy, LaunchLine({}, line)) == text


def test_a_draft_backend_is_left_out_with_its_value() -> None:
    arguments = ["--speculative-draft-attention-backend", "hybrid_mla"]
    found = refused(**test_limits.EAGLE | {"speculative_draft_attention_backend": "hybrid_mla"})
    assert found.remedy is not None and apply(found.remedy, LaunchLine({}, arguments)) == LaunchLine({}, [])


def test_a_variable_is_unset() -> None:
    name = "SGLANG_ENABLE_UNIFIED_RADIX_TREE"
    remedy, line = REMEDIES[name], LaunchLine({name: "1", "A": "1"}, ARGUMENTS)
    assert in_words(remedy, line) == f"without {name}"
    assert apply(remedy, line) == LaunchLine({"A": "1"}, ARGUMENTS)


def test_what_sglang_says_has_no_remedy_but_for_flags_of_older_releases() -> None:
    said = "unrecognized arguments: --no-such-flag 1 --enable-flashmla"
    found = said_by_sglang(f"launch_server.py: error: {said}\n")
    assert [each.text for each in found] == [f"SGLang does not know {flag}." for flag in said.split()[2::2]]
    assert [each.remedy is None for each in found] == [True, False]
    usage = "usage: launch_server.py [-h] [--model-path MODEL_PATH] [--attention-backend {fa3}]"
    (found,) = said_by_sglang(f"{usage}\nlaunch_server.py: error: unrecognized arguments: --atention-backend=fa3\n")
    assert found.text == "SGLang does not know --atention-backend: did you mean --attention-backend?"
    assert [each.code for each in said_by_sglang("")] == ["SGLang"]


def test_known_models(tmp_path: Path) -> None:
    for path in ("deepseek-ai/DeepSeek-R1", "/models/DeepSeek-R1/", "deepseek-r1"):
        assert checkpoints.known_as(path) in ("deepseek-ai/DeepSeek-R1",)
    assert checkpoints.known_as("/models/DeepSeek-R1-Distill-Qwen-7B") is None
    assert checkpoints.out_of_reach(str(tmp_path)) is None
    close = checkpoints.out_of_reach("/models/Kimi-K25")
    assert close is not None and close.startswith("/models/Kimi-K25 is neither a folder here nor a known model: give")
    assert close.endswith("Did you mean moonshotai/Kimi-K2.5?")
    folder = checkpoints.write_config("moonshotai/Kimi-K2.6", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert checkpoints.write_config("moonshotai/Kimi-K2.5", tmp_path) == folder, "a second time"
    with pytest.raises(KeyError):
        checkpoints.write_config("a/b", tmp_path)
