"""SGLang's layer for next-token prediction (NextN) with hidden sizes that its fused kernel refuses.

On a GPU the layer always norms and joins its two inputs in one kernel, which takes multiples of 256 only: a small model
could not draft for itself. Such sizes are normed here as the same layer does it on other devices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def around_eh_norm(
    original: Callable[..., torch.Tensor],
    inputs_embeds: torch.Tensor,
    previous_hidden: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """SGLang's `fused_eh_norm`.

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
