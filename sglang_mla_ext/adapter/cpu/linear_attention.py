"""Kimi's linear attention (KDA) in plain torch, for a machine without a GPU: SGLang has it in kernels for GPUs alone.
Such layers lie among those with MLA in hybrid models. What else is Kimi-K3's and has kernels alone is here, too.

    S_t = S' + beta_t · (v_t - S' · k_t) · k_t^T        S' = S_{t-1} · diag(exp(g_t))        o_t = scale · S_t · q_t

for each head, token by token, with keys and queries of length 1; g and beta are gates of the token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.cpu.stubs import absent_module

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

CHUNK_TOKENS = 64
"""SGLang keeps states of the tokens before these multiples for its radix tree."""


def around_keeps_states(original: Callable[[], bool]) -> bool:
    """Return that states are kept for the radix tree while passes overlap, as on GPUs: `track` does it here."""
    return True


def before_load(runner: ModelRunner, *args: Any) -> None:
    """Put the stand-ins in place where the model has such layers, before SGLang makes it and what calls them."""
    if installed.linear_layers(runner.server_args) is None:
        return
    _declare_absent()
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers import attn_residual
    from sglang.srt.layers.attention import hybrid_linear_attn_backend
    from sglang.srt.layers.attention.linear import kda_backend
    from sglang.srt.layers.attention.linear.kernels import kda_triton

    kda_triton.chunk_kda = chunk_kda
    kda_triton.fused_sigmoid_gating_delta_rule_update = decode_kda
    kda_backend.causal_conv1d_fn = convolve
    kda_backend.causal_conv1d_update = update_convolution
    hybrid_linear_attn_backend.track_mamba_states_if_needed = track
    hybrid_linear_attn_backend.track_mamba_states_all_layers = track_all_layers
    FusedRMSNormGated.forward = gated_norm
    # Kimi-K3's: a residual that is a mixture of those before it.
    attn_residual._mix_fused = attn_residual.aggregate_stream_torch
    torch.cuda.Stream = _NoStream  # type: ignore[assignment, misc]
    # SGLang pins which states it keeps, without asking.
    Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]


class _NoStream:
    """A second stream, which nothing is run on."""


_library: torch.library.Library | None = None


def _declare_absent() -> None:
    """Declare the module and operators that SGLang's code for another kind of linear attention imports; nobody calls
    them here."""
    global _library
    if _library is None and "sgl_kernel.mamba" not in sys.modules:
        sys.modules["sgl_kernel.mamba"] = absent_module("sgl_kernel.mamba")
        _library = torch.library.Library("sgl_kernel", "FRAGMENT")
        for name in ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu"):
            _library.define(f"{name}() -> ()")


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    **others: Any,
) -> Any:
    """Compute the attention of a prefill pass.

    Args:
        q, k, g: `[1, T, H, K]`; v: `[1, T, H, V]`; beta: `[1, T, H]`; g and beta as the projections give them.
        initial_state: `[slots, H, V, K]`, of which those of `initial_state_indices [requests]` are read and written.
        cu_seqlens: `[requests + 1]`, where each request's tokens begin.
        track_state: `[requests, H, V, K]`, written with the state before chunk number `track_chunk_idx [requests]`,
            where that is not negative.
    Returns:
        `o [1, T, H, V]`, and `[1, chunks of all requests, H, V, K]` with the states before them, if asked for.
    """
    decay, rate = _gates(g[0], beta[0], A_log, dt_bias, lower_bound)
    out, found = torch.empty_like(v), []
    for row, slot, tokens in _requests(cu_seqlens, initial_state_indices):
        state = initial_state[slot].float()
        states: list[Tensor] = []
        out[0, tokens], initial_state[slot] = _recurrence(
            q[0, tokens], k[0, tokens], v[0, tokens], decay[tokens], rate[tokens], state, states
        )
        if track_state is not None and track_chunk_idx is not None and (chunk := int(track_chunk_idx[row])) >= 0:
            track_state[row] = states[chunk]
        found += states
    return (out, torch.stack(found)[None]) if output_intermediate_states else out


def decode_kda(
    *,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    lower_bound: float | None = None,
    **others: Any,
) -> Tensor:
    """A decode step: one token of each request; shapes as of `chunk_kda`, a for g and b for beta."""
    out: Tensor = chunk_kda(
        q,
        k,
        v,
        a.reshape(q.shape),
        b.reshape(q.shape[:3]),
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )
    return out


def _gates(g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Logarithms of decays `[T, H, K]` and rates `[T, H]` of what the projections give."""
    size, g = A_log.float().exp().view(-1, 1), g.float() + dt_bias.float().view(g.shape[1:])
    decay = -size * softplus(g) if lower_bound is None else lower_bound * (size * g).sigmoid()
    return decay, beta.float().sigmoid()


