"""The shadow check on a Hopper GPU: what the merge kernels copy, and whole engines whose CUDA graphs are checked."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
import torch
from test_engine_gpu import NEW_TOKENS, all_answers, differences, make_model

from sglang_mla_ext.kernels.merge import merge
from sglang_mla_ext.kernels.partials import FIRSTS, PartialTable
from sglang_mla_ext.kernels.watch import Watch, Watched

pytestmark = pytest.mark.gpu

RANK, ROPE = 512, 64


@pytest.mark.parametrize(("rows", "heads", "dv"), [(3, 128, 128), (200, 128, 128), (513, 16, 128), (40, 16, 512)])
def test_a_merge_in_a_graph_copies_what_it_is_told(rows: int, heads: int, dv: int) -> None:
    device = "cuda"
    tail = torch.randn(heads, rows, dv, dtype=torch.bfloat16, device=device).transpose(0, 1).contiguous()
    tail_lse = torch.randn(rows, heads, device=device)
    partial_out, partial_lse2 = torch.randn(rows, heads, dv, device=device), torch.randn(rows, heads, device=device)
    table = PartialTable.empty(rows, rows, "cpu")
    for row in range(0, rows, 2):
        table.begins[row], table.counts[row], table.partials[row] = row, 1, row
        table.firsts[row] = torch.tensor([row] + [0] * (FIRSTS - 1), dtype=torch.int32)
    table = table.to(device)
    q = torch.randn(heads, rows, RANK, dtype=torch.bfloat16, device=device).transpose(0, 1)
    rope = torch.randn(rows, heads, ROPE, dtype=torch.bfloat16, device=device)
    watch = Watch(max_rows=64, heads=heads, columns=RANK + ROPE, dv=dv, dtype=torch.bfloat16, device=device)

    def layers(out: torch.Tensor, watched: bool) -> None:
        for layer in range(3):
            look = Watched(watch, layer, q * (layer + 1), rope) if watched else None
            out[layer].copy_(tail)
            merge(out[layer], tail_lse + layer, partial_out, partial_lse2, table, out[layer], watched=look)

    plain, out = (tail.new_empty(3, *tail.shape) for _ in range(2))
    layers(plain, False)
    layers(out, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers(out, True)
    for layer, first in ((0, 0), (2, rows // 2), (1, rows - 1)):
        watch.query.fill_(float("nan"))
        watch.out.fill_(float("nan"))
        watch.set_target(layer, first)
        graph.replay()
        watch.clear_target()
        graph.replay()
        assert torch.equal(out, plain), "watched or not, the result is the same bits"
        count = min(64, rows - first)
        some = slice(first, first + count)
        assert torch.equal(watch.out[:count], plain[layer][some])
        assert torch.equal(watch.query[:count], torch.cat([q * (layer + 1), rope], dim=-1)[some])
        assert watch.query[count:].isnan().all() and watch.out[count:].isnan().all()


@pytest.mark.parametrize("heads", [128, 16])
def test_engines_are_checked_and_answer_the_same(heads: int, tmp_path: Path) -> None:
    """Every third step, in CUDA graphs, in every kind of storage, with and without grouped absorb: nothing is found."""
    model = make_model(tmp_path / "checkpoint", "--heads", str(heads))
    modes = {"naive": {"MODE": "naive"}, "fp8 prefix": {"MODE": "naive", "PREFIX_DTYPE": "fp8_e4m3"}}
    if heads == 16:
        modes["grouped"] = {"MODE": "grouped_absorb"}
    engines = {}
    for name, given in modes.items():
        for checked in (0, 3):
            options = {**given, "VERIFY_INTERVAL": str(checked), "PREFIX_MEMORY_GB": "5"}
            env = {f"SGLANG_HYBRID_MLA_{option}": value for option, value in options.items()}
            engines[f"{name} {checked}"] = dict(backend="hybrid_mla", env=env)
    cache = dict(backend="hybrid_mla", kv_cache_dtype="fp8_e4m3")
    engines["fp8 cache 3"] = cache | {"env": env | {"SGLANG_HYBRID_MLA_MODE": "auto"}}
    found = all_answers(model, tmp_path, engines)
    for name, answer in found.items():
        counters = answer["info"]["counters"]
        print(name, json.dumps({key: value for key, value in counters.items() if "shadow" in key}))
        assert counters["shadow_failures"] == 0 and counters["fallbacks"] == {}
        assert (counters["shadow_checks"] > NEW_TOKENS // 6) == name.endswith(" 3")
    for name in modes:
        apart = differences(found[f"{name} 0"], found[f"{name} 3"])
        assert median(apart) < 0.01, "runs differ by the order in which requests were prefilled"
