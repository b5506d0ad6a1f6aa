"""A worker process of SGLang without a server: hooks installed by SGLang's registry, and the parts behind them.

The parts are the real ones: planner, expanded pool, expander, backend, and SGLang's radix tree. SGLang's functions are
its own too, but for those that need a whole server or a GPU: their bodies are replaced before the hooks are applied, so
that the registry wraps the replacements. Used by the scenarios of test_hooks.py, each in a process of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from doubles import server_args
from release import index_translator, published_arguments

PAGE, CONTEXT = 64, 4096
HEADS, DN, DR, DV, RANK, LAYERS = 2, 16, 8, 16, 32, 2
PROMPT = "systemprompt"  # a page for each letter: 768 tokens, three chunks
AVAILABLE = 1 << 30  # bytes that SGLang has for its KV cache
BUDGET = 4 << 20
FP8 = torch.float8_e4m3fn

FOR_GOOD = ExitStack()
"""What this process does not undo."""

CALLED: set[str] = set()
"""Targets whose hooks this process has called."""


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
            _get_mla_kv_buffer=None,
        )
        for index in range(LAYERS)
    ]


def install() -> list[str]:
    """As a worker process does when SGLang loads its plug-ins. Parts that take long to import are imported as well.

    Returns:
        what is hooked; `CALLED` says later which hooks of them were called.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_mla_ext.adapter.build import start
    from sglang_mla_ext.adapter.compat import installed
    from sglang_mla_ext.adapter.step import hooks

    installed.prefill_graph_rows = lambda args: 0  # prefill has no graphs here
    register = HookRegistry.register

    def recorded(target: str, hook: Callable[..., Any], kind: Any) -> None:
        @functools.wraps(hook)
        def called(*args: Any, **kwargs: Any) -> Any:
            CALLED.add(target)
            return hook(*args, **kwargs)

        register(target, called, kind)

    HookRegistry.register = staticmethod(recorded)
    hooks.install()
    HookRegistry.apply_hooks()
    start.assert_installed()
    importlib.import_module("sglang_mla_ext.adapter.build.assemble")
    return sorted(start.hooked)


def of_ranks(count: int) -> dict[str, Any]:
    """Ranks of DP attention, as older releases and newer ones keep them."""
    return {"ps": SimpleNamespace(attn_dp_size=count), "attn_dp_size": count}


def profile_bytes(available: int, **changes: Any) -> int:
    """What SGLang sizes its KV cache by, where so many bytes are available.

    Args:
        changes: fields of SGLang's configurator.
    """
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    from sglang_mla_ext.adapter.build import model

    configurator = object.__new__(KVCacheConfigurator)
    fields = {field.name for field in dataclasses.fields(KVCacheConfigurator)}
    values = dict(
        device="cpu",
        model=None,
        model_config=SimpleNamespace(context_len=CONTEXT),
        model_dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        **of_ranks(1),
        mambaish_config=None,
        server_args=server_args(device=changes.get("device", "cpu")),
    )
    for name, value in {**values, **changes}.items():
        if name in fields:
            setattr(configurator, name, value)
    model.attention_layers = lambda configurator: make_layers()
    return configurator._profile_available_bytes(pre_model_load_memory=available)


@contextmanager
def options(**values: Any) -> Iterator[None]:
    names = {f"SGLANG_HYBRID_MLA_{name.upper()}": str(value) for name, value in values.items()}
    os.environ.update(names)
    yield
    for name in names:
        del os.environ[name]


def make_runner(**changes: Any) -> Any:
    """What our factory and SGLang's torch backend look at of a ModelRunner."""
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    values = dict(
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        device="cpu",
        is_draft_worker=False,
        lora_manager=None,
        prefill_attention_backend_str="hybrid_mla",
        draft_attention_backend=None,
        model_config=SimpleNamespace(
            hidden_size=64, context_len=CONTEXT, model_is_mrope=False, requires_mm_token_modalities=False
        ),
        req_to_token_pool=SimpleNamespace(size=12, req_to_token=torch.zeros(12, CONTEXT, dtype=torch.int32)),
        token_to_kv_pool=None,
        memory_saver_adapter=TorchMemorySaverAdapter.create(enable=False),
        server_args=server_args(
            attention_backend="hybrid_mla",
            enable_lora=False,
            quantization_param_path=None,
            hicache_storage_backend=None,
        ),
        ngram_embedding_manager=SimpleNamespace(enabled=False),
    )
    return SimpleNamespace(**{**values, **changes})


