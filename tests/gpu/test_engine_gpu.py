"""The real engine on a Hopper GPU, CUDA graphs on: hybrid_mla answers as SGLang's own FlashMLA backend does.

The truth is FlashMLA without a prefix cache: every request computes its whole prompt, and nothing is merged in prefill.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

REPOSITORY = Path(__file__).parents[2]
PREFIX, BATCH, NEW_TOKENS = 7069, 64, 32
AT_A_TIME = 6


@pytest.fixture(scope="module", params=[128, 16], ids=lambda heads: f"{heads}heads")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "checkpoint", "--heads", str(request.param))


def make_model(folder: Path, *options: str) -> Path:
    """DeepSeek-V3's attention, 4 layers, random weights at which attention matters."""
    sizes = ["--layers", "4", "--hidden", "1024", "--q-lora-rank", "1536"]
    script = REPOSITORY / "scripts" / "make_demo_model.py"
    subprocess.run([sys.executable, script, folder, *sizes, *options], check=True)
    return folder


def answers(
    model: Path,
    out: Path,
    backend: str,
    env: Mapping[str, str] | None = None,
    batch: int = BATCH,
    prefix: int = PREFIX,
    **arguments: Any,
) -> dict:
    script = Path(__file__).parent / "engine_logprobs.py"
    sizes = [str(prefix), str(batch), str(NEW_TOKENS)]
    command = [sys.executable, script, model, backend, out, *sizes, json.dumps(arguments)]
    subprocess.run(command, check=True, env=os.environ | (env or {}))
    return json.loads(out.read_text())


def all_answers(
    model: Path, folder: Path, engines: dict[str, dict[str, Any]], at_a_time: int = AT_A_TIME
) -> dict[str, dict]:
    """Of several engines, some of them at a time: starting one takes longer than its answers.

    Args:
        engines: arguments of `answers` by name.
    """
    with ThreadPoolExecutor(at_a_time) as pool:
        running = {
            name: pool.submit(answers, model, folder / f"{index}", **arguments)
            for index, (name, arguments) in enumerate(engines.items())
        }
    return {name: one.result() for name, one in running.items()}


def differences(a: dict, b: dict) -> list[float]:
    """Absolute log-probability differences, request by request up to the first token in which they differ."""
    found = []
    for request_a, request_b in zip(a["tokens"], b["tokens"], strict=True):
        for (value_a, token_a), (value_b, token_b) in zip(request_a, request_b, strict=True):
            if token_a != token_b:
                break
            found.append(abs(value_a - value_b))
    return found


def differences_of(truth: dict, found: dict[str, dict]) -> dict[str, list[float]]:
    apart = {name: differences(truth, answer) for name, answer in found.items()}
    for name, values in apart.items():
        print(f"{name}: {len(values)} of {BATCH * NEW_TOKENS} tokens, mean {mean(values):.5f}, max {max(values):.4f}")
    return apart


def test_log_probabilities_match_those_of_prompts_computed_whole(model: Path, tmp_path: Path) -> None:
    """In every mode there is. FlashInfer without a prefix cache shows what BF16 rounding does to the truth."""
    few_heads = json.loads((model / "config.json").read_text())["num_attention_heads"] == 16
    modes = ["naive", "auto", *(["grouped_absorb"] if few_heads else [])]
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", disable_radix_cache=True),
        "flashinfer, uncached": dict(backend="flashinfer", disable_radix_cache=True),
        "flashmla": dict(backend="flashmla"),
        **{mode: dict(backend="hybrid_mla", env={"SGLANG_HYBRID_MLA_MODE": mode}) for mode in modes},
    }
    found = all_answers(model, tmp_path, engines)
    truth = found.pop("truth")

    apart = differences_of(truth, found)
    # The random model is not smooth: twice the rounding of two stock backends is allowed.
    yardstick = apart["flashinfer, uncached"]
    for mode in modes:
        counters = found[mode]["info"]["counters"]
        grouped = mode == "grouped_absorb"
        assert counters["steps_grouped" if grouped else "steps_naive"] > NEW_TOKENS // 2
        assert grouped or counters["prefill_tokens_saved"] >= BATCH * (PREFIX // 64 * 64)
        assert counters["max_group_size"] == BATCH
        assert counters["fallbacks"] == {}
        assert len(apart[mode]) > 0.5 * len(yardstick)
        assert mean(apart[mode]) < 2 * mean(yardstick) + 1e-3


def test_prefill_that_expands_for_itself(model: Path, tmp_path: Path) -> None:
    """Where no memory keeps anything expanded; over an FP8 cache, too, beside SGLang's own."""
    fp8 = dict(kv_cache_dtype="fp8_e4m3")
    env = {"SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB": "0", "SGLANG_HYBRID_MLA_PREFILL_EXPAND_TOKENS": "4096"}
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", disable_radix_cache=True),
        "flashinfer, uncached": dict(backend="flashinfer", disable_radix_cache=True),
        "ours": dict(backend="hybrid_mla", env=env),
        "FP8 cache": dict(backend="flashmla", disable_radix_cache=True, **fp8),
        "ours, FP8 cache": dict(backend="hybrid_mla", env=env, **fp8),
    }
    found = all_answers(model, tmp_path, engines)
    apart = differences_of(found.pop("truth"), found)
    for ours, stock in (("ours", "flashinfer, uncached"), ("ours, FP8 cache", "FP8 cache")):
        counters = found[ours]["info"]["counters"]
        assert counters["prefill_tokens_saved"] > counters["prefill_tokens_expanded"] > 0, counters
        assert counters["expansions"] == 0 and counters["fallbacks"] == {}, counters
        assert len(apart[ours]) > 0.5 * len(apart[stock])
        assert mean(apart[ours]) < 2 * mean(apart[stock]) + 1e-3


