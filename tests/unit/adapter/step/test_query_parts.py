"""Absorbed query and key in two parts, as SGLang hands them over: the same rows in the cache and the same result as
with whole ones, whichever part of the backend computes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.latent.protocol import LatentSizes
from sglang_mla_ext.adapter.step import layer as mla_layer
from sglang_mla_ext.adapter.step.passes import Kind, Pass, passes
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expanded import FP8
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

pytestmark = pytest.mark.usefixtures("published")

ROWS, HEADS, RANK, ROPE, PAGE, PAGES = 3, 4, 32, 16, 64, 8
SIZES = LatentSizes(HEADS, RANK, ROPE, torch.float32, False, ROWS, ROWS, 2 * PAGE)
LENS = (70, 1, 64)
FIRST_PAGES = (1, 3, 5)  # requests lie in consecutive slots from here on
LAYER = SimpleNamespace(
    layer_id=0,
    scaling=0.2,
    tp_q_head_num=HEADS,
    tp_k_head_num=1,
    head_dim=RANK + ROPE,
    qk_head_dim=RANK + ROPE,
    v_head_dim=RANK,
    is_cross_attention=False,
    sliding_window_size=-1,
    attn_type=None,
)


def flash_mla(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, softmax_scale: float, **_: Any) -> Any:
    """FlashMLA's result: out `[rows, 1, heads, RANK]`, lse `[rows, heads, 1]`."""
    assert q.is_contiguous() and q.shape == (ROWS, 1, HEADS, RANK + ROPE)
    parts = []
    for row, length in enumerate(cache_seqlens.tolist()):
        keys = k_cache[block_table[row].long()].flatten(0, 2)[None, :length]
        query = q[row, :, :, :RANK], q[row, :, :, RANK:]
        parts.append(reference.absorb(*query, keys, torch.tensor([length]), softmax_scale))
    return torch.stack([out for out, _ in parts]), torch.cat([lse for _, lse in parts])[..., None]