def _requests(starts: Tensor, slots: Tensor) -> Iterator[tuple[int, int, slice]]:
    """Yield row number, slot and token range of each request that has tokens and a state."""
    bounds = starts.tolist()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0 and bounds[row] < bounds[row + 1]:
            yield row, slot, slice(bounds[row], bounds[row + 1])


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, state: Tensor, states: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The tokens of one request: `o [T, H, V]` and the state `[H, V, K]` behind them. `states` gets those before each
    chunk."""
    scale = k.shape[-1] ** -0.5
    q, k, v, kept = normalize(q.float(), dim=-1), normalize(k.float(), dim=-1), v.float(), decay.exp()
    out = torch.empty_like(v)
    for t in range(len(q)):
        if t % CHUNK_TOKENS == 0:
            states.append(state)
        state = state * kept[t, :, None]
        error = v[t] - (state @ k[t, :, :, None])[..., 0]
        state = state + (rate[t, :, None] * error)[:, :, None] * k[t, :, None]
        out[t] = (state @ q[t, :, :, None])[..., 0] * scale
    return out, state


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    **others: Any,
) -> Tensor:
    """The convolution along the tokens before them.

    Args:
        x: `[dim, T]`; weight: `[dim, width]`; bias: `[dim]`.
        conv_states: `[slots, dim, width - 1]`, the inputs before a request's tokens, read where `has_initial_state
            [requests]` says so, and written.
    Returns:
        `[dim, T]`.
    """
    out = torch.empty_like(x)
    for row, slot, tokens in _requests(query_start_loc, cache_indices):
        before = conv_states[slot] if has_initial_state[row] else torch.zeros_like(conv_states[slot])
        inputs = torch.cat([before.to(x.dtype), x[:, tokens]], dim=1)
        out[:, tokens] = _convolve(inputs, weight, bias)
        conv_states[slot] = inputs[:, -before.shape[1] :].to(conv_states.dtype)
    return out


def update_convolution(
    x: Tensor, conv_states: Tensor, weight: Tensor, bias: Tensor | None, *, conv_state_indices: Tensor, **others: Any
) -> Tensor:
    """The same in a decode step: `[requests, dim]` of `x [requests, dim]`."""
    slots = conv_state_indices.long().clamp(min=0)  # padding has none, and nobody reads its result
    inputs = torch.cat([conv_states[slots].to(x.dtype), x[:, :, None]], dim=2)  # [requests, dim, width]
    there = conv_state_indices >= 0
    conv_states[slots[there]] = inputs[there, :, 1:].to(conv_states.dtype)
    return _convolve(inputs, weight, bias)[..., 0]


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`[.., dim, n]` of `inputs [.., dim, n + width - 1]`."""
    windows = inputs.float().unfold(-1, weight.shape[1], 1)  # [.., dim, n, width]
    out = (windows * weight.float()[:, None]).sum(-1)
    return silu(out if bias is None else out + bias.float()[:, None]).to(inputs.dtype)


def track(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    **others: Any,
) -> None:
    """Keep a layer's states of some requests for the radix tree: `[slots, ..]` from a request's slot to another."""
    kept = mamba_track_mask[:batch_size]
    source, target = cache_indices[:batch_size][kept].long(), mamba_track_indices[:batch_size][kept].long()
    for states in (conv_states, ssm_states):
        states[target] = states[source]


def track_all_layers(conv_states_pool: Tensor, ssm_states_pool: Tensor, *args: Any, **others: Any) -> None:
    """The same of all layers, `[layers, slots, ..]`."""
    for states in zip(conv_states_pool, ssm_states_pool, strict=True):
        track(*states, *args, **others)


def gated_norm(norm: Any, x: Tensor, g: Tensor, **others: Any) -> Tensor:
    """RMS norm times a gate."""
    scaled: Tensor = x.float() * (x.float().square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.float()
    gate = g.float().sigmoid() if norm.activation == "sigmoid" else silu(g.float())
    return (scaled * gate).to(x.dtype)