def make_scheduler(
    tree_cache: Any,
    metrics_collector: Any = None,
    syncs: bool = False,
    build: Callable[[], object] = lambda: None,
    pool: Any = None,
) -> Any:
    """SGLang's scheduler; `build` is called where that loads its model."""
    from sglang.srt.managers.scheduler import Scheduler

    given = dict(tree_cache=tree_cache, metrics_collector=metrics_collector, require_mlp_sync=syncs, build=build)
    runner = SimpleNamespace(decode_cuda_graph_runner=None, req_to_token_pool=pool)
    return Scheduler(SimpleNamespace(**given, tp_worker=SimpleNamespace(model_runner=runner)))


class Server:
    """A worker process after its start: hooks installed, pools sized, backend and scheduler built by SGLang's names.

    Attributes:
        queries: query tokens of a request in a verify step; 1 without speculative decoding.
        role: of SGLang's `--disaggregation-mode`.
        syncs: whether ranks agree on each pass, as with DP attention.
        session: of the process; steps: `session.steps`.
        kv: SGLang's pool of latent rows; buffers: the one allocation of expanded prefixes.
    """

    def __init__(
        self,
        prefill: str = "hybrid_mla",
        saver: Any = None,
        queries: int = 1,
        role: str = "null",
        syncs: bool = False,
        tree_cache: Any = None,
        metrics_collector: Any = None,
        **given: Any,
    ) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from trees import Tree

        from sglang_mla_ext.adapter.build import model
        from sglang_mla_ext.adapter.step.session import process

        self.tree, self.layers = Tree(PAGE), make_layers()
        sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=DR, layer_num=LAYERS, device="cpu", enable_memory_saver=False)
        self.kv = MLATokenToKVPool(8192, page_size=PAGE, dtype=torch.float32, **sizes)
        for buffer in self.kv.kv_buffer:
            buffer.normal_()
        self.runner = make_runner(token_to_kv_pool=self.kv, **({"memory_saver_adapter": saver} if saver else {}))
        table = self.runner.req_to_token_pool.req_to_token
        self.runner.kv_index_translator = index_translator(table, self.kv, PAGE)
        self.runner.server_args.prefill_attention_backend = prefill
        self.runner.server_args.disaggregation_mode = role
        self.queries = queries
        if queries > 1:
            args = self.runner.server_args
            args.speculative_algorithm, args.speculative_num_draft_tokens = "EAGLE", queries
            args.speculative_eagle_topk = 1
        self.buffers = self._buffers_to_come()
        with options(**{"mode": "naive", "min_prefix_len": PAGE, "prefix_memory_gb": BUDGET / (1 << 30), **given}):
            assert profile_bytes(AVAILABLE) < AVAILABLE
            model.attention_layers = lambda runner: self.layers
            make_backend = functools.partial(ATTENTION_BACKENDS["hybrid_mla"], self.runner)
            pool = self.runner.req_to_token_pool
            self.scheduler = make_scheduler(tree_cache or self.tree.cache, metrics_collector, syncs, make_backend, pool)
        self.of_sync: dict[str, Any] = {"disable_cuda_graph": False, "others_prefill": False}
        self.said: Any = None  # of the last batch to the other rank, where there is one
        self.session = process.session
        self.backend, self.steps = self.session.backend, self.session.steps
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
            request.input_embeds = request.positional_embed_overrides = request.multimodal_inputs = None
            request.return_hidden_states = request.is_prefill_only = request.return_logprob = False
            request.extend_end, request.full_untruncated_fill_ids = len(request.slots), range(len(request.slots))
            request.skip_radix_cache_insert, request.host_hit_length = False, 0
        return requests

    def forward(
        self,
        mode: str,
        requests: list[Any],
        *,
        draft: bool = False,
        prefix_lens: list[int] | None = None,
        new_tokens: list[int] | None = None,
        decoding: int = 0,
        batch: Any = None,
    ) -> Any:
        """`ForwardBatch.init_new`, as SGLang's worker calls it before a forward pass, in which the last so many
        requests of a mixed batch are decoding; returns the batch.

        Args:
            batch: the scheduler's, which gets whatever a pass needs here; by default a new one.
        """
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        class ScheduleBatch:
            """Has None for whatever a pass here does not need."""

            def __getattr__(self, name: str) -> None:
                return None

        batch = ScheduleBatch() if batch is None else batch
        batch.forward_mode, batch.reqs = ForwardMode[mode], requests
        rows = len(requests)
        batch.seq_lens = torch.tensor([len(request.slots) for request in requests], dtype=torch.int64)
        batch.seq_lens_cpu, batch.orig_seq_lens = batch.seq_lens, batch.seq_lens
        each = self.queries if mode == "TARGET_VERIFY" else 1
        batch.input_ids = torch.zeros(sum(new_tokens or [each] * rows), dtype=torch.int64)
        batch.req_pool_indices = torch.arange(rows)
        batch.prefix_lens, batch.extend_lens = prefix_lens, new_tokens
        batch.extend_num_tokens = len(batch.input_ids)
        batch.extend_logprob_start_lens, batch.hicache_consumer_index = new_tokens, -1
        batch.decoding_reqs = requests[rows - decoding :]
        if self.session.admission.votes:
            from sglang.srt.managers.scheduler_components import dp_attn

            self.said = dp_attn.prepare_mlp_sync_batch_raw(batch, **self.of_sync).said
        runner = SimpleNamespace(**{**vars(self.runner), "is_draft_worker": draft})
        return ForwardBatch.init_new(
            batch, runner, capture_hidden_mode=CaptureHiddenMode.NULL, return_hidden_states_before_norm=False
        )

    @property
    def coming(self) -> Any:
        """The pass that runs, or is about to."""
        from sglang_mla_ext.adapter.step.passes import passes

        return passes.now

    def shares(self) -> bool:
        """Whether the coming decode step shares anything."""
        return bool(self.coming.plan.segments)


