"""SGLang 0.5.23: the tree's core is in Rust and gives whole paths on demand; FlashMLA is a package of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.compat import sglang_0_5_20
from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.compat.numbered_tree import NumberedTree, PathNode, UnsupportedTree
from sglang_mla_ext.adapter.compat.table import Changes, Feature, needed_for, use

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.server_args import ServerArgs

_ARGS = "server_args.ServerArgs"
_CORE = "mem_cache.unified_cache.unified_tree_core_interface"
_INTERFACE = f"{_CORE}.UnifiedTreeCoreInterface"
_NODE = f"{_CORE}.TreePathNodeInfo"

CHANGES = Changes(
    uses=(
        *needed_for(
            Feature.FP8,
            use(
                "mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
                "function",
                "storing keys in two parts",
                "self layer loc_info cache_k_nope cache_k_rope",
            ),
            use(
                "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
                "function",
                "our pool in place of SGLang's",
                "self max_total_num_tokens mla_pool_class",
            ),
            use(
                "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_linear_kv_pool",
                "function",
                "the same beside linear attention",
                "self",
                "mla_pool_class",
            ),
        ),
        *needed_for(
            Feature.PREFILL_GRAPH,
            use(
                "layers.radix_attention.RadixAttention._eager_attention",
                "function",
                "attention between two segments of a prefill graph",
                "self q k v output save_kv_cache",
            ),
            use(
                "mem_cache.kv_index_translator.KVIndexTranslator.pack_read_stream",
                "function",
                "slots of tails",
                "self plan",
                "req_pool_indices seq_lens indptr out kv_start_idx",
            ),
            use("model_executor.cuda_graph_config.PhaseConfig.bs", "attribute", "rows of prefill graphs"),
            use("model_executor.forward_batch_info.ForwardBatch.kv_loc_plan", "attribute", "slots of tails"),
        ),
        use(f"{_ARGS}.chunked_prefill_size", "attribute", "tokens of a prefill pass"),
        use(f"{_ARGS}.max_prefill_tokens", "attribute", "tokens of a prefill pass"),
        use("managers.schedule_batch.Req.kv", "attribute", "slots of a request"),
        use("managers.schedule_batch.ReqKvInfo.req_pool_idx", "attribute", "slots of a request"),
        use(f"{_ARGS}.attn_dp_size", "attribute", "whether there is DP attention"),
        use(f"{_ARGS}.enable_kv_cache_sharding", "attribute", "unsupported features"),
        use(f"{_ARGS}.enable_nvidia_megakernel", "attribute", "unsupported features"),
        use(f"{_ARGS}.enable_pd_role_switch", "attribute", "unsupported features"),
        use(f"{_ARGS}.disaggregation_decode_retraction_backup", "attribute", "unsupported features"),
        use(f"{_INTERFACE}.collect_path_info", "function", "paths", "self end_node_ids"),
        use(f"{_INTERFACE}.is_root", "function", "whether a node is there", "self node_id"),
        use(f"{_INTERFACE}.root_node_handle", "function", "slots of a path", "self"),
        use(
            f"{_INTERFACE}.collect_full_device_indices",
            "function",
            "slots of a path",
            "self from_node_id until_node_id",
        ),
        use(f"{_NODE}.node_id", "attribute", "paths"),
        use(f"{_NODE}.path_end", "attribute", "paths"),
        use(f"{_NODE}.num_children", "attribute", "paths"),
    ),
    renamed={"sgl_kernel.flash_mla": "sglang.kernels.ops.attention.flash_mla_interface"},
    gone=(
        "managers.schedule_batch.Req.req_pool_idx",
        "mem_cache.unified_cache.unified_tree_core",
        "environ.Envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
    ),
)


class TreeView(NumberedTree):
    """See NumberedTree. Any core will do: SGLang takes the one in Python where that in Rust lacks something."""

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        """
        Raises:
            UnsupportedTree: another kind of prefix cache, or none.
        """
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        if not isinstance(tree_cache, UnifiedRadixCache) or tree_cache.disable:
            raise UnsupportedTree(type(tree_cache).__name__)
        super().__init__(tree_cache.tree_core)
        self._core: UnifiedTreeCoreInterface

    def _paths(self, ids: Sequence[int]) -> list[Sequence[PathNode]]:
        return list(self._core.collect_path_info(ids))


def dp_attention_ranks(args: ServerArgs) -> int:
    """See sglang_0_5_17. When SGLang resolves its arguments, --enable-dp-attention becomes a number of its own."""
    return int(args.dp_size if args.enable_dp_attention else args.attn_dp_size)


def flash_mla() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """See sglang_0_5_17."""
    from sglang.kernels.ops.attention.flash_mla_interface import flash_mla_with_kvcache, get_mla_metadata

    return flash_mla_with_kvcache, get_mla_metadata


def row_of_request(req: Any) -> int:
    """See sglang_0_5_17."""
    return int(req.kv.req_pool_idx)


def mla_draft_backend(fp8: bool) -> str:
    """See sglang_0_5_17. With FlashMLA's the host waits for the target's prefill before it can launch the draft's: the
    GPU idled for 14 ms after each prefill pass."""
    return "flashmla" if fp8 else "fa3"


def polls_nixl() -> bool:
    """See sglang_0_5_17. The prefill server reports what has come (transfer_worker, disaggregation/nixl/conn.py:1602).
    A decode server asks NIXL for nothing: without NIXL's thread no transfer ended in 300 s."""
    return False


def shares_in_prefill_graphs() -> bool:
    """See sglang_0_5_17."""
    return True


def prefill_graph_rows(args: ServerArgs) -> int:
    """See sglang_0_5_17."""
    if args.device == "cpu":
        return int(args.max_prefill_tokens) + max(args.chunked_prefill_size or 0, 0)
    config = args.cuda_graph_config.prefill
    return max(config.bs or [0]) if config.backend == "breakable" else 0


def write_slots(batch: ForwardBatch, translator: KVIndexTranslator, out: torch.Tensor, **ranges: torch.Tensor) -> None:
    """See sglang_0_5_17."""
    translator.pack_read_stream(batch.kv_loc_plan, req_pool_indices=batch.req_pool_indices, out=out, **ranges)


def other_trees() -> list[str]:
    """None. See sglang_0_5_17."""
    return []


def further_findings(args: ServerArgs) -> list[Finding]:
    """See sglang_0_5_17. SGLang keeps rows of NEXTN's drafts beside the model's on the host, which must be as long
    (check_packed_kv_rows, mem_cache/hybrid_cache/host_pool_config.py:268): 576 bytes beside 656 with an FP8 cache."""
    on_host, fp8 = args.enable_hierarchical_cache, args.kv_cache_dtype == "fp8_e4m3"
    drafts_on_host = on_host and args.speculative_algorithm is not None
    return [
        *unsupported("--enable-hierarchical-cache beside drafts over an FP8 cache", drafts_on_host and fp8),
        *sglang_0_5_20.new_flags(args),
        *unsupported("--enable-kv-cache-sharding", args.enable_kv_cache_sharding),
        *unsupported("--enable-nvidia-megakernel", args.enable_nvidia_megakernel),
        *unsupported("--enable-pd-role-switch", args.enable_pd_role_switch),
        *unsupported(
            "--disaggregation-decode-retraction-backup host_pool",
            args.disaggregation_decode_retraction_backup == "host_pool",
        ),
    ]
