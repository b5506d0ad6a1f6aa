"""What our hooks do for forward passes: before them, inside the model, and when what is expanded must be forgotten.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

import gc
import os
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import DN, DR, DV, HEADS, PAGE, PROMPT, RANK, Server, batch_of, make_layers, refused
from release import OLDEST, UpdateRequest, prefill_runs, weight_updater

# ---- before a forward pass


def scenario_a_decode_step_is_planned() -> None:
    server = Server()
    other, *sharing = server.run("other", PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", [sharing[0], other, sharing[1]])
    (segment,) = server.coming.plan.segments
    assert (segment.rows, segment.tokens) == ((0, 2), 13 * PAGE)
    assert server.coming.plan.prefix_lens == (13 * PAGE, 0, 13 * PAGE)
    assert server.counters.steps_naive == 1
    server.forward("DECODE", [other])
    assert not server.shares() and server.counters.steps_absorb == 1


def scenario_a_draft_worker_is_ignored() -> None:
    """Its passes have the requests of the target's, and another pool: nothing is planned for them, nor counted."""
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    steps = server.counters.steps_naive
    server.forward("DECODE", requests[:1], draft=True)
    assert not server.shares()
    server.forward("EXTEND", requests[:1], draft=True, prefix_lens=[0], new_tokens=[5])
    assert not server.shares() and server.prefixes.plan.segments
    assert (server.counters.steps_naive, server.counters.steps_absorb) == (steps, 0)


def scenario_a_prompt_of_no_tokens_is_refused() -> None:
    Server()
    from sglang.srt.managers import utils

    def said(tokens: int) -> str | None:
        return utils.validate_input_length(SimpleNamespace(origin_input_ids=[7] * tokens), 5, False)

    assert (said(0), said(1), said(5), said(6)) == ("input_ids cannot be empty.", None, None, "too long")


def scenario_passes_before_there_is_a_scheduler_are_ignored() -> None:
    from sglang_mla_ext.adapter.step.session import process

    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.session.serves = False
    server.forward("DECODE", requests)
    assert not server.shares() and server.counters.steps_absorb == 0
    server.session.serves, process.session = True, None
    server.forward("DECODE", requests)
    process.session = server.session
    assert not server.shares()


def scenario_a_new_pass_forgets_what_the_one_before_left() -> None:
    """As when a pass ended in an error between two hooks."""
    server = Server()
    from sglang_mla_ext.adapter.step.passes import passes

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    for mode, lens in (
        ("DECODE", {}),
        ("IDLE", {}),
        ("EXTEND", {"prefix_lens": [0, 0], "new_tokens": [1, 1]}),
    ):
        server.coming.takes_query, server.coming.prefill = True, "plan"
        passes.now.q_nope = passes.now.tail_lse = torch.zeros(1)
        server.forward(mode, requests, **lens)
        assert not server.coming.takes_query and passes.now.q_nope is None and passes.now.tail_lse is None, mode
        assert server.coming.prefill is None, mode
        assert server.shares() == (mode == "DECODE"), mode


def scenario_prefill_is_planned_with_the_requests_own_lengths() -> None:
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    lens = {"prefix_lens": [13 * PAGE, 8 * PAGE], "new_tokens": [5, 3]}
    server.forward("EXTEND", requests, **lens)
    plan = server.coming.prefill
    assert plan.covered == (13 * PAGE, 8 * PAGE)
    assert [(window.start, window.stop) for window in plan.windows] == [(0, 8)]
    server.forward("EXTEND", requests, prefix_lens=[5, 3], new_tokens=[13 * PAGE, 8 * PAGE])
    assert server.coming.prefill is None, "hardly anything is cached"


