"""The real engine on a Hopper GPU with speculative decoding: hybrid_mla verifies drafts as SGLang's own FlashMLA does,
and as it decodes without them.

The draft is a random layer, which is hardly ever right, so what requests accept is forced where it matters.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from test_engine_gpu import BATCH, NEW_TOKENS, answers, differences_of, make_model

pytestmark = pytest.mark.gpu

STEPS = 3
DRAFTS: dict[str, Any] = dict(
    speculative_algorithm="NEXTN",
    speculative_num_steps=STEPS,
    speculative_eagle_topk=1,
    speculative_num_draft_tokens=STEPS + 1,
    max_running_requests=BATCH,
)
FP8: dict[str, Any] = dict(kv_cache_dtype="fp8_e4m3")


@pytest.fixture(scope="module", params=[128, 16], ids=lambda heads: f"{heads}heads")
def heads(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def model(heads: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "checkpoint", "--heads", str(heads), "--nextn")


def modes_of(heads: int) -> list[tuple[str, dict[str, str], dict[str, Any]]]:
    """Name, environment and arguments of the servers to look at."""
    return [
        ("naive", {"MODE": "naive"}, {}),
        ("auto", {"MODE": "auto"}, {}),
        *([("grouped_absorb", {"MODE": "grouped_absorb"}, {})] if heads == 16 else []),
        ("FP8 prefix", {"MODE": "naive", "PREFIX_DTYPE": "fp8_e4m3"}, {}),
        ("FP8 cache", {"MODE": "naive"}, FP8),
    ]


def equal_share(one: dict, other: dict) -> float:
    """Of all tokens, those up to the first one in which a request's answers differ."""
    found = 0
    for request, same in zip(one["tokens"], other["tokens"], strict=True):
        for (_, token), (_, expected) in zip(request, same, strict=True):
            if token != expected:
                break
            found += 1
    return found / (BATCH * NEW_TOKENS)


def check_counters(answer: dict, name: str) -> None:
    info = answer["info"]
    counters = info["counters"]
    assert counters["fallbacks"] == {} and counters["max_group_size"] == BATCH
    assert counters["steps_verify"] == sum(counters[f"steps_{mode}"] for mode in ("naive", "grouped", "absorb"))
    shared = counters["steps_grouped" if name == "grouped_absorb" else "steps_naive"]
    assert shared > 0.5 * counters["steps_verify"] > 0
    assert 1 <= info["avg_spec_accept_length"] <= STEPS + 1


