"""Where the shared part is merged in a layer that has hooks of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.step import layer as layer_module
from sglang_mla_ext.adapter.step.layer import merge_before_o_proj
from sglang_mla_ext.adapter.step.passes import passes


@pytest.mark.parametrize("shares", [False, True])
def test_a_gate_is_of_the_merged_result(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    """As GigaChat 3.5 has one: a hook before its output projection, made with the layer."""
    projection = torch.nn.Identity()
    gate = torch.tensor([2.0, 0.5])

    def before(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] * gate,)

    projection.register_forward_pre_hook(before)
    monkeypatch.setattr(layer_module, "_ours", frozenset())
    monkeypatch.setattr(passes.now, "tail_lse", torch.zeros(1) if shares else None)
    layer: Any = SimpleNamespace(o_proj=projection)
    merge_before_o_proj([layer], lambda tail_out: tail_out + 1)
    tail_out = torch.tensor([3.0, 4.0])
    assert torch.equal(projection(tail_out), (tail_out + shares) * gate)
