"""The real engine on a Hopper GPU with speculative decoding: hybrid_mla verifies drafts as SGLang's own FlashMLA does,
and as it decodes without them.

The draft is a random layer, which is hardly ever right, so what requests accept is forced where it matters.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from test_engine_gpu import BATCH, all_answers, differences_of, make_model

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
STOCK: dict[str, Any] = dict(backend="flashmla")
FLASHINFER: dict[str, Any] = dict(backend="flashinfer")


def hybrid(mode: str, **arguments: Any) -> dict[str, Any]:
    """Arguments of a hybrid_mla engine; a mode with `FP8 prefix` expands to FP8."""
    env = {"SGLANG_HYBRID_MLA_MODE": mode.removesuffix(", FP8 prefix")}
    if mode.endswith(", FP8 prefix"):
        env["SGLANG_HYBRID_MLA_PREFIX_DTYPE"] = "fp8_e4m3"
    return dict(backend="hybrid_mla", env=env, **arguments)


MODES: dict[str, dict[str, Any]] = {
    "naive": hybrid("naive"),
    "naive, FP8 prefix": hybrid("naive, FP8 prefix"),
    "naive, FP8 cache": hybrid("naive", **FP8),
    "grouped_absorb": hybrid("grouped_absorb"),
}
"""The servers to look at."""


class Engines:
    """Answers of engines over one model; of each kind it runs one, when it is first asked for."""

    def __init__(self, folder: Path, heads: int) -> None:
        self.heads, self._folder = heads, folder
        self._model = make_model(folder / "checkpoint", "--heads", str(heads), "--nextn")
        self._answers: dict[str, dict] = {}

    def answers(self, **engines: dict[str, Any]) -> dict[str, dict]:
        """By name, of engines with these arguments; those that have not run yet run side by side."""
        missing = {str(one): one for one in engines.values() if str(one) not in self._answers}
        folder = self._folder / str(len(self._answers))
        folder.mkdir(exist_ok=True)
        self._answers |= all_answers(self._model, folder, missing)
        return {name: self._answers[str(one)] for name, one in engines.items()}

    @property
    def modes(self) -> dict[str, dict[str, Any]]:
        """Those that there are with so many heads."""
        return {mode: one for mode, one in MODES.items() if mode != "grouped_absorb" or self.heads == 16}


@pytest.fixture(scope="module", params=[128, 16], ids=lambda heads: f"{heads}heads")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("speculative"), request.param)


TRUTH = dict(STOCK, disable_radix_cache=True)
"""Without drafts and without a prefix cache."""


def ties(one: dict, other: dict) -> list[float]:
    """How close to each other the two tokens are where a request's answers part: what `one` loses, in log-probability,
    by the other's token; what it loses by its fourth best, if the other's is none of its four best."""
    found = []
    for request, same, best in zip(one["tokens"], other["tokens"], one["top"], strict=True):
        for (value, token), (_, other_token), top in zip(request, same, best, strict=True):
            if token != other_token:
                of_token = {each: its for its, each in top}
                found.append(value - of_token.get(other_token, min(of_token.values())))
                break
    return found


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


def test_greedy_tokens_with_drafts_are_those_without(engines: Engines) -> None:
    """In every mode, and those of FlashMLA with the same drafts, but for ties, of which FlashMLA has some with
    itself. Their log-probabilities are within the yardstick of test_engine_gpu.py."""
    found = engines.answers(
        truth=TRUTH,
        flashinfer=FLASHINFER | dict(disable_radix_cache=True),
        alone=STOCK,
        stock=STOCK | DRAFTS,
        stock_fp8=STOCK | FP8 | DRAFTS,
        **{mode: one | DRAFTS for mode, one in engines.modes.items()},
        **{f"{mode}, alone": one for mode, one in engines.modes.items()},
    )
    apart = differences_of(found["truth"], {name: answer for name, answer in found.items() if name != "truth"})
    rounding = {False: ties(found["flashinfer"], found["truth"]), True: ties(found["stock_fp8"], found["stock"])}
    for name, those in {
        "FlashInfer and FlashMLA": rounding[False],
        "FlashMLA over FP8 and BF16": rounding[True],
    }.items():
        print(f"{name} part at {_several(those)}")
    print(f"FlashMLA with drafts and without parts at {_several(ties(found['stock'], found['alone']))}")
    for mode in engines.modes:
        fp8 = "FP8" in mode
        apart_by_drafts = ties(found[mode], found[f"{mode}, alone"])
        print(f"{mode} with drafts and without parts at {_several(apart_by_drafts)}", end=", ")
        print(f"from FlashMLA with drafts at {_several(ties(found[mode], found['stock']))}")
        check_counters(found[mode], mode)
        check(mode, apart[mode], apart["stock_fp8" if fp8 else "flashinfer"], fp8)
        assert mean(apart_by_drafts or [0]) < 2 * mean(rounding[fp8]) + 1e-3, mode


def _several(found: list[float]) -> str:
    return f"{len(found)} ties (mean {mean(found or [0]):.3f}, max {max(found, default=0):.3f})"


@pytest.mark.parametrize("accepted", [2, STEPS + 1])
def test_drafts_that_are_accepted(engines: Engines, accepted: int) -> None:
    """By force, whatever they are: their keys are read in later steps. The truth is FlashMLA's with the same drafts."""
    forced = {"SGLANG_SIMULATE_ACC_LEN": str(accepted), "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}

    def with_drafts(one: dict[str, Any], **arguments: Any) -> dict[str, Any]:
        return one | DRAFTS | arguments | dict(env=one.get("env", {}) | forced)

    found = engines.answers(
        truth=with_drafts(STOCK),
        flashinfer=with_drafts(FLASHINFER),
        stock_fp8=with_drafts(STOCK, **FP8),
        **{mode: with_drafts(one) for mode, one in engines.modes.items()},
    )
    apart = differences_of(found["truth"], {name: answer for name, answer in found.items() if name != "truth"})
    for mode in engines.modes:
        check_counters(found[mode], mode)
        assert mean(found[mode]["accepted"]) > accepted - 0.5
        check(mode, apart[mode], apart["stock_fp8" if "FP8" in mode else "flashinfer"], "FP8" in mode)


def test_requests_that_are_taken_back(engines: Engines) -> None:
    """Between verify steps; without CUDA graphs, without overlap, and over an FP8 cache, too. And where prefill has
    another backend, verify steps go to the decode backend all the same."""
    retracting = {"SGLANG_TEST_RETRACT": "1"}
    kinds = [{}, FP8, {"disable_cuda_graph": True}, {"disable_overlap_schedule": True}]
    ours = {str(kind): hybrid("naive") | DRAFTS | kind for kind in kinds}
    split = dict(prefill_attention_backend="flashinfer", decode_attention_backend="hybrid_mla", page_size=64)
    found = engines.answers(
        truth=TRUTH,
        stock=STOCK | DRAFTS,
        stock_fp8=STOCK | FP8 | DRAFTS,
        split=hybrid("naive") | FLASHINFER | split | DRAFTS,
        **{name: one | dict(env=one["env"] | retracting) for name, one in ours.items()},
    )
    apart = differences_of(found["truth"], {name: answer for name, answer in found.items() if name != "truth"})
    check_counters(found["split"], "naive")
    check("split", apart["split"], apart["stock"], fp8=False)
    for name in ours:
        assert found[name]["retractions"] > 0 and found[name]["info"]["counters"]["fallbacks"] == {}
        fp8 = name == str(FP8)
        check(name, apart[name], apart["stock_fp8" if fp8 else "stock"], fp8)
