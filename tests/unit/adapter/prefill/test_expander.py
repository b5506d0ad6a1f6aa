"""From latent rows to expanded prefixes on the CPU, FP8 too: attention reads what the layer would compute."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_mla_ext.adapter.prefill import expander as expander_module
from sglang_mla_ext.adapter.prefill.expander import Expander, temporary_bytes, weights_of
from sglang_mla_ext.kernels.naive.attention import TorchSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import FP8, FP8_MAX, ExpandedBuffers, scale_bounds
from sglang_mla_ext.segment import Mode, Segment

HEADS, DN, DR, DV, RANK, LAYERS, SLOTS = 2, 32, 16, 32, 64, 2, 900
N, CHUNKS = 600, (3, 0, 2)


class Projection:
    """SGLang's linear layers return the product and a bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.t(), None


@pytest.fixture
def model() -> tuple[list[Any], Any]:
    """Layers and pool; latent rows as RMS norm leaves them, one of them with all its length in one element."""
    torch.manual_seed(0)
    layers, rows = [], {}
    for layer in range(LAYERS):
        norm = torch.rand(RANK) * (layer + 1) + 0.1
        weight = torch.randn(HEADS * (DN + DV), RANK)
        layers.append(
            SimpleNamespace(
                attn_mqa=SimpleNamespace(layer_id=layer),
                kv_b_proj=Projection(weight),
                kv_a_layernorm=SimpleNamespace(weight=norm),
                num_local_heads=HEADS,
                kv_lora_rank=RANK,
                qk_nope_head_dim=DN,
                qk_rope_head_dim=DR,
                v_head_dim=DV,
            )
        )
        latent = torch.nn.functional.rms_norm(torch.randn(SLOTS, RANK), (RANK,)) * norm
        latent[7] = 0
        latent[7, 5] = RANK**0.5 * norm[5]
        rows[layer] = torch.cat([latent, torch.randn(SLOTS, DR)], dim=1)[:, None]  # [slots, 1, rank + rope]
    return layers, SimpleNamespace(get_key_buffer=rows.__getitem__)


def allocate(dtype: torch.dtype) -> ExpandedBuffers:
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR)
    return ExpandedBuffers.allocate(layers=LAYERS, chunks=4, heads=HEADS, dtype=dtype, device="cpu", **sizes)


