"""What SGLang reads of a backend (the contract's table) is answered by ours, or passed on from the stock backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_mla_ext.adapter.compat import contract

READ = {read.name: read for read in contract.table().read_of_backend}
ANSWERED = {
    "forward",
    "forward_decode",
    "forward_extend",
    "init_cuda_graph_state",
    "init_forward_metadata",
    "init_forward_metadata_in_graph",
    "init_forward_metadata_out_graph",
}
"""Our backend's own business, tested by its behaviour."""
STAMPED = {"prefill_attention_backend_str", "decode_attention_backend_str"}
"""Set by SGLang on the backend that it has asked for: ours, which alone it reads them of."""


class Stock:
    """Every attribute is a function that returns its own name, so that a value and a method are told apart."""

    def __getattr__(self, name: str) -> Any:
        if name not in READ:
            raise AttributeError(name)
        return lambda *args, **kwargs: (name, args, kwargs)


def backend_over(stock: Any) -> Any:
    from sglang_mla_ext.adapter.step.backend import HybridMLABackend

    owner = SimpleNamespace(backend=stock, decodes=True, plain=None)
    return HybridMLABackend(owner, None, None, None, layer_index={}, heads=1, requests=range(0))


@pytest.mark.parametrize("name", sorted(set(READ) - ANSWERED - STAMPED))
def test_it_is_the_stock_backends(name: str) -> None:
    assert getattr(backend_over(Stock()), name)(1, of=2) == (name, (1,), {"of": 2})


@pytest.mark.parametrize("name", sorted(ANSWERED | STAMPED))
def test_the_rest_is_there(name: str) -> None:
    assert name in READ and hasattr(backend_over(Stock()), name)


def test_what_the_stock_backend_may_lack_is_missing_here_too() -> None:
    """SGLang asks for these, as of its torch backend, and leaves out what is not there."""
    optional = {name for name, read in READ.items() if read.optional}
    lacks = SimpleNamespace(**{name: None for name in set(READ) - optional})
    for name in optional:
        if not hasattr(type(backend_over(lacks)), name):
            assert not hasattr(backend_over(lacks), name)


@pytest.mark.parametrize("of_stock", [False, True], ids=["has none", "has the runner's"])
def test_sglang_finds_its_translator_in_both(of_stock: bool) -> None:
    """SGLang gives one to a backend without, stops where it finds another than the runner's, and the stock backend
    reads its own."""
    pytest.importorskip("sglang.srt.mem_cache.kv_index_translator", reason="from 0.5.23 on")
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    stock, runners = type("Stock", (AttentionBackend,), {})(), KVIndexTranslator.__new__(KVIndexTranslator)
    if of_stock:
        stock.kv_index_translator = runners
    backend = backend_over(stock)
    runners.bind_and_verify_backends([backend, backend])
    assert backend.kv_index_translator is stock.kv_index_translator is runners


@pytest.mark.parametrize("of_stock", [None, True, False])
def test_a_prefill_pass_that_shares_replays_no_graph(monkeypatch: pytest.MonkeyPatch, of_stock: bool | None) -> None:
    """From 0.5.23 on SGLang asks, where it captured prefill; ranks answer alike."""
    from sglang_mla_ext.adapter.step.passes import Kind, Pass, passes

    asked: list[Any] = []
    stock = (
        SimpleNamespace() if of_stock is None else SimpleNamespace(can_run_prefill_cuda_graph=lambda batch: of_stock)
    )
    backend = backend_over(stock)
    for shares in (False, True):
        monkeypatch.setattr(passes, "now", Pass(Kind.PREFILL, prefill=SimpleNamespace() if shares else None))
        backend._leave_graph = lambda mine: asked.append(mine) or mine
        assert backend.can_run_prefill_cuda_graph("batch") is (not shares and of_stock is not False)
        backend._leave_graph = lambda mine: False  # another rank shares nothing
        assert backend.can_run_prefill_cuda_graph("batch") is (of_stock is not False)
    assert asked == [False, True]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_pass_leaves_its_graph_where_it_is_sooner_without(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Whether or not it shares, where prefixes are shared inside of graphs, too."""
    from sglang_mla_ext.adapter.step.passes import Kind, Pass, passes

    backend = backend_over(SimpleNamespace())
    backend._prefill_graph = SimpleNamespace()
    for prefill in (None, SimpleNamespace()):
        monkeypatch.setattr(passes, "now", Pass(Kind.PREFILL, prefill=prefill, leaves_graph=leaves))
        assert backend.can_run_prefill_cuda_graph("batch") is not leaves


@pytest.mark.skipif(contract.line() == "0.5.17", reason="from 0.5.23 on")
def test_sglang_asks_whether_a_prefill_pass_replays_a_graph() -> None:
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner

    assert hasattr(prefill_cuda_graph_runner.PrefillCudaGraphRunner, "_backend_can_run_prefill_cuda_graph")


def test_requests_of_a_step_to_try_kernels_out_are_limited_as_the_stock_backends() -> None:
    """From 0.5.23 on; the interface's default is that they are not."""
    name = "extend_dummy_seqs_capped_by_req_pool"
    for limited in (False, True):
        assert getattr(backend_over(SimpleNamespace(**{name: limited})), name) is limited
