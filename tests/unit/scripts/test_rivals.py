"""Rivals of the benchmarks get a case's cache, queries and pages; torch computes in place of their kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from bench.cases import DR, LATENT, PAGE_TOKENS, SCALE, Case, page_table
from bench.rivals import CONTEXT_TOKENS, fa3_bf16, flashinfer_mla


class Uneven(Case):
    """Rows of different lengths."""

    @property
    def lengths(self) -> list[int]:
        return [3, PAGE_TOKENS, 2 * PAGE_TOKENS + 1, 40]


CASES = [Case(130, 70, 2, (3,)), Case(0, 100, 2, (), 2, s_q=2), Uneven(0, 0, 2, (), 4, s_q=3)]


def agrees_with_every_row_alone(case: Case, rival: Callable[[], torch.Tensor]) -> None:
    """Against attention over each row's own pages: the same random cache and queries (same seed).

    Args:
        rival: makes the rival's input and runs it: `[B * S, H, 512]`, rows of a request after each other.
    """
    torch.manual_seed(0)
    out = rival()
    torch.manual_seed(0)
    table, n_pages = page_table(case.lengths, case.sizes, case.prefix // PAGE_TOKENS)
    cache = torch.randn(n_pages, PAGE_TOKENS, 1, LATENT + DR, dtype=torch.bfloat16)[:, :, 0].float()
    query = torch.randn(case.batch, case.s_q, case.heads, LATENT + DR, dtype=torch.bfloat16).float()
    for request, (pages, length) in enumerate(zip(table, case.lengths, strict=True)):
        keys = cache[pages].flatten(0, 1)
        for token in range(case.s_q):
            seen = keys[: length - (case.s_q - 1 - token)]
            weights = (query[request, token] @ seen.T * SCALE).softmax(-1)
            found, expected = out[request * case.s_q + token].float(), weights @ seen[:, :LATENT]
            assert torch.allclose(found, expected, rtol=0.02, atol=0.02)


def attend(query: torch.Tensor, keys: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """A request's rows `[S, H, 576]` over its keys `[tokens, 576]`: `[S, H, 512]`. Causal: the last row sees all."""
    scores = torch.einsum("qhd,kd->qhk", query.float(), keys.float()) * scale
    if causal:
        seen = len(keys) - len(query) + 1 + torch.arange(len(query))
        scores.masked_fill_(torch.arange(len(keys)) >= seen[:, None, None], float("-inf"))
    return torch.einsum("qhk,kd->qhd", scores.softmax(-1), keys[:, :LATENT].float()).to(query.dtype)


class PagedAttention:
    """FlashInfer's wrapper in torch: it takes what that of 0.6.15 takes, and does what its documentation says."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False, backend: str = "auto"
    ) -> None:
        assert backend == "fa3" and float_workspace_buffer.numel() >= 128 << 20

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {one.dtype for one in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type) == (512, 64, torch.bfloat16, torch.bfloat16)
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1 and len(kv_indices) == kv_indptr[-1]
        self.planned = qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, page_size, causal, sm_scale

    def run(self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> torch.Tensor:
        """q `[rows, heads, 512]` and `[rows, heads, 64]`; keys `[pages, page_size, 512]` and `[.., .., 64]`."""
        qo_indptr, kv_indptr, kv_indices, lengths, heads, page_size, causal, sm_scale = self.planned
        assert q_nope.shape == (qo_indptr[-1], heads, 512) and q_pe.shape == (qo_indptr[-1], heads, 64)
        assert ckv.shape[1:] == (page_size, 512) and kpe.shape == (len(ckv), page_size, 64)
        out = torch.empty_like(q_nope)
        for request, length in enumerate(lengths.tolist()):
            pages = kv_indices[kv_indptr[request] : kv_indptr[request + 1]].long()
            rows = slice(int(qo_indptr[request]), int(qo_indptr[request + 1]))
            keys = torch.cat([ckv, kpe], dim=-1)[pages].flatten(0, 1)[:length]
            out[rows] = attend(torch.cat([q_nope, q_pe], dim=-1)[rows], keys, sm_scale, causal)
        return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flashinfer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mla")
    module.BatchMLAPagedAttentionWrapper = PagedAttention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", module)
    agrees_with_every_row_alone(case, lambda: flashinfer_mla(case, device="cpu")())


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    qv: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    **others: Any,
) -> torch.Tensor:
    """FlashAttention-3 in torch, with what SGLang gives it for MLA. `others` do what they do by default, and say so."""
    defaults = dict(softcap=0.0, k_descale=None, v_descale=None, return_softmax_lse=False, num_splits=0, ver=3)
    assert others == defaults
    assert {one.dtype for one in (q, qv, k_cache, v_cache)} == {torch.bfloat16}
    assert {one.stride(-1) for one in (q, qv, k_cache, v_cache, page_table)} == {1}
    assert {one.dtype for one in (page_table, cache_seqlens, cu_seqlens_q, cu_seqlens_k_new)} == {torch.int32}
    pages, page_tokens, batch = len(k_cache), k_cache.shape[1], len(cache_seqlens)
    assert k_cache.shape == (pages, page_tokens, 1, 64) and v_cache.shape == (pages, page_tokens, 1, 512)
    assert (
        page_table.shape == (batch, CONTEXT_TOKENS // page_tokens) and 0 <= page_table.min() <= page_table.max() < pages
    )
    assert q.shape == (cu_seqlens_q[-1], q.shape[1], 64) and qv.shape == (*q.shape[:2], 512)
    assert cu_seqlens_q.diff().tolist() == [max_seqlen_q] * batch
    assert cu_seqlens_k_new.diff().tolist() == cache_seqlens.tolist()
    out = torch.empty_like(qv)
    for request, length in enumerate(cache_seqlens.tolist()):
        of_request = page_table[request, : -(-length // page_tokens)].long()
        keys = torch.cat([v_cache, k_cache], dim=-1)[of_request].flatten(0, 2)[:length]
        rows = slice(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1]))
        out[rows] = attend(torch.cat([qv, q], dim=-1)[rows], keys, softmax_scale, causal)
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fa3(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sgl_kernel", package)
    monkeypatch.setitem(sys.modules, "sgl_kernel.flash_attn", module)
    agrees_with_every_row_alone(case, lambda: fa3_bf16(case, device="cpu")())
