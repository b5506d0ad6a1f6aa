"""Several GPUs under one server: its answers are those of one GPU, whether ranks divide the heads or the requests.

The truth is FlashMLA without a prefix cache on one GPU, as in test_engine_gpu.py. Allow 500 s for each test on GPUs for
which nothing is compiled yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_gpu import BATCH, NEW_TOKENS, PREFIX, all_answers, differences_of, make_model
from test_speculative_gpu import DRAFTS, FLASHINFER, FP8, MODES, STOCK, TRUTH, check

from sglang_mla_ext.adapter.compat import installed

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

GPUS = 4 if torch.cuda.device_count() >= 4 else 2
# FlashInfer's all-reduce needs NVLink multicast, and SGLang 0.5.17's own one hangs on hosts without it, whatever the
# attention backend.
NO_MULTICAST: dict[str, Any] = dict(tp_size=GPUS, enforce_disable_flashinfer_allreduce_fusion=True)
TENSOR_PARALLEL = NO_MULTICAST | dict(disable_custom_all_reduce=True)
DP_ATTENTION: dict[str, Any] = dict(tp_size=2, dp_size=2, enable_dp_attention=True)

AT_A_TIME = 5  # engines, each of them on both GPUs
NESTED_AT_A_TIME = 3  # whose prompts are longer, so that a pass takes more memory

STOCK_ENGINES: dict[str, dict[str, Any]] = {"stock": STOCK, "stock_fp8": STOCK | FP8}


@pytest.fixture(autouse=True)
def engines_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang refuses GPUs of which one has less free memory: the engine of the truth runs on the first one alone."""
    monkeypatch.setenv("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "0")


def check_ranks(found: dict[str, dict], largest_group: int) -> None:
    """What the names of MODES yield, against `truth`, `stock` and `stock_fp8`, on every rank."""
    truth = found.pop("truth")
    apart = differences_of(truth, found)
    for name in found.keys() - STOCK_ENGINES:
        fp8 = "FP8" in name
        check(name, apart[name], apart["stock_fp8" if fp8 else "stock"], fp8)
        for rank in found[name]["ranks"]:
            counters = rank["counters"]
            mode = "steps_grouped" if name.startswith("grouped_absorb") else "steps_naive"
            assert counters[mode] > NEW_TOKENS // 2, (name, counters)
            # One more where requests are sent in turn: the one that says when they decode.
            assert largest_group <= counters["max_group_size"] <= largest_group + 1, (name, counters)
            # SGLang 0.5.23 computes decode rows in prefill graphs while a rank with other requests prefills.
            as_prefill = largest_group < BATCH and installed.shares_in_prefill_graphs
            assert counters["fallbacks"] == {} and (as_prefill or counters["rows_as_prefill"] == 0), (name, counters)


def test_ranks_that_divide_the_heads(tmp_path: Path) -> None:
    """Tensor parallelism, with 16 heads on each of two or four GPUs."""
    model = make_model(tmp_path / "checkpoint", "--heads", str(16 * GPUS))
    engines = STOCK_ENGINES | MODES
    found = all_answers(
        model, tmp_path, {"truth": TRUTH, **{name: one | TENSOR_PARALLEL for name, one in engines.items()}}, AT_A_TIME
    )
    check_ranks(found, largest_group=BATCH)


def test_ranks_that_divide_the_heads_select_the_same_graph(tmp_path: Path) -> None:
    """SGLang's own all-reduce knows the other ranks' addresses graph by graph. Requests share nothing, or all of them
    share, but for the last ones with drafts."""
    model = make_model(tmp_path / "checkpoint", "--heads", str(16 * GPUS), "--nextn")
    ranks = MODES["naive"] | (NO_MULTICAST if installed.has_graph_variants else TENSOR_PARALLEL)
    alone = {"truth": TRUTH, "flashinfer": FLASHINFER | dict(disable_radix_cache=True)}
    engines = {"decode": ranks, "verify": ranks | DRAFTS}
    for prefix, shares in ((16, False), (PREFIX, True)):
        asked = {name: one | dict(prefix=prefix) for name, one in {**alone, **engines}.items()}
        folder = tmp_path / str(prefix)
        folder.mkdir()
        found = all_answers(model, folder, asked)
        apart = differences_of(found.pop("truth"), found)
        for name in engines:
            check(name, apart[name], apart["flashinfer"], fp8=False)
            for rank in found[name]["ranks"]:
                counters = rank["counters"]
                assert counters["fallbacks"] == {} and (counters["steps_naive"] > 0) == shares, (name, counters)


def test_ranks_that_divide_the_requests(tmp_path: Path) -> None:
    """DP attention, SGLang dealing out requests. Also with one rank that has nothing while the other decodes, and one
    that prefills while the other decodes."""
    model = make_model(tmp_path / "checkpoint", "--heads", "16")
    engines = STOCK_ENGINES | MODES
    engines |= {f"{name}, in turn": one | dict(in_turn=True) for name, one in MODES.items() if "cache" not in name}
    # A server's ports follow from its own with DP attention.
    found = all_answers(
        model,
        tmp_path,
        {
            "truth": TRUTH,
            **{name: one | DP_ATTENTION | dict(port=31000 + 50 * i) for i, (name, one) in enumerate(engines.items())},
        },
        AT_A_TIME,
    )
    for name in engines:
        assert name.endswith("in turn") == found[name]["overlapped"], name
    check_ranks(found, largest_group=BATCH // 2)


def sharded(mode: str, via: str = "peers", env: Mapping[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """One of MODES, in which ranks shard prefixes."""
    one = MODES[mode]
    return (
        one | DP_ATTENTION | arguments | dict(env=one["env"] | {"SGLANG_HYBRID_MLA_PREFIX_SHARDING": via} | (env or {}))
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_ranks_that_hold_prefixes_together(tmp_path: Path, fp8: bool) -> None:
    """DP attention, half of the heads of every prefix on each rank. Prompts branch in three levels; documents are on
    whichever ranks their requests are. In turn, the second time: one rank attends for the other's requests while it has
    none, and while it prefills nothing is shared."""
    model = make_model(tmp_path / "checkpoint", "--heads", "16")
    engines: dict[str, dict[str, Any]] = {"stock": STOCK | DP_ATTENTION}
    if fp8:
        engines["stock_fp8"] = STOCK | FP8 | DP_ATTENTION
        engines |= {mode: sharded(mode) for mode in ("naive, FP8 prefix", "naive, FP8 cache")}
    else:
        engines |= {
            "naive": sharded("naive"),
            "naive, in turn": sharded("naive", in_turn=True, fillers=1),
            "naive, checked": sharded("naive", env={"SGLANG_HYBRID_MLA_VERIFY_INTERVAL": "3"}),
            "naive, by NCCL": sharded("naive", "nccl"),
        }
    engines = {name: one | dict(port=31500 + 50 * i) for i, (name, one) in enumerate(engines.items())}
    nested = {name: one | dict(nested=True) for name, one in {"truth": TRUTH, **engines}.items()}
    found = all_answers(model, tmp_path, nested, NESTED_AT_A_TIME)
    for name in engines.keys() - STOCK_ENGINES:
        one, other = (rank["counters"] for rank in found[name]["ranks"])
        print(name, one["steps_sharded"], one["not_sharded"], one["expanded_tokens"], other["expanded_tokens"])
        assert one["steps_sharded"] == other["steps_sharded"] > NEW_TOKENS // 2, (name, one, other)
        assert one["shadow_failures"] == other["shadow_failures"] == 0, (name, one, other)
        assert (one["shadow_checks"] > 0) == name.endswith("checked")
    check_ranks(found, largest_group=BATCH // 2)


def test_drafts_over_prefixes_that_ranks_hold_together(tmp_path: Path) -> None:
    """Each request has as many rows as drafts, on every rank. In turn, one rank verifies nothing for a while."""
    model = make_model(tmp_path / "checkpoint", "--heads", "16", "--nextn")
    drafts = DRAFTS | dict(max_running_requests=2 * BATCH + 16)
    engines = {
        "stock": STOCK | DP_ATTENTION,
        "naive": sharded("naive"),
        "naive, in turn": sharded("naive", in_turn=True),
        "naive, checked": sharded("naive", env={"SGLANG_HYBRID_MLA_VERIFY_INTERVAL": "3"}),
    }
    engines = {name: one | drafts | dict(port=31500 + 50 * i) for i, (name, one) in enumerate(engines.items())}
    alone = {"truth": TRUTH, "flashinfer": FLASHINFER | dict(disable_radix_cache=True)}
    found = all_answers(
        model, tmp_path, {name: one | dict(nested=True) for name, one in {**alone, **engines}.items()}, NESTED_AT_A_TIME
    )
    apart = differences_of(found["truth"], {name: answer for name, answer in found.items() if name != "truth"})
    for name in engines.keys() - STOCK_ENGINES:
        check(name, apart[name], apart["flashinfer"], fp8=False)
        one, other = (rank["counters"] for rank in found[name]["ranks"])
        assert one["steps_sharded"] == other["steps_sharded"] > NEW_TOKENS // 2, (name, one, other)
        assert one["steps_verify"] > 0 and one["fallbacks"] == other["fallbacks"] == {}, (name, one, other)
        assert one["shadow_failures"] == other["shadow_failures"] == 0, (name, one, other)
        assert (one["shadow_checks"] > 0) == name.endswith("checked")


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_ranks_that_divide_requests_and_heads(tmp_path: Path) -> None:
    """Two groups with half of the requests each, in which two ranks divide the heads. SGLang's own FlashMLA and
    FlashInfer end there at a prefill pass of an odd number of tokens (sgl-project/sglang#35876)."""
    model = make_model(tmp_path / "checkpoint", "--heads", "32")
    alone = {"truth": TRUTH, "stock": FLASHINFER | dict(disable_radix_cache=True), "stock_fp8": STOCK | FP8}
    engines: dict[str, dict[str, Any]] = {
        name: one | TENSOR_PARALLEL | DP_ATTENTION | dict(tp_size=4, port=32000 + 50 * i)
        for i, (name, one) in enumerate(MODES.items())
    }
    found = all_answers(model, tmp_path, alone | engines, AT_A_TIME)
    check_ranks(found, largest_group=BATCH // 2)
