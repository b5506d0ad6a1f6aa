"""Other kernels on a case of decode attention: FlashMLA, FlashInfer, FlashAttention-3, and two of them together.

Every function that makes a kernel's input returns a callable without arguments that launches the kernel; the callable
keeps what it needs alive. The packages are imported only there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from bench.cases import DN, DR, DV, LATENT, PAGE_TOKENS, SCALE, Case, padded, page_table

CONTEXT_TOKENS = 163_840
"""Context of DeepSeek-V3, the width of the page tables in SGLang's CUDA graphs."""


def flashmla_bf16(case: Case, *, fp8: bool = False) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """FlashMLA over prefix and tail, BF16; the rows of a group read the same pages of the prefix."""
    pages = page_table(case.lengths, case.sizes, case.prefix // PAGE_TOKENS)
    return flashmla_over(case.heads, case.lengths, *pages, fp8=fp8, s_q=case.s_q)


def flashmla_fp8(case: Case) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """FlashMLA over prefix and tail, queries and cache FP8; pages as in `flashmla_bf16`."""
    return flashmla_bf16(case, fp8=True)


def flashmla_tail(case: Case) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """FlashMLA over what is private, BF16: out `[B, 1, H, 512]` latent, lse `[B, H, 1]` float32, natural log."""
    return flashmla_over(case.heads, case.tail_lengths, *page_table(case.tail_lengths, (), 0))


def flashmla_over(
    heads: int, lengths: list[int], pages: list[list[int]], n_pages: int, *, fp8: bool = False, s_q: int = 1
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """FlashMLA over any pages: out `[B, S, H, 512]` latent, lse `[B, H, S]` float32, natural log.

    Args:
        lengths: `[B]` tokens of each row; pages: of each row, from its first token on; n_pages: distinct ones.
    """
    from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    table = torch.tensor(padded(pages), dtype=torch.int32, device="cuda")  # [B, pages]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")  # [B]
    cache, query = _cache_and_query(n_pages, len(lengths), s_q, heads, "cuda")
    schedule = FlashMLASchedMeta()  # the first call fills it in
    options: dict[str, Any] = dict(softmax_scale=SCALE, causal=s_q > 1, use_legacy=True)
    if fp8:
        cache, query = cache.to(torch.float8_e4m3fn), query.to(torch.float8_e4m3fn)
        one = torch.ones(1, device="cuda")
        options |= dict(is_fp8_kvcache=True, descale_q=one, descale_k=one)
        schedule.tile_scheduler_metadata, schedule.num_splits = get_mla_decoding_metadata(
            seq_lens, heads * s_q, 1, is_fp8_kvcache=True, use_legacy=True
        )
    return lambda: flash_mla_with_kvcache(query, cache, table, seq_lens, LATENT, schedule, **options)


def _cache_and_query(
    n_pages: int, requests: int, s_q: int, heads: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random pages `[pages, 64, 1, 576]` and a query `[B, S, H, 576]`, BF16; the same ones after the same seed."""
    cache = torch.randn(n_pages, PAGE_TOKENS, 1, LATENT + DR, device=device, dtype=torch.bfloat16)
    return cache, torch.randn(requests, s_q, heads, LATENT + DR, device=device, dtype=torch.bfloat16)


def flashinfer_mla(case: Case, device: str = "cuda") -> Callable[[], torch.Tensor]:
    """FlashInfer's MLA kernel for Hopper over prefix and tail, absorb form, BF16: out `[B * S, H, 512]` latent, rows of
    a request after each other; pages as in `flashmla_bf16`."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    def on_device(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    pages, n_pages = page_table(case.lengths, case.sizes, case.prefix // PAGE_TOKENS)
    counts = [-(-length // PAGE_TOKENS) for length in case.lengths]
    cache, query = _cache_and_query(n_pages, case.batch, case.s_q, case.heads, device)
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 << 20, dtype=torch.uint8, device=device), backend="fa3")
    wrapper.plan(
        qo_indptr=on_device([row * case.s_q for row in range(case.batch + 1)]),
        kv_indptr=on_device([0, *accumulate(counts)]),  # in pages
        kv_indices=on_device([page for row, count in zip(pages, counts, strict=True) for page in row[:count]]),
        kv_len_arr=on_device(case.lengths),
        num_heads=case.heads,
        head_dim_ckv=LATENT,
        head_dim_kpe=DR,
        page_size=PAGE_TOKENS,
        causal=case.s_q > 1,
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q_latent, q_rope = query.flatten(0, 1).split([LATENT, DR], dim=-1)  # [B * S, H, 512], [B * S, H, 64]
    latent, rope = cache.squeeze(2).split([LATENT, DR], dim=-1)  # [pages, 64, 512], [pages, 64, 64]
    return lambda: wrapper.run(q_latent, q_rope, latent, rope)


def fa3_bf16(case: Case, device: str = "cuda") -> Callable[[], torch.Tensor]:
    """FlashAttention-3 over prefix and tail, absorb form, BF16: out `[B * S, H, 512]` latent, rows of a request after
    each other; the same tokens as in `flashmla_bf16`.

    What SGLang takes for MLA on Hopper where nothing is said, with the arguments that its CUDA graphs capture it with,
    but for its pages of one token. From 65 query rows a request on the kernel copies pages of 64 with TMA.

    Source: SGLang 0.5.17, `FlashAttentionBackend.forward_decode` and `_bind_metadata_buffers`; for several query tokens
        `forward_extend`, which verifies drafts with the same call.
    """
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    def ends(counts: list[int]) -> torch.Tensor:  # [B + 1]
        return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)

    pages, n_pages = page_table(case.lengths, case.sizes, case.prefix // PAGE_TOKENS)
    # The kernel bounds its splits of the keys by the table's width, so the width is part of what is timed.
    table = torch.zeros(case.batch, CONTEXT_TOKENS // PAGE_TOKENS, dtype=torch.int32, device=device)
    table[:, : len(pages[0])] = torch.tensor(pages, dtype=torch.int32)
    cache, query = _cache_and_query(n_pages, case.batch, case.s_q, case.heads, device)
    q_latent, q_rope = query.flatten(0, 1).split([LATENT, DR], dim=-1)  # [B * S, H, 512], [B * S, H, 64]
    latent, rope = cache.split([LATENT, DR], dim=-1)
    options: dict[str, Any] = dict(
        q=q_rope,
        k_cache=rope,  # [pages, 64, 1, 64]
        v_cache=latent,  # [pages, 64, 1, 512]
        qv=q_latent,
        page_table=table,
        cache_seqlens=torch.tensor(case.lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=ends([case.s_q] * case.batch),
        cu_seqlens_k_new=ends(case.lengths),
        max_seqlen_q=case.s_q,
        softmax_scale=SCALE,
        causal=True,
        softcap=0.0,
        k_descale=None,
        v_descale=None,
        return_softmax_lse=False,
        num_splits=0,
        ver=3,
    )
    return lambda: flash_attn_with_kvcache(**options)


def flashinfer_fa3_naive(case: Case) -> Callable[[], Any]:
    """FlashInfer's FlashAttention-3 over one shared prefix, naive form, BF16, with lse: all rows are one sequence."""
    import flashinfer

    rows, heads, prefix = case.batch, case.heads, case.prefix
    query = torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(prefix, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
    value = torch.randn(prefix, heads, DV, device="cuda", dtype=torch.bfloat16)
    workspace = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
    of_rows, of_keys = (torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (rows, prefix))
    types = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    wrapper.plan(of_rows, of_keys, heads, heads, DN + DR, DV, causal=False, **types)
    return lambda: wrapper.run(query, key, value, return_lse=True)


def typhoon_parts(case: Case) -> Callable[[], Any]:
    """TyphoonMLA from the fastest kernels for its two parts, without the merge: `flashinfer_fa3_naive` over the shared
    prefix, then `flashmla_tail`."""
    shared, tail = flashinfer_fa3_naive(case), flashmla_tail(case)
    return lambda: (shared(), tail())


class Rival(NamedTuple):
    """A rival and what its records say."""

    make: Callable[[Case], Callable[[], Any]]
    dtype: str
    one_group: bool = False  # works only where all rows share one prefix

    def work(self, case: Case) -> tuple[int, int]:
        """Operations, and bytes of keys and values, each counted once."""
        lengths = case.tail_lengths if self.one_group else case.lengths
        sizes, shared_pages = ((), 0) if self.one_group else (case.sizes, case.prefix // PAGE_TOKENS)
        pages = page_table(lengths, sizes, shared_pages)[1]
        flops = case.latent_flops(lengths)
        read_bytes = pages * PAGE_TOKENS * (LATENT + DR) * (1 if self.dtype == "fp8" else 2)
        if self.one_group:
            flops += case.shared_flops
            read_bytes += 2 * case.prefix * case.heads * (DN + DR + DV)
        return flops, read_bytes


RIVALS = {
    "flashmla_bf16": Rival(flashmla_bf16, "bf16"),
    "flashmla_fp8": Rival(flashmla_fp8, "fp8"),
    "fa3_bf16": Rival(fa3_bf16, "bf16"),
    "flashinfer_mla": Rival(flashinfer_mla, "bf16"),
    "typhoon_parts": Rival(typhoon_parts, "bf16", one_group=True),
}
