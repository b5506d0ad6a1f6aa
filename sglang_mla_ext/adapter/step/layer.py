"""The hooks inside DeepSeek's MLA layer.

SGLang's absorbed forward is: q -> (q_nope, q_rope) -> absorb q_nope through w_kc -> attention backend -> w_vc ->
o_proj. Naive attention needs q_nope before it is absorbed, and its result is not in the latent space, so it is merged
between w_vc and o_proj. Both are taken at the seams: after `_split_q_nope_pe`, and as o_proj's input. The layer's own
code in between stays SGLang's, with every form of w_vc (BF16, FP8, DeepGEMM) that it knows.

Queries that a model scales by their positions are scaled at the first seam, and where prefill makes them per head.

In prefill SGLang computes with keys per head, chunk by chunk of the cached prefix. Where that is expanded, attention to
it comes first (prefill.py), and SGLang's chunks begin behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.failure import our_part
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.reasons import Fallback

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


_ours: Collection[int] = frozenset()
"""Ids of the layers whose attention is our backend's. A draft model's is another's."""


def forward_method(attention: DeepseekV2AttentionMLA, forward_batch: Any) -> Any:
    """Return the layer's forward method for a phase: keys per head, in chunks, for prefill over expanded prefixes.

    Otherwise FlashMLA's choice, and always absorb in a pass that was chosen for it, and on the CPU.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    with our_part(Fallback.CHOOSE_ATTENTION):
        expanded = passes.now.prefill is not None and not absorbs_prefill()
    if expanded:
        return handlers.AttnForwardMethod.MHA_CHUNKED_KV
    if passes.now.absorbs or not torch.cuda.is_available():
        return handlers.AttnForwardMethod.MLA
    return handlers.AttentionBackendRegistry.get_handler("flashmla")(attention, forward_batch)


def absorbs_prefill() -> bool:
    """Return whether the pass is a prefill by absorb that may share (prefill_graph.py): one that CUDA graphs are
    captured from, that has them in it, or that is as if it had."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    captured = handlers.is_in_tc_piecewise_cuda_graph() or handlers.is_in_breakable_cuda_graph()
    return passes.now.absorbs or bool(captured)


def accept_query_parts(wanted: bool = True) -> None:
    """Let the layer hand over absorbed query and key in two parts, content and rotary part. Otherwise it joins them,
    which is two more copies in every layer, and scales the query, where the model does so by its position."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    backends = forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    if wanted != (BACKEND_NAME in backends):  # in place: other modules have the same list
        (backends.append if wanted else backends.remove)(BACKEND_NAME)


def after_split_q(result: tuple[torch.Tensor, ...], attention: DeepseekV2AttentionMLA, *args: Any) -> None:
    """Keep the query before absorption, `[tokens, heads, qk_nope_head_dim]`, for the attention call that follows."""
    step = passes.now
    if id(attention) in _ours and (step.takes_query or absorbs_prefill()):
        step.q_nope = result[0]
        if step.query_scaling is not None:
            with our_part(Fallback.SCALE_QUERY):
                step.q_nope = scaled(result[0])


def after_query_scaling(result: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """`_get_llama_4_scaling`, at the beginning of a forward pass: `[tokens, 1, 1]`, which SGLang multiplies queries by
    behind absorption."""
    passes.now.query_scaling = result


def scaled(query: torch.Tensor) -> torch.Tensor:
    """Queries of a pass, `[tokens, heads, size]`, by their positions."""
    scaling = passes.now.query_scaling
    assert scaling is not None, "SGLang has computed it at the beginning of the pass"
    return (query * scaling).to(query.dtype)


def after_queries_per_head(
    result: tuple[torch.Tensor, ...], attention: DeepseekV2AttentionMLA, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...] | None:
    """`forward_normal_prepare`, of prefill with keys per head: scale its queries, too. SGLang does not, so that its
    answers depend on which tokens came together in a pass.

    Args:
        result: query `[tokens, heads, qk_nope_head_dim + qk_rope_head_dim]`, and what else prefill takes.
    """
    if passes.now.query_scaling is None or id(attention) not in _ours:
        return None
    with our_part(Fallback.SCALE_QUERY):
        query, *rest = result
        return scaled(query), *rest


def around_chunk_info(original: Callable[..., None], forward_batch: Any, device: torch.device, **packing: bool) -> None:
    """`ForwardBatch.prepare_chunked_prefix_cache_info`: SGLang's chunks start where the expanded part ends.

    Args:
        packing: how other backends than FlashMLA want the chunks; from 0.5.23 on.
    """
    plan = passes.now.prefill
    if plan is None or forward_batch.prefix_chunk_len is not None:
        original(forward_batch, device, **packing)
        return
    with our_part(Fallback.SKIP_EXPANDED):
        rest = copy.copy(forward_batch)  # as if the cached prefixes were what is left of them
        lens = zip(forward_batch.extend_prefix_lens_cpu, plan.covered, strict=True)
        rest.extend_prefix_lens_cpu = [total - there for total, there in lens]
        if any(rest.extend_prefix_lens_cpu):  # else SGLang asks for nothing on the device
            # Pinned, and not waited for: the pass before this one may still run.
            covered = torch.tensor(plan.covered, dtype=torch.int32, pin_memory=forward_batch.extend_prefix_lens.is_cuda)
            starts = covered.to(forward_batch.extend_prefix_lens.device, non_blocking=True)
            rest.extend_prefix_lens = forward_batch.extend_prefix_lens - starts
    original(rest, device, **packing)
    with our_part(Fallback.SKIP_EXPANDED):
        for name, value in vars(rest).items():
            if name not in ("extend_prefix_lens", "extend_prefix_lens_cpu"):
                setattr(forward_batch, name, value)
        if forward_batch.num_prefix_chunks:
            forward_batch.prefix_chunk_starts = forward_batch.prefix_chunk_starts + starts
            forward_batch.prefix_chunk_starts_cpu = forward_batch.prefix_chunk_starts_cpu + covered
    if forward_batch.num_prefix_chunks:
        forward_batch.prepare_chunked_kv_indices(device)


def around_prefix_attention(
    original: Callable[..., torch.Tensor],
    layer: DeepseekV2AttentionMLA,
    q: torch.Tensor,
    accum_output: torch.Tensor,
    accum_lse: torch.Tensor,
    forward_batch: Any,
) -> torch.Tensor:
    """`_chunked_prefix_attn_mha`: first the expanded part, in one go, then SGLang's chunks.

    Args:
        q: `[rows, heads, qk_nope_head_dim + qk_rope_head_dim]`.
        accum_output: `[rows, heads, v_head_dim]`, accum_lse: `[rows, heads]` of the new tokens among themselves.
    """
    with our_part(Fallback.PREFILL_ATTENTION):
        if (plan := passes.now.prefill) is not None:
            parts = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
            plan.attend(layer, parts, accum_output, accum_lse)
    return original(layer, q=q, accum_output=accum_output, accum_lse=accum_lse, forward_batch=forward_batch)


def attention_layers(runner: ModelRunner) -> list[DeepseekV2AttentionMLA]:
    """The model's MLA layers on this rank, by layer id: those of DeepSeek's class, and of classes derived from it.

    Raises:
        ValueError: the model has none that we know.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    layers = [module for module in runner.model.modules() if isinstance(module, DeepseekV2AttentionMLA)]
    if not layers:
        raise ValueError(
            f"hybrid_mla knows DeepSeek's MLA layer, which {type(runner.model).__name__} does not have: "
            "choose another --attention-backend."
        )
    return sorted(layers, key=lambda layer: layer.attn_mqa.layer_id)


