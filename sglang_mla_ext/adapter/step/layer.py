"""The hooks inside DeepSeek's MLA layer.

SGLang's absorbed forward is: q -> (q_nope, q_rope) -> absorb q_nope through w_kc -> attention backend -> w_vc ->
o_proj. Naive attention needs q_nope before it is absorbed, and its result is not in the latent space, so it is merged
between w_vc and o_proj. Both are taken at the seams: after `_split_q_nope_pe`, and as o_proj's input. The layer's own
code in between stays SGLang's, with every form of w_vc (BF16, FP8, DeepGEMM) that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.step import prefill
from sglang_mla_ext.adapter.step.relay import relay
from sglang_mla_ext.adapter.step.rerun import our_part

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


def forward_method(attention: DeepseekV2AttentionMLA, forward_batch: Any) -> Any:
    """Which of the layer's forward methods a phase takes: keys per head, in chunks, for prefill over expanded prefixes.

    Otherwise FlashMLA's choice, and always absorb on the CPU.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    # A captured prefill graph has absorb in it and asks for nothing else.
    captured = handlers.is_in_tc_piecewise_cuda_graph() or handlers.is_in_breakable_cuda_graph()
    with our_part("looking for a plan"):
        planned = prefill.plan_of(forward_batch) is not None
    if planned and not captured:
        return handlers.AttnForwardMethod.MHA_CHUNKED_KV
    if not torch.cuda.is_available():
        return handlers.AttnForwardMethod.MLA
    return handlers.AttentionBackendRegistry.get_handler("flashmla")(attention, forward_batch)


def take_parts() -> None:
    """Let the layer hand over absorbed query and key in two parts, content and rotary part. Otherwise it joins them,
    which is two more copies in every layer."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    backends = forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    if BACKEND_NAME not in backends:
        backends.append(BACKEND_NAME)  # in place: other modules have the same list


def after_split_q(result: tuple[torch.Tensor, ...], attention: DeepseekV2AttentionMLA, *args: Any) -> None:
    """Keep the query before absorption, `[tokens, heads, qk_nope_head_dim]`, for the attention call that follows."""
    if relay.takes_query and id(attention) in relay.layers:
        relay.q_nope = result[0]


def attention_layers(runner: ModelRunner) -> list[DeepseekV2AttentionMLA]:
    """The model's MLA layers on this rank, by layer id.

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


def merge_before_o_proj(
    layers: Sequence[DeepseekV2AttentionMLA], merge: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Have `merge` add the shared part to what each layer hands to its output projection, where there is one, and their
    queries be kept for it. Before any hook that the layer has there itself: a gate is of the merged result."""

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if relay.tail_lse is None:
            return None
        return merge(args[0]), *args[1:]

    relay.layers = frozenset(map(id, layers))
    for layer in layers:
        layer.o_proj.register_forward_pre_hook(before, prepend=True)
