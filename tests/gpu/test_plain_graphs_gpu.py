"""Decode graphs without sharing on a Hopper GPU: SGLang's FlashAttention-3, which reads nothing behind a last token."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_engine_gpu import all_answers, differences_of, make_model
from test_speculative_gpu import DRAFTS

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.kernels.reference import attention as reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not installed.has_graph_variants, reason="SGLang has graph variants from 0.5.23 on"),
]

RANK, ROPE, PAGE, SCALE = 512, 64, 64, 0.07
LENS = (4, 63, 64, 65, 300, 1025)  # with the rows' own tokens


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("queries", [1, 4])
def test_nothing_is_read_behind_a_last_token(heads: int, queries: int) -> None:
    """Over pages that hold NaN there; with queries in two parts and whole."""
    from sglang_mla_ext.adapter.compat.sglang_0_5_23.plain_backend import PlainBackend

    torch.manual_seed(0)
    lens = torch.tensor(LENS, dtype=torch.int32)
    pages = [-(-length // PAGE) for length in LENS]
    cache = torch.full((sum(pages) + 1, PAGE, 1, RANK + ROPE), torch.nan, dtype=torch.bfloat16)
    table, rows, first = torch.zeros(len(LENS), max(pages), dtype=torch.int32), [], 1
    for index, (length, count) in enumerate(zip(LENS, pages, strict=True)):
        table[index, :count] = torch.arange(first, first + count)
        keys = torch.randn(length, RANK + ROPE).to(cache.dtype)
        cache[first : first + count].view(-1, RANK + ROPE)[:length] = keys
        rows.append(keys)
        first += count
    query = torch.randn(len(LENS) * queries, heads, RANK + ROPE).to(cache.dtype)

    backend = object.__new__(PlainBackend)
    backend.page_size, backend.num_splits, backend._padding = PAGE, 0, torch.zeros(8, dtype=torch.int32, device="cuda")
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer_id: cache.flatten(0, 1).cuda())
    backend.forward_metadata = SimpleNamespace(
        page_table=table.cuda(),
        cache_seqlens_int32=lens.cuda(),
        cu_seqlens_q=torch.arange(0, len(query) + 1, queries, dtype=torch.int32).cuda(),
        max_seq_len_q=queries,
    )
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, v_head_dim=RANK, scaling=SCALE)
    content, rope = query.cuda().split([RANK, ROPE], dim=-1)
    forward = backend.forward_decode if queries == 1 else backend.forward_extend
    out = forward(content, None, None, layer, None, save_kv_cache=False, q_rope=rope).view(len(query), heads, RANK)
    whole = forward(query.cuda(), None, None, layer, None, save_kv_cache=False).view(len(query), heads, RANK)
    assert torch.equal(out, whole)
    for index, keys in enumerate(rows):
        for token in range(queries):
            row = index * queries + token
            seen = keys[None, : LENS[index] - (queries - 1 - token)].double()
            parts = query[row : row + 1, :, :RANK].double(), query[row : row + 1, :, RANK:].double()
            expected, _ = reference.absorb(*parts, seen, torch.tensor([seen.shape[1]]), SCALE)
            torch.testing.assert_close(out[row : row + 1].double().cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("heads", [128, 16])
def test_steps_that_share_nothing(heads: int, tmp_path: Path) -> None:
    """They answer as FlashMLA without a prefix cache does, also where they verify drafts."""
    model = make_model(tmp_path / "checkpoint", "--heads", str(heads), "--nextn")
    engines: dict[str, dict[str, Any]] = {
        "truth": dict(backend="flashmla", disable_radix_cache=True),
        "flashinfer, uncached": dict(backend="flashinfer", disable_radix_cache=True),
        "decode": dict(backend="hybrid_mla"),
        "verify": dict(backend="hybrid_mla", **DRAFTS),
    }
    found = all_answers(model, tmp_path, {name: one | dict(prefix=16) for name, one in engines.items()})
    apart = differences_of(found.pop("truth"), found)
    yardstick = apart["flashinfer, uncached"]
    for name in ("decode", "verify"):
        counters = found[name]["info"]["counters"]
        assert counters["fallbacks"] == {} and counters["max_group_size"] == 0, counters
        assert counters["steps_absorb"] > 0, counters
        assert len(apart[name]) > 0.5 * len(yardstick)
        assert mean(apart[name]) < 2 * mean(yardstick) + 1e-3