def test_greedy_tokens_with_drafts_are_those_without(
    heads: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of FlashMLA with the same drafts, but for ties in BF16, of which FlashMLA has some with itself. Their
    log-probabilities are within the yardstick of test_engine_gpu.py."""
    truth = answers(model, tmp_path / "truth", "flashmla", disable_radix_cache=True)
    stock = {
        "flashinfer, uncached": answers(model, tmp_path / "flashinfer", "flashinfer", disable_radix_cache=True),
        "flashmla": answers(model, tmp_path / "flashmla", "flashmla"),
        "flashmla, drafts": answers(model, tmp_path / "flashmla drafts", "flashmla", **DRAFTS),
        "flashmla, FP8 cache, drafts": answers(model, tmp_path / "flashmla fp8", "flashmla", **FP8, **DRAFTS),
    }
    found, without = {}, {}
    for name, env, arguments in modes_of(heads):
        with monkeypatch.context() as patched:
            for variable, value in env.items():
                patched.setenv(f"SGLANG_HYBRID_MLA_{variable}", value)
            found[name] = answers(model, tmp_path / name, "hybrid_mla", **arguments, **DRAFTS)
            without[name] = answers(model, tmp_path / f"{name} alone", "hybrid_mla", **arguments)

    apart = differences_of(truth, {**stock, **found})
    ties = equal_share(stock["flashmla, drafts"], stock["flashmla"])
    print(f"flashmla with drafts and without: {ties:.3f} of the tokens are equal")
    for name, answer in found.items():
        check_counters(answer, name)
        fp8 = name.startswith("FP8")
        same, as_stock = equal_share(answer, without[name]), equal_share(answer, stock["flashmla, drafts"])
        print(f"{name}: {same:.3f} of the tokens are those without drafts, {as_stock:.3f} those of flashmla with them")
        assert same > 0.8 * ties
        yardstick = apart["flashmla, FP8 cache, drafts" if fp8 else "flashinfer, uncached"]
        assert len(apart[name]) > 0.5 * len(yardstick)
        assert mean(apart[name]) < (1.1 if fp8 else 2) * mean(yardstick) + 1e-3
        assert fp8 or as_stock > 0.5 * ties


@pytest.mark.parametrize("accepted", [2, STEPS + 1])
def test_drafts_that_are_accepted(
    heads: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: int
) -> None:
    """By force, whatever they are: their keys are read in later steps. The truth is FlashMLA's with the same drafts."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", str(accepted))
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    draft = dict(speculative_draft_attention_backend="flashmla", page_size=64)
    truth = answers(model, tmp_path / "truth", "flashmla", **DRAFTS)
    found = {
        "flashinfer": answers(model, tmp_path / "flashinfer", "flashinfer", **DRAFTS, **draft),
        "flashmla, FP8 cache": answers(model, tmp_path / "flashmla fp8", "flashmla", **FP8, **DRAFTS),
    }
    for name, env, arguments in modes_of(heads):
        with monkeypatch.context() as patched:
            for variable, value in env.items():
                patched.setenv(f"SGLANG_HYBRID_MLA_{variable}", value)
            found[name] = answers(model, tmp_path / name, "hybrid_mla", **arguments, **DRAFTS)
    apart = differences_of(truth, found)
    for name, answer in found.items():
        if answer["info"] is None:
            continue
        check_counters(answer, name)
        assert answer["info"]["avg_spec_accept_length"] > accepted - 0.5
        fp8 = name.startswith("FP8")
        yardstick = apart["flashmla, FP8 cache" if fp8 else "flashinfer"]
        assert len(apart[name]) > 0.5 * len(yardstick)
        assert mean(apart[name]) < (1.1 if fp8 else 2) * mean(yardstick) + 1e-3


@pytest.mark.parametrize("arguments", [{}, FP8, {"disable_cuda_graph": True}, {"disable_overlap_schedule": True}])
def test_requests_that_are_taken_back(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """Between verify steps; without CUDA graphs, and without overlap, too."""
    monkeypatch.setenv("SGLANG_HYBRID_MLA_MODE", "naive")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    truth = answers(model, tmp_path / "truth", "flashmla", disable_radix_cache=True)
    stock = answers(model, tmp_path / "stock", "flashmla", **arguments, **DRAFTS)
    ours = answers(model, tmp_path / "ours", "hybrid_mla", **arguments, **DRAFTS)
    assert ours["retractions"] > 0
    apart = differences_of(truth, {"flashmla": stock, "hybrid_mla": ours})
    assert ours["info"]["counters"]["fallbacks"] == {}
    assert len(apart["hybrid_mla"]) > 0.5 * len(apart["flashmla"])
    assert mean(apart["hybrid_mla"]) < (1.1 if arguments == FP8 else 2) * mean(apart["flashmla"]) + 1e-3


def test_another_backend_for_prefill(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify steps go to the decode backend all the same."""
    monkeypatch.setenv("SGLANG_HYBRID_MLA_MODE", "naive")
    truth = answers(model, tmp_path / "truth", "flashmla", disable_radix_cache=True)
    split = dict(prefill_attention_backend="flashinfer", decode_attention_backend="hybrid_mla", page_size=64)
    stock = answers(model, tmp_path / "stock", "flashmla", **DRAFTS)
    ours = answers(model, tmp_path / "ours", "flashinfer", **split, **DRAFTS)
    check_counters(ours, "naive")
    apart = differences_of(truth, {"flashmla": stock, "hybrid_mla": ours})
    assert mean(apart["hybrid_mla"]) < 2 * mean(apart["flashmla"]) + 1e-3
