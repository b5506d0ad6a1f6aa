"""The backend over the FP8 pool on a GPU, here on the CPU: what it writes, hands to the kernel and makes of its result.

The kernel is replaced by its reference; SGLang's FlashMLA backend is imported, but not constructed.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.kernels.reference import fp8 as reference_fp8
from sglang_mla_ext.kernels.storage.expanded import FP8
from sglang_mla_ext.kernels.storage.latent_rows import quantize

HEADS, RANK, ROPE, PAGE, PAGES, LAYER = 4, 32, 16, 64, 12, 1


class ReferenceAbsorb:
    """make_absorb_fp8's result, in torch."""

    workspace_bytes = 1000

    def __init__(self, pool: torch.Tensor, *, heads: int, layout: Any, page_size: int, max_requests: int, **_: Any):
        self.max_requests, self.layout, self.page_size, self.calls = max_requests, layout, page_size, []
        self.prepared: list[Any] = []
        assert heads == HEADS and page_size == PAGE and pool.shape[1] == layout.row_bytes

    def prepare(self, lens, page_table) -> None:
        assert len(lens) <= self.max_requests and lens.dtype == torch.int32
        self.prepared.append((lens.tolist(), page_table.tolist()))

    def output(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tokens, HEADS, RANK, dtype=dtype)

    def run(self, q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse) -> None:
        assert len(lens) <= self.max_requests and lens.dtype == torch.int32 and page_table.dtype == torch.int32
        assert lens.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
        self.calls.append(len(lens))
        if self.prepared:
            assert self.prepared[-1] == (lens.tolist(), page_table.tolist())
        for row, length in enumerate(lens.tolist()):
            token = torch.arange(length)
            slots = page_table[row, token // PAGE].long() * PAGE + token % PAGE
            keys = reference_fp8.keys_of_rows(pool[slots], self.layout)
            query = q_absorbed[row, None], q_rope[row, None]
            out[row], lse[row] = (part[0] for part in reference_fp8.absorb_fp8(*query, keys, softmax_scale))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make(mode) -> backend` with a pool of random rows."""
    flash_mla: Any = ModuleType("sgl_kernel.flash_mla")
    flash_mla.flash_mla_with_kvcache = flash_mla.get_mla_metadata = None
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", flash_mla)
    for name in ("backend_fp8", "backend_flashmla", "grouped_absorb"):
        monkeypatch.delitem(sys.modules, f"sglang_mla_ext.adapter.{name}", raising=False)
    from sglang_mla_ext.adapter import backend_flashmla, backend_fp8
    from sglang_mla_ext.adapter.latent_pool import LatentPool

    sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=2)
    pool = LatentPool(PAGES * PAGE - PAGE, page_size=PAGE, dtype=FP8, device="cpu", enable_memory_saver=False, **sizes)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(PAGES * PAGE, 1, RANK + ROPE, generator=generator)
    pool.set_kv_buffer(SimpleNamespace(layer_id=LAYER), torch.arange(PAGES * PAGE), rows)

    def stock_init(self: Any, runner: Any, options: Any, budget_bytes: int) -> None:
        self.options, self._heads, self._hybrid = options, HEADS, False
        attention = SimpleNamespace(layer_id=0, scaling=0.2)
        self._layers = [SimpleNamespace(attn_mqa=attention, chunked_prefix_cache_threshold=8192) for _ in range(2)]
        self.kv_lora_rank, self.qk_rope_head_dim, self.kv_cache_dim = RANK, ROPE, RANK + ROPE
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._tail_lens = torch.zeros(8, dtype=torch.int32)
        self.counters = SimpleNamespace(fall_back=None)
        assert self._prepare_decode(runner) == ReferenceAbsorb.workspace_bytes

    monkeypatch.setattr(backend_flashmla.FlashMLAHybridBackend, "__init__", stock_init)
    monkeypatch.setattr(backend_fp8, "make_absorb_fp8", ReferenceAbsorb)
    monkeypatch.setattr(backend_fp8, "MAX_ROWS", 2)
    runner = SimpleNamespace(
        token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(size=100), device="cpu", dtype=torch.float32
    )
    return lambda mode="auto": backend_fp8.FP8HybridBackend(runner, SimpleNamespace(mode=mode), 0)


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_decode(make: Any, hybrid: bool, parts: bool) -> None:
    """With whole queries and keys, or with the parts that SGLang has of them."""
    backend = make()
    shared: list[Any] = []
    backend.attend_shared = lambda q_rope, lse, layer: shared.append((q_rope, lse))
    generator = torch.Generator().manual_seed(1)
    table = torch.tensor([[3, 4], [5, 9], [7, 1]], dtype=torch.int32)
    lens = torch.tensor([70, 1, 64])
    backend._hybrid = hybrid
    backend._tail_lens[:3] = lens if hybrid else -1
    backend.forward_metadata = SimpleNamespace(block_kv_indices=table)
    new_slots = torch.tensor([4 * PAGE + 5, 5 * PAGE, 7 * PAGE + 63])  # of the last tokens
    batch = SimpleNamespace(batch_size=3, seq_lens=torch.tensor([999] * 3) if hybrid else lens, out_cache_loc=new_slots)
    layer = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, head_dim=RANK + ROPE, scaling=0.2)
    q = torch.randn(3, HEADS * (RANK + ROPE), generator=generator)
    k = torch.randn(3, 1, RANK + ROPE, generator=generator)
    q_absorbed, q_rope = q.view(3, HEADS, -1).split([RANK, ROPE], dim=-1)
    before = backend.token_to_kv_pool.rows(LAYER).clone()

    if parts:
        heads_first = q_absorbed.transpose(0, 1).contiguous().transpose(0, 1)
        latent, k_rope = k.split([RANK, ROPE], dim=-1)
        out = backend.forward_decode(heads_first, latent, latent, layer, batch, q_rope=q_rope, k_rope=k_rope)
    else:
        out = backend.forward_decode(q, k, k[..., :RANK], layer, batch)

    rows = backend.token_to_kv_pool.rows(LAYER)
    changed = (rows != before).any(dim=1).nonzero().flatten()
    assert changed.tolist() == new_slots.sort().values.tolist()
    assert torch.equal(rows[new_slots], quantize(k[:, 0, :RANK], k[:, 0, RANK:]))
    expected, expected_lse = torch.empty(3, HEADS, RANK), torch.empty(3, HEADS)
    sizes = dict(max_requests=3, heads=HEADS, layout=backend.token_to_kv_pool.layout, page_size=PAGE)
    reference = ReferenceAbsorb(rows, **sizes)
    reference.run(q_absorbed, q_rope, rows, table, lens.int(), 0.2, expected, expected_lse)
    assert torch.equal(out, expected.view(3, -1))
    assert backend._absorb.calls == [2, 1], "as many requests at once as there is room for"
    assert [lens for lens, _ in backend._absorb.prepared] == [[70, 1], [64]], "a schedule for each of them"
    assert len(shared) == hybrid
    for shared_rope, lse in shared:
        assert torch.equal(shared_rope, q_rope) and torch.equal(lse, expected_lse)


def test_grouped_absorb_gets_the_parts(make: Any) -> None:
    backend = make()
    calls: list[Any] = []

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(args)
        return torch.zeros(2, HEADS, RANK), torch.ones(2, HEADS)

    backend._grouped, backend._stacked, backend._hybrid = SimpleNamespace(run=run), True, True
    backend.attend_shared = lambda *args: calls.append(args)
    layer = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, head_dim=RANK + ROPE, scaling=0.2)
    q = torch.randn(2, HEADS, RANK + ROPE)
    q_absorbed, q_rope = q.split([RANK, ROPE], dim=-1)
    batch = SimpleNamespace(batch_size=2)
    backend.forward_decode(q_absorbed, None, None, layer, batch, q_rope=q_rope)
    backend.forward_decode(q.view(2, -1), None, None, layer, batch)
    for ran, shared in (calls[:2], calls[2:]):
        assert torch.equal(ran[0], q_absorbed) and torch.equal(ran[3], q_rope) and ran[2] == 0.2
        assert torch.equal(shared[0], q_rope) and shared[1].all() and shared[2] is layer


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_step_is_scheduled_once_before_its_layers(
    make: Any, monkeypatch: pytest.MonkeyPatch, hybrid: bool, in_graph: bool
) -> None:
    backend = make()
    stock = type(backend).__mro__[1]
    table = torch.tensor([[3, 4], [5, 9], [7, 1]], dtype=torch.int32)

    def stock_metadata(self: Any, forward_batch: Any, in_capture: bool = False) -> None:
        self.forward_metadata, self._hybrid = SimpleNamespace(block_kv_indices=table), hybrid

    monkeypatch.setattr(stock, "init_forward_metadata", stock_metadata)
    monkeypatch.setattr(stock, "init_forward_metadata_out_graph", stock_metadata)
    prepare = backend.init_forward_metadata_out_graph if in_graph else backend.init_forward_metadata
    backend._tail_lens[:2] = torch.tensor([7, 9]) if hybrid else -1

    def batch(decode: bool, rows: int) -> Any:
        mode = SimpleNamespace(is_decode=lambda: decode)
        return SimpleNamespace(batch_size=rows, forward_mode=mode, seq_lens=torch.tensor([70, 64, 3]))

    prepare(batch(decode=False, rows=2))
    prepare(batch(decode=True, rows=3))  # too many for one schedule
    assert not backend._absorb.prepared
    prepare(batch(decode=True, rows=2))
    lens = [7, 9] if hybrid else [70, 64]
    assert backend._absorb.prepared == [(lens, [[3, 4], [5, 9]])]
    layer = SimpleNamespace(layer_id=LAYER, tp_q_head_num=HEADS, head_dim=RANK + ROPE, scaling=0.2)
    backend.attend_shared = lambda q, lse, layer: None
    backend.forward_decode(torch.randn(2, HEADS * (RANK + ROPE)), None, None, layer, batch(decode=True, rows=2))
    assert backend._absorb.calls == [2] and len(backend._absorb.prepared) == 1


def test_prefill_is_never_by_absorb(make: Any) -> None:
    assert [layer.chunked_prefix_cache_threshold for layer in make()._layers] == [0, 0]


def test_grouped_absorb_says_where_its_kernels_do_not_run(make: Any) -> None:
    assert make()._make_grouped(None) is None
    with pytest.raises(NotImplementedError, match="does not read an FP8 cache"):
        make("grouped_absorb")._make_grouped(None)
