"""What our hooks do while a worker process starts, and what they tell of it: memory, factories, scheduler, pool.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import (
    AVAILABLE,
    BUDGET,
    CONTEXT,
    FP8,
    HEADS,
    LAYERS,
    PAGE,
    PROMPT,
    Server,
    make_runner,
    make_scheduler,
    of_ranks,
    options,
    profile_bytes,
    refused,
)
from release import OLDEST, data_parallel_rank, pool_class

# ---- memory


def scenario_the_budget_is_taken_out_of_sglangs_memory() -> None:
    from sglang_mla_ext.adapter.step.session import process

    for given, budget in (
        ({"prefix_memory_gb": 0.25}, 1 << 28),
        ({"prefix_memory_gb": 0}, 0),
        ({}, AVAILABLE // 4),
        ({"mode": "absorb", "prefix_memory_gb": 0.25}, 0),
        ({"mode": "grouped_absorb"}, 0),
    ):
        with options(**given):
            for _ in range(2):  # asked again, it takes it out of what is available then
                assert profile_bytes(AVAILABLE) == AVAILABLE - budget, given
                assert process.budget_bytes == budget, given


def scenario_a_budget_that_leaves_nothing_is_refused() -> None:
    for gb in (1, 2.5):
        with options(prefix_memory_gb=gb):
            kind, message = refused(lambda: profile_bytes(AVAILABLE))
        assert kind == "OptionError"
        assert f"--hybrid-mla-prefix-memory-gb {gb} leaves nothing of the 1.00 GiB" in message
        assert "lower it, or raise --mem-fraction-static" in message


def scenario_our_buffers_are_sized_by_what_sglangs_configurator_knows() -> None:
    """Over an FP8 cache there are some in every mode, and their page tables follow the limit on running requests."""
    from sglang.srt.mem_cache import kv_cache_configurator

    from sglang_mla_ext.adapter.build import budget
    from sglang_mla_ext.adapter.latent.protocol import LatentSizes
    from sglang_mla_ext.adapter.launch import mixed_steps

    schedule = SimpleNamespace(max_running_requests=None)
    kv_cache_configurator.get_schedule = lambda: schedule
    torch.cuda.get_device_name = lambda *args: "NVIDIA H200"
    budget.multiprocessors = lambda device: 132
    found: list[LatentSizes] = []

    class Kind:
        @staticmethod
        def workspace_bytes_for(sizes: LatentSizes, programs: int) -> int:
            found.append(sizes)
            return 12345

    budget.latent_kind = lambda fp8: Kind
    mixed_steps._predicted = lambda args: 256
    server = dict(device="cuda", kv_cache_dtype=FP8, model_dtype=torch.bfloat16)
    for limit, ranks, requests, mixed in (
        *((None, 1, 4096, 0), (1000, 1, 1000, 0), (1000, 8, 125, 0)),
        *((None, 1, 4096, 256), (1000, 8, 125, 256)),
    ):
        schedule.max_running_requests = limit
        with options(mode="absorb", **({} if mixed else {"mixed_tokens": 0})):
            assert profile_bytes(AVAILABLE, **server, **of_ranks(ranks)) == AVAILABLE - 12345
        sizes, rows = found.pop(), min(requests, 1024) + mixed
        assert (sizes.max_rows, sizes.max_requests) == (rows, -(-(requests + mixed) // 64) * 64)
        assert (sizes.heads, sizes.max_tokens, sizes.dtype) == (HEADS, CONTEXT, torch.bfloat16)
        assert budget.max_requests(requests) >= requests
    with options(mode="absorb"):
        assert profile_bytes(AVAILABLE, device="cuda", kv_cache_dtype=torch.bfloat16) == AVAILABLE
    assert not found, "SGLang's own backend does all steps"


def scenario_all_that_is_allocated_is_inside_the_budget() -> None:
    server = Server()
    (buffers,) = server.buffers
    assert 0 < buffers.bytes <= BUDGET
    assert buffers.chunks == server.pool.num_chunks
    from sglang_mla_ext.adapter.step.session import process

    assert server.steps.reports.report()["budget_bytes"] == process.budget_bytes == BUDGET


# ---- graphs


def scenario_decode_graphs_are_captured_with_sharing_and_without() -> None:
    """Graphs of the model are captured twice, those of its draft once. A step replays what it shares for, or what the
    ranks agreed on."""
    if OLDEST:
        return
    server = Server()
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    from sglang_mla_ext.adapter.step.passes import Kind, Pass, passes
    from sglang_mla_ext.prefix.planner.plan import Plan
    from sglang_mla_ext.segment import Mode, Segment

    def variants(draft: bool = False) -> Any:
        runner: Any = object.__new__(DecodeCudaGraphRunner)
        runner.model_runner, runner.attention_graph_variants = SimpleNamespace(is_draft_worker=draft), None
        return runner.capture()

    assert variants() is None
    server.steps.plain_graphs = True
    assert variants(draft=True) is None
    found = variants()
    groups = Plan(2, (Segment((0, 1), 0, 64, Mode.NAIVE, (0,)),))
    for plan, label in ((Plan(2), "plain"), (groups, "shared")):
        passes.begin(Pass(Kind.DECODE, plan=plan))
        assert found.select(None) == label and label in found.capture_labels
    for agreed, label in ((True, "shared"), (False, "plain")):
        server.steps.sharded = SimpleNamespace(agreed=agreed)
        passes.begin(Pass(Kind.DECODE, plan=Plan(2) if agreed else groups))
        assert found.select(None) == label
    passes.end()


def scenario_ranks_that_divide_the_heads_select_the_same_graph() -> None:
    """They do by the requests of the batch, which are known before anything may fail on one of the ranks. Where these
    cannot be compared, SGLang sees the error."""
    if OLDEST:
        return
    server = Server()
    from sglang_mla_ext.adapter.ranks.prompts import Beginnings

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    for request in requests:
        request.origin_input_ids, request.extra_key = [ord(letter) for letter in PROMPT], None
        request.cache_salt = None
    server.steps.beginnings = Beginnings(tokens=len(PROMPT), requests=2)
    server.forward("DECODE", requests)
    assert server.shares() and server.steps.shares_now()
    server.forward("DECODE", requests[:1])
    assert not server.shares() and not server.steps.shares_now()

    def fails(*args: Any) -> None:
        raise ValueError("on this rank alone")

    server.session.admission.choose = fails
    server.forward("DECODE", requests)
    assert server.steps.shares_now() and server.counters.fallbacks == {"begin_pass": 1}
    server.steps.beginnings.some_are_alike = fails
    server.forward("DECODE", requests)
    assert refused(server.steps.shares_now) == ("ValueError", "on this rank alone")


# ---- the backend's factory


def scenario_the_factory_refuses_what_cannot_work() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    create = ATTENTION_BACKENDS["hybrid_mla"]
    kind, message = refused(lambda: create(make_runner()))
    assert kind == "ContractError" and "before it sized its KV cache" in message
    profile_bytes(AVAILABLE)
    kind, message = refused(lambda: create(make_runner(dtype=torch.float16)))
    assert kind == "Refusal" and "the model runs in float16" in message and "use --dtype bfloat16" in message
    beside_another_prefill = make_runner(kv_cache_dtype=FP8)
    beside_another_prefill.server_args.prefill_attention_backend = "flashmla"
    kind, message = refused(lambda: create(beside_another_prefill))
    assert kind == "Refusal" and "prefill runs flashmla, which cannot read --kv-cache-dtype fp8_e4m3" in message


def scenario_the_factory_hands_the_budget_to_the_build() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_mla_ext.adapter.build import assemble
    from sglang_mla_ext.adapter.step.session import process

    built, rule = [], SimpleNamespace(tokens=0, query_tokens=1)
    steps = SimpleNamespace(sharded=None, plain_graphs=False)
    process.scheduler = SimpleNamespace()

    def record(runner: Any, options: Any, budget_bytes: int, memory: Any) -> tuple[str, Any, Any]:
        built.append((runner, options.mode, budget_bytes, memory))
        return "backend", steps, rule

    assemble.build = record
    for cache in (torch.bfloat16, FP8):
        runner = make_runner(dtype=torch.bfloat16, kv_cache_dtype=cache)
        with options(mode="naive", prefix_memory_gb=0.25):
            profile_bytes(AVAILABLE)
            assert ATTENTION_BACKENDS["hybrid_mla"](runner) == "backend"
        session = process.session
        assert built.pop() == (runner, "naive", 1 << 28, session.memory) and session.steps is steps


def scenario_the_models_layers_are_found_in_their_order_or_the_launch_is_refused() -> None:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from sglang_mla_ext.adapter.step.layer import attention_layers

    def layer(layer_id: int) -> torch.nn.Module:
        made = DeepseekV2AttentionMLA.__new__(DeepseekV2AttentionMLA)
        torch.nn.Module.__init__(made)
        made.attn_mqa = SimpleNamespace(layer_id=layer_id)
        return made

    model = torch.nn.ModuleList([torch.nn.Identity(), layer(2), torch.nn.ModuleList([layer(0)]), layer(1)])
    found = attention_layers(make_runner(model=model))
    assert [attention.attn_mqa.layer_id for attention in found] == [0, 1, 2]
    kind, message = refused(lambda: attention_layers(make_runner(model=torch.nn.Identity())))
    assert kind == "ValueError"
    assert "which Identity does not have: choose another --attention-backend" in message


# ---- the pool


def scenario_an_fp8_pool_is_ours_and_sized_as_such() -> None:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import pool_configurator

    from sglang_mla_ext.adapter.latent.pool import LatentPool

    execution = SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False))
    for module in (kv_cache_configurator, runtime_context):
        module.get_exec = lambda: execution
    pool_configurator.get_parallel = lambda: SimpleNamespace(attn_tp_size=1, attn_dcp_size=1)
    hf_config = SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], index_topk=None)
    configurator = SimpleNamespace(
        use_mla_backend=True,
        kv_cache_dtype_str="auto",
        model_config=SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64, context_len=CONTEXT, hf_config=hf_config),
        pool_page_size=PAGE,
        layer_info=SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        device="cpu",
        kv_shard_rank=None,
    )
    for dtype, decode, draft, ours, row_bytes in (
        (FP8, "hybrid_mla", False, True, 656),
        (FP8, "hybrid_mla", True, False, 576),
        (FP8, "flashmla", False, False, 576),
        (torch.bfloat16, "hybrid_mla", False, False, 1152),
    ):
        configurator.kv_cache_dtype, configurator.is_draft_worker = dtype, draft
        configurator.server_args = SimpleNamespace(
            get_attention_backends=lambda decode=decode: (decode, decode),
            prefill_attention_backend=decode,
            decode_attention_backend=decode,
            enable_hisparse=False,
            max_total_tokens=None,
            enable_dsa_cache_layer_split=False,
        )
        build = kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool
        pool = build(configurator, max_total_num_tokens=2 * PAGE, **pool_class())
        assert isinstance(pool, LatentPool) is ours
        build_hybrid = kv_cache_configurator.KVCacheConfigurator._build_hybrid_linear_kv_pool
        assert (build_hybrid(configurator, mla_pool_class="SGLang's") is LatentPool) is ours
        sizing = object.__new__(pool_configurator.DefaultPoolConfigurator)
        assert sizing._compute_cell_size(configurator, LAYERS) == row_bytes * LAYERS
        assert pool.get_kv_size_bytes() == 3 * PAGE * row_bytes * LAYERS, "what is sized is what is allocated"


# ---- the scheduler


def scenario_the_scheduler_gets_no_further_without_the_backend() -> None:
    from trees import Tree

    kind, message = refused(lambda: make_scheduler(Tree(PAGE).cache))
    assert kind == "ContractError" and "SGLang did not build the backend" in message


def scenario_the_scheduler_gets_no_further_with_a_tree_that_cannot_be_read() -> None:
    kind, message = refused(lambda: Server(tree_cache=SimpleNamespace()))
    assert kind == "UnsupportedTree" and "--disable-radix-cache" in message


def scenario_the_scheduler_says_when_all_is_ready() -> None:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("sglang_mla_ext").addHandler(handler)
    logging.getLogger("sglang_mla_ext").setLevel(logging.INFO)
    server = Server()
    assert records[-1] == f"hybrid_mla: ready; {server.steps.reports.description}"
    assert (
        "for expanded prefixes" in server.steps.reports.description and "mode naive" in server.steps.reports.description
    )


def scenario_server_info_has_our_report() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    without = object.__new__(Scheduler)
    assert without.get_internal_state(None).internal_state == {"of": "sglang"}
    server = Server()
    server.forward("DECODE", server.run(PROMPT + "-a", PROMPT + "-b"))
    state = server.scheduler.get_internal_state(None).internal_state
    assert state == {"of": "sglang", "hybrid_mla": {**server.steps.reports.status(0), "rank": 0}}
    with data_parallel_rank(server.scheduler, 3):
        assert server.scheduler.get_internal_state(None).internal_state["hybrid_mla"]["rank"] == 3
    server.scheduler.accept_length = 2.5
    with_drafts = server.scheduler.get_internal_state(None).internal_state
    assert with_drafts["hybrid_mla"] == {**state["hybrid_mla"], "avg_spec_accept_length": 2.5}
    assert state["hybrid_mla"]["groups"] == [{"start": 0, "prefix_len": 13 * PAGE, "requests": 2, "mode": "naive"}]


def scenario_metrics_are_published_once_a_second_and_when_idle() -> None:
    from sglang_mla_ext.adapter.step import reports

    published: list[Any] = []

    class Metrics:
        def __init__(self, labels: dict[str, str]) -> None:
            assert labels == {"model_name": "m"}

        def publish(self, report: Any, shadow_errors: list[float]) -> None:
            assert shadow_errors == [0.5] * (not published), "each is given once"
            published.append(report)

    now = 1000.0
    reports.Metrics, reports.time = Metrics, SimpleNamespace(monotonic=lambda: now)
    server = Server()
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    assert published == [], "a server without metrics"
    server.steps.reports.publish_as({"model_name": "m"})
    server.steps.shadow = SimpleNamespace(pop_errors=iter([[0.5], [], []]).__next__, judge=lambda: None)
    for _ in range(3):
        server.forward("DECODE", requests)
    assert [report["counters"]["steps_naive"] for report in published] == [2]
    now += 1.5
    server.forward("DECODE", requests)
    assert [report["counters"]["steps_naive"] for report in published] == [2, 5]
    now += 1.5
    server.scheduler.on_idle()
    assert len(published) == 3 and published[-1]["groups"] == []
    begun = Server(metrics_collector=SimpleNamespace(labels={"model_name": "m"}))
    assert isinstance(begun.steps.reports._metrics, Metrics), "with SGLang's labels"


# ---- what a server on a CPU needs


def scenario_sglangs_torch_code_runs_beside_our_backend_on_a_cpu() -> None:
    """Also where a module has imported the function by name."""
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.utils import common

    for module in (common, forward_batch_info):
        assert module.support_triton("hybrid_mla") is torch.cuda.is_available()
        # Newer releases say of a CPU that nothing there does.
        assert module.support_triton("triton") is (OLDEST or torch.cuda.is_available())
        assert module.support_triton("torch_native") is False


# ---- prefill and decode on servers of their own


def scenario_a_peer_with_other_rows_is_refused_by_sglang() -> None:
    """By the name of the cache's dtype, which SGLang compares; with its own pool it stays what it was."""
    from sglang.srt.disaggregation.common import conn

    from sglang_mla_ext.adapter.latent.pool import LatentPool
    from sglang_mla_ext.adapter.step.session import process
    from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout

    def manager(dtype: str, ours: bool) -> Any:
        pool: Any = object.__new__(LatentPool) if ours else SimpleNamespace()
        process.session = SimpleNamespace(pool=pool)
        if ours:
            pool.layout = LatentRowLayout(512, 64)
        args = SimpleNamespace(kv_cache_dtype_str=dtype, page_size=64)
        made = conn.CommonKVManager(args, None, None)
        made.prefill_info_table, made.dcp_size, made.attn_tp_size = {}, 1, 1
        made._resolve_rank_mapping = lambda info: None
        return made

    def meets(decode: Any, prefill: Any) -> bool:
        info = {f"{name}_size": 1 for name in ("attn_tp", "attn_cp", "dp", "pp")} | {"page_size": 64}
        info |= dict(kv_cache_dtype=prefill.kv_cache_dtype_str, follow_bootstrap_room=False)
        conn.requests = SimpleNamespace(get=lambda *_, **__: SimpleNamespace(status_code=200, json=lambda: info))
        return decode.try_ensure_parallel_info("a peer")

    for dtype in ("auto", "bf16", "fp8_e4m3"):
        assert meets(manager(dtype, False), manager(dtype, False))
        assert manager(dtype, False).kv_cache_dtype_str == dtype
    assert meets(manager("fp8_e4m3", True), manager("fp8_e4m3", True))
    for decode in (False, True):
        peers = manager("fp8_e4m3", decode), manager("fp8_e4m3", not decode)
        kind, message = refused(lambda peers=peers: meets(*peers))
        assert kind == "RuntimeError" and "KV cache dtype mismatch" in message
        assert "kv_cache_dtype=fp8_e4m3 (hybrid_mla: 656 bytes a row)" in message
