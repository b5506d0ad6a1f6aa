"""Prefill on a Hopper GPU, in whole engines whose calls of FlashInfer's attention to latent rows are noted."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from test_engine_gpu import BATCH, PREFIX, all_answers, differences_of, make_model

pytestmark = pytest.mark.gpu

LAYERS = 4  # of make_model

PLUGIN = '''
"""A plugin for SGLang: writes the name of each such call into a file."""
import os

def install():
    from flashinfer import BatchMLAPagedAttentionWrapper as wrapper

    for name in ("plan", "run"):
        def called(self, *args, _name=name, _original=getattr(wrapper, name), **kwargs):
            with open(os.environ["CALLS_OF_TESTS"], "a") as file:
                file.write(_name + "\\n")
            return _original(self, *args, **kwargs)
        setattr(wrapper, name, called)
'''


def noting(folder: Path, calls: Path, **env: str) -> dict[str, str]:
    """An environment in which SGLang has that plugin, of a distribution in this folder."""
    info = folder / "notes_calls-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / "notes_calls.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notes_calls\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nnotes_calls = notes_calls:install\n")
    calls.touch()
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "CALLS_OF_TESTS": str(calls), **env}


def test_absorb_is_planned_where_it_runs(tmp_path: Path) -> None:
    """Not before a pass over expanded prefixes; once, before the first layer, where cached ones take absorb. Answers
    are as far from the truth as those of SGLang's own backend, which plans before every pass."""
    model = make_model(tmp_path / "checkpoint", "--heads", "16")
    absorbs = {"SGLANG_HYBRID_MLA_MODE": "absorb", "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": str(1 << 30)}
    calls = {name: tmp_path / f"{name}.calls" for name in ("naive", "absorb")}
    plugin = tmp_path / "plugin"
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", disable_radix_cache=True),
        "flashmla": dict(backend="flashmla", env=absorbs),
        "naive": dict(backend="hybrid_mla", env=noting(plugin, calls["naive"], SGLANG_HYBRID_MLA_MODE="naive")),
        "absorb": dict(backend="hybrid_mla", env=noting(plugin, calls["absorb"], **absorbs)),
    }
    found = all_answers(model, tmp_path, engines)
    noted = {name: file.read_text().split() for name, file in calls.items()}

    assert noted["naive"] == []
    assert found["naive"]["info"]["counters"]["prefill_tokens_saved"] >= BATCH * (PREFIX // 64 * 64)
    passes = noted["absorb"].count("plan")
    assert passes > 0 and noted["absorb"] == ["plan", *["run"] * LAYERS] * passes
    assert found["absorb"]["info"]["counters"]["prefill_tokens_saved"] == 0
    apart = differences_of(found.pop("truth"), found)
    for name in ("naive", "absorb"):
        assert found[name]["info"]["counters"]["fallbacks"] == {}
        assert len(apart[name]) > 0.5 * len(apart["flashmla"])
        assert mean(apart[name]) < 2 * mean(apart["flashmla"]) + 1e-3
