"""SGLang's FlashMLA backend as the stock backend: what it is set up with, and what planning asks of it."""

from __future__ import annotations

import ast
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class FakeWrapper:
    """FlashInfer's wrapper: notes down what is called. `run` adds to what the last plan's buffers hold."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def plan(self, name: str, starts: torch.Tensor, causal: bool = False) -> None:
        self.calls.append(f"plan {name}, causal {causal}")
        self._starts = starts.tolist()

    def run(self, q: int, *, out: int) -> list[int]:
        self.calls.append("run")
        return [start + q + out for start in self._starts]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make(reads_pool, chunks) -> stock, layers`; SGLang's backend cannot be constructed without a GPU."""
    flash_mla: Any = ModuleType("sgl_kernel.flash_mla")
    flash_mla.flash_mla_with_kvcache = flash_mla.get_mla_metadata = None
    # The second one from 0.5.23 on.
    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        monkeypatch.setitem(sys.modules, name, flash_mla)
    from sglang_mla_ext.adapter.stock import flashmla

    def make_one(reads_pool: bool, chunks: bool = True) -> tuple[Any, list[Any]]:
        paged = FakeWrapper()
        backend = SimpleNamespace(enable_chunk_kv=chunks, is_fp8_kvcache=not reads_pool, prefill_wrapper_paged=paged)
        monkeypatch.setattr(flashmla, "FlashMLABackend", lambda runner: backend)
        monkeypatch.setattr(flashmla.installed, "plain_backend", lambda runner: "plain")
        layers = [SimpleNamespace(chunked_prefix_cache_threshold=8192) for _ in range(2)]
        return flashmla.FlashMLAStock(None, layers, reads_pool=reads_pool), layers

    return make_one


def test_over_an_fp8_pool_prefill_is_never_by_absorb(make: Any) -> None:
    """It would read the pool itself, as would FlashMLA; nor does an idle rank make a schedule for FP8 keys."""
    stock, layers = make(reads_pool=False)
    assert [layer.chunked_prefix_cache_threshold for layer in layers] == [0, 0]
    assert not stock.decodes and stock.backend.is_fp8_kvcache is False
    assert not stock.make_plain(None) and stock.plain is None
    assert stock.affordable([3, 4]) == 7
    stock, layers = make(reads_pool=True)
    assert [layer.chunked_prefix_cache_threshold for layer in layers] == [8192, 8192] and stock.decodes
    assert stock.plain is None and stock.make_plain(None) and stock.plain == "plain"


@pytest.mark.parametrize("chunks", [False, True])
def test_what_sglang_would_expand_itself(make: Any, chunks: bool) -> None:
    """Long prefixes, in chunks; without these nothing, and no lse either."""
    stock, _ = make(reads_pool=True, chunks=chunks)
    assert stock.affordable([8000, 191]) == 0 and stock.affordable([]) == 0
    assert stock.affordable([8000, 192]) == (8192 if chunks else 0)
    assert stock.can_finish([300, 0], [256, 0]) is chunks


# ---- rows that are nobody's


