"""The real engine on a Hopper GPU with speculative decoding: hybrid_mla verifies drafts as SGLang's own FlashMLA does,
and as it decodes without them.

The draft is a random layer, which is hardly ever right, so what requests accept is forced where it matters.
"""

from __future__ import annotations

import os
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


MODES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "naive": ({"MODE": "naive"}, {}),
    "auto": ({"MODE": "auto"}, {}),
    "grouped_absorb": ({"MODE": "grouped_absorb"}, {}),
    "FP8 prefix": ({"MODE": "naive", "PREFIX_DTYPE": "fp8_e4m3"}, {}),
    "FP8 cache": ({"MODE": "naive"}, FP8),
}
"""Options and arguments of the servers to look at."""


class Engines:
    """Answers of engines over one model; of each kind it runs one, when it is asked for."""

    def __init__(self, folder: Path, heads: int) -> None:
        self.heads, self._folder = heads, folder
        self._model = make_model(folder / "checkpoint", "--heads", str(heads), "--nextn")
        self._answers: dict[str, dict] = {}

    def answers(self, backend: str, **arguments: Any) -> dict:
        kind = f"{backend} {sorted(arguments.items())} {sorted(environment().items())}"
        if kind not in self._answers:
            out = self._folder / f"answers{len(self._answers)}"
            self._answers[kind] = answers(self._model, out, backend, **arguments)
        return self._answers[kind]

    @property
    def truth(self) -> dict:
        """Without drafts and without a prefix cache."""
        return self.answers("flashmla", disable_radix_cache=True)


def environment() -> dict[str, str]:
    """What an engine's answers depend on."""
    names = ("SGLANG_HYBRID_MLA_", "SGLANG_SIMULATE_", "SGLANG_TEST_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}


@pytest.fixture(scope="module", params=[128, 16], ids=lambda heads: f"{heads}heads")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("speculative"), request.param)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, engines: Engines) -> str:
    if request.param == "grouped_absorb" and engines.heads != 16:
        pytest.skip("so many heads are not stacked")
    return request.param


def hybrid(engines: Engines, mode: str, **drafts: Any) -> dict:
    options, arguments = MODES[mode]
    with pytest.MonkeyPatch.context() as patched:
        for name, value in options.items():
            patched.setenv(f"SGLANG_HYBRID_MLA_{name}", value)
        return engines.answers("hybrid_mla", **arguments, **drafts)


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
    counters = answer["info"]["counters"]
    assert counters["fallbacks"] == {} and counters["max_group_size"] == BATCH
    assert counters["steps_verify"] == sum(counters[f"steps_{mode}"] for mode in ("naive", "grouped", "absorb"))
    shared = counters["steps_grouped" if name == "grouped_absorb" else "steps_naive"]
    assert shared > 0.5 * counters["steps_verify"] > 0
    assert all(1 <= length <= STEPS + 1 for length in answer["accepted"])


def check(name: str, found: list[float], yardstick: list[float], fp8: bool) -> None:
    """The random model is not smooth: twice the rounding of two stock backends is allowed, or that of SGLang's FP8."""
    assert len(found) > 0.5 * len(yardstick), name
    assert mean(found) < (1.1 if fp8 else 2) * mean(yardstick) + 1e-3, name


def test_greedy_tokens_with_drafts_are_those_without(engines: Engines, mode: str) -> None:
    """And those of FlashMLA with the same drafts, but for ties in BF16, of which FlashMLA has some with itself. Their
    log-probabilities are within the yardstick of test_engine_gpu.py."""
    fp8 = mode.startswith("FP8")
    stock = engines.answers("flashmla", **DRAFTS)
    ours, alone = hybrid(engines, mode, **DRAFTS), hybrid(engines, mode)
    if fp8:
        yardstick = engines.answers("flashmla", **FP8, **DRAFTS)
    else:
        yardstick = engines.answers("flashinfer", disable_radix_cache=True)
    apart = differences_of(engines.truth, {"yardstick": yardstick, "flashmla": stock, mode: ours})
    ties = equal_share(stock, engines.answers("flashmla"))
    same, as_stock = equal_share(ours, alone), equal_share(ours, stock)
    print(f"equal tokens: {ties:.3f} flashmla with drafts and without, {same:.3f} {mode}, {as_stock:.3f} {mode} and it")
    check_counters(ours, mode)
    check(mode, apart[mode], apart["yardstick"], fp8)
    assert same > 0.8 * ties and (fp8 or as_stock > 0.5 * ties)


@pytest.mark.parametrize("accepted", [2, STEPS + 1])
def test_drafts_that_are_accepted(engines: Engines, mode: str, monkeypatch: pytest.MonkeyPatch, accepted: int) -> None:
    """By force, whatever they are: their keys are read in later steps. The truth is FlashMLA's with the same drafts."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", str(accepted))
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_TOKEN_MODE", "real-draft-token")
    fp8 = mode.startswith("FP8")
    if fp8:
        yardstick = engines.answers("flashmla", **FP8, **DRAFTS)
    else:
        draft = dict(speculative_draft_attention_backend="flashmla", page_size=64)
        yardstick = engines.answers("flashinfer", **DRAFTS, **draft)
    ours = hybrid(engines, mode, **DRAFTS)
    apart = differences_of(engines.answers("flashmla", **DRAFTS), {"yardstick": yardstick, mode: ours})
    check_counters(ours, mode)
    assert mean(ours["accepted"]) > accepted - 0.5
    check(mode, apart[mode], apart["yardstick"], fp8)


@pytest.mark.parametrize("arguments", [{}, FP8, {"disable_cuda_graph": True}, {"disable_overlap_schedule": True}])
def test_requests_that_are_taken_back(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """Between verify steps; without CUDA graphs, and without overlap, too."""
    truth = engines.truth
    monkeypatch.setenv("SGLANG_HYBRID_MLA_MODE", "naive")
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    stock, ours = (engines.answers(name, **arguments, **DRAFTS) for name in ("flashmla", "hybrid_mla"))
    assert ours["retractions"] > 0 and ours["info"]["counters"]["fallbacks"] == {}
    apart = differences_of(truth, {"flashmla": stock, "hybrid_mla": ours})
    check("hybrid_mla", apart["hybrid_mla"], apart["flashmla"], arguments == FP8)


def test_another_backend_for_prefill(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify steps go to the decode backend all the same."""
    stock, truth = engines.answers("flashmla", **DRAFTS), engines.truth
    monkeypatch.setenv("SGLANG_HYBRID_MLA_MODE", "naive")
    split = dict(prefill_attention_backend="flashinfer", decode_attention_backend="hybrid_mla", page_size=64)
    ours = engines.answers("flashinfer", **split, **DRAFTS)
    check_counters(ours, "naive")
    apart = differences_of(truth, {"flashmla": stock, "hybrid_mla": ours})
    check("hybrid_mla", apart["hybrid_mla"], apart["flashmla"], fp8=False)