def scenario_prefill_expands_what_running_requests_share() -> None:
    """Those that have finished hold nothing any more."""
    for running_ends, expanded in ((False, 13 * PAGE), (True, 0)):
        if not (child := os.fork()):
            server = Server()
            first, second = server.run(PROMPT + "-a", PROMPT + "-b")
            first.finished = lambda ends=running_ends: ends
            server.scheduler.running_batch.reqs = [first]
            server.forward("EXTEND", [second], prefix_lens=[13 * PAGE], new_tokens=[7])
            os._exit(server.pool.used_chunks != -(-expanded // 256))
        assert os.waitpid(child, 0)[1] == 0, running_ends


def scenario_prefill_expands_what_requests_share_that_are_being_sent() -> None:
    """On a prefill server none is decoding; those that have run hold their prefix until a decode server has it."""
    server = Server(role="prefill")
    first, second = server.run(PROMPT + "-a", PROMPT + "-b")
    server.scheduler.disagg_prefill_inflight_queue = [first]
    server.forward("EXTEND", [second], prefix_lens=[13 * PAGE], new_tokens=[7])
    assert server.coming.prefill.covered == (13 * PAGE,) and server.pool.used_chunks == 4


def scenario_beside_another_prefill_backend_nothing_is_planned_for_prefill() -> None:
    """But what its requests share is expanded, for decode."""
    server = Server(prefill="torch_native")
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("EXTEND", requests, prefix_lens=[13 * PAGE] * 2, new_tokens=[7, 7])
    assert server.coming.prefill is None and server.pool.used_chunks == 4


# ---- when what is expanded is forgotten


def scenario_a_flush_forgets_everything() -> None:
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    server.backend.init_forward_metadata(batch_of(server, requests))
    server.scheduler.idle = False
    assert server.scheduler.flush_cache() is False
    assert server.pool.used_chunks and server.shares(), "SGLang did not flush"

    server.coming.prefill = "plan"
    nodes = list(map(weakref.ref, server.prefixes.source.tree.hold(requests)))
    assert len(nodes) == 2
    requests.clear()
    server.scheduler.idle = True
    assert server.scheduler.flush_cache(empty_cache=False) is True
    assert server.pool.used_chunks == 0 and server.counters.evictions == 4
    assert not server.shares() and server.prefixes.plan.segments == ()
    assert server.coming.prefill is None
    assert server.steps.reports.report()["expanded_bytes"] == 0
    gc.collect()
    assert all(node() is None for node in nodes), "something keeps the flushed tree alive"


def scenario_idle_forgets_only_when_fully_idle() -> None:
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    server.tree.finish(*requests)
    server.scheduler.idle = False
    server.scheduler.on_idle()
    assert server.pool.used_chunks == 4 and server.shares()
    server.scheduler.idle = True
    server.scheduler.on_idle()
    assert not server.shares() and server.prefixes.plan.segments == ()
    assert server.pool.used_chunks == 4, "its prompt is still in the tree"


def scenario_weights_that_change_take_expansions_and_scales_along() -> None:
    """All four ways to change them. SGLang flushes its cache afterwards only if it is asked to."""
    server = Server(prefix_dtype="fp8_e4m3")
    from sglang.srt.managers import io_struct

    torch.distributed.barrier = lambda group=None: None
    io_struct_outputs = ("UpdateWeightFromDiskReqOutput", "UpdateWeightsFromIPCReqOutput")
    assert all(hasattr(io_struct, name) for name in io_struct_outputs)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    (buffers,) = server.buffers
    seen = []

    def update() -> None:
        seen.append((server.pool.used_chunks, server.shares(), server.prefixes.plan.segments))
        server.layers[1].kv_b_proj.weight *= 4

    manager = weight_updater(update)
    recv_req = UpdateRequest()
    if not OLDEST:
        manager.begin_weight_update(recv_req)
    for source in ("disk", "distributed", "tensor", "ipc"):
        server.forward("DECODE", requests)
        assert server.shares() and server.pool.used_chunks == 4
        check_expanded(server, requests[0])
        before = buffers.k_scale.clone(), buffers.v_scale.clone()
        method = f"update_weights_from_{source}"
        assert getattr(manager, method)(recv_req).success
        assert seen.pop() == (0, False, ()), f"{source}: forgotten before they change"
        server.forward("DECODE", requests)
        check_expanded(server, requests[0])
        for scale, old in zip((buffers.k_scale, buffers.v_scale), before, strict=True):
            assert torch.allclose(scale, old * torch.tensor([[1.0], [4.0]])), source
    if OLDEST:
        return
    # Weights that a peer has written: SGLang hears of them when the update ends.
    manager.end_weight_update(recv_req)
    manager.begin_weight_update(recv_req)
    server.forward("DECODE", requests)
    assert server.shares() and server.pool.used_chunks == 4
    assert manager.end_weight_update(recv_req).success
    assert (server.pool.used_chunks, server.shares()) == (0, False)
    server.forward("DECODE", requests)
    check_expanded(server, requests[0])


def check_expanded(server: Server, request: Any) -> None:
    """The expanded keys and values are those of the request's latent rows and of the weights of now."""
    (segment,) = server.coming.plan.segments
    slots = request.slots[: segment.tokens]
    for index, layer in enumerate(server.layers):
        k_nope, v, k_rope = server.buffers[0].read(index, segment.chunks, segment.tokens)
        rows = server.kv.get_key_buffer(index)[slots, 0]
        expected = layer.kv_b_proj(rows[:, :RANK])[0].view(-1, HEADS, DN + DV).split([DN, DV], dim=-1)
        for found, exact in zip((k_nope, v, k_rope), (*expected, rows[:, RANK:]), strict=True):
            assert (found.float() - exact).norm() < 0.08 * exact.norm()


# ---- inside the model


def scenario_a_decode_step_from_query_to_output_projection() -> None:
    server = Server()
    requests = server.run(PROMPT + "-a", "else", PROMPT + "-bcd")
    for _ in range(2):
        check_decode_step(server, requests)
    assert server.counters.steps_naive == 2


def check_decode_step(server: Server, requests: list[Any]) -> None:
    """The layers' own steps, with their weights as absorb takes them: each row ends as attention over all its keys."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    from sglang_mla_ext.adapter.step.passes import passes
    from sglang_mla_ext.kernels.reference import attention as reference

    rows = len(requests)
    server.forward("DECODE", requests)
    batch = batch_of(server, requests, new_tokens=1)
    server.backend.init_forward_metadata(batch)
    for index, layer in enumerate(server.layers):
        weights = layer.kv_b_proj.weight.view(HEADS, DN + DV, RANK)
        w_k, w_v = weights.split([DN, DV], dim=1)
        q = torch.randn(rows, HEADS, DN + DR)
        latent = torch.randn(rows, RANK + DR)
        q_nope, q_rope, k_rope = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
        q_absorbed = torch.einsum("bhd,hdr->bhr", q_nope, w_k)
        k_nope = latent[:, None, :RANK]
        attention = SimpleNamespace(layer_id=index, scaling=0.2, v_head_dim=RANK)
        parts = {"q_rope": q_rope, "k_rope": k_rope}
        out = server.backend.forward_decode(q_absorbed, k_nope, k_nope, attention, batch, **parts)
        per_head = torch.einsum("bhr,hdr->bhd", out.view(rows, HEADS, RANK), w_v)
        found = layer.o_proj(per_head.reshape(rows, HEADS * DV)).view(rows, HEADS, DV)
        assert passes.now.q_nope is None and passes.now.tail_lse is None
        for row, request in enumerate(requests):
            slots = torch.cat([request.slots, batch.out_cache_loc[row, None]])
            keys_of = server.kv.get_key_buffer(index)[slots, 0]
            expanded = layer.kv_b_proj(keys_of[:, :RANK])[0].view(len(keys_of), HEADS, DN + DV)
            keys = expanded[..., :DN], keys_of[:, RANK:], expanded[..., DN:]
            exact, _ = reference.naive(q_nope[row, None], q_rope[row, None], *keys, 0.2)
            torch.testing.assert_close(found[row], exact[0], rtol=1e-4, atol=1e-5, msg=f"row {row}")


def scenario_a_layer_whose_shared_part_is_not_merged_is_noticed() -> None:
    """By the layer after it, and by no later pass."""
    server = Server()
    from sglang_mla_ext.adapter.step.passes import passes

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    query = torch.randn(2, HEADS, RANK), None, None
    for _ in range(2):
        server.forward("DECODE", requests)
        batch = batch_of(server, requests)
        server.backend.init_forward_metadata(batch)
        for index in range(2):
            passes.now.q_nope = torch.randn(2, HEADS, DN)
            layer = SimpleNamespace(layer_id=index, scaling=0.2, v_head_dim=RANK)
            attend = partial(server.backend.forward_decode, *query, layer, batch, q_rope=torch.randn(2, HEADS, DR))
            if index == 0:
                attend()
            else:
                kind, message = refused(attend)
        assert kind == "OurPartFailedError" and "the layer before did not call its output projection" in message


def scenario_the_query_is_kept_only_where_it_is_needed() -> None:
    """And of no draft model's layer. Models that scale queries by their positions do so with what is kept, too."""
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    from sglang_mla_ext.adapter.step.layer import take_over
    from sglang_mla_ext.adapter.step.passes import passes

    (layer, of_a_draft), q, latent = make_layers(), torch.randn(3, HEADS, DN + DR), torch.randn(3, RANK + DR)
    take_over([layer])
    for needed in (False, True):
        passes.now.takes_query = needed
        result = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
        assert [part.shape[-1] for part in result] == [DN, DR, DR]
        DeepseekMLAForwardMixin._split_q_nope_pe(of_a_draft, q, latent)
        assert passes.now.q_nope is (result[0] if needed else None)
    scaling = utils._get_llama_4_scaling(2, 0.1, torch.arange(3))
    result = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
    assert scaling[2] > 1 and torch.equal(passes.now.q_nope, result[0] * scaling)


def scenario_queries_of_prefill_are_scaled_too() -> None:
    """With keys per head, where SGLang does not; of no draft model's layer."""
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    from sglang_mla_ext.adapter.step.layer import take_over

    forward_mha.get_attn_backend = lambda: SimpleNamespace(prepare_prefill_qkv=lambda q, **rest: (q, "k", "v"))
    layers, hidden = make_layers(), torch.randn(3, HEADS * (DN + DR)).bfloat16()
    for layer in layers:
        layer.q_lora_rank, layer.qk_head_dim = None, DN + DR
        layer.q_proj = lambda rows: (rows.clone(),)
        layer.kv_a_proj_with_mqa = lambda rows: (torch.zeros(3, RANK + DR),)
        layer.kv_a_layernorm = torch.nn.Identity()
    take_over(layers[:1])

    def query(layer: Any) -> torch.Tensor:
        prepare = forward_mha.DeepseekMHAForwardMixin.forward_normal_prepare
        found, *rest = prepare(layer, torch.arange(3), hidden, SimpleNamespace(), None)
        assert rest[:2] == ["k", "v"] and found.dtype == hidden.dtype
        return found

    unscaled = hidden.view(3, HEADS, DN + DR)
    assert torch.equal(query(layers[0]), unscaled)
    scaling = utils._get_llama_4_scaling(2, 0.1, torch.arange(3))
    assert torch.equal(query(layers[0]), (unscaled * scaling).bfloat16())
    assert torch.equal(query(layers[1]), unscaled)


def scenario_prefill_attends_to_what_is_expanded() -> None:
    """SGLang's bookkeeping of chunks and its loop over them are left with nothing."""
    server = Server()
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as bookkeeping
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    from sglang_mla_ext.kernels.reference import attention as reference

    bookkeeping.get_token_to_kv_pool = lambda: server.kv
    prefill_runs(server.backend)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    new_tokens = [3, 2]
    batch = server.forward("EXTEND", requests, prefix_lens=[13 * PAGE] * 2, new_tokens=new_tokens)
    batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))
    assert batch.num_prefix_chunks == 0
    assert batch.extend_prefix_lens_cpu == batch.extend_prefix_lens.tolist() == [13 * PAGE] * 2
    for index, layer in enumerate(server.layers):
        q, out, lse = torch.randn(5, HEADS, DN + DR), torch.randn(5, HEADS, DV), torch.randn(5, HEADS)
        rows = server.kv.get_key_buffer(index)[requests[0].slots[: 13 * PAGE], 0]
        expanded = layer.kv_b_proj(rows[:, :RANK])[0].view(len(rows), HEADS, DN + DV)
        keys = expanded[..., :DN], rows[:, RANK:], expanded[..., DN:]
        expected, expected_lse = reference.merge(*reference.naive(q[..., :DN], q[..., DN:], *keys, 0.2), out, lse)
        found = forward_mha.DeepseekMHAForwardMixin._chunked_prefix_attn_mha(
            layer, q=q, accum_output=out, accum_lse=lse, forward_batch=batch
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    assert (server.counters.prefills_naive, server.counters.prefill_tokens_saved) == (1, 2 * 13 * PAGE)


def scenario_prefill_without_a_plan_is_sglangs() -> None:
    server = Server()
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as bookkeeping
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    bookkeeping.get_token_to_kv_pool = lambda: server.kv
    ForwardBatch.prepare_chunked_kv_indices = lambda self, device, *_, **__: None  # a kernel for GPUs
    batch = server.forward("EXTEND", server.run("alone"), prefix_lens=[5 * PAGE], new_tokens=[7])
    batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))
    assert batch.num_prefix_chunks == 1 and batch.prefix_chunk_num_tokens == [5 * PAGE]
    assert batch.prefix_chunk_starts.tolist() == [[0]]


