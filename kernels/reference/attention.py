"""Every operation in plain torch: the reference of the tests, and what a server without a GPU runs.

Computed in float32, or in float64 where an input is float64. Shapes: B rows (requests), H heads, n tokens,
r = kv_lora_rank, dn = qk_nope_head_dim, dr = qk_rope_head_dim, dv = v_head_dim. Every `lse` is the natural logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..constants import FP8_MAX
from ..storage.expanded import to_fp8


def expand(latent: Tensor, w_kc: Tensor, w_vc: Tensor) -> tuple[Tensor, Tensor]:
    """Uncompress latent rows into keys and values per head.

    Args:
        latent: `[n, r]`, the content part of the latent rows (after its norm, without the rotary part).
        w_kc: `[H, dn, r]`; w_vc: `[H, r, dv]`, the two halves of `kv_b_proj`.
    Returns:
        `k_nope [n, H, dn]` and `v [n, H, dv]`.
    Source: DeepSeek-V2, equations 9 to 11.
    """
    latent, w_kc, w_vc = _same_precision(latent, w_kc, w_vc)
    k_nope = torch.einsum("nr,hdr->nhd", latent, w_kc)
    v = torch.einsum("nr,hrd->nhd", latent, w_vc)
    return k_nope, v


def naive(
    q_nope: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every row over the same expanded prefix; no mask, every query sees every key.

    Args:
        q_nope: `[B, H, dn]`; q_rope: `[B, H, dr]`.
        k_nope: `[n, H, dn]`; k_rope: `[n, dr]`, one for all heads; v: `[n, H, dv]`.
    Returns:
        `out [B, H, dv]` and `lse [B, H]`; 0 and -inf when n is 0.
    Source: TyphoonMLA, algorithm 1, lines 1 to 4.
    """
    q_nope, q_rope, k_nope, k_rope, v = _same_precision(q_nope, q_rope, k_nope, k_rope, v)
    scores = torch.einsum("bhd,nhd->bhn", q_nope, k_nope)
    scores = (scores + torch.einsum("bhd,nd->bhn", q_rope, k_rope)) * softmax_scale  # [B, H, n]
    weights, lse = _softmax(scores)
    return torch.einsum("bhn,nhd->bhd", weights, v), lse


