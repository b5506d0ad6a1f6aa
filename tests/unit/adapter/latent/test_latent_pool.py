"""The FP8 pool under every operation that SGLang performs on its MLA pool, and how much of it fits into memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from release import pool_class

from sglang_mla_ext.kernels.dispatch import append_rows, fetch_rows
from sglang_mla_ext.kernels.storage.expanded import FP8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout, dequantize, quantize

pytestmark = pytest.mark.usefixtures("published")
RANK, ROPE, LAYERS, TOKENS, PAGE, START = 512, 64, 3, 200, 4, 5
DTYPES = [torch.bfloat16, torch.float32]


def build(cls: Any, dtype: torch.dtype = FP8, **changes: Any) -> Any:
    sizes = dict(
        kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=LAYERS, start_layer=START, end_layer=START + LAYERS
    )
    return cls(TOKENS, page_size=PAGE, dtype=dtype, device="cpu", enable_memory_saver=False, **{**sizes, **changes})


@pytest.fixture
def pool() -> Any:
    """Every row is NaN in all its parts."""
    from sglang_mla_ext.adapter.latent.pool import LatentPool

    pool = build(LatentPool)
    for buffer in pool.kv_buffer:
        buffer.fill_(0x7F)  # NaN in e4m3
        pool.layout.scale(buffer).fill_(torch.nan)
        pool.layout.rope(buffer).fill_(torch.nan)
    return pool


def layer(index: int) -> Any:
    """What the pool looks at of SGLang's RadixAttention."""
    return SimpleNamespace(layer_id=START + index)