def take_over(layers: Sequence[DeepseekV2AttentionMLA]) -> None:
    """The attention of these layers is our backend's: their queries are kept where that wants them, and scaled."""
    global _ours
    _ours = frozenset(map(id, layers))


def merge_before_o_proj(
    layers: Sequence[DeepseekV2AttentionMLA], merge: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Have `merge` add the shared part to what each layer hands to its output projection, where there is one. Before
    any hook that the layer has there itself: a gate is of the merged result."""

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if passes.now.tail_lse is None and not absorbs_prefill():
            return None
        return merge(args[0]), *args[1:]

    for layer in layers:
        layer.o_proj.register_forward_pre_hook(before, prepend=True)


def hand_over_queries(layers: Sequence[DeepseekV2AttentionMLA]) -> None:
    """Give the attention call of a prefill by absorb the query before absorption, as `q_nope`. As an argument of the
    call it follows SGLang's prefill graphs, in which each layer and size has its own."""

    def before(
        module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if passes.now.q_nope is None or not absorbs_prefill():
            return None
        q_nope, passes.now.q_nope = passes.now.q_nope, None
        return args, kwargs | {"q_nope": q_nope}

    for layer in layers:
        layer.attn_mqa.register_forward_pre_hook(before, with_kwargs=True)


def around_eh_norm(
    original: Callable[..., torch.Tensor],
    inputs_embeds: torch.Tensor,
    previous_hidden: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`fused_eh_norm` of SGLang's layer for next-token prediction (NextN), for hidden sizes that its kernel refuses.

    On a GPU the layer always norms and joins its two inputs in one kernel, which takes multiples of 256 only: a small
    model could not draft for itself. Such sizes are normed here as the same layer does it on other devices.

    Args:
        inputs_embeds, previous_hidden: `[rows, hidden]`.
        enorm_weight, hnorm_weight: `[hidden]`.
    Returns:
        `[rows, 2 * hidden]`: the normed embeddings, then the normed states.
    """
    from sglang.kernels.ops.layernorm.fused_eh_norm import is_supported_fused_eh_norm_hidden_size

    hidden = inputs_embeds.shape[-1]
    if is_supported_fused_eh_norm_hidden_size(hidden):
        return original(inputs_embeds, previous_hidden, enorm_weight, hnorm_weight, eps)
    halves = ((inputs_embeds, enorm_weight), (previous_hidden, hnorm_weight))
    return torch.cat([F.rms_norm(x, (hidden,), weight, eps) for x, weight in halves], dim=-1)
