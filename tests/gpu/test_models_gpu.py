"""The real engine on a Hopper GPU over other models than DeepSeek-V3: small random checkpoints of their architecture,
answered from what is expanded as FlashMLA answers prompts that are computed whole. 12 and 6 heads are those of
Kimi-K3's ranks, in DeepSeek-V3's layers; Kimi-Linear and Kimi-K3 have MLA in every second layer. Kimi-K3 is of its
whole class, read as one of text: for its class of text alone SGLang 0.5.23 wants pages of one token.

SGLang scales Mistral Large 3's queries by position in absorb alone, so that its answers depend on which tokens come
together in a pass: it is compared with SGLang's backends without any pass with keys per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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


def small(**more: Any) -> Settings:
    sizes = dict(layers=3, heads=16, q_lora_rank=1536, vocab=2048, max_positions=16384, seed=0, config_only=False)
    return Settings(**WIDE | sizes | more)


@dataclass(frozen=True)
class Model:
    """How its answers are compared.

    Args:
        arguments: what every engine of it is started with.
        linear: it has layers with linear attention: no FP8 cache there, and no shared prefix with SGLang 0.5.17.
        query_scale: its queries are scaled by their position.
    """

    checkpoint: Settings | Known
    arguments: Mapping[str, Any] = field(default_factory=dict)
    linear: bool = False
    query_scale: bool = False

    def engines(self) -> dict[str, dict[str, Any]]:
        """Arguments of `answers` by name. "truth" computes prompts whole; "ours" is compared with "yardstick", which
        shows what BF16 rounding does to the truth, and over an FP8 cache with what that cache does."""
        whole = dict(backend="flashmla", disable_radix_cache=True)
        ours: dict[str, Any] = dict(backend="hybrid_mla", env={"SGLANG_HYBRID_MLA_MODE": "naive"})
        fp8 = dict(kv_cache_dtype="fp8_e4m3")
        found = {"truth": whole, "ours": ours}
        if self.query_scale:
            # Of SGLang's own, FlashInfer scales no query, and none absorbs in prefill over an FP8 cache.
            found["truth"] = whole | dict(flashinfer_mla_disable_ragged=True)
            fp8_whole = dict(backend="hybrid_mla", env={"SGLANG_HYBRID_MLA_MODE": "absorb"})
        else:
            found["yardstick"] = dict(backend="flashinfer", disable_radix_cache=True)
            fp8_whole = whole
        if not self.linear:
            found |= {"ours, FP8 cache": ours | fp8, "yardstick, FP8 cache": fp8_whole | fp8}
        return {name: dict(self.arguments) | arguments for name, arguments in found.items()}


# LongCat-Flash's configuration has not what SGLang reads: rotation without scaling.
ROTATION = dict(json_model_override_args='{"rope_parameters": {"factor": 1.0}}')
# Room for the states of all engines' requests, five of each; what SGLang takes by default leaves room for one engine.
STATES = dict(max_mamba_cache_size=6 * BATCH)
LINEAR: dict[str, Any] = dict(layers=4, linear_dtype="bfloat16", **WIDE)

MODELS: dict[str, Model] = {
    "queries of one projection": Model(small(q_lora_rank=0)),
    "experts": Model(small(experts=True)),
    "kimi-k2": Model(Known("kimi-k2", q_lora_rank=1536, **WIDE)),
    "longcat-flash": Model(Known("longcat-flash", q_lora_rank=1536, **WIDE), ROTATION),
    "12 heads": Model(small(heads=12)),
    "6 heads": Model(small(heads=6)),
    "glm-4.7-flash": Model(Known("glm-4.7-flash", q_lora_rank=768, **WIDE)),
    "mistral-large-3": Model(Known("mistral-large-3", q_lora_rank=1536, **WIDE), query_scale=True),
    "kimi-linear": Model(Known("kimi-linear", heads=12, **LINEAR), STATES, linear=True),
    "kimi-k3": Model(Known("kimi-k3", heads=6, q_lora_rank=1536, **LINEAR), STATES, linear=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_prompts_computed_whole(name: str, tmp_path: Path) -> None:
    model = MODELS[name]
    if model.linear and contract.line() == "0.5.17":
        pytest.skip("its prefixes are in a tree of another kind")
    folder = tmp_path / "checkpoint"
    if isinstance(model.checkpoint, Known):
        make_known(folder, model.checkpoint)
    else:
        make(folder, model.checkpoint)
    found = all_answers(folder, tmp_path, model.engines())
    apart = differences_of(found.pop("truth"), found)
    # The random model is not smooth: twice the rounding of two stock backends is allowed.
    compared = [("ours", "yardstick, FP8 cache", 1.1) if model.query_scale else ("ours", "yardstick", 2.0)]
    if not model.linear:
        compared.append(("ours, FP8 cache", "yardstick, FP8 cache", 1.1))
    for ours, yardstick, allowed in compared:
        counters = found[ours]["info"]["counters"]
        assert counters["steps_naive"] > NEW_TOKENS // 2 and counters["max_group_size"] == BATCH
        assert counters["fallbacks"] == {}
        assert len(apart[ours]) > 0.5 * len(apart[yardstick])
        assert mean(apart[ours]) < allowed * mean(apart[yardstick]) + 1e-3
