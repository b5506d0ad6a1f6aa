"""What our hooks do in a server with speculative decoding: for verify steps, for the draft model, and between them.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import DN, DR, DV, HEADS, PAGE, PROMPT, RANK, Server, batch_of, make_runner
from release import OLDEST, draft_backends

QUERIES = 3


# ---- the draft model


def scenario_a_draft_model_gets_sglangs_own_backend() -> None:
    """Also where nobody has named one for it, and nothing is taken from the model's own."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_mla_ext.adapter.step.session import process

    server = Server()
    steps = process.session.steps
    for mla, on_gpu in ((True, "flashmla"), (False, "flashinfer")):
        name = on_gpu if torch.cuda.is_available() else "torch_native"
        ATTENTION_BACKENDS[name] = lambda runner, name=name: (name, runner)
        draft = make_runner(is_draft_worker=True, use_mla_backend=mla)
        assert ATTENTION_BACKENDS["hybrid_mla"](draft) == (name, draft)
    assert process.session.steps is steps is server.steps


def scenario_a_drafts_backends_know_their_names() -> None:
    """By which its layers take their forward methods; SGLang 0.5.17 leaves them without."""

    class Backend:
        prefill_attention_backend_str = decode_attention_backend_str = None

    def named(backend: Any) -> tuple[Any, Any]:
        return backend.prefill_attention_backend_str, backend.decode_attention_backend_str

    steps = Backend()
    steps.attn_backends = [Backend(), Backend()]
    extend = Backend()
    for given, old in (("flashmla", ("flashmla", "flashmla")), (None, (None, None))):
        expected = old if OLDEST else ("flashmla", "flashmla")  # SGLang names them
        factory = draft_backends(given, steps, extend)
        for each in (steps, *steps.attn_backends, extend):
            each.prefill_attention_backend_str = each.decode_attention_backend_str = None
        assert factory.create_decode_backend() is steps and factory.create_draft_extend_backend() is extend
        assert {named(each) for each in (steps, *steps.attn_backends, extend)} == {expected}
        factory.speculative_num_steps = 1
        assert factory.create_decode_backend() is None


def scenario_a_drafts_prefill_does_not_take_the_models_plan() -> None:
    """SGLang runs both on the same batch, with the same list of lengths."""
    server = Server(queries=QUERIES)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    lens = {"prefix_lens": [13 * PAGE, 8 * PAGE], "new_tokens": [5, 3]}
    batch = server.forward("EXTEND", requests, **lens)
    assert server.coming.prefill is not None
    of_draft = server.forward("EXTEND", requests, draft=True, **lens)
    lens_of_draft, lens_of_model = of_draft.extend_prefix_lens_cpu, batch.extend_prefix_lens_cpu
    assert lens_of_draft == lens_of_model and (lens_of_draft is lens_of_model) is OLDEST
    assert server.coming.prefill is None


# ---- verify steps


def scenario_a_verify_step_is_planned_by_requests_and_shared_by_rows() -> None:
    """Whatever passes the draft model makes before it and behind it."""
    server = Server(queries=QUERIES)
    other, *sharing = server.run("other", PROMPT + "-a", PROMPT + "-b")
    requests = [sharing[0], other, sharing[1]]
    server.forward("DECODE", requests, draft=True)
    batch = server.forward("TARGET_VERIFY", requests)
    assert batch.forward_mode.is_extend(), "SGLang counts it as prefill, too"
    (segment,) = server.coming.plan.segments
    assert segment.rows == (0, 2) and segment.tokens == 13 * PAGE
    (of_rows,) = server.coming.rows.by_row([segment])
    assert of_rows.rows == (0, 1, 2, 6, 7, 8)
    assert server.coming.plan.prefix_lens == (13 * PAGE, 0, 13 * PAGE)
    assert server.coming.prefill is None
    server.backend.init_forward_metadata(batch_of(server, requests, drafts=QUERIES))
    assert server.coming.takes_query
    lens = {"prefix_lens": [13 * PAGE] * 3, "new_tokens": [QUERIES] * 3}
    server.forward("DRAFT_EXTEND_V2", requests, draft=True, **lens)
    assert not server.coming.takes_query
    counters = server.counters
    assert (counters.steps_verify, counters.steps_naive, counters.steps_absorb) == (1, 1, 0)
    assert counters.max_group_size == 2 and counters.forward_passes == 1, "the draft model's passes are not counted"