class FakeAttention:
    """As strict as FlashInfer: as many rows as the requests have new tokens. `out` of a row is its query, doubled."""

    def __init__(self, tokens: int, *, lse: bool) -> None:
        self.tokens, self.lse, self.stored = tokens, lse, []
        self.token_to_kv_pool = SimpleNamespace(set_kv_buffer=lambda _, slots, k, v: self.stored.append((slots, k, v)))

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool) -> Any:
        assert len(q) == self.tokens, f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self.tokens})"
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        self.keys = len(k)
        return (2 * q, q.sum(-1)) if self.lse else 2 * q


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (6, 6), (8, 8), (8, 40)])  # of 5 new tokens; 40: a prefix's
def test_flashinfer_gets_no_row_that_is_nobodys(make: Any, rows: int, keys: int, lse: bool, save: bool) -> None:
    """All rows come back, those added as zeros, and all are stored: SGLang has slots for them."""
    stock, _ = make(reads_pool=True)
    stock.backend = FakeAttention(5, lse=lse)
    q, k, v = torch.randn(rows, 4, 3), torch.randn(keys, 4, 3), torch.randn(keys, 4, 2)
    q[5:] = torch.nan
    batch = SimpleNamespace(extend_seq_lens_cpu=[2, 3], out_cache_loc=torch.arange(rows))
    result = stock.extend(q, k, v, None, batch, save)
    out = result[0] if lse else result
    assert torch.equal(out[:5], 2 * q[:5]) and len(out) == rows and not out[5:].any()
    if lse:
        torch.testing.assert_close(result[1][:5], q[:5].sum(-1) * math.log(2))
        assert len(result[1]) == rows and not result[1][5:].any()
    assert stock.backend.keys == (5 if keys == rows else 40)
    stored = [(len(slots), len(k), len(v)) for slots, k, v in stock.backend.stored]
    assert stored == ([(rows, keys, keys)] if save else [])


# ---- absorb in prefill


@pytest.fixture
def wrappers(make: Any) -> tuple[Any, FakeWrapper]:
    """What SGLang has for absorb in prefill, and what FlashInfer does of it."""
    from sglang_mla_ext.adapter.stock.flashmla import PlannedAtRun

    fake = FakeWrapper()
    return PlannedAtRun(fake), fake


def test_absorb_is_planned_where_it_runs(make: Any) -> None:
    """With the arguments that it was to be planned with, once for all layers."""
    stock, _ = make(reads_pool=True)
    paged = stock.backend.prefill_wrapper_paged
    paged.plan("a", torch.tensor([0, 2]), causal=True)
    assert paged._wrapper.calls == []
    assert [paged.run(1, out=10) for _ in range(3)] == [[11, 13]] * 3
    assert paged._wrapper.calls == ["plan a, causal True", *["run"] * 3]


def test_a_pass_with_keys_per_head_plans_nothing(wrappers: Any) -> None:
    """The next one overwrites SGLang's buffers and plans again: only the last of these plans is run."""
    paged, fake = wrappers
    starts = torch.zeros(2, dtype=torch.int32)
    for number, name in enumerate("abc"):
        starts[1] = number
        paged.plan(name, starts)
    assert fake.calls == []
    assert paged.run(0, out=0) == [0, 2]
    paged.plan("d", starts + 5)
    assert paged.run(0, out=0) == [5, 7]
    assert fake.calls == ["plan c, causal False", "run", "plan d, causal False", "run"]


def test_a_plan_that_fails_is_still_owed(wrappers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass is not run with the plan of another one."""
    paged, fake = wrappers
    paged.plan("a", torch.tensor([1]))
    paged.run(0, out=0)
    paged.plan("b", torch.tensor([2]), unknown=1)
    for _ in range(2):
        with pytest.raises(TypeError):
            paged.run(0, out=0)
    assert fake.calls == ["plan a, causal False", "run"]


@pytest.mark.parametrize("graph", ["is_in_tc_piecewise_cuda_graph", "is_in_breakable_cuda_graph"])
def test_a_pass_with_graphs_is_planned_at_once(wrappers: Any, monkeypatch: pytest.MonkeyPatch, graph: str) -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    paged, fake = wrappers
    paged.plan("before", torch.tensor([0]))
    monkeypatch.setattr(handlers, graph, lambda: True)
    paged.plan("a", torch.tensor([3]))
    assert fake.calls == ["plan a, causal False"]
    assert paged.run(0, out=0) == [3]
    assert fake.calls == ["plan a, causal False", "run"]


def test_sglang_asks_nothing_else_of_it() -> None:
    """In its source: whoever has the wrapper of prefill calls these two of it."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "srt/layers/attention"
    asked = set()
    for file in ("flashmla_backend.py", "flashinfer_mla_backend.py"):
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in (
                "prefill_wrapper_paged",
                "wrapper_paged",
            ):
                asked.add(node.attr)
    assert asked == {"plan", "run"}
