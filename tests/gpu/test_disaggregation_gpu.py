"""Prefill on one GPU and decode on another, the cache moved by NIXL: answers are those of one GPU.

The truth is FlashMLA without a prefix cache on one GPU, as in test_engine_gpu.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_gpu import BATCH, NEW_TOKENS, all_answers, differences_of, make_model
from test_speculative_gpu import FP8, MODES, STOCK, TRUTH, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def pair(port: int, one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Engines with these arguments, one for each phase."""
    given = one | dict(meet=port, disaggregation_transfer_backend="nixl", disaggregation_bootstrap_port=port)
    decodes = dict(disaggregation_mode="decode", base_gpu_id=1, disaggregation_decode_enable_radix_cache=True)
    return {"prefill": given | dict(disaggregation_mode="prefill"), "decode": given | decodes}


def test_one_gpu_prefills_and_another_decodes(tmp_path: Path) -> None:
    pytest.importorskip("nixl", reason="needs NIXL")
    model = make_model(tmp_path / "checkpoint", "--heads", "16")
    modes = {name: MODES[name] for name in ("naive", "naive, FP8 cache")}
    pairs = {"stock": STOCK, **modes}
    engines = {
        f"{name}: {phase}": one
        for index, (name, both) in enumerate(pairs.items())
        for phase, one in pair(21700 + 100 * index, both).items()
    }
    # Both of a pair have to be there at once.
    found = all_answers(model, tmp_path, {**engines, "truth": TRUTH, "fp8": STOCK | FP8}, len(engines))
    decoded = {name: found[f"{name}: decode"] for name in pairs}
    apart = differences_of(found["truth"], decoded | {"fp8": found["fp8"]})
    for name in modes:
        fp8 = "FP8" in name
        check(name, apart[name], apart["fp8" if fp8 else "stock"], fp8)
        of_prefill, of_decode = (found[f"{name}: {phase}"]["info"]["counters"] for phase in ("prefill", "decode"))
        assert of_decode["steps_naive"] > NEW_TOKENS // 2 and of_decode["max_group_size"] == BATCH, of_decode
        assert of_prefill["prefill_tokens_saved"] > 0 == of_prefill["steps_naive"], of_prefill
        assert of_prefill["fallbacks"] == of_decode["fallbacks"] == {}, (of_prefill, of_decode)
