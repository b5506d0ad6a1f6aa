"""Every hook into SGLang, called through SGLang's own registry, and what it makes of the parts behind it.

The parts are the real ones: planner, expanded pool, expander, backend, and SGLang's radix tree. SGLang's functions are
its own too, but for those that need a whole server or a GPU: their bodies are replaced before the hooks are applied, so
that the registry wraps the replacements.

Importing SGLang takes seconds, so one process imports it and forks a child for each scenario. Run as a program, this
file is that process.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PAGE, CONTEXT = 64, 4096
HEADS, DN, DR, DV, RANK, LAYERS = 2, 16, 8, 16, 32, 2
PROMPT = "systemprompt"  # a page for each letter: 768 tokens, three chunks
AVAILABLE = 1 << 30  # bytes that SGLang has for its KV cache
BUDGET = 4 << 20
FP8 = torch.float8_e4m3fn


# ---- a scheduler process without a scheduler's loop


class Projection(torch.nn.Module):
    """SGLang's linear layers return the product and a bias."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.t(), None


def make_layers() -> list[Any]:
    torch.manual_seed(0)
    return [
        SimpleNamespace(
            attn_mqa=SimpleNamespace(layer_id=index, scaling=0.2),
            attn_mha=SimpleNamespace(layer_id=index, scaling=0.2),
            kv_b_proj=Projection(torch.randn(HEADS * (DN + DV), RANK)),
            kv_a_layernorm=SimpleNamespace(weight=torch.rand(RANK) + 0.1),
            o_proj=torch.nn.Identity(),
            num_local_heads=HEADS,
            num_heads=HEADS,
            kv_lora_rank=RANK,
            qk_nope_head_dim=DN,
            qk_rope_head_dim=DR,
            v_head_dim=DV,
            w_kc=None,
            w_vc=None,
        )
        for index in range(LAYERS)
    ]


def install() -> None:
    """As a worker process does when SGLang loads its plug-ins. Parts that take long to import are imported as well."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_mla_ext.adapter import hooks

    hooks.install()
    HookRegistry.apply_hooks()
    hooks.assert_installed()
    importlib.import_module("sglang_mla_ext.adapter.build")


def profile_bytes(available: int) -> int:
    """What SGLang sizes its KV cache by, where so many bytes are available."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    return object.__new__(KVCacheConfigurator)._profile_available_bytes(pre_model_load_memory=available)


@contextmanager
def options(**values: Any) -> Iterator[None]:
    names = {f"SGLANG_HYBRID_MLA_{name.upper()}": str(value) for name, value in values.items()}
    os.environ.update(names)
    yield
    for name in names:
        del os.environ[name]


def make_runner(**changes: Any) -> Any:
    """What our factory and SGLang's torch backend look at of a ModelRunner."""
    values = dict(
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        device="cpu",
        is_draft_worker=False,
        model_config=SimpleNamespace(hidden_size=64, context_len=CONTEXT, model_is_mrope=False),
        req_to_token_pool=SimpleNamespace(size=12, req_to_token=torch.zeros(12, CONTEXT, dtype=torch.int32)),
        token_to_kv_pool=None,
        server_args=SimpleNamespace(
            get_attention_backends=lambda: ("hybrid_mla", "hybrid_mla"),
            attention_backend="hybrid_mla",
            enable_lora=False,
            quantization_param_path=None,
        ),
        ngram_embedding_manager=SimpleNamespace(enabled=False),
    )
    return SimpleNamespace(**{**values, **changes})


def make_scheduler(tree_cache: Any, metrics_collector: Any = None) -> Any:
    from sglang.srt.managers.scheduler import Scheduler

    return Scheduler(SimpleNamespace(tree_cache=tree_cache, metrics_collector=metrics_collector))


