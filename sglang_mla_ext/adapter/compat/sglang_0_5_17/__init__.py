"""SGLang 0.5.17, the oldest supported release: what is used of it, and the base class of all releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import tree_view
from sglang_mla_ext.adapter.compat.sglang_0_5_17.arguments import Arguments0517
from sglang_mla_ext.adapter.compat.sglang_0_5_17.read_of_backend import READ_OF_BACKEND
from sglang_mla_ext.adapter.compat.sglang_0_5_17.tree import NodeTreeView
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_at_start import USED_AT_START
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_by_features import USED_BY_FEATURES
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_in_a_pass import USED_IN_A_PASS
from sglang_mla_ext.adapter.compat.table import Changes, Feature

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from sglang_mla_ext.adapter.compat.draft_units import Units


class Release0517(Arguments0517):
    """The part of SGLang's interface that differs between releases. A newer release is a class derived from the one
    before; `compat.installed` is the object to call.

    Attributes:
        CHANGES: what is used of the release otherwise than of the one before; of this one, all that is used.
        TreeView: reads its radix tree.
        ends_weight_updates: whether `end_weight_update` ends an update of weights, perhaps the only call of it.
        polls_nixl: whether a decode server asks NIXL for messages, which moves data along without a thread of NIXL's
            own.
        shares_in_prefill_graphs: whether prefill graphs call the backend between their segments (prefill_graph.py).
        has_graph_variants: whether it captures decode graphs of several kinds for each size (graph_variants.py).
    """

    CHANGES: ClassVar[Changes] = Changes(
        uses={Feature.BASE: USED_AT_START + USED_IN_A_PASS, **USED_BY_FEATURES}, reads=READ_OF_BACKEND
    )
    TreeView: ClassVar[type[tree_view.TreeView]] = NodeTreeView
    ends_weight_updates: ClassVar[bool] = False
    polls_nixl: ClassVar[bool] = True
    shares_in_prefill_graphs: ClassVar[bool] = False
    has_graph_variants: ClassVar[bool] = False

    def row_of_request(self, req: Any) -> int:
        """Return a running request's row in the table of slots."""
        return int(req.req_pool_idx)

    def extend_tokens(self, req: Req) -> int:
        """Return the new tokens that a prefill batch computes of a request."""
        return int(req.extend_range.length)

    def report_decoded(self, reporter: Any, batch: ScheduleBatch, in_graph: bool) -> None:
        """Have SGLang's metrics count a token of each request of a batch."""
        reporter.report_decode_stats(in_graph, running_batch=batch)

    def namespace(self, req: Any) -> str | None:
        """Return what keeps the tokens of a request, or of a tokenized one, apart from equal tokens of others."""
        key: str | None = req.extra_key
        return key

    def wait_for_whole_pass(self, runner: ModelRunner) -> None:
        """Have the scheduler wait for all that was launched with a pass before it writes to what passes read, such as
        slots of requests. Otherwise it waits only until the pass's graph has read them."""
        runner.war_fastpath_read_done_event = None

    def dp_rank(self, scheduler: Scheduler) -> int:
        """Return the data-parallel rank of a scheduler, a replica or a rank of DP attention; 0 where it is alone."""
        return int(scheduler.ps.dp_rank or 0)

    def wait_before_loading(self, controller: HiCacheController, stream: torch.Stream) -> None:
        """Have the next copy from the host to the device wait for what was put on this stream; see host_cache.py."""
        controller.load_stream.wait_stream(stream)

    def flash_mla(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return FlashMLA's attention over pages, and what makes its schedule."""
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        return flash_mla_with_kvcache, get_mla_metadata

    def plain_backend(self, runner: ModelRunner) -> AttentionBackend | None:
        """Return SGLang's backend for decode graphs without sharing, over a BF16 cache; None where there are none."""
        return None

    def captured_graph(self) -> str | None:
        """Return the label of the decode graph that is captured, where there are several of a size."""
        return None

    def prefill_graph_rows(self, args: ServerArgs) -> int:
        """Return the most new tokens of a prefill pass in a CUDA graph, 0 where there are no such graphs. Without a
        GPU, those of the largest pass that runs as one. `args` are resolved."""
        return 0

    def write_slots(self, batch: ForwardBatch, translator: Any, out: torch.Tensor, **ranges: torch.Tensor) -> None:
        """Write the slots of a part of each request's tokens, one request after the other, for prefill graphs.

        Args:
            translator: SGLang's KVIndexTranslator.
            out: `[tokens]` int32.
            ranges: int32 on the device: `kv_start_idx [requests]`, the first token of each request's part; `seq_lens
                [requests]`, its tokens; `indptr [requests + 1]`, where they begin in `out`.
        """
        raise NotImplementedError("this release has no prefill graphs that prefixes are shared in")

    def mixes_with_drafts(self, args: ServerArgs) -> bool:
        """Return whether new tokens can be rows of the steps that verify this server's drafts; also where there are
        none. `args` are resolved."""
        return args.speculative_algorithm is None

    def extend_draft(self, units: Units, runner: ModelRunner, batch: ForwardBatch, draft_worker: Any) -> Any:
        """Run the drafting layer over new tokens that were in a verify step.

        Args:
            runner: the draft's; batch: what SGLang asked for, an extend of the same tokens.
            draft_worker: SGLang's, of the drafting model.
        Returns:
            SGLang's ModelRunnerOutput: logits and hidden states of each request's last token; None where SGLang is to
            compute them.
        """
        return None

    def mla_draft_backend(self, fp8: bool) -> str:
        """Return SGLang's attention backend for a draft with Multi-head Latent Attention on a GPU.

        Args:
            fp8: whether the cache is in FP8.
        """
        return "flashmla"

    def set_draft_backend(self, args: ServerArgs, name: str) -> None:
        """Give the draft model another attention backend. `args` are resolved, but not what `resolved` returns."""
        args.override(BACKEND_NAME, speculative_draft_attention_backend=name)

    def name_draft_backend(self, backend: Any, factory: Any) -> None:
        """Tell a draft's attention backend its name, as SGLang does for those that a model runner builds. A layer takes
        its forward method by it, and by the server's own backend, which is ours, where there is none.

        Args:
            backend: what a DraftBackendFactory made: a backend, one that owns some for each draft step, or None.
        """
        if backend is None or not factory.draft_attn_backend:
            return
        for each in (backend, *getattr(backend, "attn_backends", ())):
            each.prefill_attention_backend_str = each.decode_attention_backend_str = factory.draft_attn_backend
