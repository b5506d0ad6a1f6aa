"""The real engine on a Hopper GPU over other models than DeepSeek-V3: small random checkpoints of their architecture,
answered from what is expanded as FlashMLA answers prompts that are computed whole. 12 and 6 heads are those of
Kimi-K3's ranks, in DeepSeek-V3's layers; Kimi-Linear and Kimi-K3 have MLA in every second layer. Kimi-K3 is of its
whole class, read as one of text: for its class of text alone SGLang 0.5.23 wants pages of one token.

SGLang scales Mistral Large 3's queries by position in absorb alone, so that its answers depend on which tokens come
together in a pass: it is compared with SGLang's backends without any pass with keys per head."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from demo_model.checkpoint import Settings, make
from known import Known, make_known
from test_engine_gpu import BATCH, NEW_TOKENS, all_answers, differences_of

from sglang_mla_ext.adapter.compat import contract

pytestmark = pytest.mark.gpu

WIDE: dict[str, int] = dict(hidden=1024, intermediate=2048)
# LongCat-Flash's configuration has not what SGLang reads: rotation without scaling.
ROTATION = dict(json_model_override_args='{"rope_parameters": {"factor": 1.0}}')


def small(**more: Any) -> Settings:
    sizes = dict(layers=3, heads=16, q_lora_rank=1536, vocab=2048, max_positions=16384, seed=0, config_only=False)
    return Settings(**WIDE | sizes | more)


# Room for the states of all engines' requests, five of each; what SGLang takes by default leaves room for one engine.
STATES = dict(max_mamba_cache_size=6 * BATCH)
LINEAR: dict[str, Any] = dict(layers=4, linear_dtype="bfloat16", **WIDE)
# Of SGLang's backends.
ABSORBED = dict(flashinfer_mla_disable_ragged=True)


MODELS: dict[str, tuple[Settings | Known, dict[str, Any]]] = {
    "queries of one projection": (small(q_lora_rank=0), {}),
    "experts": (small(experts=True), {}),
    "kimi-k2": (Known("kimi-k2", q_lora_rank=1536, **WIDE), {}),
    "longcat-flash": (Known("longcat-flash", q_lora_rank=1536, **WIDE), ROTATION),
    "12 heads": (small(heads=12), {}),
    "6 heads": (small(heads=6), {}),
    "glm-4.7-flash": (Known("glm-4.7-flash", q_lora_rank=768, **WIDE), {}),
    "mistral-large-3": (Known("mistral-large-3", q_lora_rank=1536, **WIDE), ABSORBED),
    "kimi-linear": (Known("kimi-linear", heads=12, **LINEAR), STATES),
    "kimi-k3": (Known("kimi-k3", heads=6, q_lora_rank=1536, **LINEAR), STATES),
}


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_prompts_computed_whole(name: str, tmp_path: Path) -> None:
    """FlashInfer without a prefix cache shows what BF16 rounding does to the truth, as in test_engine_gpu.py."""
    settings, arguments = MODELS[name]
    linear = arguments is STATES
    if linear and contract.line() in ("0.5.17", "0.5.18"):
        pytest.skip("its prefixes are in a tree of another kind")
    model = tmp_path / "checkpoint"
    if isinstance(settings, Known):
        make_known(model, settings)
    else:
        make(model, settings)
    naive, absorb = ({"SGLANG_HYBRID_MLA_MODE": mode} for mode in ("naive", "absorb"))
    absorbed = arguments is ABSORBED
    ours, stock = ({} if absorbed else arguments), arguments | dict(disable_radix_cache=True)
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", **stock),
        "naive": dict(backend="hybrid_mla", env=naive, **ours),
    }
    # SGLang scales no query of FlashInfer's by its position.
    compared = [("naive", "FP8 cache", 1.1) if absorbed else ("naive", "flashinfer", 2.0)]
    if not absorbed:
        engines["flashinfer"] = dict(backend="flashinfer", **stock)
    if not linear:  # an FP8 cache is refused beside layers with linear attention
        fp8 = dict(kv_cache_dtype="fp8_e4m3")
        engines |= {
            "naive, FP8 cache": engines["naive"] | fp8,
            # SGLang's own cannot absorb in prefill over an FP8 cache: ours without sharing.
            "FP8 cache": (dict(backend="hybrid_mla", env=absorb, **ours) if absorbed else engines["truth"]) | fp8,
        }
        compared.append(("naive, FP8 cache", "FP8 cache", 1.1))
    found = all_answers(model, tmp_path, engines)
    truth = found.pop("truth")
    apart = differences_of(truth, found)
    for ours, theirs, allowed in compared:
        counters = found[ours]["info"]["counters"]
        assert counters["steps_naive"] > NEW_TOKENS // 2 and counters["max_group_size"] == BATCH
        assert counters["fallbacks"] == {}
        assert len(apart[ours]) > 0.5 * len(apart[theirs])
        assert mean(apart[ours]) < allowed * mean(apart[theirs]) + 1e-3