class Server:
    """A worker process after its start: hooks installed, pools sized, backend and scheduler built by SGLang's names.

    Attributes:
        worker: what the hooks know; steps: `worker.steps`.
        kv: SGLang's pool of latent rows; buffers: the one allocation of expanded prefixes.
    """

    def __init__(self, prefill: str = "hybrid_mla", **given: Any) -> None:
        from conftest import Tree
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        from sglang_mla_ext.adapter import build, hooks

        self.tree, self.layers = Tree(PAGE), make_layers()
        sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=DR, layer_num=LAYERS, device="cpu", enable_memory_saver=False)
        self.kv = MLATokenToKVPool(8192, page_size=PAGE, dtype=torch.float32, **sizes)
        for buffer in self.kv.kv_buffer:
            buffer.normal_()
        self.runner = make_runner(token_to_kv_pool=self.kv)
        self.runner.server_args.get_attention_backends = lambda: (prefill, "hybrid_mla")
        build.attention_layers = lambda runner: self.layers
        self.buffers = self._buffers_to_come()
        with options(**{"mode": "naive", "min_prefix_len": PAGE, "prefix_memory_gb": BUDGET / (1 << 30), **given}):
            assert profile_bytes(AVAILABLE) < AVAILABLE
            self.backend = ATTENTION_BACKENDS["hybrid_mla"](self.runner)
        self.scheduler = make_scheduler(self.tree.cache)
        self.worker, self.steps = hooks.worker, hooks.worker.steps
        self.counters, self.prefixes = self.steps.counters, self.steps._prefixes
        self.pool = self.prefixes.pool

    @staticmethod
    def _buffers_to_come() -> list[Any]:
        from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers

        found: list[Any] = []
        allocate = ExpandedBuffers.allocate

        def recorded(**sizes: Any) -> Any:
            found.append(allocate(**sizes))
            return found[-1]

        ExpandedBuffers.allocate = staticmethod(recorded)
        return found

    def run(self, *texts: str) -> list[Any]:
        """Start requests, whose prompts are cached from now on."""
        requests = [self.tree.run(text) for text in texts]
        for request in requests:
            request.lora_id = request.token_type_ids = None  # SGLang reads them when it makes a batch
        return requests

    def forward(
        self,
        mode: str,
        requests: list[Any],
        *,
        draft: bool = False,
        prefix_lens: list[int] | None = None,
        new_tokens: list[int] | None = None,
    ) -> Any:
        """`ForwardBatch.init_new`, as SGLang's worker calls it before a forward pass; returns the batch."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        class ScheduleBatch:
            """Has None for whatever a pass here does not need."""

            def __getattr__(self, name: str) -> None:
                return None

        batch = ScheduleBatch()
        batch.forward_mode, batch.reqs = ForwardMode[mode], requests
        rows = len(requests)
        batch.seq_lens = torch.tensor([len(request.slots) for request in requests], dtype=torch.int64)
        batch.seq_lens_cpu = batch.seq_lens
        batch.input_ids = torch.zeros(sum(new_tokens or [1] * rows), dtype=torch.int64)
        batch.req_pool_indices = torch.arange(rows)
        batch.prefix_lens, batch.extend_lens = prefix_lens, new_tokens
        batch.extend_num_tokens = len(batch.input_ids)
        runner = SimpleNamespace(**{**vars(self.runner), "is_draft_worker": draft})
        return ForwardBatch.init_new(
            batch, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )

    def shares(self) -> bool:
        """Whether the coming decode step shares anything."""
        return bool(self.steps.next)


def replace_bodies() -> None:
    """SGLang's functions that need a whole server or a GPU, before hooks are applied to them."""
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor import forward_batch_info

    def init(self: Any, server_args: Any) -> None:
        self.tree_cache, self.metrics_collector = server_args.tree_cache, server_args.metrics_collector
        self.running_batch = SimpleNamespace(reqs=[])
        self.idle = True

    def flush_cache(self: Any, empty_cache: bool = True) -> bool:
        if self.idle:
            self.tree_cache.reset()
        return self.idle

    forward_batch_info.enable_num_token_non_padded = lambda: False  # it asks for groups of ranks
    Scheduler.__init__ = init
    Scheduler.flush_cache = flush_cache
    Scheduler.is_fully_idle = lambda self: self.idle
    Scheduler.on_idle = lambda self: None
    Scheduler.get_internal_state = lambda self, recv_req: GetInternalStateReqOutput(internal_state={"of": "sglang"})
    KVCacheConfigurator._profile_available_bytes = lambda self, pre_model_load_memory: pre_model_load_memory


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    """The class and the message of the error that a call ends in."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("it was let through")


# ---- memory


def scenario_the_budget_is_taken_out_of_sglangs_memory() -> None:
    from sglang_mla_ext.adapter.hooks import worker

    for given, budget in (
        ({"prefix_memory_gb": 0.25}, 1 << 28),
        ({"prefix_memory_gb": 0}, 0),
        ({}, AVAILABLE // 10),
        ({"mode": "absorb", "prefix_memory_gb": 0.25}, 0),
        ({"mode": "grouped_absorb"}, 0),
    ):
        with options(**given):
            for _ in range(2):  # asked again, it takes it out of what is available then
                assert profile_bytes(AVAILABLE) == AVAILABLE - budget, given
                assert worker.budget_bytes == budget, given


def scenario_a_budget_that_leaves_nothing_is_refused() -> None:
    for gb in (1, 2.5):
        with options(prefix_memory_gb=gb):
            kind, message = refused(lambda: profile_bytes(AVAILABLE))
        assert kind == "OptionError"
        assert f"--hybrid-mla-prefix-memory-gb {gb} leaves nothing of the 1.00 GiB" in message
        assert "lower it, or raise --mem-fraction-static" in message


def scenario_all_that_is_allocated_is_inside_the_budget() -> None:
    server = Server()
    (buffers,) = server.buffers
    assert 0 < buffers.bytes <= BUDGET
    assert buffers.chunks == server.pool.num_chunks
    assert server.steps.report()["budget_bytes"] == server.worker.budget_bytes == BUDGET


# ---- the backend's factory


def scenario_the_factory_refuses_what_cannot_work() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    create = ATTENTION_BACKENDS["hybrid_mla"]
    kind, message = refused(lambda: create(make_runner()))
    assert kind == "ContractError" and "before it sized its KV cache" in message
    profile_bytes(AVAILABLE)
    kind, message = refused(lambda: create(make_runner(dtype=torch.float16)))
    assert kind == "OptionError" and "the model runs in float16" in message and "use --dtype bfloat16" in message
    beside_another_prefill = make_runner(kv_cache_dtype=FP8)
    beside_another_prefill.server_args.get_attention_backends = lambda: ("flashmla", "hybrid_mla")
    kind, message = refused(lambda: create(beside_another_prefill))
    assert kind == "OptionError" and "prefill runs flashmla, which cannot read --kv-cache-dtype fp8_e4m3" in message


def scenario_the_factory_hands_the_budget_to_the_build() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_mla_ext.adapter import build, hooks

    built = []

    def record(runner: Any, options: Any, budget_bytes: int) -> tuple[str, str]:
        built.append((runner, options.mode, budget_bytes))
        return "backend", "steps"

    build.build = record
    for cache in (torch.bfloat16, FP8):
        runner = make_runner(dtype=torch.bfloat16, kv_cache_dtype=cache)
        with options(mode="naive", prefix_memory_gb=0.25):
            profile_bytes(AVAILABLE)
            assert ATTENTION_BACKENDS["hybrid_mla"](runner) == "backend"
        assert built.pop() == (runner, "naive", 1 << 28) and hooks.worker.steps == "steps"


# ---- the scheduler


def scenario_the_scheduler_gets_no_further_without_the_backend() -> None:
    from conftest import Tree

    kind, message = refused(lambda: make_scheduler(Tree(PAGE).cache))
    assert kind == "ContractError" and "SGLang did not build the backend" in message


def scenario_the_scheduler_gets_no_further_with_a_tree_that_cannot_be_read() -> None:
    Server()
    kind, message = refused(lambda: make_scheduler(SimpleNamespace()))
    assert kind == "UnsupportedTree" and "--disable-radix-cache" in message


def scenario_the_scheduler_says_when_all_is_ready() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("sglang_mla_ext").addHandler(handler)
    logging.getLogger("sglang_mla_ext").setLevel(logging.INFO)
    server = Server()
    assert records[-1] == f"hybrid_mla: ready; {server.steps.description}"
    assert "for expanded prefixes" in server.steps.description and "mode naive" in server.steps.description


def scenario_server_info_has_our_report() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    without = object.__new__(Scheduler)
    assert without.get_internal_state(None).internal_state == {"of": "sglang"}
    server = Server()
    server.forward("DECODE", server.run(PROMPT + "-a", PROMPT + "-b"))
    state = server.scheduler.get_internal_state(None).internal_state
    assert state == {"of": "sglang", "hybrid_mla": server.steps.report()}
    assert state["hybrid_mla"]["groups"] == [{"prefix_len": 13 * PAGE, "requests": 2, "mode": "naive"}]


def scenario_metrics_are_published_once_a_second_and_when_idle() -> None:
    server = Server()
    from sglang_mla_ext.adapter import hooks

    published: list[Any] = []

    class Metrics:
        def __init__(self, labels: dict[str, str]) -> None:
            assert labels == {"model_name": "m"}

        publish = staticmethod(published.append)

    now = 1000.0
    hooks.Metrics, hooks.time = Metrics, SimpleNamespace(monotonic=lambda: now)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    assert published == [], "a server without metrics"
    server.scheduler = make_scheduler(server.tree.cache, SimpleNamespace(labels={"model_name": "m"}))
    for _ in range(3):
        server.forward("DECODE", requests)
    assert [report["counters"]["steps_naive"] for report in published] == [2]
    now += 1.5
    server.forward("DECODE", requests)
    assert [report["counters"]["steps_naive"] for report in published] == [2, 5]
    now += 1.5
    server.scheduler.on_idle()
    assert len(published) == 3 and published[-1]["groups"] == []


# ---- before a forward pass


def scenario_a_decode_step_is_planned() -> None:
    server = Server()
    other, *sharing = server.run("other", PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", [sharing[0], other, sharing[1]])
    (segment,) = server.steps.next.expanded
    assert (segment.rows, segment.tokens) == ((0, 2), 13 * PAGE)
    assert server.steps.next.tail_starts == (13 * PAGE, 0, 13 * PAGE)
    assert server.counters.steps_naive == 1
    server.forward("DECODE", [other])
    assert not server.shares() and server.counters.steps_absorb == 1


def scenario_a_draft_worker_is_ignored() -> None:
    """Its passes have the requests of the target's, and another pool."""
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    planned, steps = server.steps.next, server.counters.steps_naive
    server.forward("DECODE", requests[:1], draft=True)
    server.forward("EXTEND", requests[:1], draft=True, prefix_lens=[0], new_tokens=[5])
    assert server.steps.next is planned and planned
    assert (server.counters.steps_naive, server.counters.steps_absorb) == (steps, 0)