def new_rows(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """`[n, 1, rank + rope]`, as SGLang hands them over, and strided: they are a part of a wider tensor."""
    generator = torch.Generator().manual_seed(n)
    size = 10 ** (4 * torch.rand(n, 1, 1, generator=generator) - 2)
    wide = size * torch.randn(n, 1, RANK + ROPE + 8, generator=generator)
    return wide.to(dtype)[..., : RANK + ROPE]


def some_slots(n: int) -> torch.Tensor:
    return torch.randperm(TOKENS, generator=torch.Generator().manual_seed(n))[:n] + PAGE


def meant(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`[n, rank + rope]`: what is read back of rows that were written."""
    rows = rows[:, 0]
    return torch.cat(dequantize(quantize(rows[:, :RANK], rows[:, RANK:])), dim=-1).to(dtype)


def read(pool: Any, index: int, slots: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    latent, rope = pool.get_mla_kv_buffer(layer(index), slots, dtype)
    assert latent.shape == (len(slots), 1, RANK) and rope.shape == (len(slots), 1, ROPE)
    assert latent.is_contiguous() and rope.is_contiguous()
    return torch.cat([latent, rope], dim=-1)[:, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 37])
@pytest.mark.parametrize("way", ["whole", "location", "parts"])
def test_rows_are_written_and_read_by_their_slots(
    pool: Any, way: str, n: int, slots_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    rows, slots = new_rows(n, dtype), some_slots(n)
    before = [buffer.clone() for buffer in pool.kv_buffer]
    to = slots.to(slots_dtype)
    match way:
        case "whole":
            pool.set_kv_buffer(layer(1), to, rows, rows[..., :RANK])
        case "location":
            pool.set_kv_buffer(layer(1), KVWriteLoc(to, None), rows, None)
        case "parts":
            pool.set_mla_kv_buffer(layer(1), to, rows[..., :RANK], rows[..., RANK:])
    for dst in (*DTYPES, None):
        assert torch.equal(read(pool, 1, to, dst), meant(rows, dst or torch.bfloat16))
    others = torch.ones(TOKENS + PAGE, dtype=torch.bool)
    others[slots] = False
    for index, buffer in enumerate(pool.kv_buffer):
        untouched = others if index == 1 else slice(None)
        assert torch.equal(buffer[untouched], before[index][untouched])


def test_only_the_rows_asked_for_are_read(pool: Any) -> None:
    """All others are NaN."""
    rows, slots = new_rows(9), some_slots(9)
    pool.set_kv_buffer(layer(0), slots, rows)
    picked = torch.tensor([8, 0, 3, 3])
    assert read(pool, 0, slots[picked], torch.float32).isfinite().all()
    out = torch.full((4, RANK + ROPE + 3), -7.0)
    pool.fetch(START, slots[picked], out[:, : RANK + ROPE])
    assert torch.equal(out[:, : RANK + ROPE], meant(rows[picked], torch.float32))
    assert (out[:, RANK + ROPE :] == -7.0).all()


def test_padded_tokens_write_to_the_first_page(pool: Any) -> None:
    """SGLang gives all of them slot 0, in one call."""
    rows = new_rows(6)
    pool.set_kv_buffer(layer(0), torch.tensor([0, 0, 0, 17, 0, 0]), rows)
    assert torch.equal(read(pool, 0, torch.tensor([17]), torch.float32), meant(rows[3:4], torch.float32))
    assert pool.rows(START)[PAGE:17].eq(pool.rows(START)[18:31]).all(), "nothing else is written"


def test_the_whole_pool_is_not_a_tensor_of_numbers(pool: Any) -> None:
    for ask in (pool.get_key_buffer, pool.get_value_buffer, pool.get_kv_buffer):
        with pytest.raises(NotImplementedError, match="read rows by their slots"):
            ask(START)
    assert pool.rows(START + 2).shape == (TOKENS + PAGE, 656)
    assert pool.rows(START + 2).data_ptr() == pool.kv_buffer[2].data_ptr()


def test_rows_move(pool: Any) -> None:
    slots = some_slots(12)
    rows = [new_rows(12) * (index + 1) for index in range(LAYERS)]
    for index in range(LAYERS):
        pool.set_kv_buffer(layer(index), slots, rows[index])
    free = torch.tensor([slot for slot in range(PAGE, TOKENS) if slot not in slots.tolist()][:12])
    pool.move_kv_cache(free, slots)
    pool.move_kv_cache(free[:0], slots[:0])
    for index in range(LAYERS):
        assert torch.equal(read(pool, index, free, torch.float32), meant(rows[index], torch.float32))


def test_rows_leave_and_come_back(pool: Any) -> None:
    """As for a request that is retracted, to other slots, in more than one piece."""
    pool.cpu_offloading_chunk_size = 8
    slots, to = some_slots(20), some_slots(21)[:20]
    rows = [new_rows(20) * (index + 1) for index in range(LAYERS)]
    for index in range(LAYERS):
        pool.set_kv_buffer(layer(index), slots, rows[index])
    copy = pool.get_cpu_copy(slots)
    for buffer in pool.kv_buffer:
        buffer.fill_(0x7F)
    pool.load_cpu_copy(copy, to)
    for index in range(LAYERS):
        assert torch.equal(read(pool, index, to, torch.float32), meant(rows[index], torch.float32))


def test_sizes(pool: Any) -> None:
    total = (TOKENS + PAGE) * 656 * LAYERS
    assert pool.get_kv_size_bytes() == total
    assert pool.mem_usage == pytest.approx(total / (1 << 30))
    assert pool.kv_cache_dim == 656 and pool.dtype == FP8 and pool.store_dtype == torch.uint8
    pointers, lengths, page_lengths = pool.get_contiguous_buf_infos()
    assert pointers == [buffer.data_ptr() for buffer in pool.kv_buffer] == pool.data_ptrs.tolist()
    assert lengths == [(TOKENS + PAGE) * 656] * LAYERS and page_lengths == [PAGE * 656] * LAYERS


def test_it_is_freed_and_allocated_again(pool: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    assert isinstance(pool, MLATokenToKVPool)
    pool._clear_buffers()
    assert not hasattr(pool, "kv_buffer")
    pool._create_buffers()
    assert all(not buffer.any() for buffer in pool.kv_buffer)


def test_what_the_layout_has_no_place_for_is_refused() -> None:
    from sglang_mla_ext.adapter.latent.pool import LatentPool

    with pytest.raises(ValueError, match="multiple of 16, not 500"):
        build(LatentPool, kv_lora_rank=500)
    with pytest.raises(ValueError, match=r"not torch\.bfloat16"):
        build(LatentPool, torch.bfloat16)


def test_a_negative_slot_is_skipped_as_by_the_kernels() -> None:
    rows, layout = new_rows(3)[:, 0], LatentRowLayout()
    pool = torch.full((5, layout.row_bytes), 0x7F, dtype=torch.uint8)
    slots = torch.tensor([4, -1, 0])
    append_rows(rows[:, :RANK], rows[:, RANK:], slots, pool)
    assert (pool[1:4] == 0x7F).all()
    latent, rope = torch.full((3, RANK), -7.0), torch.full((3, ROPE), -7.0)
    fetch_rows(pool, slots, latent, rope)
    assert (latent[1] == -7).all() and (rope[1] == -7).all()
    assert torch.equal(torch.cat([latent, rope], dim=1)[[0, 2]], meant(rows[[0, 2]][:, None], torch.float32))


# ---- how SGLang builds it


def configurator(dtype: torch.dtype, decode: str = "hybrid_mla", mla: bool = True, draft: bool = False) -> Any:
    """What SGLang's code and ours look at of a KVCacheConfigurator."""
    hf_config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], index_topk=None)
    sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=ROPE, context_len=4096, hf_config=hf_config)
    server_args = SimpleNamespace(
        get_attention_backends=lambda: (decode, decode),
        prefill_attention_backend=decode,
        decode_attention_backend=decode,
        max_total_tokens=None,
        enable_dsa_cache_layer_split=False,
        enable_hisparse=False,
    )
    return SimpleNamespace(
        server_args=server_args,
        use_mla_backend=mla,
        kv_cache_dtype=dtype,
        kv_cache_dtype_str="auto",
        model_config=SimpleNamespace(**sizes),
        pool_page_size=PAGE,
        layer_info=SimpleNamespace(num_effective_layers=LAYERS, start_layer=START, end_layer=START + LAYERS),
        device="cpu",
        is_draft_worker=draft,
        kv_shard_rank=None,
    )