def expand(model: Any, buffers: ExpandedBuffers) -> tuple[Expander, torch.Tensor]:
    """Expand in two pieces; return the slots too, slot 7 among them."""
    expander = Expander(*model, buffers)
    slots = torch.cat([torch.tensor([7]), torch.randperm(SLOTS)])[:N]
    for first, last in ((0, CHUNK_TOKENS), (CHUNK_TOKENS, N)):
        expander.expand_slots(slots[first:last], CHUNKS[first // CHUNK_TOKENS :])
    return expander, slots


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (FP8, 0.05)], ids=str)
def test_attention_over_what_was_expanded(
    model: Any, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expander_module, "PRODUCT_TOKENS", 100)
    buffers = allocate(dtype)
    _, slots = expand(model, buffers)
    attention = TorchSharedAttention(buffers, max_rows=3, heads=HEADS)
    attention.plan([Segment((0, 2), 0, N, Mode.NAIVE, CHUNKS)], 3)
    q_nope, q_rope = torch.randn(3, HEADS, DN) * 0.1, torch.randn(3, HEADS, DR)
    for layer, attention_layer in enumerate(model[0]):
        rows = model[1].get_key_buffer(layer)[slots].squeeze(1)
        expanded = attention_layer.kv_b_proj(rows[:, :RANK])[0].view(N, HEADS, DN + DV)
        exact, _ = reference.naive(q_nope, q_rope, expanded[..., :DN], rows[:, RANK:], expanded[..., DN:], 0.1)
        attention.run(layer, q_nope, q_rope, 0.1)
        out = torch.zeros(3, HEADS, DV)
        attention.merge(out, torch.full((3, HEADS), -torch.inf), out)
        assert reference.errors(out[[0, 2]], exact[[0, 2]]).rel_l2 < bound


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_some_heads_are_expanded_as_they_are_among_all(model: Any, dtype: torch.dtype) -> None:
    whole = allocate(dtype)
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=dtype, device="cpu")
    part = ExpandedBuffers.allocate(layers=LAYERS, chunks=4, heads=1, **sizes)
    Expander(*model, part, first_head=1).expand_slots(torch.arange(CHUNK_TOKENS), [3])
    Expander(*model, whole).expand_slots(torch.arange(CHUNK_TOKENS), [3])
    for layer in range(LAYERS):
        some, every = (buffers.read(layer, [3], CHUNK_TOKENS) for buffers in (part, whole))
        assert all(torch.equal(one[:, 0], two[:, 1]) for one, two in zip(some[:2], every[:2], strict=True))
        assert torch.equal(some[2], every[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_rows_of_an_fp8_pool_are_expanded_as_what_they_mean(
    model: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not among the slots are NaN."""
    monkeypatch.setattr(expander_module, "FETCHED_TOKENS", 130)
    from sglang_mla_ext.adapter.latent.pool import LatentPool

    layers, rows = model
    sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=DR, layer_num=LAYERS)
    pool = LatentPool(SLOTS, page_size=1, dtype=FP8, device="cpu", enable_memory_saver=False, **sizes)
    torch.manual_seed(1)
    slots = torch.randperm(SLOTS)[:N]
    meant = {}
    for layer in range(LAYERS):
        pool.layout.scale(pool.kv_buffer[layer]).fill_(torch.nan)
        attention = SimpleNamespace(layer_id=layer)
        pool.set_kv_buffer(attention, slots, rows.get_key_buffer(layer)[slots])
        meant[layer] = torch.cat(pool.get_mla_kv_buffer(attention, torch.arange(SLOTS), torch.float32), dim=-1)
    results = []
    for source in (pool, SimpleNamespace(get_key_buffer=meant.__getitem__)):
        buffers = allocate(dtype)
        expander = Expander(layers, source, buffers)
        for first, last in ((0, CHUNK_TOKENS), (CHUNK_TOKENS, N)):
            expander.expand_slots(slots[first:last], CHUNKS[first // CHUNK_TOKENS :])
        results.append([part for layer in range(LAYERS) for part in buffers.read(layer, CHUNKS, N)])
    for actual, expected in zip(*results, strict=True):
        assert actual.isfinite().all() and torch.equal(actual, expected)


def test_a_tree_node_is_expanded_from_its_slots(model: Any) -> None:
    """`expand` asks the tree that it was given for the slots of the range, whose chunks begin with it."""
    slots = torch.randperm(SLOTS)[:N]
    asked = []

    def slots_of(node: str, node_end: int, start: int, end: int) -> torch.Tensor:
        asked.append((node, node_end, start, end))
        return slots[start:end]

    by_node, by_slots = allocate(torch.float32), allocate(torch.float32)
    expander = Expander(*model, by_node)
    expander.attach(SimpleNamespace(slots=slots_of))
    for first, last in ((0, CHUNK_TOKENS), (CHUNK_TOKENS, N)):
        expander.expand("node", N, first, last, CHUNKS[first // CHUNK_TOKENS :])
    Expander(*model, by_slots).expand_slots(slots, CHUNKS)
    assert asked == [("node", N, 0, CHUNK_TOKENS), ("node", N, CHUNK_TOKENS, N)]
    for layer in range(LAYERS):
        for found, expected in zip(by_node.read(layer, CHUNKS, N), by_slots.read(layer, CHUNKS, N), strict=True):
            assert torch.equal(found, expected)


def test_rows_of_another_dtype_than_the_model(model: Any) -> None:
    """A BF16 cache beside a float32 model."""
    layers, rows = model
    buffers = allocate(torch.float32)
    bf16 = SimpleNamespace(get_key_buffer=lambda layer: rows.get_key_buffer(layer).bfloat16())
    Expander(layers, bf16, buffers).expand_slots(torch.arange(5), CHUNKS)
    latent = rows.get_key_buffer(1)[:5, 0, :RANK].bfloat16().float()
    expected = layers[1].kv_b_proj(latent)[0].view(5, HEADS, DN + DV)[..., :DN]
    assert torch.equal(buffers.read(1, CHUNKS, 5)[0], expected)


def test_scales_bound_every_token_and_follow_the_weights(model: Any) -> None:
    buffers = allocate(FP8)
    expander, _ = expand(model, buffers)
    for layer, attention in enumerate(model[0]):
        everything = attention.kv_b_proj(model[1].get_key_buffer(layer)[:, 0, :RANK])[0].view(SLOTS, HEADS, DN + DV)
        assert (everything[..., :DN].abs() <= buffers.k_scale[layer, :, None] * FP8_MAX).all()
        assert (everything[..., DN:].abs() <= buffers.v_scale[layer, :, None] * FP8_MAX).all()
    before = buffers.k_scale.clone()
    model[0][1].kv_b_proj.weight *= 4
    expander.expand_slots(torch.tensor([1]), CHUNKS)
    assert torch.equal(buffers.k_scale, before)
    expander.weights_changed()
    expander.expand_slots(torch.tensor([1]), CHUNKS)
    assert torch.allclose(buffers.k_scale, before * torch.tensor([[1.0], [4.0]]))


def quantised(layer: Any) -> Any:
    """The layer as SGLang has it of a checkpoint in FP8 blocks: `kv_b_proj` in FP8, and for absorb the weights that
    these blocks mean, in strides of its own."""
    w_k, w_v = layer.kv_b_proj.weight.view(HEADS, DN + DV, RANK).split([DN, DV], dim=1)
    absorbed = dict(w_kc=w_k.transpose(1, 2).contiguous().transpose(1, 2), w_vc=w_v.contiguous().transpose(1, 2))
    stored = SimpleNamespace(weight=layer.kv_b_proj.weight.to(FP8))
    return SimpleNamespace(**{**vars(layer), **absorbed, "kv_b_proj": stored, "use_deep_gemm_bmm": False})


class Peak(TorchDispatchMode):
    """The most bytes that new tensors take together while it is entered.

    Attributes:
        bytes: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._known.add(tensor.untyped_storage()._cdata)
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        self.bytes = max(self.bytes, self._now)
        return made

    def _free(self, name: int, size: int) -> None:
        self._known.discard(name)
        self._now -= size


@pytest.mark.parametrize("of_fp8", [False, True], ids=["pool", "fp8-pool"])
@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_what_expansion_takes_while_it_runs_is_known(
    model: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, of_fp8: bool
) -> None:
    monkeypatch.setattr(expander_module, "FETCHED_TOKENS", 256)
    monkeypatch.setattr(expander_module, "PRODUCT_TOKENS", 128)
    layers, pool = model
    if of_fp8:
        latent = torch.cat([pool.get_key_buffer(0)[:, 0]])
        pool = SimpleNamespace(fetch=lambda layer_id, slots, rows: rows.copy_(latent[slots]))
    buffers, slots = allocate(dtype), torch.arange(N)
    buffers.read(0, CHUNKS, 1)  # what is kept from the first use on
    with Peak() as peak:
        Expander(layers, pool, buffers).expand_slots(slots, CHUNKS)
    known = temporary_bytes(layers[0], torch.float32, fetches=of_fp8, to_fp8=dtype == FP8)
    assert 0 < peak.bytes <= known
    # On so small a model the bound on what a chunk's write takes is most of it.
    assert known < 3 * peak.bytes


@pytest.mark.parametrize("one_scale", [False, True], ids=["blocks", "one-scale"])
def test_weights_that_are_made_for_an_expansion_are_counted(
    model: Any, monkeypatch: pytest.MonkeyPatch, one_scale: bool
) -> None:
    for name in ("PRODUCT_TOKENS", "CHUNK_TOKENS"):  # leaves the weights
        monkeypatch.setattr(expander_module, name, 0)
    layer = quantised(model[0][0])
    if one_scale:
        layer.w_scale = torch.tensor([1.0])
        layer.w_kc, layer.w_vc = (weight.to(FP8) for weight in (layer.w_kc, layer.w_vc))
    with Peak() as peak:
        assert weights_of(layer, torch.float32) is not None
    sizes = dict(fetches=False, to_fp8=False)
    assert temporary_bytes(model[0][0], torch.float32, **sizes) == 0
    assert 0 < peak.bytes <= temporary_bytes(layer, torch.float32, **sizes)


def test_weights_in_fp8_with_one_scale(model: Any) -> None:
    """As SGLang keeps them for absorb where the checkpoint has one scale; DeepGEMM's have others."""
    layer = quantised(model[0][1])
    w_k, w_v = weights_of(layer, torch.float32)
    scale = torch.tensor([w_k.abs().max() / FP8_MAX])
    layer.w_kc, layer.w_vc, layer.w_scale = (layer.w_kc / scale).to(FP8), (layer.w_vc / scale).to(FP8), scale
    for found, expected in zip(weights_of(layer, torch.float32), (w_k, w_v), strict=True):
        assert found.stride(-1) == 1
        assert (found - expected).norm() < 0.04 * expected.norm()
    layer.use_deep_gemm_bmm = True
    assert weights_of(layer, torch.float32) is None


def test_weights_of_a_quantised_layer_are_those_that_absorb_uses(model: Any) -> None:
    plain = model[0][1]
    layer = quantised(plain)
    for found, expected in zip(weights_of(layer, torch.float32), weights_of(plain, torch.float32), strict=True):
        assert torch.equal(found, expected)
        assert found.stride(-1) == 1
    assert weights_of(layer, torch.bfloat16) is None  # absorb's are of another dtype, too
    without_weight = SimpleNamespace(**{**vars(layer), "kv_b_proj": SimpleNamespace()})  # AWQ
    assert torch.equal(weights_of(without_weight, torch.float32)[0], layer.w_kc)
    not_loaded = SimpleNamespace(**{**vars(layer), "w_kc": None})
    assert weights_of(not_loaded, torch.float32) is None


def test_scales_of_a_quantised_layer(model: Any) -> None:
    """They come from the weights: its `kv_b_proj` cannot be called here."""
    layers, pool = model
    plain, of_quantised = allocate(FP8), allocate(FP8)
    Expander(layers, pool, plain)._set_scales()
    Expander([quantised(layer) for layer in layers], pool, of_quantised)._set_scales()
    assert torch.equal(plain.k_scale, of_quantised.k_scale)
    assert torch.equal(plain.v_scale, of_quantised.v_scale)


def test_the_bound_is_reached_by_the_worst_token() -> None:
    weight_rows = torch.randn(3, 5, RANK)
    bound = scale_bounds(weight_rows) * FP8_MAX
    longest = weight_rows.norm(dim=-1).amax(dim=-1)  # a latent row along this weight row, of length sqrt(rank)
    assert torch.allclose(bound, longest * RANK**0.5 * 1.02)


def test_values_out_of_range_become_the_largest() -> None:
    buffers = allocate(FP8)
    huge = torch.full((1, HEADS, DN), 1e6)
    buffers.write(0, 1, 17, huge, -huge, torch.zeros(1, DR))
    k_nope, v, _ = buffers.read(0, (1,), 18)
    assert (k_nope[17] == FP8_MAX).all() and (v[17] == -FP8_MAX).all() and not v[:17].any()