def scenario_passes_before_there_is_a_scheduler_are_ignored() -> None:
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    scheduler, server.worker.scheduler = server.worker.scheduler, None
    server.forward("DECODE", requests)
    assert not server.shares() and server.counters.steps_absorb == 0
    server.worker.scheduler, steps = scheduler, server.worker.steps
    server.worker.steps = None
    server.forward("DECODE", requests)
    server.worker.steps = steps
    assert not server.shares()


def scenario_a_new_pass_forgets_what_the_one_before_left() -> None:
    """As when a pass ended in an error between two hooks."""
    server = Server()
    from sglang_mla_ext.adapter.relay import relay

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    for mode, lens in (
        ("DECODE", {}),
        ("IDLE", {}),
        ("EXTEND", {"prefix_lens": [0, 0], "new_tokens": [1, 1]}),
    ):
        relay.takes_query, relay.prefill, relay.prefill_lens = True, "plan", [1]
        relay.q_nope = relay.tail_lse = torch.zeros(1)
        server.steps.next = "of the step before"
        server.forward(mode, requests, **lens)
        assert not relay.takes_query and relay.q_nope is None and relay.tail_lse is None, mode
        assert relay.prefill is None, mode
        assert server.shares() == (mode == "DECODE"), mode


def scenario_prefill_is_planned_with_the_requests_own_lengths() -> None:
    server = Server()
    from sglang_mla_ext.adapter.prefill import plan_of
    from sglang_mla_ext.adapter.relay import relay

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    lens = {"prefix_lens": [13 * PAGE, 8 * PAGE], "new_tokens": [5, 3]}
    batch = server.forward("EXTEND", requests, **lens)
    plan = plan_of(batch)
    assert plan is not None and plan is relay.prefill
    assert plan.covered == (13 * PAGE, 8 * PAGE)
    assert [(part.start, part.stop) for part in plan.passes] == [(0, 8)]
    assert plan_of(SimpleNamespace(extend_prefix_lens_cpu=list(lens["prefix_lens"]))) is None, "another step"
    server.forward("EXTEND", requests, prefix_lens=[5, 3], new_tokens=[13 * PAGE, 8 * PAGE])
    assert relay.prefill is None, "hardly anything is cached"


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


