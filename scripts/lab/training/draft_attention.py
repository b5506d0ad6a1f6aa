"""Attention of a draft step: causal over the keys of the first step, and over the row's own keys of the later steps.

    out = softmax(scale * [q k'; q own_k']) [v; own_v]

A layer that drafts several tokens one after another is run again on its own hidden states. In step s, the row of a
position has the keys of the first step up to that position, which are made of the model's hidden states, and one key
from each later step so far. No row sees another row's keys of those steps.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.training.network import Packed

AttendOwn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Packed, float], Tensor]
"""q, k `[tokens, heads, dim]`, v `[tokens, heads, v_dim]`, own_k `[tokens, own, heads, dim]`, own_v, documents, scale
-> `[tokens, heads, v_dim]`."""


def attend_own_each(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, packed: Packed, scale: float
) -> Tensor:
    """Attend one document after another, with all scores in memory. Runs anywhere."""
    own = torch.einsum("thd,tehd->hte", q, own_k) * scale
    outs = []
    for begin, end in pairwise(packed.starts.tolist()):
        if end == begin:
            continue
        part = slice(begin, end)
        scores = torch.einsum("qhd,khd->hqk", q[part], k[part]) * scale
        future = torch.ones(end - begin, end - begin, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        weights = torch.cat((scores, own[:, part]), dim=-1).float().softmax(-1).to(v.dtype)
        causal, single = weights.split((end - begin, own.shape[-1]), dim=-1)
        outs.append(torch.einsum("hqk,khd->qhd", causal, v[part]))
        outs[-1] = outs[-1] + torch.einsum("hte,tehd->thd", single, own_v[part])
    return torch.cat(outs)


class _Merged(torch.autograd.Function):
    """torch's FlashAttention over the shared keys, merged with the own ones by log-sum-exp.

    Its backward kernel recomputes the softmax from the lse and takes the sum of out and its gradient from `out`: given
    both of the union, it returns the gradients of attention over the union.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, packed: Packed, scale: float
    ) -> Tensor:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, packed.starts, packed.starts, packed.longest, packed.longest, 0.0, True, False, scale=scale
        )  # [tokens, heads, dim], [heads, tokens]
        scores = torch.einsum("thd,tehd->the", q.float(), own_k.float()) * scale
        shared = lse.transpose(0, 1).unsqueeze(-1)  # [tokens, heads, 1]
        total = torch.cat((shared, scores), dim=-1).logsumexp(-1, keepdim=True)
        weights = (scores - total).exp()
        merged = out.float() * (shared - total).exp() + torch.einsum("the,tehd->thd", weights, own_v.float())
        merged = merged.to(out.dtype)
        lse = total.squeeze(-1).transpose(0, 1).contiguous()
        ctx.save_for_backward(q, k, v, own_k, own_v, merged, lse, weights, state, unused, packed.starts)
        ctx.longest, ctx.scale = packed.longest, scale
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, own_k, own_v, out, lse, weights, state, unused, starts = ctx.saved_tensors
        grad, longest = grad.contiguous(), ctx.longest
        grad_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, lse, starts, starts, longest, longest, 0.0, True, state, unused), scale=ctx.scale
        )
        wide = grad.float()
        of_weights = torch.einsum("thd,tehd->the", wide, own_v.float())
        of_scores = weights * (of_weights - (wide * out.float()).sum(-1, keepdim=True)) * ctx.scale
        grad_q = grad_q + torch.einsum("the,tehd->thd", of_scores, own_k.float()).to(q.dtype)
        own_k_grad = torch.einsum("the,thd->tehd", of_scores, q.float()).to(q.dtype)
        own_v_grad = torch.einsum("the,thd->tehd", weights, wide).to(q.dtype)
        return grad_q, grad_k, grad_v, own_k_grad, own_v_grad, None, None


@torch.compiler.disable
def attend_own_packed(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, packed: Packed, scale: float
) -> Tensor:
    """Attend all documents at once (CUDA, BF16). The kernel wants values padded with zeros to the keys' dimension."""
    v_dim = v.shape[-1]
    padding = (0, q.shape[-1] - v_dim)
    tensors = (q, k, F.pad(v, padding), own_k, F.pad(own_v, padding))
    with torch.autocast(q.device.type, enabled=False):  # scores of own keys stay in float32
        out: Tensor = _Merged.apply(*(x.to(torch.bfloat16).contiguous() for x in tensors), packed, scale)
    return out[..., :v_dim]


def own_attention(device: torch.device) -> AttendOwn:
    """Return the attention of later steps for a device."""
    return attend_own_packed if device.type == "cuda" else attend_own_each
