"""Absorbed query and key in two parts, as SGLang hands them over: the same rows in the cache and the same result as
with whole ones, by every backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter import layer as mla_layer
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expanded import FP8
from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.planner import Group, Plan

ROWS, HEADS, RANK, ROPE, PAGE, PAGES = 3, 4, 32, 16, 64, 8
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


def store(buffer: torch.Tensor, slots: torch.Tensor, *parts: torch.Tensor) -> None:
    """SGLang's kernel that writes keys in two parts."""
    buffer[slots] = torch.cat(parts, dim=-1)


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A pool of random rows; always the same."""
    from sglang.srt.mem_cache import memory_pool

    from sglang_mla_ext.adapter.latent_pool import LatentPool

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


def run_both(make: Callable[[], Any], phase: str) -> None:
    """Compare cache, result, and what goes to the attention over expanded prefixes."""
    results = []
    for parts in (False, True):
        backend, shared = make(), []
        backend.attend_shared = lambda q_rope, lse, layer, shared=shared: shared.extend((q_rope, lse))
        whole, rope = inputs(parts)
        before = backend.token_to_kv_pool.kv_buffer[0].clone()
        out = getattr(backend, f"forward_{phase}")(*whole, LAYER, SimpleNamespace(**requests()), **rope)
        cache = backend.token_to_kv_pool.kv_buffer[0]
        changed = (cache != before).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert changed == requests()["out_cache_loc"].tolist()
        assert out.numel() == ROWS * HEADS * RANK and not out.isnan().any()
        results.append((out.view(ROWS, HEADS, RANK), cache, *shared))
    assert len(results[0]) == len(results[1]) == (4 if backend._hybrid else 2)
    for whole, of_parts in zip(*results, strict=True):
        assert torch.equal(whole, of_parts)


@pytest.mark.parametrize("hybrid", [False, True])
def test_decode_by_flashmla(make_pool: Any, monkeypatch: pytest.MonkeyPatch, hybrid: bool) -> None:
    module: Any = ModuleType("sgl_kernel.flash_mla")
    module.flash_mla_with_kvcache = module.get_mla_metadata = None
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_mla", module)
    from sglang.srt.layers.attention import flashmla_backend

    from sglang_mla_ext.adapter import backend_flashmla

    for user in (flashmla_backend, backend_flashmla):
        monkeypatch.setattr(user, "flash_mla_with_kvcache", flash_mla)

    def make() -> Any:
        backend = object.__new__(backend_flashmla.FlashMLAHybridBackend)
        table = torch.tensor([[page, page + 1] for page in FIRST_PAGES], dtype=torch.int32)
        metadata = SimpleNamespace(block_kv_indices=table, flashmla_metadata=None, num_splits=None)
        backend.token_to_kv_pool, backend.forward_metadata, backend._hybrid = make_pool(torch.float32), metadata, hybrid
        backend.kv_lora_rank, backend.kv_cache_dim, backend.is_fp8_kvcache = RANK, RANK + ROPE, False
        backend._tail_lens = torch.tensor(LENS, dtype=torch.int32)
        return backend

    run_both(make, "decode")
    if not hybrid:
        seen: list[Any] = []
        monkeypatch.setattr(flashmla_backend.FlashMLABackend, "forward_extend", lambda self, *args: seen.append(args))
        for parts in (False, True):
            whole, rope = inputs(parts)
            make().forward_extend(*whole, LAYER, None, **rope)
        assert all(torch.equal(seen[0][i], seen[1][i]) for i in range(3)), "SGLang's own code gets whole ones"


@pytest.mark.parametrize("cache", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize(
    ("phase", "groups"), [("decode", None), ("decode", Mode.GROUPED_ABSORB), ("extend", None)], ids=str
)
def test_on_the_cpu(
    make_pool: Any, monkeypatch: pytest.MonkeyPatch, phase: str, groups: Mode | None, cache: torch.dtype
) -> None:
    from sglang_mla_ext.adapter.cpu import backend as module

    monkeypatch.setattr(module.prefill, "plan_of", lambda forward_batch: None)

    def make() -> Any:
        backend = object.__new__(module.TorchHybridBackend)
        backend.token_to_kv_pool = make_pool(cache)
        backend.req_to_token_pool = SimpleNamespace(req_to_token=requests()["req_to_token"])
        backend.swa_out_cache_loc = None
        backend._hybrid, backend._prefix_lens = groups is not None, torch.zeros(ROWS, dtype=torch.int32)
        backend._written = Plan(ROWS, (Group((0,), "n", 0, PAGE, groups),) if groups else ())
        if groups:
            backend._prefix_lens[0] = PAGE
        return backend

    run_both(make, phase)


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
    mla_layer.take_parts()
    mla_layer.take_parts()
    assert taking_parts == [*others, BACKEND_NAME]


@pytest.mark.parametrize("listed", [False, True])
def test_the_layer_gives_what_the_list_says(taking_parts: list[str], listed: bool) -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    class Called(Exception):
        pass

    def attention(*args: Any, **kwargs: Any) -> None:
        raise Called(args, kwargs)

    if listed:
        mla_layer.take_parts()
    no = lambda *args: False  # noqa: E731
    layer = SimpleNamespace(
        current_attention_backend=BACKEND_NAME,
        attn_mqa=attention,
        _skip_rope_for_dsa_tilelang_fused=no,
        _fuse_rope_for_trtllm_mla=no,
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