def scenario_beside_another_prefill_backend_nothing_is_planned_for_prefill() -> None:
    """But what its requests share is expanded, for decode."""
    server = Server(prefill="torch_native")
    from sglang_mla_ext.adapter.prefill import plan_of

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    batch = server.forward("EXTEND", requests, prefix_lens=[13 * PAGE] * 2, new_tokens=[7, 7])
    assert plan_of(batch) is None and server.pool.used_chunks == 4


# ---- when what is expanded is forgotten


def scenario_a_flush_forgets_everything() -> None:
    server = Server()
    import gc
    import weakref

    from sglang_mla_ext.adapter.relay import relay

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    server.backend.init_forward_metadata(batch_of(server, requests))
    server.scheduler.idle = False
    assert server.scheduler.flush_cache() is False
    assert server.pool.used_chunks and server.shares(), "SGLang did not flush"

    relay.prefill = "plan"
    nodes = [weakref.ref(request.last_node) for request in requests]
    requests.clear()
    server.scheduler.idle = True
    assert server.scheduler.flush_cache(empty_cache=False) is True
    assert server.pool.used_chunks == 0 and server.counters.evictions == 1
    assert not server.shares() and server.prefixes.plan.groups == ()
    assert relay.prefill is None
    assert server.steps.report()["expanded_bytes"] == 0
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
    assert server.pool.used_chunks == 0 and not server.shares() and server.prefixes.plan.groups == ()