def test_a_checkpoint_in_fp8_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSeek-V3's own. Its prefixes expand with the weights that absorb uses, so that decode is no further from
    the truth than FlashMLA's own."""
    monkeypatch.setenv("SGLANG_HYBRID_MLA_MODE", "naive")
    # DeepGEMM then compiles the products of this test as they come, not those of every batch size there could be.
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    model = make_model(tmp_path / "checkpoint", "--heads", "16", "--fp8-blocks")
    truth = answers(model, tmp_path / "truth", "flashmla", disable_radix_cache=True)
    found = {name: answers(model, tmp_path / name, name) for name in ("flashmla", "hybrid_mla")}
    apart = differences_of(truth, found)
    assert found["hybrid_mla"]["info"]["counters"]["steps_naive"] > NEW_TOKENS // 2
    assert found["hybrid_mla"]["info"]["counters"]["fallbacks"] == {}
    assert len(apart["hybrid_mla"]) > 0.5 * len(apart["flashmla"])
    assert mean(apart["hybrid_mla"]) < 2 * mean(apart["flashmla"]) + 1e-3


def test_beside_torch_compile(tmp_path: Path) -> None:
    """With --enable-torch-compile, which compiles the model around the attention and the hooks in its layers."""
    model = make_model(tmp_path / "checkpoint", "--heads", "16")
    # By default torch tunes, which takes minutes.
    env = {"SGLANG_TORCH_COMPILE_MODE": "default", "SGLANG_HYBRID_MLA_MODE": "naive"}
    compiled = dict(enable_torch_compile=True, torch_compile_max_bs=BATCH, cuda_graph_bs_decode=[BATCH], env=env)
    engines: dict[str, dict[str, Any]] = {name: dict(backend=name, **compiled) for name in ("flashmla", "hybrid_mla")}
    found = all_answers(model, tmp_path, {"truth": dict(backend="flashmla", disable_radix_cache=True), **engines})
    truth = found.pop("truth")
    apart = differences_of(truth, found)
    counters = found["hybrid_mla"]["info"]["counters"]
    assert counters["steps_naive"] > NEW_TOKENS // 2 and counters["fallbacks"] == {}
    assert len(apart["hybrid_mla"]) > 0.5 * len(apart["flashmla"])
    assert mean(apart["hybrid_mla"]) < 2 * mean(apart["flashmla"]) + 1e-3