def causal(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Attention of new tokens among themselves, with keys per head: token i sees tokens 0 to i.

    Args:
        q, k: `[n, H, dn + dr]`; v: `[n, H, dv]`.
    Returns:
        `out [n, H, dv]` and `lse [n, H]`.
    """
    q, k, v = _same_precision(q, k, v)
    scores = torch.einsum("ihd,jhd->ihj", q, k) * softmax_scale  # [n, H, n]
    later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    weights, lse = _softmax(scores.masked_fill(later[:, None, :], -torch.inf))
    return torch.einsum("ihj,jhd->ihd", weights, v), lse


def naive_fp8(
    q_nope: Tensor,
    q_rope: Tensor,
    k_nope: Tensor,
    k_rope: Tensor,
    v: Tensor,
    k_scale: Tensor,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """`naive` with the rounding steps of the FP8 kernel: the kernel should be no less exact than this.

    The content query is rounded to e4m3 with one scale for each row and head; the rotary query is divided by both
    scales and rounded to BF16; the weights, scaled so that the largest is 448, are rounded to e4m3, but their sum is
    taken before that.

    Args:
        k_nope, v: values read back from FP8 storage (`ExpandedBuffers.read`); others as for `naive`.
        k_scale: `[H]` float32.
    """
    q_nope, q_rope = q_nope.float(), q_rope.float()
    q_scale = q_nope.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8) / FP8_MAX  # [B, H, 1]
    q_nope = to_fp8(q_nope / q_scale).float() * q_scale
    both = q_scale * k_scale[:, None]
    q_rope = (q_rope / both).to(torch.bfloat16).float() * both
    scores = torch.einsum("bhd,nhd->bhn", q_nope, k_nope.float())
    scores = (scores + torch.einsum("bhd,nd->bhn", q_rope, k_rope.float())) * softmax_scale
    weights = FP8_MAX * torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    out = torch.einsum("bhn,nhd->bhd", to_fp8(weights).float(), v.float()) / weights.sum(dim=-1)[..., None]
    return out, torch.logsumexp(scores, dim=-1)


def absorb(
    q_absorbed: Tensor, q_rope: Tensor, latent_rows: Tensor, lengths: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of every row over its own latent rows, in the compressed space.

    Args:
        q_absorbed: `[B, H, r]`, `q_nope` times `w_kc`; q_rope: `[B, H, dr]`.
        latent_rows: `[B, max_len, r + dr]`, content and then rotary; rows from `lengths[b]` on are not read as numbers
            and may hold NaN.
        lengths: `[B]` integers, 0 allowed.
    Returns:
        `out_latent [B, H, r]` (`w_vc` still to be applied) and `lse [B, H]`; 0 and -inf where the length is 0.
    Source: DeepSeek-V2, section 2.1.2; TyphoonMLA, algorithm 1, lines 5 to 7.
    """
    q_absorbed, q_rope, latent_rows = _same_precision(q_absorbed, q_rope, latent_rows)
    max_len, rank = latent_rows.shape[1], q_absorbed.shape[-1]
    valid = torch.arange(max_len, device=lengths.device) < lengths[:, None]  # [B, max_len]
    latent_rows = latent_rows.masked_fill(~valid[:, :, None], 0.0)
    query = torch.cat([q_absorbed, q_rope], dim=-1)  # [B, H, r + dr]
    scores = torch.einsum("bhd,bnd->bhn", query, latent_rows) * softmax_scale  # [B, H, max_len]
    weights, lse = _softmax(scores.masked_fill(~valid[:, None, :], -torch.inf))
    return torch.einsum("bhn,bnr->bhr", weights, latent_rows[..., :rank]), lse


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial attentions over disjoint keys.

    Args:
        out_a, out_b: `[rows, heads, v_dim]`, each normalised over its own keys; not read where its lse is -inf.
        lse_a, lse_b: `[rows, heads]` float32, natural log; -inf where a part has no keys.
    Returns:
        `out [rows, heads, v_dim]` and `lse [rows, heads]` over the union; rows with no key in either part are 0
        and -inf.
    Source: TyphoonMLA, algorithm 1, line 8.
    """
    out_a, out_b, lse_a, lse_b = _same_precision(out_a, out_b, lse_a, lse_b)
    highest = torch.maximum(lse_a, lse_b)  # [rows, heads]
    out, total = torch.zeros_like(out_a), torch.zeros_like(lse_a)
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        empty = part_lse == -torch.inf
        weight = torch.exp(part_lse - highest).masked_fill(empty, 0.0)  # [rows, heads]
        out += weight[..., None] * part.masked_fill(empty[..., None], 0.0)
        total += weight
    # Divide by the sum, not by exp(lse): with a rounded lse the weights would no longer add up to one.
    return out / total.masked_fill(total == 0, 1.0)[..., None], highest + torch.log(total.masked_fill(total == 0, 1.0))


@dataclass(frozen=True)
class Errors:
    """Measures of a result's error against its reference; see `errors`."""

    rel_l2: float
    max_rel: float
    cos_dist: float


def errors(actual: Tensor, expected: Tensor) -> Errors:
    """Three measures of the error of `actual`, computed in float64 over all elements.

    Where both hold the same infinity there is no error; a NaN, or an infinity in only one of them, makes all measures
    infinite.

    Returns:
        rel_l2: |actual - expected| / |expected|, L2 norms.
        max_rel: the largest |actual - expected| / max(|expected|, root mean square of expected) of an element.
        cos_dist: 1 - 2·actual·expected / (|actual|² + |expected|²), 0 for equal tensors (FlashMLA's measure).
    """
    actual, expected = actual.double().flatten(), expected.double().flatten()
    finite = torch.isfinite(expected)
    wrong = torch.isnan(actual) | torch.isnan(expected) | ((actual != expected) & ~(finite & torch.isfinite(actual)))
    if wrong.any():
        return Errors(torch.inf, torch.inf, torch.inf)
    actual, expected = actual[finite], expected[finite]
    difference = (actual - expected).abs()
    norm = expected.norm()
    if norm == 0:
        worst = torch.inf if difference.any() else 0.0
        return Errors(worst, worst, worst)
    rms = norm / expected.numel() ** 0.5
    return Errors(
        rel_l2=(difference.norm() / norm).item(),
        max_rel=(difference / expected.abs().clamp_min(rms)).max().item(),
        cos_dist=(1 - 2 * (actual @ expected) / (actual @ actual + expected @ expected)).item(),
    )


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and lse over the last axis; a row with no finite score (or no score) has weights 0 and lse -inf."""
    lse = torch.logsumexp(scores, dim=-1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    return torch.exp(scores - shift[..., None]), lse


def _same_precision(*tensors: Tensor) -> list[Tensor]:
    """Convert all to float64 if one of them is, else to float32."""
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return [t.to(dtype) for t in tensors]