def replace_bodies() -> None:
    """SGLang's functions that need a whole server or a GPU, before hooks are applied to them."""
    from sglang.srt.disaggregation.common.conn import CommonKVManager
    from sglang.srt.distributed import parallel_state
    from sglang.srt.managers import utils
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components import batch_result_processor, dp_attn
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor import cuda_graph_buffer_registry, forward_batch_info
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner import base_cuda_graph_runner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    def init(self: Any, server_args: Any) -> None:
        self.tree_cache, self.metrics_collector = server_args.tree_cache, server_args.metrics_collector
        self.tp_worker, self.waiting_queue, self.chunked_req = server_args.tp_worker, [], None
        self.is_mixed_chunk, self.chunked_prefill_size, self.page_size = False, 256, PAGE
        self.max_prefill_tokens = 16384
        self.draft_worker = None
        self.running_batch, self.disagg_prefill_inflight_queue = SimpleNamespace(reqs=[]), None
        self.enable_overlap, self.ps = False, SimpleNamespace(dp_rank=None)
        self.idle, self.require_mlp_sync = True, server_args.require_mlp_sync
        server_args.build()

    def flush_cache(self: Any, empty_cache: bool = True) -> bool:
        if self.idle:
            self.tree_cache.reset()
        return self.idle

    def get_internal_state(self: Any, recv_req: Any) -> Any:
        speculative = {"avg_spec_accept_length": self.accept_length} if hasattr(self, "accept_length") else {}
        return GetInternalStateReqOutput(internal_state={"of": "sglang", **speculative})

    def init_kv_manager(self: Any, args: Any, disaggregation_mode: Any, server_args: Any) -> None:
        self.kv_args, self.kv_cache_dtype_str = args, args.kv_cache_dtype_str

    def sync(batch: Any, *, disable_cuda_graph: bool, others_prefill: bool) -> Any:
        """With one other rank. Of an extend SGLang says that there is one, and no decode graph."""
        info = object.__new__(dp_attn.MLPSyncBatchInfo)
        info.is_extend_in_batch = batch is not None and batch.forward_mode.is_extend()
        info.can_run_decode_cuda_graph, info.local_forward_mode = not info.is_extend_in_batch, None
        info.all_gather("cpu", group=None)
        if batch is not None:
            batch.is_extend_in_batch, batch.said = info.said[0] or others_prefill, info.said
        return batch

    def all_gather(self: Any, device: str, group: Any) -> None:
        self.said = self._get_local_tensor(device=device)

    def add_one_req(self: Any, req: Any, has_chunked_req: bool = False, truncation_align_size: Any = None) -> Any:
        self.can_run_list.append(req)
        return AddReqResult.CONTINUE

    FOR_GOOD.enter_context(published_arguments())
    PrefillAdder.add_one_req = add_one_req
    Scheduler.run_batch = lambda self, batch: self.body(batch)
    Scheduler.process_batch_result = lambda self, batch, result: self.processed.append((batch, result))
    dp_attn.prepare_mlp_sync_batch_raw = sync
    dp_attn.MLPSyncBatchInfo.all_gather = all_gather
    dp_attn.MLPSyncBatchInfo._get_local_tensor = lambda self, device: (
        self.is_extend_in_batch,
        self.can_run_decode_cuda_graph,
        self.local_forward_mode,
    )
    CommonKVManager.__init__ = init_kv_manager
    parallel_state.get_attn_tp_group = lambda: SimpleNamespace(world_size=1)
    EagerRunner.execute = lambda self, forward_batch, pp_proxy_tensors=None: self.run(forward_batch)
    DecodeCudaGraphRunner.capture = lambda self: self.attention_graph_variants
    PrefillCudaGraphRunner.execute = lambda self, forward_batch, **kwargs: self.run(forward_batch)
    ModelRunner.forward = lambda self, batch: self._forward_raw(batch) if hasattr(self, "run") else "SGLang's output"
    ModelRunner._forward_raw = lambda self, batch: self.run(batch)
    ScheduleBatch.prepare_for_extend = lambda self: None
    results = batch_result_processor.SchedulerBatchResultProcessor
    results.process_batch_result_prefill = lambda self, batch, result: None
    base_cuda_graph_runner.get_batch_sizes_to_capture = lambda runner, captured_req_width=1: ([1, 2, 12], [1])
    cuda_graph_buffer_registry.build_eager_registry = lambda *, max_bs: max_bs
    forward_batch_info.enable_num_token_non_padded = lambda: False  # it asks for groups of ranks
    Scheduler.__init__ = init
    Scheduler.flush_cache = flush_cache
    Scheduler.is_fully_idle = lambda self, **_: self.idle
    Scheduler.on_idle = lambda self: None
    Scheduler.get_internal_state = get_internal_state
    utils.validate_input_length = lambda req, most, truncates: "too long" if len(req.origin_input_ids) > most else None
    Scheduler._get_new_batch_prefill_raw = lambda self, running_batch: self.make(running_batch)
    Scheduler.get_num_allocatable_reqs = lambda self, running_bs: 12 - running_bs
    KVCacheConfigurator._profile_available_bytes = lambda self, pre_model_load_memory: pre_model_load_memory
    KVCacheConfigurator._build_hybrid_linear_kv_pool = lambda self, *, mla_pool_class: mla_pool_class


def refused(call: Callable[[], Any]) -> tuple[str, str]:
    """The class and the message of the error that a call ends in."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("it was let through")


def batch_of(server: Server, requests: list[Any], new_tokens: int = 0, drafts: int = 0) -> Any:
    """What a step's batch is to the backend: of a decode step, where each request has so many tokens behind its prompt,
    or of a verify step, with so many drafts behind them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    table = server.runner.req_to_token_pool.req_to_token
    slots = []
    for row, request in enumerate(requests):
        length, behind = len(request.slots), torch.arange(max(drafts, 1))
        table[row, :length] = request.slots
        table[row, length + behind] = (7000 + 8 * row + behind).int()
        slots += (7000 + 8 * row + behind).tolist()
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY if drafts else ForwardMode.DECODE,
        batch_size=len(requests),
        seq_lens=torch.tensor([len(request.slots) + new_tokens for request in requests]),
        req_pool_indices=torch.arange(len(requests)),
        out_cache_loc=torch.tensor(slots),
        encoder_lens=None,
        _original_forward_mode=None,
    )