def scenario_weights_that_change_take_expansions_and_scales_along() -> None:
    """All four ways to change them. SGLang flushes its cache afterwards only if it is asked to."""
    server = Server(prefix_dtype="fp8_e4m3")
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    torch.distributed.barrier = lambda group=None: None
    io_struct_outputs = ("UpdateWeightFromDiskReqOutput", "UpdateWeightsFromIPCReqOutput")
    assert all(hasattr(io_struct, name) for name in io_struct_outputs)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    (buffers,) = server.buffers
    seen = []

    class TpWorker:
        def update(self, recv_req: Any) -> tuple[bool, str]:
            seen.append((server.pool.used_chunks, server.shares(), server.prefixes.plan.groups))
            server.layers[1].kv_b_proj.weight *= 4
            return True, "done"

        update_weights_from_disk = update_weights_from_distributed = update
        update_weights_from_tensor = update_weights_from_ipc = update

    manager = SchedulerWeightUpdaterManager(
        tp_worker=TpWorker(),
        draft_worker=None,
        tp_cpu_group=None,
        memory_saver_adapter=None,
        flush_cache=None,
        is_fully_idle=None,
    )
    recv_req = SimpleNamespace(flush_cache=False, disable_draft_model=True)
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


def check_expanded(server: Server, request: Any) -> None:
    """The expanded keys and values are those of the request's latent rows and of the weights of now."""
    (segment,) = server.steps.next.expanded
    slots = request.slots[: segment.tokens]
    for index, layer in enumerate(server.layers):
        k_nope, v, k_rope = server.buffers[0].read(index, segment.chunks, segment.tokens)
        rows = server.kv.get_key_buffer(index)[slots, 0]
        expected = layer.kv_b_proj(rows[:, :RANK])[0].view(-1, HEADS, DN + DV).split([DN, DV], dim=-1)
        for found, exact in zip((k_nope, v, k_rope), (*expected, rows[:, RANK:]), strict=True):
            assert (found.float() - exact).norm() < 0.08 * exact.norm()


# ---- inside the model


