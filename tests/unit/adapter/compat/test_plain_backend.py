"""SGLang's FlashAttention-3 backend in decode graphs without sharing, called with what it is called with on a GPU, over
FlashAttention-3 in torch: against attention over each row's keys."""

from __future__ import annotations

import importlib
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.kernels.reference import attention as reference

HEADS, RANK, ROPE, PAGE, SCALE = 4, 32, 16, 64, 0.1
LENS = (3, 64, 65, 130)


def flash_attn_with_kvcache(q: torch.Tensor, qv: torch.Tensor, **given: Any) -> torch.Tensor:
    """FlashAttention-3, without TMA: it reads no key behind the last one."""
    lens, ends, padding = (given.pop(name) for name in ("cache_seqlens", "cu_seqlens_q", "cache_leftpad"))
    caches, table, scale = (
        [given.pop("k_cache"), given.pop("v_cache")],
        given.pop("page_table"),
        given.pop("softmax_scale"),
    )
    assert (ends.diff() == given.pop("max_seqlen_q")).all() and padding.shape == lens.shape and not padding.any()
    assert given == dict(causal=True, num_splits=0, ver=3)
    outs = []
    for request, (first, end) in enumerate(itertools.pairwise(ends.tolist())):
        rope, content = (cache[table[request].long()].flatten(0, 2) for cache in caches)
        for row in range(first, end):
            seen = int(lens[request]) - (end - 1 - row)
            scores = (q[row] @ rope[:seen].T + qv[row] @ content[:seen].T) * scale
            outs.append(scores.softmax(-1) @ content[:seen])
    return torch.stack(outs)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over doubles of SGLang's, which cannot be imported without a GPU."""
    kernels, backend = ModuleType("flash_attention"), ModuleType("flashattention_backend")
    vars(kernels)["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    vars(backend)["FlashAttentionBackend"] = type("FlashAttentionBackend", (), {})
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.flash_attention", kernels)
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.flashattention_backend", backend)
    name = "sglang_mla_ext.adapter.compat.sglang_0_5_23.plain_backend"
    sys.modules.pop(name, None)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("parts", [True, False], ids=["in parts", "whole"])
def test_each_row_sees_its_own_keys(plain: Any, queries: int, parts: bool) -> None:
    """Also with NaN behind the last token, and fewer requests than a graph may have."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-max(LENS) // PAGE)
    rows = torch.full(((len(LENS) * pages + 1) * PAGE, 1, RANK + ROPE), torch.nan)
    table = 1 + torch.arange(len(LENS) * pages, dtype=torch.int32).view(len(LENS), pages)
    keys = [torch.randn(length, RANK + ROPE, generator=generator) for length in LENS]
    for own, first in zip(keys, table[:, 0].tolist(), strict=True):
        rows[first * PAGE : first * PAGE + len(own), 0] = own
    query = torch.randn(len(LENS) * queries, HEADS, RANK + ROPE, generator=generator)

    backend = object.__new__(plain.PlainBackend)
    backend.page_size, backend.num_splits, backend._padding = PAGE, 0, torch.zeros(8, dtype=torch.int32)
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer_id: rows)
    backend.forward_metadata = SimpleNamespace(
        page_table=table,
        cache_seqlens_int32=torch.tensor(LENS, dtype=torch.int32),
        cu_seqlens_q=torch.arange(0, len(query) + 1, queries, dtype=torch.int32),
        max_seq_len_q=queries,
    )
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=HEADS, v_head_dim=RANK, scaling=SCALE)
    content, rope = query.split([RANK, ROPE], dim=-1)
    given = (content, dict(q_rope=rope)) if parts else (query.flatten(1), {})
    forward = backend.forward_decode if queries == 1 else backend.forward_extend
    out = forward(given[0], None, None, layer, None, save_kv_cache=False, **given[1]).view(len(query), HEADS, RANK)
    for row, found in enumerate(out):
        own = keys[row // queries]
        length = torch.tensor([len(own) - (queries - 1 - row % queries)])
        expected, _ = reference.absorb(content[row : row + 1], rope[row : row + 1], own[None], length, SCALE)
        torch.testing.assert_close(found, expected[0])