def scenario_prefill_over_a_plan_has_keys_per_head_but_in_a_captured_graph() -> None:
    """A captured graph has absorb in it; on a GPU, FlashMLA's own rule says so."""
    server = Server()
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    method = handlers.AttnForwardMethod
    of_ours = handlers.AttentionBackendRegistry.get_handler("hybrid_mla")
    handlers.mla_use_prefill_cp = lambda forward_batch: False
    layer = SimpleNamespace(
        flashinfer_mla_disable_ragged=False,
        chunked_prefix_cache_threshold=0,
        disable_chunked_prefix_cache=False,
        qk_rope_head_dim=DR,
    )
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    planned = server.forward("EXTEND", requests, prefix_lens=[13 * PAGE] * 2, new_tokens=[3, 2])
    of_flashmla = handlers.AttentionBackendRegistry.get_handler("flashmla")
    asked = []
    handlers.AttentionBackendRegistry.register("flashmla", lambda *args: asked.append(args) or of_flashmla(*args))

    for on_gpu in (False, True):
        torch.cuda.is_available = lambda on_gpu=on_gpu: on_gpu
        assert of_ours(layer, planned) is method.MHA_CHUNKED_KV
        assert asked == []
        for captured in ("is_in_tc_piecewise_cuda_graph", "is_in_breakable_cuda_graph"):
            eager = getattr(handlers, captured)
            setattr(handlers, captured, lambda: True)
            assert of_ours(layer, planned) is method.MLA, captured
            setattr(handlers, captured, eager)
            assert bool(asked) is on_gpu
            asked.clear()

    server.coming.absorbs = True  # as chosen for a pass with running requests in it
    assert of_ours(layer, planned) is method.MLA and asked == [], "in a graph or not"

    plain = server.forward("EXTEND", server.run("alone"), prefix_lens=[5 * PAGE], new_tokens=[7])
    plain.seq_lens_cpu = [10**9]  # too long for one shot
    torch.cuda.is_available = lambda: True
    assert of_ours(layer, plain) is of_flashmla(layer, plain) is method.MHA_CHUNKED_KV
    assert asked.pop() == (layer, plain)
    torch.cuda.is_available = lambda: False
    assert of_ours(layer, plain) is method.MLA