def batch_of(server: Server, requests: list[Any], new_tokens: int = 0) -> Any:
    """What a decode step's batch is to the backend; each request has so many tokens behind its prompt."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table = server.runner.req_to_token_pool.req_to_token
    slots = []
    for row, request in enumerate(requests):
        length = len(request.slots)
        table[row, :length] = request.slots
        slots.append(7000 + row)
        table[row, length] = slots[-1]
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(requests),
        seq_lens=torch.tensor([len(request.slots) + new_tokens for request in requests]),
        req_pool_indices=torch.arange(len(requests)),
        out_cache_loc=torch.tensor(slots),
    )


def scenario_a_decode_step_from_query_to_output_projection() -> None:
    """The layer's own steps, with its weights as absorb takes them: each row ends as attention over all of its keys."""
    server = Server()
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    from sglang_mla_ext.adapter.relay import relay
    from sglang_mla_ext.kernels.reference import attention as reference

    requests = server.run(PROMPT + "-a", "else", PROMPT + "-bcd")
    for step in range(2):
        server.forward("DECODE", requests)
        batch = batch_of(server, requests, new_tokens=1)
        server.backend.init_forward_metadata(batch)
        for index, layer in enumerate(server.layers):
            weights = layer.kv_b_proj.weight.view(HEADS, DN + DV, RANK)
            w_k, w_v = weights.split([DN, DV], dim=1)
            q = torch.randn(3, HEADS, DN + DR)
            latent = torch.randn(3, RANK + DR)
            q_nope, q_rope, k_rope = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
            q_absorbed = torch.einsum("bhd,hdr->bhr", q_nope, w_k)
            k_nope = latent[:, None, :RANK]
            attention = SimpleNamespace(layer_id=index, scaling=0.2, v_head_dim=RANK)
            parts = {"q_rope": q_rope, "k_rope": k_rope}
            out = server.backend.forward_decode(q_absorbed, k_nope, k_nope, attention, batch, **parts)
            per_head = torch.einsum("bhr,hdr->bhd", out.view(3, HEADS, RANK), w_v)
            found = layer.o_proj(per_head.reshape(3, HEADS * DV)).view(3, HEADS, DV)
            assert relay.q_nope is None and relay.tail_lse is None
            for row, request in enumerate(requests):
                slots = torch.cat([request.slots, batch.out_cache_loc[row, None]])
                rows = server.kv.get_key_buffer(index)[slots, 0]
                expanded = layer.kv_b_proj(rows[:, :RANK])[0].view(len(rows), HEADS, DN + DV)
                keys = expanded[..., :DN], rows[:, RANK:], expanded[..., DN:]
                exact, _ = reference.naive(q_nope[row, None], q_rope[row, None], *keys, 0.2)
                torch.testing.assert_close(found[row], exact[0], rtol=1e-4, atol=1e-5, msg=f"step {step}, row {row}")
    assert server.counters.steps_naive == 2


def scenario_the_query_is_kept_only_where_it_is_needed() -> None:
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

    from sglang_mla_ext.adapter.relay import relay

    (layer, _), q, latent = make_layers(), torch.randn(3, HEADS, DN + DR), torch.randn(3, RANK + DR)
    for needed in (False, True):
        relay.takes_query = needed
        result = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
        assert [part.shape[-1] for part in result] == [DN, DR, DR]
        assert relay.q_nope is (result[0] if needed else None)


def scenario_prefill_attends_to_what_is_expanded() -> None:
    """SGLang's bookkeeping of chunks and its loop over them are left with nothing."""
    server = Server()
    from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as bookkeeping
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    from sglang_mla_ext.kernels.reference import attention as reference

    bookkeeping.get_token_to_kv_pool = lambda: server.kv
    forward_mha._resolve_attn_backend = lambda forward_batch: server.backend
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
    ForwardBatch.prepare_chunked_kv_indices = lambda self, device: None  # a kernel for GPUs
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
        flashinfer_mla_disable_ragged=False, chunked_prefix_cache_threshold=0, disable_chunked_prefix_cache=False
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

    plain = server.forward("EXTEND", server.run("alone"), prefix_lens=[5 * PAGE], new_tokens=[7])
    plain.seq_lens_cpu = [10**9]  # too long for one shot
    torch.cuda.is_available = lambda: True
    assert of_ours(layer, plain) is of_flashmla(layer, plain) is method.MHA_CHUNKED_KV
    assert asked.pop() == (layer, plain)
    torch.cuda.is_available = lambda: False
    assert of_ours(layer, plain) is method.MLA