@pytest.fixture
def sglang_globals(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What SGLang's functions ask of the process that they run in."""
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator

    execution = SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False))
    for module in (kv_cache_configurator, runtime_context):
        monkeypatch.setattr(module, "get_exec", lambda: execution)
    monkeypatch.setattr(pool_configurator, "get_parallel", lambda: SimpleNamespace(attn_tp_size=1, attn_dcp_size=1))
    return kv_cache_configurator.KVCacheConfigurator, pool_configurator.DefaultPoolConfigurator


OTHERS = [
    (torch.bfloat16, "hybrid_mla", False),
    (FP8, "flashmla", False),
    (torch.float8_e5m2, "hybrid_mla", False),
    (FP8, "hybrid_mla", True),
]


def test_sglang_builds_it_for_an_fp8_cache(sglang_globals: Any) -> None:
    from sglang_mla_ext.adapter.latent.pool import LatentPool, around_build_mla_pool

    original = sglang_globals[0]._build_mla_kv_pool
    built = around_build_mla_pool(original, configurator(FP8), max_total_num_tokens=TOKENS, **pool_class())
    assert type(built) is LatentPool
    # The one that SGLang would have built differs in its rows only.
    stock = original(configurator(FP8), max_total_num_tokens=TOKENS, **pool_class())
    tensors = ("kv_buffer", "data_ptrs", "kv_cache_dim", "mem_usage", "layout", "memory_saver_adapter")
    for name in set(vars(built)) - set(tensors):
        assert vars(built)[name] == vars(stock)[name], name
    assert [buffer.shape[:2] for buffer in built.kv_buffer] == [buffer.shape[:2] for buffer in stock.kv_buffer]


@pytest.mark.parametrize(("dtype", "decode", "draft"), OTHERS, ids=str)
def test_sglang_builds_its_own_otherwise(sglang_globals: Any, dtype: torch.dtype, decode: str, draft: bool) -> None:
    """For a draft model, too."""
    from sglang_mla_ext.adapter.latent.pool import LatentPool, around_build_mla_pool

    original = sglang_globals[0]._build_mla_kv_pool
    built = around_build_mla_pool(
        original, configurator(dtype, decode, draft=draft), max_total_num_tokens=TOKENS, **pool_class()
    )
    assert not isinstance(built, LatentPool) and built.kv_cache_dim == RANK + ROPE


def test_the_same_memory_holds_more_tokens(sglang_globals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own computation, with our size of a row: 1,152 / 656 = 1.756 times BF16's tokens."""
    from sglang_mla_ext.adapter.latent.pool import after_cell_size

    sizing = sglang_globals[1]
    original = sizing._compute_cell_size
    monkeypatch.setattr(
        sizing, "_compute_cell_size", lambda self, *args: after_cell_size(original(self, *args), self, *args)
    )

    def tokens(dtype: torch.dtype, decode: str = "hybrid_mla") -> int:
        made = object.__new__(sizing)
        cell = made._compute_cell_size(configurator(dtype, decode), LAYERS)
        return (10 << 30) // cell

    bf16, ours = tokens(torch.bfloat16), tokens(FP8)
    assert bf16 == (10 << 30) // (1152 * LAYERS) and ours == (10 << 30) // (656 * LAYERS)
    assert ours / bf16 == pytest.approx(1.756, abs=1e-3)
    assert tokens(FP8, "flashmla") == (10 << 30) // (576 * LAYERS), "SGLang's own FP8 pool"


def test_sglang_builds_it_for_the_layers_with_mla_among_others(sglang_globals: Any) -> None:
    from sglang_mla_ext.adapter.latent.pool import LatentPool, around_build_hybrid_pool

    for dtype, cls in ((FP8, LatentPool), (torch.bfloat16, "SGLang's")):
        given = around_build_hybrid_pool(lambda self, **given: given, configurator(dtype), mla_pool_class="SGLang's")
        assert given == {"mla_pool_class": cls}


def test_rows_of_layers_with_mla_among_others(pool: Any) -> None:
    """They have the numbers of the model's layers, and the pool that they are in waits for them."""
    from sglang_mla_ext.adapter.latent.pool import dtype_for_peers, fp8_rows

    waited: list[int] = []
    index = {3: START, 7: START + 1}
    others = SimpleNamespace(
        full_kv_pool=pool,
        full_attention_layer_id_mapping=index,
        layer_transfer_counter=SimpleNamespace(wait_until=waited.append),
        start_layer=2,
    )
    slots, rows = some_slots(37), new_rows(37)
    pool.set_kv_buffer(layer(1), slots, rows)
    found, out = fp8_rows(others), torch.empty(37, RANK + ROPE)  # type: ignore[arg-type]
    assert found is not None and found.layout is pool.layout
    found.fetch(7, slots, out)
    assert torch.equal(out, meant(rows, torch.float32))
    assert found.rows(3).data_ptr() == pool.rows(START).data_ptr() and waited == [5, 1]
    assert dtype_for_peers("fp8_e4m3", others) == "fp8_e4m3 (hybrid_mla: 656 bytes a row)"  # type: ignore[arg-type]
    assert fp8_rows(pool) is pool and fp8_rows(None) is fp8_rows(SimpleNamespace()) is None  # type: ignore[arg-type]