def test_three_levels(model: Path, tmp_path: Path) -> None:
    """A prompt, documents below it, conversations below those: in every mode there is, and with an FP8 prefix."""
    few_heads = json.loads((model / "config.json").read_text())["num_attention_heads"] == 16
    naive = dict(backend="hybrid_mla", env={"SGLANG_HYBRID_MLA_MODE": "naive"})
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", disable_radix_cache=True),
        "flashinfer, uncached": dict(backend="flashinfer", disable_radix_cache=True),
        "flashmla, FP8 cache": dict(backend="flashmla", disable_radix_cache=True, kv_cache_dtype="fp8_e4m3"),
        "naive": naive,
        "FP8 prefix": naive | dict(env=naive["env"] | {"SGLANG_HYBRID_MLA_PREFIX_DTYPE": "fp8_e4m3"}),
    }
    if few_heads:
        engines["grouped_absorb"] = dict(backend="hybrid_mla", env={"SGLANG_HYBRID_MLA_MODE": "grouped_absorb"})
    found = all_answers(model, tmp_path, {name: one | dict(nested=True) for name, one in engines.items()})
    truth = found.pop("truth")

    apart = differences_of(truth, found)
    # The random model is not smooth: twice the rounding of two stock backends is allowed.
    yardstick, fp8 = apart.pop("flashinfer, uncached"), apart.pop("flashmla, FP8 cache")
    for name, ours in apart.items():
        counters = found[name]["info"]["counters"]
        assert counters["steps_grouped" if name == "grouped_absorb" else "steps_naive"] > NEW_TOKENS // 2
        assert counters["max_depth"] == 3 and counters["fallbacks"] == {}
        stock = fp8 if name == "FP8 prefix" else yardstick
        assert len(ours) > 0.5 * len(stock)
        assert mean(ours) < (1.1 if name == "FP8 prefix" else 2) * mean(stock) + 1e-3


def test_an_fp8_cache_is_no_worse_than_sglangs(model: Path, tmp_path: Path) -> None:
    """In decoding and with prefix reuse; then in a cache that holds less than the requests need, with prompts in chunks
    and requests taken back. SGLang's FP8 cache has one scale and rounds rotary keys, too. Nor is a prefix in FP8 beside
    a cache in BF16."""
    fp8: dict[str, Any] = dict(kv_cache_dtype="fp8_e4m3")
    cramped = fp8 | dict(max_total_tokens=(PREFIX // 64 + 2) * 64 + BATCH * 192, chunked_prefill_size=2048)
    naive = {"SGLANG_HYBRID_MLA_MODE": "naive"}
    # SGLang's own way to test retraction: every so many steps it takes back a request as if its cache were full.
    retracting = naive | {"SGLANG_TEST_RETRACT": "1"}
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", disable_radix_cache=True),
        "flashmla, FP8 cache": dict(backend="flashmla", disable_radix_cache=True, **fp8),
        "hybrid_mla, FP8 cache": dict(backend="hybrid_mla", env=naive, **fp8),
        "hybrid_mla, FP8 prefix": dict(
            backend="hybrid_mla", env=naive | {"SGLANG_HYBRID_MLA_PREFIX_DTYPE": "fp8_e4m3"}
        ),
        "hybrid_mla, FP8 cache, cramped": dict(backend="hybrid_mla", env=retracting, **cramped),
    }
    found = all_answers(model, tmp_path, engines)
    truth = found.pop("truth")
    assert found["hybrid_mla, FP8 cache, cramped"]["retractions"] > 0
    apart = differences_of(truth, found)
    stock = apart.pop("flashmla, FP8 cache")
    for name, ours in apart.items():
        counters = found[name]["info"]["counters"]
        assert counters["steps_naive"] > NEW_TOKENS // 2 and counters["fallbacks"] == {}
        assert len(ours) > 0.5 * len(stock)
        assert mean(ours) < 1.1 * mean(stock) + 1e-3


def test_memory_goes_back_while_sglang_sleeps(tmp_path: Path) -> None:
    """With SGLang's memory saver: what is expanded, and our buffers, go with its KV cache; then all is as before."""
    model = make_model(tmp_path / "checkpoint", "--heads", "128")
    script, out = Path(__file__).parent / "engine_sleep.py", tmp_path / "out"
    env = os.environ | {"SGLANG_HYBRID_MLA_MODE": "naive"}
    subprocess.run([sys.executable, script, model, out], check=True, env=env)
    found = json.loads(out.read_text())
    before, after = found["answers"]
    # The second time the prompt is prefilled anew; the random model is not smooth, so that a few tokens may differ.
    same = mean(token == other for a, b in zip(before, after, strict=True) for token, other in zip(a, b, strict=True))
    assert same > 0.9, same
    awake, asleep = found["free_bytes"][1], found["free_bytes"][2]
    given_back, budget = (asleep - awake) / 2**30, found["budget_bytes"] / 2**30
    print(f"{given_back:.1f} GiB given back, {budget:.1f} of them hybrid_mla's budget")
    assert given_back > 0.9 * budget
    assert found["free_bytes"][3] == pytest.approx(awake, rel=0.05)
    assert found["steps"][0] > 0 and found["steps"][1] > found["steps"][0] and found["fallbacks"] == {}
