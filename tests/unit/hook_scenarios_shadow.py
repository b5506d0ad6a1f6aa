"""What our hooks do for the shadow check.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import DN, DR, HEADS, PROMPT, RANK, Server, batch_of
from release import OLDEST


def attend(server: Server, batch: Any) -> None:
    """All layers of a decode step, as SGLang's layer goes through them."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    rows = batch.batch_size
    for layer in server.layers:
        w_k, w_v = layer.kv_b_proj.weight.view(HEADS, -1, RANK).split([DN, layer.v_head_dim], dim=1)
        latent = torch.randn(rows, RANK + DR)
        q_nope, q_rope, k_rope = DeepseekMLAForwardMixin._split_q_nope_pe(
            layer, torch.randn(rows, HEADS, DN + DR), latent
        )
        query, key = torch.einsum("bhd,hdr->bhr", q_nope, w_k), latent[:, None, :RANK]
        attention = SimpleNamespace(layer_id=layer.attn_mqa.layer_id, scaling=0.2, v_head_dim=RANK)
        out = server.backend.forward_decode(query, key, key, attention, batch, q_rope=q_rope, k_rope=k_rope)
        layer.o_proj(torch.einsum("bhr,hdr->bhd", out.view(rows, HEADS, RANK), w_v).flatten(1))


def scenario_a_step_is_checked_behind_its_forward_pass() -> None:
    """Of the model, not of its draft; what was found is known at the next step, and what is wrong is shared no more."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    server = Server(verify_interval=1)
    model: Any = object.__new__(ModelRunner)
    draft: Any = object.__new__(ModelRunner)
    model.is_draft_worker, draft.is_draft_worker = False, True
    requests = server.run(PROMPT + "-a", PROMPT + "-b")

    read_early = "war_fastpath_read_done_event" if OLDEST else "shared_read_done_event"

    def step() -> None:
        server.forward("DECODE", requests)
        batch = batch_of(server, requests, new_tokens=1)
        server.backend.init_forward_metadata(batch)
        attend(server, batch)
        setattr(model, read_early, "the graph has read slots")
        assert draft.forward(batch) == model.forward(batch) == "SGLang's output"
        # Without the event the scheduler waits for the check, too, before it gives a request's place to another.
        assert getattr(model, read_early) is None

    for checks in range(3):
        step()
        assert server.counters.shadow_checks == checks and server.counters.shadow_failures == 0
    assert max(server.steps.shadow.pop_errors()) < 1e-5
    server.buffers[0].v_t.normal_()
    step()
    assert server.prefixes.plan.segments and server.counters.shadow_failures == 0
    server.forward("DECODE", requests)
    assert not server.shares() and server.counters.shadow_failures == 1
    assert max(server.steps.shadow.pop_errors()) > 0.1
    assert server.pool.used_chunks == 0


def scenario_a_server_without_the_check_looks_at_nothing() -> None:
    from sglang.srt.model_executor.model_runner import ModelRunner

    server, model = Server(), object.__new__(ModelRunner)
    model.is_draft_worker = False
    server.forward("DECODE", server.run(PROMPT + "-a", PROMPT + "-b"))
    assert server.steps.shadow is None and model.forward(None) == "SGLang's output"
