"""SGLang 0.5.23: server arguments keep what the user gave beside what was decided; the tree's core is in Rust and gives
whole paths on demand; FlashMLA is a package of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat.sglang_0_5_17 import Release0517
from sglang_mla_ext.adapter.compat.sglang_0_5_23 import used
from sglang_mla_ext.adapter.compat.sglang_0_5_23.arguments import Arguments0523
from sglang_mla_ext.adapter.compat.sglang_0_5_23.tree import NumberedTreeView

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
    from sglang.srt.server_args import ServerArgs

    from sglang_mla_ext.adapter.compat.draft_units import Units


class Release0523(Arguments0523, Release0517):
    """See Release0517, also for each method."""

    CHANGES = used.CHANGES
    TreeView = NumberedTreeView
    # Weights that a peer has written (RDMA) come with no other call, and what is derived from any is made there
    # (end_weight_update, managers/scheduler_components/weight_updater.py:323).
    ends_weight_updates = True
    # The prefill server reports what has come (transfer_worker, disaggregation/nixl/conn.py:1602) and a decode server
    # asks NIXL for nothing: without NIXL's thread no transfer ended in 300 s.
    polls_nixl = False
    shares_in_prefill_graphs = True
    has_graph_variants = True

    def row_of_request(self, req: Any) -> int:
        return int(req.kv.req_pool_idx)

    def extend_tokens(self, req: Req) -> int:
        return int(req.extend_len)

    def report_decoded(self, reporter: Any, batch: ScheduleBatch, in_graph: bool) -> None:
        reporter.report_decode_stats(in_graph, running_batch=batch, num_generated_tokens=len(batch.reqs))

    def namespace(self, req: Any) -> str | None:
        """See Release0517: a key and a salt, which older releases join to one key."""
        both = req.extra_key, req.cache_salt
        return None if both == (None, None) else repr(both)

    def wait_for_whole_pass(self, runner: ModelRunner) -> None:
        """See Release0517 (`_apply_war_barrier`, managers/scheduler.py:2012)."""
        runner.shared_read_done_event = None

    def dp_rank(self, scheduler: Scheduler) -> int:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().dp_rank or 0)

    def wait_before_loading(self, controller: HiCacheController, stream: torch.Stream) -> None:
        """See Release0517. SGLang has it wait."""

    def flash_mla(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

        return flash_mla_with_kvcache, get_mla_metadata

    def plain_backend(self, runner: ModelRunner) -> AttentionBackend:
        from sglang_mla_ext.adapter.compat.sglang_0_5_23.plain_backend import PlainBackend

        return PlainBackend(runner)

    def captured_graph(self) -> str | None:
        from sglang.srt.model_executor.runner_utils.capture_mode import get_capture_attention_variant

        label: str | None = get_capture_attention_variant()
        return label

    def prefill_graph_rows(self, args: ServerArgs) -> int:
        if args.device == "cpu":
            return int(args.max_prefill_tokens) + max(args.chunked_prefill_size or 0, 0)
        config = args.cuda_graph_config.prefill
        return max(config.bs or [0]) if config.backend == "breakable" else 0

    def write_slots(
        self, batch: ForwardBatch, translator: KVIndexTranslator, out: torch.Tensor, **ranges: torch.Tensor
    ) -> None:
        translator.pack_read_stream(batch.kv_loc_plan, req_pool_indices=batch.req_pool_indices, out=out, **ranges)

    def mixes_with_drafts(self, args: ServerArgs) -> bool:
        """See Release0517: with one chain of drafts a request, and passes before which ranks exchange nothing, as they
        do with DP attention and dense layers of fewer ranks (`require_mlp_sync`)."""
        from sglang.srt.environ import envs

        if args.speculative_algorithm is None:
            return True
        exchanges = self.dp_attention_ranks(args) > 1 or args.moe_dense_tp_size is not None
        apart = exchanges or envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get()
        return args.speculative_algorithm in ("EAGLE", "EAGLE3") and args.speculative_eagle_topk == 1 and not apart

    def extend_draft(
        self, units: Units, runner: ModelRunner, batch: ForwardBatch, draft_worker: Any
    ) -> ModelRunnerOutput | None:
        from sglang_mla_ext.adapter.compat.sglang_0_5_23.draft_extend import extend_draft

        return extend_draft(units, runner, batch, draft_worker)

    def mla_draft_backend(self, fp8: bool) -> str:
        """See Release0517. With FlashMLA's the host waits for the target's prefill before it can launch the draft's:
        the GPU idled for 14 ms after each prefill pass."""
        return "flashmla" if fp8 else "fa3"

    def set_draft_backend(self, args: ServerArgs, name: str) -> None:
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(args, BACKEND_NAME, speculative_draft_attention_backend=name)

    def name_draft_backend(self, backend: Any, factory: Any) -> None:
        """See Release0517. A DraftBackendFactory names what it makes."""
