"""What our hooks do for a layer that drafts.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

import torch


def scenario_a_drafting_layer_has_any_hidden_size() -> None:
    """Through the name that SGLang's layer calls; 512 is one that its own kernel takes, which needs a GPU."""
    from hooked_worker import refused
    from sglang.srt.models import deepseek_nextn

    generator = torch.Generator().manual_seed(0)
    for hidden in (64, 384):
        embedded, states = (torch.randn(5, hidden, generator=generator) for _ in range(2))
        weights = [1 + 0.1 * torch.randn(hidden, generator=generator) for _ in range(2)]
        found = deepseek_nextn.fused_eh_norm(embedded, states, *weights, 1e-6)
        for x, weight, half in zip((embedded, states), weights, found.chunk(2, dim=-1), strict=True):
            expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
            torch.testing.assert_close(half, expected)
    x, weight = torch.randn(2, 512), torch.ones(512)
    kind, message = refused(lambda: deepseek_nextn.fused_eh_norm(x, x, weight, weight, 1e-6))
    assert kind == "RuntimeError" and "fused_eh_norm: unsupported dtype" in message
