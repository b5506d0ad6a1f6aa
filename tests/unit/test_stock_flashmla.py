"""SGLang's FlashMLA backend as the stock backend: what it is set up with, and what planning asks of it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make(reads_pool, chunks) -> stock, layers`; SGLang's backend cannot be constructed without a GPU."""
    flash_mla: Any = ModuleType("sgl_kernel.flash_mla")
    flash_mla.flash_mla_with_kvcache = flash_mla.get_mla_metadata = None
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", flash_mla)
    from sglang_mla_ext.adapter.step import stock_flashmla

    def make_one(reads_pool: bool, chunks: bool = True) -> tuple[Any, list[Any]]:
        backend = SimpleNamespace(enable_chunk_kv=chunks, is_fp8_kvcache=not reads_pool)
        monkeypatch.setattr(stock_flashmla, "FlashMLABackend", lambda runner: backend)
        layers = [SimpleNamespace(chunked_prefix_cache_threshold=8192) for _ in range(2)]
        return stock_flashmla.FlashMLAStock(None, layers, reads_pool=reads_pool), layers

    return make_one


def test_over_an_fp8_pool_prefill_is_never_by_absorb(make: Any) -> None:
    """It would read the pool itself, as would FlashMLA; nor does an idle rank make a schedule for FP8 keys."""
    stock, layers = make(reads_pool=False)
    assert [layer.chunked_prefix_cache_threshold for layer in layers] == [0, 0]
    assert not stock.decodes and stock.backend.is_fp8_kvcache is False
    assert stock.affordable([3, 4]) == 7
    stock, layers = make(reads_pool=True)
    assert [layer.chunked_prefix_cache_threshold for layer in layers] == [8192, 8192] and stock.decodes


@pytest.mark.parametrize("chunks", [False, True])
def test_what_sglang_would_expand_itself(make: Any, chunks: bool) -> None:
    """Long prefixes, in chunks; without these nothing, and no lse either."""
    stock, _ = make(reads_pool=True, chunks=chunks)
    assert stock.affordable([8000, 191]) == 0 and stock.affordable([]) == 0
    assert stock.affordable([8000, 192]) == (8192 if chunks else 0)
    assert stock.can_finish([300, 0], [256, 0]) is chunks