# ---- the pool


def scenario_an_fp8_pool_is_ours_and_sized_as_such() -> None:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator

    from sglang_mla_ext.adapter.latent_pool import LatentPool

    execution = SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False))
    for module in (kv_cache_configurator, runtime_context):
        module.get_exec = lambda: execution
    pool_configurator.get_parallel = lambda: SimpleNamespace(attn_tp_size=1)
    hf_config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], index_topk=None)
    configurator = SimpleNamespace(
        use_mla_backend=True,
        kv_cache_dtype_str="auto",
        model_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, context_len=CONTEXT, hf_config=hf_config),
        pool_page_size=PAGE,
        layer_info=SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        device="cpu",
        is_draft_worker=True,  # ends a question about sparse models
    )
    for dtype, decode, ours, row_bytes in (
        (FP8, "hybrid_mla", True, 656),
        (FP8, "flashmla", False, 576),
        (torch.bfloat16, "hybrid_mla", False, 1152),
    ):
        configurator.kv_cache_dtype = dtype
        configurator.server_args = SimpleNamespace(
            get_attention_backends=lambda decode=decode: (decode, decode), max_total_tokens=None
        )
        build = kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool
        pool = build(configurator, max_total_num_tokens=2 * PAGE)
        assert isinstance(pool, LatentPool) is ours
        sizing = object.__new__(pool_configurator.DefaultPoolConfigurator)
        assert sizing._compute_cell_size(configurator, LAYERS) == row_bytes * LAYERS
        assert pool.get_kv_size_bytes() == 3 * PAGE * row_bytes * LAYERS, "what is sized is what is allocated"


# ---- what a server on a CPU needs


def scenario_sglangs_torch_code_runs_beside_our_backend_on_a_cpu() -> None:
    """Also where a module has imported the function by name."""
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.utils import common

    for module in (common, forward_batch_info):
        assert module.support_triton("hybrid_mla") is torch.cuda.is_available()
        assert module.support_triton("triton") is True and module.support_triton("torch_native") is False


# ---- the process of the scenarios, and its tests

SCENARIOS = {name.removeprefix("scenario_"): run for name, run in globals().items() if name.startswith("scenario_")}


def main(out: Path, names: list[str]) -> None:
    """Run each scenario in a child; `out/NAME` has its error, and is empty where it went through."""
    import conftest  # noqa: F401  stand-ins on a machine without a GPU, before SGLang is imported
    import sglang.srt.managers.scheduler
    import sglang.srt.models.deepseek_v2  # noqa: F401

    replace_bodies()
    install()
    for name in names:
        if not (child := os.fork()):
            error = "it did not end"
            try:
                SCENARIOS[name]()
                error = ""
            except BaseException:
                error = traceback.format_exc()
            finally:
                (out / name).write_text(error)
                os._exit(0)
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    folder = tmp_path_factory.mktemp("hooks")
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    command = [sys.executable, "-W", "ignore", __file__, str(folder), *SCENARIOS]
    process = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)

    def outcome(name: str) -> str:
        path = folder / name
        return path.read_text() if path.exists() else process.stderr or "it did not begin"

    return outcome


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, outcomes: Callable[[str], str]) -> None:
    error = outcomes(name)
    assert not error, error


def test_every_hook_is_called_here() -> None:
    """A hook that is added needs a scenario."""
    import ast

    from sglang_mla_ext.adapter import hooks

    source = ast.parse(Path(hooks.__file__).read_text())
    install_body = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "install")
    fragments = [node.value for node in ast.walk(install_body) if isinstance(node, ast.Constant)]
    called = Path(__file__).read_text()
    names = {str(text).rsplit(".", 1)[-1] for text in fragments if isinstance(text, str) and text.startswith(".")}
    assert len(names) >= 12
    missing = {name for name in names if f"{name}(" not in called and name != "__init__"}
    assert not missing


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