def mla_metadata(lens: torch.Tensor, heads: int, kv_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashMLA's schedule, of which only the sizes matter here."""
    assert lens.dtype == torch.int32 and (heads, kv_heads) == (HEADS, 1)
    return torch.zeros(2, 8, dtype=torch.int32), torch.zeros(len(lens) + 1, dtype=torch.int32)


def store(buffer: torch.Tensor, slots: torch.Tensor, *parts: torch.Tensor) -> None:
    """SGLang's kernel that writes keys in two parts."""
    buffer[slots] = torch.cat(parts, dim=-1)


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A pool of random rows; always the same."""
    from sglang.srt.mem_cache import memory_pool

    from sglang_mla_ext.adapter.latent.pool import LatentPool

    monkeypatch.setattr(memory_pool, "set_mla_kv_buffer_triton", store)
    sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=1, page_size=PAGE)

    def make(dtype: torch.dtype) -> Any:
        kind = LatentPool if dtype == FP8 else memory_pool.MLATokenToKVPool
        pool = kind((PAGES - 1) * PAGE, dtype=dtype, device="cpu", enable_memory_saver=False, **sizes)
        rows = torch.randn(PAGES * PAGE, 1, RANK + ROPE, generator=torch.Generator().manual_seed(0))
        pool.set_kv_buffer(LAYER, torch.arange(PAGES * PAGE), rows, None)
        return pool

    return make


def requests() -> dict[str, Any]:
    req_to_token = torch.zeros(ROWS, 2 * PAGE, dtype=torch.int32)
    for row, (page, length) in enumerate(zip(FIRST_PAGES, LENS, strict=True)):
        req_to_token[row, :length] = torch.arange(length) + page * PAGE
    last = torch.tensor([page * PAGE + length - 1 for page, length in zip(FIRST_PAGES, LENS, strict=True)])
    return dict(
        batch_size=ROWS,
        seq_lens=torch.tensor(LENS),
        req_pool_indices=torch.arange(ROWS),
        out_cache_loc=last,
        req_to_token=req_to_token,
        encoder_lens=None,
        attn_attend_prefix_cache=None,
        # of a prefill step with one new token for each request
        extend_prefix_lens=torch.tensor(LENS) - 1,
        extend_prefix_lens_cpu=[length - 1 for length in LENS],
        extend_seq_lens=torch.ones(ROWS, dtype=torch.int64),
        extend_seq_lens_cpu=[1] * ROWS,
    )


def prefill_batch() -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(forward_mode=ForwardMode.EXTEND, extend_seq_lens_cpu=[1] * ROWS)


def inputs(parts: bool) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Arguments of a forward call: q, k, v, and the rotary parts if they come apart, strided as SGLang's are."""
    generator = torch.Generator().manual_seed(1)
    content = torch.randn(HEADS, ROWS, RANK, generator=generator).transpose(0, 1)  # as after the product with w_kc
    q_rope = torch.randn(ROWS, HEADS, 2 * ROPE, generator=generator)[..., ROPE:]  # the end of a query
    k_nope = torch.randn(ROWS, 1, RANK, generator=generator)
    k_rope = torch.randn(ROWS, RANK + ROPE, generator=generator)[:, None, RANK:]  # the end of a latent row
    if parts:
        return (content, k_nope, k_nope), dict(q_rope=q_rope, k_rope=k_rope)
    return (torch.cat([content, q_rope], dim=-1), torch.cat([k_nope, k_rope], dim=-1), k_nope), {}


class Shared:
    """Stands where the attention over expanded prefixes is, and keeps what it gets."""

    runs_beside_tails = False

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def plan(self, segments: Any, rows: int) -> None:
        pass

    def run(self, layer: int, q_nope: Any, q_rope: torch.Tensor, scale: float) -> None:
        assert (layer, q_nope, scale) == (5, "q_nope", LAYER.scaling)
        self.seen.append(q_rope)


def compose(stock: Any, latent: Any, planned: Plan | None) -> Any:
    """The backend, with its parts in their places, and a decode step to come that shares what is planned."""
    from sglang_mla_ext.adapter.step.backend import HybridMLABackend

    steps = SimpleNamespace(succeed=lambda: None, has_lost_memory=False, shadow=None, sharded=None)
    passes.now = Pass(Kind.DECODE, Rows(ROWS), planned or Plan(0))
    shared = Shared() if planned else None
    rows = range(2, ROWS + 1) if planned else range(0)
    latent.allocate()
    return HybridMLABackend(stock, latent, shared, steps, layer_index={0: 5}, heads=HEADS, requests=rows)


def run_both(make: Callable[[], Any], phase: str) -> None:
    """Compare cache, result, and what goes to the attention over expanded prefixes."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    results = []
    for parts in (False, True):
        mode = ForwardMode[phase.upper()]
        backend, batch = make(), SimpleNamespace(**requests(), forward_mode=mode, _original_forward_mode=None)
        backend.init_forward_metadata(batch)
        shares = passes.now.takes_query
        assert shares is (backend._shared is not None)
        passes.now.q_nope = "q_nope"
        whole, rope = inputs(parts)
        before = backend.token_to_kv_pool.kv_buffer[0].clone()
        out = getattr(backend, f"forward_{phase}")(*whole, LAYER, batch, **rope)
        cache = backend.token_to_kv_pool.kv_buffer[0]
        changed = (cache != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert changed == requests()["out_cache_loc"].tolist()
        assert out.numel() == ROWS * HEADS * RANK and not out.isnan().any()
        of_shared = (*backend._shared.seen, passes.now.tail_lse) if shares else ()
        results.append((out.view(ROWS, HEADS, RANK), cache, *of_shared))
        passes.end()
    assert len(results[0]) == len(results[1]) == (4 if shares else 2)
    for whole, of_parts in zip(*results, strict=True):
        assert torch.equal(whole, of_parts)


@pytest.fixture
def flashmla(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with our attention by FlashMLA, whose two functions are replaced by torch, there and in SGLang."""
    module: Any = ModuleType("sgl_kernel.flash_mla")
    module.flash_mla_with_kvcache = module.get_mla_metadata = None
    for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
        monkeypatch.setitem(sys.modules, name, module)
    from sglang.srt.layers.attention import flashmla_backend

    from sglang_mla_ext.adapter.latent import flashmla as latent_flashmla

    for user in (flashmla_backend, latent_flashmla):
        monkeypatch.setattr(user, "flash_mla_with_kvcache", flash_mla)
        monkeypatch.setattr(user, "get_mla_metadata", mla_metadata)
    return latent_flashmla


def flashmla_stock(pool: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's FlashMLA backend over this pool; it cannot be constructed without a GPU."""
    from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend

    from sglang_mla_ext.adapter.stock.flashmla import FlashMLAStock

    def metadata(self: Any, forward_batch: Any) -> None:
        table = torch.tensor([[page, page + 1] for page in FIRST_PAGES], dtype=torch.int32)
        self.forward_metadata = SimpleNamespace(block_kv_indices=table, flashmla_metadata=None, num_splits=None)

    monkeypatch.setattr(FlashMLABackend, "init_forward_metadata", metadata)
    stock = object.__new__(FlashMLAStock)
    stock.backend, stock.decodes, stock.plain = object.__new__(FlashMLABackend), True, None
    stock.backend.token_to_kv_pool = pool
    stock.backend.kv_lora_rank, stock.backend.kv_cache_dim, stock.backend.is_fp8_kvcache = RANK, RANK + ROPE, False
    return stock


@pytest.mark.parametrize("shares", [False, True])
def test_decode_by_flashmla(make_pool: Any, flashmla: Any, monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    """By SGLang's own backend, or by ours where a step shares something."""

    def make() -> Any:
        pool = make_pool(torch.float32)
        table = requests()["req_to_token"]
        latent = flashmla.FlashMLALatent(pool, table, SIZES, layer_id=0, on_failure=None)
        planned = Plan(ROWS, (Segment((0,), 0, PAGE, Mode.NAIVE, (0,)),))
        return compose(flashmla_stock(pool, monkeypatch), latent, planned if shares else None)

    run_both(make, "decode")
    if not shares:
        from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend

        seen: list[Any] = []
        monkeypatch.setattr(FlashMLABackend, "forward_extend", lambda self, *args: seen.append(args) or args[0])
        for parts in (False, True):
            whole, rope = inputs(parts)
            make().forward_extend(*whole, LAYER, prefill_batch(), **rope)
        assert all(torch.equal(seen[0][i], seen[1][i]) for i in range(3)), "SGLang's own code gets whole ones"


def test_prefill_by_flashmla_has_a_natural_lse(make_pool: Any, flashmla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own is base 2; what merges it takes it for a natural one. A result without an lse passes."""
    from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend

    out, lse = torch.randn(ROWS, HEADS, RANK), torch.randn(ROWS, HEADS)
    results = [(out, lse / math.log(2)), out]
    monkeypatch.setattr(FlashMLABackend, "forward_extend", lambda self, *args: results.pop(0))
    pool = make_pool(torch.float32)
    latent = flashmla.FlashMLALatent(pool, requests()["req_to_token"], SIZES, layer_id=0, on_failure=None)
    backend = compose(flashmla_stock(pool, monkeypatch), latent, None)
    whole, _ = inputs(parts=False)
    found, found_lse = backend.forward_extend(*whole, LAYER, prefill_batch())
    assert found is out
    torch.testing.assert_close(found_lse, lse)
    assert backend.forward_extend(*whole, LAYER, prefill_batch()) is out


@pytest.mark.parametrize("cache", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize(("phase", "grouped"), [("decode", False), ("decode", True), ("extend", False)])
def test_on_the_cpu(make_pool: Any, phase: str, grouped: bool, cache: torch.dtype) -> None:
    from sglang_mla_ext.adapter.cpu.latent_torch import TorchLatent
    from sglang_mla_ext.adapter.stock.torch_native import TorchStock

    def make() -> Any:
        pool, table = make_pool(cache), requests()["req_to_token"]
        runner = SimpleNamespace(
            device="cpu", token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=table)
        )
        planned = Plan(ROWS, (Segment((0,), 0, PAGE, Mode.GROUPED_ABSORB),))
        return compose(TorchStock(runner), TorchLatent(pool, table, grouped=grouped), planned if grouped else None)

    run_both(make, phase)


@pytest.mark.parametrize("phase", ["IDLE", "EXTEND", "MIXED", "DRAFT_EXTEND_V2"])
def test_a_step_that_is_no_decode_is_the_stock_backends(phase: str) -> None:
    """Eager or in a graph, also after a decode step that shared something, and with as many rows."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    class Latent:
        def allocate(self) -> None:
            pass

        def plan(self, *planned: Any) -> None:
            pass

        def begin_step(self, batch: Any, *, sharing: bool, uncounted: int) -> None:
            assert not uncounted
            calls.append("ours")

    class Recorded(AttentionBackend):
        def init_forward_metadata(self, forward_batch: Any) -> None:
            calls.append((forward_batch, "eager"))

        def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
            calls.append((forward_batch, "out of the graph", in_capture))

        def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
            calls.append((forward_batch, "in the graph"))

    calls: list[Any] = []
    planned = Plan(ROWS, (Segment((0, 1), 0, PAGE, Mode.GROUPED_ABSORB),))
    for decodes in (True, False):
        backend = compose(SimpleNamespace(backend=Recorded(), decodes=decodes, plain=None), Latent(), planned)
        decode = SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=ROWS)
        requests = 0 if phase == "IDLE" else ROWS
        other = SimpleNamespace(forward_mode=ForwardMode[phase], batch_size=requests, _original_forward_mode=None)
        for _ in range(2):
            passes.now = Pass(Kind.DECODE, Rows(ROWS), planned)
            backend.init_forward_metadata(decode)
            assert passes.now.takes_query and calls.pop() == "ours"
            backend.init_forward_metadata(other)
            assert not passes.now.takes_query and calls.pop() == (other, "eager")
            for in_capture in (True, False):
                backend.init_forward_metadata_out_graph(other, in_capture=in_capture)
                backend.init_forward_metadata_in_graph(other)
                assert calls == [(other, "out of the graph", in_capture), (other, "in the graph")]
                calls.clear()


# -- what asks for them ------------------------------------------------------------------------------------------------


@pytest.fixture
def taking_parts() -> Iterator[list[str]]:
    """SGLang's list of backends that take parts, as it is before."""
    from sglang.srt.models.deepseek_common import utils

    backends = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    before = list(backends)
    backends[:] = [name for name in before if name != BACKEND_NAME]
    yield backends
    backends[:] = before


def test_the_backend_is_listed_once(taking_parts: list[str]) -> None:
    others = list(taking_parts)
    mla_layer.accept_query_parts()
    mla_layer.accept_query_parts()
    assert taking_parts == [*others, BACKEND_NAME]


@pytest.mark.parametrize("listed", [False, True])
def test_the_layer_gives_what_the_list_says(taking_parts: list[str], listed: bool) -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    class Called(Exception):
        pass

    def attention(*args: Any, **kwargs: Any) -> None:
        raise Called(args, kwargs)

    if listed:
        mla_layer.accept_query_parts()
    no = lambda *args: False  # noqa: E731
    layer = SimpleNamespace(
        current_attention_backend=BACKEND_NAME,
        attn_mqa=attention,
        _skip_rope_for_dsa_tilelang_fused=no,
        _fuse_rope_for_trtllm_mla=no,
        is_dcp_mla_decode_phase=no,
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=no, is_target_verify=no))
    (content, k_nope, _), rope = inputs(parts=True)
    q_rope, k_rope = rope["q_rope"], rope["k_rope"]
    with pytest.raises(Called) as called:
        DeepseekMLAForwardMixin.forward_absorb_core(
            layer, q_rope, k_rope, content, k_nope, batch, None, None, None, None
        )
    args, kwargs = called.value.args
    if listed:
        assert args == (content, k_nope, k_nope, batch) and kwargs == rope
    else:
        whole, _ = inputs(parts=False)
        assert all(torch.equal(*pair) for pair in zip(args[:3], whole, strict=True)) and not kwargs.get("q_rope")
