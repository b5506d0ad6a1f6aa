"""SGLang 0.5.17, the oldest supported release: what is used of it, and the base class of all releases."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import tree_view
from sglang_mla_ext.adapter.compat.findings import Finding
from sglang_mla_ext.adapter.compat.sglang_0_5_17.read_of_backend import READ_OF_BACKEND
from sglang_mla_ext.adapter.compat.sglang_0_5_17.tree import NodeTreeView
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_at_start import USED_AT_START
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_by_features import USED_BY_FEATURES
from sglang_mla_ext.adapter.compat.sglang_0_5_17.used_in_a_pass import USED_IN_A_PASS
from sglang_mla_ext.adapter.compat.table import Changes

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs

    from sglang_mla_ext.adapter.compat.draft_units import Units


class Release0517:
    """The part of SGLang's interface that differs between releases. A newer release is a class derived from the one
    before; `compat.installed` is the object to call.

    Attributes:
        CHANGES: what is used of the release otherwise than of the one before; of this one, all that is used.
        RESOLVED_BY: the method of SGLang's server arguments that turns what the user gave into what the server does.
        TreeView: reads its radix tree.
    """

    CHANGES: ClassVar[Changes] = Changes(
        uses=(*USED_AT_START, *USED_IN_A_PASS, *USED_BY_FEATURES), reads=READ_OF_BACKEND
    )
    RESOLVED_BY: ClassVar[str] = "__post_init__"
    TreeView: ClassVar[type[tree_view.TreeView]] = NodeTreeView

    # ---- server arguments

    def is_resolved(self, args: ServerArgs) -> bool:
        """Return whether RESOLVED_BY has run before on these arguments, in the process that they come from."""
        return False  # there is no calling it again

    def resolve(self, args: ServerArgs) -> None:
        """Run RESOLVED_BY, where making the arguments has not."""

    def resolved(self, args: ServerArgs) -> Any:
        """Return the arguments as they were decided on, with the same names; where they are not resolved, as given."""
        return args

    def attention_backends(self, args: ServerArgs) -> tuple[str | None, str | None]:
        """Return the names of the attention backends for prefill and decode."""
        prefill, decode = args.get_attention_backends()
        return prefill, decode

    def dp_attention_ranks(self, args: ServerArgs) -> int:
        """Return the ranks of DP attention, 1 without it. `args` are resolved."""
        return int(args.dp_size) if args.enable_dp_attention else 1

    def infiniband_check(self) -> tuple[Any, str]:
        """Return where the check that InfiniBand devices are here is found: its owner, and its name."""
        from sglang.srt.server_args import ServerArgs

        return ServerArgs, "_validate_ib_devices"

    def other_trees(self) -> list[str]:
        """Return the environment variables that have SGLang keep its prefixes in a tree that TreeView cannot read."""
        from sglang.srt.environ import envs

        trees = {
            "SGLANG_ENABLE_UNIFIED_RADIX_TREE": envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE,
            "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE": envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE,
        }
        return [name for name, variable in trees.items() if variable.get()]

    def further_findings(self, args: ServerArgs) -> list[Finding]:
        """Return what is asked for of features that this release has, the oldest has not, and `hybrid_mla` does not
        support. `args` are resolved."""
        return []

    # ---- the model

    def uses_mla(self, args: ServerArgs) -> bool:
        """Return whether the model has Multi-head Latent Attention."""
        return bool(args.use_mla_backend())

    def model_config(self, args: ServerArgs) -> Any:
        """Return the Hugging Face configuration of the model that a server is launched with."""
        return self._model_config(args).hf_config

    def _model_config(self, args: ServerArgs) -> Any:
        return args.get_model_config()

    def linear_layers(self, args: ServerArgs) -> Any:
        """Return the configuration of a model's layers with linear attention, whose states SGLang keeps in a pool of
        their own; None where it has none."""
        from sglang.srt.configs.hybrid_arch import mambaish_config

        return mambaish_config(self._model_config(args))

    def tree_of_linear_layers(self) -> str | None:
        """Return the prefix cache of a model with such layers; None where it is the one that TreeView reads."""
        return "MambaRadixCache"

    # ---- memory

    def latent_pool_arguments(self, configurator: KVCacheConfigurator) -> dict[str, Any]:
        """Return keyword arguments of SGLang's pool of latent rows, but for its size, as its own configurator gives
        them."""
        from sglang.srt.runtime_context import get_exec

        return dict(
            page_size=configurator.pool_page_size,
            dtype=configurator.kv_cache_dtype,
            kv_lora_rank=configurator.model_config.kv_lora_rank,
            qk_rope_head_dim=configurator.model_config.qk_rope_head_dim,
            layer_num=configurator.layer_info.num_effective_layers,
            device=configurator.device,
            enable_memory_saver=get_exec().features.enable_memory_saver,
            start_layer=configurator.layer_info.start_layer,
            end_layer=configurator.layer_info.end_layer,
        )

    def most_requests(self, configurator: KVCacheConfigurator) -> int:
        """Return the most requests that SGLang's pool of requests can have, however many tokens there is room for."""
        any_number = 1 << 40
        return int(configurator.resolve_max_num_reqs(any_number))

    def row_of_request(self, req: Any) -> int:
        """Return a running request's row in the table of slots."""
        return int(req.req_pool_idx)

    def memory_region(self, runner: ModelRunner) -> Callable[[], AbstractContextManager[object]]:
        """Return what makes contexts for allocations that SGLang releases with its KV cache while it sleeps. They come
        back at the same addresses with other contents. Without --enable-memory-saver the contexts do nothing."""
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        return functools.partial(runner.memory_saver_adapter.region, GPU_MEMORY_TYPE_KV_CACHE)

    def gives_kv_memory(self, tags: Sequence[str] | None) -> bool:
        """Return whether a request to release or resume memory, by its tags, is about that of the KV cache."""
        from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

        return not tags or GPU_MEMORY_TYPE_KV_CACHE in tags

    def wait_before_loading(self, controller: HiCacheController, stream: torch.Stream) -> None:
        """Have the next copy from the host to the device wait for what was put on this stream; see host_cache.py."""
        controller.load_stream.wait_stream(stream)

    def ends_weight_updates(self) -> bool:
        """Return whether `end_weight_update` ends an update of weights, perhaps the only call of it."""
        return False

    def polls_nixl(self) -> bool:
        """Return whether a decode server asks NIXL for messages, which moves data along without a thread of NIXL's
        own."""
        return True

    # ---- passes

    def flash_mla(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return FlashMLA's attention over pages, and what makes its schedule."""
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        return flash_mla_with_kvcache, get_mla_metadata

    def decode_graph_backend(self, args: ServerArgs) -> str:
        """Return how decode is captured in CUDA graphs, "disabled" where it is not. `args` are resolved."""
        return str(args.cuda_graph_config.decode.backend)

    def prefill_graph_backend(self, args: ServerArgs) -> str:
        """Return how prefill is captured in CUDA graphs, "disabled" where it is not. `args` are resolved."""
        return str(args.cuda_graph_config.prefill.backend)

    def disable_prefill_graph(self, args: ServerArgs) -> None:
        """Run prefill without CUDA graphs, unless --cuda-graph-backend-prefill says otherwise. `args` are not
        resolved."""
        args.disable_prefill_cuda_graph = True

    def shares_in_prefill_graphs(self) -> bool:
        """Return whether prefill graphs call the backend between their segments (prefill_graph.py)."""
        return False

    def prefill_graph_rows(self, args: ServerArgs) -> int:
        """Return the most new tokens of a prefill pass in a CUDA graph, 0 where there are no such graphs. Without a
        GPU, those of the largest pass that runs as one. `args` are resolved."""
        return 0

    def prefill_chunk_tokens(self) -> int:
        """Return how many tokens of cached prompts a prefill pass makes keys and values of at a time."""
        from sglang.srt.environ import envs

        return int(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get())

    def write_slots(self, batch: ForwardBatch, translator: Any, out: torch.Tensor, **ranges: torch.Tensor) -> None:
        """Write the slots of a part of each request's tokens, one request after the other, for prefill graphs.

        Args:
            translator: SGLang's KVIndexTranslator.
            out: `[tokens]` int32.
            ranges: int32 on the device: `kv_start_idx [requests]`, the first token of each request's part; `seq_lens
                [requests]`, its tokens; `indptr [requests + 1]`, where they begin in `out`.
        """
        raise NotImplementedError("this release has no prefill graphs that prefixes are shared in")

    # ---- speculative decoding

    def draft_tokens(self, args: ServerArgs) -> int:
        """Return the query tokens of a request in a verify step, the last accepted one among them; 1 without
        speculative decoding. `args` are resolved."""
        args = self.resolved(args)
        if args.speculative_algorithm is None:
            return 1
        return int(args.speculative_num_draft_tokens or 1)

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

    def draft_has_mla(self, args: ServerArgs) -> bool:
        """Return whether the draft model has Multi-head Latent Attention. `args` are resolved."""
        from sglang.srt.configs.model_config import AttentionArch, ModelConfig

        draft = ModelConfig.from_server_args(
            args,
            model_path=args.speculative_draft_model_path,
            model_revision=args.speculative_draft_model_revision,
            is_draft_model=True,
        )
        return bool(draft.attention_arch == AttentionArch.MLA)

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

    def plans_on_a_stream(self) -> bool:
        """Return whether the environment has SGLang prepare verify steps on a stream beside the forward pass."""
        from sglang.srt.environ import envs

        return bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())
