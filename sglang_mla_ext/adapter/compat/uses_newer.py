"""What this package uses of SGLang after 0.5.17: what a release has in place of what the one before had (uses.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sglang_mla_ext.adapter.compat.reads import Read
from sglang_mla_ext.adapter.compat.sglang_0_5_17.uses import SGLANG_0_5_17
from sglang_mla_ext.adapter.compat.use import Release, Use

_ARGS = "server_args.ServerArgs"
_OVERRIDES = "arg_groups.overrides"
_HOST_CACHE = "managers.cache_controller.HiCacheController"
_TREE = "mem_cache.radix_cache"
_CORE = "mem_cache.unified_cache.unified_tree_core"
_CORE_INTERFACE = "mem_cache.unified_cache.unified_tree_core_interface"
_POOL = "mem_cache.memory_pool.MLATokenToKVPool"
_MHA_BATCH = "model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
_ONE_TREE = "mem_cache.unified_radix_cache.UnifiedRadixCache"


def _use(path: str, kind: str, why: str, params: str = "", keywords: str = "") -> Use:
    return Use(f"sglang.srt.{path}", kind, why, tuple(params.split()), tuple(keywords.split()))


def _after(
    before: Release,
    *added: Use,
    gone: tuple[str, ...] = (),
    read: tuple[Read, ...] = (),
    fields_of: Mapping[str, str] | None = None,
) -> Release:
    """A release by what differs from the one before.

    Args:
        added: what is used besides, or otherwise than before.
        gone: paths below `sglang.srt` of what is used no more; below them all.
        read: what SGLang reads of a backend besides.
    """
    again = {use.path for use in added}
    prefixes = tuple(f"sglang.srt.{path}" for path in gone)
    uses = [use for use in before.uses if use.path not in again and not _is_below(use.path, prefixes)]
    return replace(
        before,
        uses=(*uses, *added),
        read_of_backend=(*before.read_of_backend, *read),
        fields_of=before.fields_of if fields_of is None else fields_of,
    )


def _is_below(path: str, prefixes: tuple[str, ...]) -> bool:
    return any(path == prefix or path.startswith(f"{prefix}.") for prefix in prefixes)


SGLANG_0_5_18 = _after(
    SGLANG_0_5_17,
    _use(f"{_ARGS}._late_resolution", "function", "the draft model's backend", "self source"),
    _use(f"{_HOST_CACHE}.l2_transfer_engine", "attribute", "copies from the host after the step before"),
    _use("mem_cache.l2_transfer.L2TransferEngine.host_to_device_stream", "attribute", "the same"),
    gone=(
        f"{_HOST_CACHE}.load_stream",
        f"{_ARGS}.override",
        "speculative.draft_utils.DraftBackendFactory.draft_attn_backend",
        "layers.attention.flashmla_backend.FlashMLAMultiStepDraftBackend",
    ),
    read=(
        Read(
            "extend_dummy_seqs_capped_by_req_pool",
            "model_executor/runner/flashinfer_autotune.py",
            "how many requests a step to try kernels out may have",
        ),
    ),
)

SGLANG_0_5_20 = _after(
    SGLANG_0_5_18,
    # Arguments: what the user gave is kept, and what was decided is beside it.
    _use(f"{_ARGS}.resolve_once", "function", "page size; unsupported features", "self"),
    _use(f"{_ARGS}._resolution_finished", "attribute", "whether they are resolved"),
    _use(f"{_OVERRIDES}.ResolvedView", "class", "arguments as they were decided on"),
    _use(f"{_OVERRIDES}.resolved_view", "function", "the same", "server_args"),
    _use(f"{_OVERRIDES}.attention_backends_of", "function", "is the backend asked for", "cfg"),
    _use(f"{_OVERRIDES}.use_mla_backend", "function", "unsupported models", "server_args"),
    _use(f"{_OVERRIDES}.model_config_of", "function", "unsupported models", "server_args"),
    _use(f"{_OVERRIDES}.declare_resolution", "function", "the draft model's backend", "server_args source"),
    _use(f"{_ARGS}.enable_unified_cache_external_linker", "attribute", "unsupported features"),
    _use(f"{_ARGS}.enable_layernorm_sp", "attribute", "unsupported features"),
    _use(
        f"{_MHA_BATCH}.prepare_chunked_prefix_cache_info",
        "function",
        "SGLang's chunks start where expanded prefixes end",
        "self device",
        "pack_all_prefix_chunks single_chunk dense_metadata",
    ),
    _use("server_args.add_attention_backend_choices", "attribute", "the backend's name"),
    _use("server_args.add_chunked_prefix_cache_attention_backend", "attribute", "prefill over a prefix"),
    # The tree: numbers for nodes, and a core beside the cache.
    _use(f"{_ONE_TREE}.tree_core", "attribute", "the radix tree"),
    _use(f"{_ONE_TREE}.disable", "attribute", "is there a radix tree"),
    _use(f"{_CORE}.UnifiedTreeCore.node_by_id", "function", "paths", "self node_id"),
    _use(f"{_CORE}.UnifiedTreeCore.is_root", "function", "whether a node is still in the tree", "self node_id"),
    _use(f"{_CORE}.UnifiedTreeCore.root_node_handle", "function", "slots of a path", "self"),
    _use(
        f"{_CORE}.UnifiedTreeCore.collect_full_device_indices",
        "function",
        "slots of a path",
        "self from_node_id until_node_id",
    ),
    _use(
        f"{_CORE}.UnifiedTreeCore._split_node",
        "function",
        "a split leaves the old node its number and its end, which expansions are known by",
        "self key child split_len",
    ),
    _use(f"{_CORE}.UnifiedTreeNode.parent", "attribute", "paths"),
    _use(f"{_CORE}.UnifiedTreeNode.key", "attribute", "paths"),
    _use(f"{_CORE}.UnifiedTreeNode.id", "attribute", "paths"),
    _use(f"{_CORE}.UnifiedTreeNode.counter", "attribute", "numbers are not given twice"),
    _use(f"{_CORE}.UnifiedTreeNode.children", "attribute", "paths"),
    gone=(
        f"{_ARGS}.__post_init__",
        f"{_ARGS}.get_attention_backends",
        f"{_ARGS}.use_mla_backend",
        f"{_ARGS}.get_model_config",
        f"{_ARGS}._late_resolution",
        f"{_HOST_CACHE}.l2_transfer_engine",
        "mem_cache.l2_transfer.L2TransferEngine",
        "environ.Envs.SGLANG_ENABLE_UNIFIED_RADIX_TREE",
        f"{_TREE}.RadixCache",
        f"{_TREE}.TreeNode",
        f"{_TREE}.RadixKey",
    ),
    read=(
        Read(
            "kv_index_translator",
            "model_executor/forward_batch_deepseek_mha_mixin.py",
            "prefill over a prefix: what turns slots into rows of the pool",
        ),
    ),
    fields_of={"sglang.srt.server_args.ServerArgs": "sglang.srt.server_args._INPUT_NAMESPACES"},
)

_FLASH_MLA = "sglang.kernels.ops.attention.flash_mla_interface"
_OLD_FLASH_MLA = {use.path.rpartition(".")[2]: use for use in SGLANG_0_5_17.uses if use.path.startswith("sgl_kernel.")}

SGLANG_0_5_23 = _after(
    replace(SGLANG_0_5_20, uses=tuple(use for use in SGLANG_0_5_20.uses if not use.path.startswith("sgl_kernel."))),
    *(replace(use, path=f"{_FLASH_MLA}.{name}") for name, use in _OLD_FLASH_MLA.items()),
    _use(
        f"{_POOL}.set_mla_kv_buffer",
        "function",
        "storing keys in two parts",
        "self layer loc_info cache_k_nope cache_k_rope",
    ),
    _use(
        "mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
        "function",
        "the FP8 pool",
        "self max_total_num_tokens mla_pool_class",
    ),
    _use(f"{_ARGS}.enable_kv_cache_sharding", "attribute", "unsupported features"),
    _use(f"{_ARGS}.enable_nvidia_megakernel", "attribute", "unsupported features"),
    _use(f"{_CORE_INTERFACE}.UnifiedTreeCoreInterface.collect_path_info", "function", "paths", "self end_node_ids"),
    _use(f"{_CORE_INTERFACE}.UnifiedTreeCoreInterface.is_root", "function", "whether a node is there", "self node_id"),
    _use(f"{_CORE_INTERFACE}.UnifiedTreeCoreInterface.root_node_handle", "function", "slots of a path", "self"),
    _use(
        f"{_CORE_INTERFACE}.UnifiedTreeCoreInterface.collect_full_device_indices",
        "function",
        "slots of a path",
        "self from_node_id until_node_id",
    ),
    _use(f"{_CORE_INTERFACE}.TreePathNodeInfo.node_id", "attribute", "paths"),
    _use(f"{_CORE_INTERFACE}.TreePathNodeInfo.path_end", "attribute", "paths"),
    _use(f"{_CORE_INTERFACE}.TreePathNodeInfo.num_children", "attribute", "paths"),
    gone=(_CORE, "environ.Envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE"),
)
