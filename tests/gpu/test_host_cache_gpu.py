"""SGLang's cache on the host (HiCache) on a Hopper GPU: rows go there and come back bit for bit, and the real engine's
answers over a prefix that was there are those of prompts computed whole, with drafts, too.

The device holds little more than the requests need, so that other prompts drive the prefix out, twice: before the
requests have come, and before they come again. By then it is expanded, and stays so while its rows come back to other
slots.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_engine_gpu import BATCH, NEW_TOKENS, PREFIX, all_answers, differences_of, make_model
from test_speculative_gpu import DRAFTS, FLASHINFER, FP8, TRUTH, check, hybrid

pytestmark = pytest.mark.gpu

RANK, ROPE, LAYERS, PAGE, PAGES = 512, 64, 3, 64, 40


def host_cache(copies: str, layout: str, **others: Any) -> dict[str, Any]:
    """Arguments of an engine whose device holds the requests and no more, which is less than all fillers; the host
    holds everything."""
    tokens = (PREFIX // PAGE + 1 + BATCH * 5) * PAGE
    arguments = dict(max_total_tokens=tokens, enable_hierarchical_cache=True, hicache_ratio=8.0, fillers=4)
    return arguments | dict(hicache_io_backend=copies, hicache_mem_layout=layout) | others


@pytest.mark.parametrize(
    ("copies", "layout"),
    [("kernel", "layer_first"), ("kernel", "page_first"), ("direct", "layer_first"), ("direct", "page_first_direct")],
)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_rows_go_to_the_host_and_come_back(fp8: bool, copies: str, layout: str) -> None:
    """Bit for bit, to other slots, whatever their bytes are; nothing else changes."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    from sglang_mla_ext.adapter.latent.pool import LatentPool, around_host_pool

    torch.manual_seed(0)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    pool: Any = (LatentPool if fp8 else MLATokenToKVPool)(
        PAGES * PAGE,
        page_size=PAGE,
        dtype=dtype,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cuda",
        enable_memory_saver=False,
    )
    for buffer in pool.kv_buffer:
        buffer.view(torch.uint8).random_(256)
    before = [buffer.view(torch.uint8).clone() for buffer in pool.kv_buffer]
    host = object.__new__(MLATokenToKVPoolHost)
    around_host_pool(MLATokenToKVPoolHost.__init__, host, pool, 2.0, 0, PAGE, layout)
    assert host.token_stride_size == (656 if fp8 else 1152)

    def slots(pages: torch.Tensor) -> torch.Tensor:
        return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()

    order = torch.randperm(PAGES) + 1
    source, target = slots(order[:17]), slots(order[17:34])
    on_host = slots(torch.randperm(host.page_num)[:17])
    # Where SGLang's controller has them: kernels want them on the device, but for those on the host in a staged copy.
    at = "cpu" if copies == "direct" else "cuda"
    staged = copies == "kernel" and layout == "page_first" and host.can_use_write_back_jit
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # as there: CUDA copies no batch on the default one
        host.backup_from_device_all_layer(pool, on_host.to("cpu" if staged else at), source.to(at), copies)
        torch.cuda.synchronize()
        for layer in range(LAYERS):
            host.load_to_device_per_layer(pool, on_host.to(at), target.to(at), layer, copies)
    torch.cuda.synchronize()
    for buffer, was in zip(pool.kv_buffer, before, strict=True):
        was[target.cuda()] = was[source.cuda()]
        assert torch.equal(buffer.view(torch.uint8), was)
    host.destroy()


def test_rows_are_copied_from_the_host_after_the_step_before() -> None:
    """Which may still write to the slots, or read what was there."""
    from sglang_mla_ext.adapter.compat import installed

    rows, read = torch.zeros(1 << 20, device="cuda"), torch.empty(1 << 20, device="cuda")
    steps, loads = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(steps):
        torch.cuda._sleep(50_000_000)
        read.copy_(rows)
    installed.wait_before_loading(SimpleNamespace(load_stream=loads), steps)  # type: ignore[arg-type]
    with torch.cuda.stream(loads):
        rows.fill_(1.0)
    torch.cuda.synchronize()
    assert not read.any() and rows.all()


def test_answers_over_a_prefix_that_was_on_the_host(tmp_path: Path) -> None:
    """In BF16 and FP8, with and without drafts, over SGLang's ways to copy. The bounds are those of test_engine_gpu.py
    and, with drafts, of test_speculative_gpu.py."""
    model = make_model(tmp_path / "checkpoint", "--heads", "16", "--nextn")
    kinds = {
        "bf16": host_cache("kernel", "page_first"),
        "fp8": host_cache("kernel", "page_first", **FP8),
        "fp8, direct": host_cache("direct", "page_first_direct", **FP8, hicache_write_policy="write_back"),
        "bf16, drafts": host_cache("kernel", "page_first", **DRAFTS),
        "fp8, drafts": host_cache("kernel", "layer_first", **DRAFTS, **FP8),
    }
    found = all_answers(
        model,
        tmp_path,
        {
            "truth": TRUTH,
            "flashinfer": FLASHINFER | dict(disable_radix_cache=True),
            "stock fp8": TRUTH | FP8,
            **{name: hybrid("naive", **kind) for name, kind in kinds.items()},
        },
    )
    truth = found.pop("truth")
    apart = differences_of(truth, found)
    print("the first time:")
    apart_before = differences_of(truth, {name: {"tokens": found[name]["before"]} for name in kinds})
    for name in kinds:
        counters, from_host = found[name]["info"]["counters"], found[name]["from_host"]
        print(f"{name}: {from_host} tokens came from the host; counters {counters}")
        assert min(from_host) >= PREFIX // PAGE * PAGE, "the prefix was on the host both times"
        assert counters["steps_naive"] > NEW_TOKENS // 4 and counters["fallbacks"] == {}
        assert counters["prefill_tokens_saved"] > 0
        fp8 = "fp8" in name
        for ours in (apart[name], apart_before[name]):
            check(name, ours, apart["stock fp8" if fp8 else "flashinfer"], fp8)