def scenario_requests_come_and_go_between_verify_steps() -> None:
    """One that finishes, or is aborted or retracted, is in no batch any more and lets go of its nodes."""
    server = Server(queries=QUERIES)

    def rows(*requests: Any) -> list[tuple[int, ...]]:
        server.forward("TARGET_VERIFY", list(requests))
        return [segment.rows for segment in server.coming.rows.by_row(server.coming.plan.segments)]

    first, second, third = server.run(PROMPT + "-a", PROMPT + "-b", PROMPT + "-c")
    assert rows(first, second, third) == [tuple(range(9))]
    server.tree.finish(second)
    assert rows(first, third) == [tuple(range(6))]
    (new,) = server.run(PROMPT + "-d")
    assert rows(new, first, third) == [tuple(range(9))]
    server.tree.finish(first, third)
    assert rows(new) == [] and server.counters.steps_absorb == 1
    assert not server.counters.fallbacks


def scenario_a_decode_step_of_a_speculating_server_shares_nothing() -> None:
    server = Server(queries=QUERIES)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("TARGET_VERIFY", requests)
    assert server.shares()
    server.forward("DECODE", requests)
    assert not server.shares() and server.counters.steps_absorb == 1 and server.counters.steps_verify == 1


def scenario_a_verify_step_from_query_to_output_projection() -> None:
    server = Server(queries=QUERIES)
    requests = server.run(PROMPT + "-a", "else", PROMPT + "-bcd")
    for _ in range(2):
        check_verify_step(server, requests)
    assert server.counters.steps_naive == server.counters.steps_verify == 2


def check_verify_step(server: Server, requests: list[Any]) -> None:
    """The layers' own steps: each draft ends as attention over its request's keys up to its own."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    from sglang_mla_ext.adapter.step.passes import passes
    from sglang_mla_ext.kernels.reference import attention as reference

    rows = len(requests) * QUERIES
    server.forward("TARGET_VERIFY", requests)
    batch = batch_of(server, requests, drafts=QUERIES)
    server.backend.init_forward_metadata(batch)
    for index, layer in enumerate(server.layers):
        w_k, w_v = layer.kv_b_proj.weight.view(HEADS, DN + DV, RANK).split([DN, DV], dim=1)
        q, latent = torch.randn(rows, HEADS, DN + DR), torch.randn(rows, RANK + DR)
        q_nope, q_rope, k_rope = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
        q_absorbed, k_nope = torch.einsum("bhd,hdr->bhr", q_nope, w_k), latent[:, None, :RANK]
        attention = SimpleNamespace(layer_id=index, scaling=0.2, v_head_dim=RANK)
        out = server.backend.forward(q_absorbed, k_nope, k_nope, attention, batch, q_rope=q_rope, k_rope=k_rope)
        per_head = torch.einsum("bhr,hdr->bhd", out.view(rows, HEADS, RANK), w_v)
        found = layer.o_proj(per_head.reshape(rows, HEADS * DV)).view(rows, HEADS, DV)
        assert passes.now.q_nope is None and passes.now.tail_lse is None
        for row in range(rows):
            request, token = divmod(row, QUERIES)
            new = batch.out_cache_loc[request * QUERIES : row + 1]
            assert len(new) == token + 1
            keys_of = server.kv.get_key_buffer(index)[torch.cat([requests[request].slots, new]), 0]
            expanded = layer.kv_b_proj(keys_of[:, :RANK])[0].view(len(keys_of), HEADS, DN + DV)
            keys = expanded[..., :DN], keys_of[:, RANK:], expanded[..., DN:]
            exact, _ = reference.naive(q_nope[row, None], q_rope[row, None], *keys, 0.2)
            torch.testing.assert_close(found[row], exact[0], rtol=1e-4, atol=1e-5, msg=f"row {row}")
