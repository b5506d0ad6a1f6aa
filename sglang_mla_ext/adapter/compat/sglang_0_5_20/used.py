"""What is used of SGLang 0.5.20 otherwise than of 0.5.18."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.table import Changes, Feature, Read, needed_for, use

_ARGS = "server_args.ServerArgs"
_OVERRIDES = "arg_groups.overrides"
_HOST_CACHE = "managers.cache_controller.HiCacheController"
_TREE = "mem_cache.radix_cache"
_CORE = "mem_cache.unified_cache.unified_tree_core"
_MHA_BATCH = "model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
_ONE_TREE = "mem_cache.unified_radix_cache.UnifiedRadixCache"
_LINEAR_POOL = "mem_cache.memory_pool.HybridLinearKVPool"

CHANGES = Changes(
    uses=(
        # Arguments: what the user gave is kept, and what was decided is beside it.
        use(f"{_ARGS}.resolve_once", "function", "page size; unsupported features", "self"),
        use(f"{_ARGS}._resolution_finished", "attribute", "whether they are resolved"),
        use(f"{_OVERRIDES}.ResolvedView", "class", "arguments as they were decided on"),
        use(f"{_OVERRIDES}.resolved_view", "function", "the same", "server_args"),
        use(f"{_OVERRIDES}.attention_backends_of", "function", "is the backend asked for", "cfg"),
        use(f"{_OVERRIDES}.use_mla_backend", "function", "unsupported models", "server_args"),
        use(f"{_OVERRIDES}.model_config_of", "function", "unsupported models", "server_args"),
        *needed_for(
            Feature.DRAFTS,
            use(f"{_OVERRIDES}.declare_resolution", "function", "the draft model's backend", "server_args source"),
        ),
        use(f"{_ARGS}.enable_unified_cache_external_linker", "attribute", "unsupported features"),
        use(f"{_ARGS}.enable_layernorm_sp", "attribute", "unsupported features"),
        use(
            f"{_MHA_BATCH}.prepare_chunked_prefix_cache_info",
            "function",
            "SGLang's chunks start where expanded prefixes end",
            "self device",
            "pack_all_prefix_chunks single_chunk dense_metadata",
        ),
        use("server_args.add_attention_backend_choices", "attribute", "the backend's name"),
        use("server_args.add_chunked_prefix_cache_attention_backend", "attribute", "prefill over a prefix"),
        # The pool of a model with linear attention, whose layers keep the numbers that they have in the model.
        use(f"{_LINEAR_POOL}.get_key_buffer", "function", "latent rows beside linear attention", "self layer_id"),
        use(
            f"{_LINEAR_POOL}.set_mla_kv_buffer",
            "function",
            "storing keys in two parts",
            "self layer loc_info cache_k_nope cache_k_rope",
        ),
        use(f"{_LINEAR_POOL}.layer_transfer_counter", "attribute", "waiting for rows that come from the host"),
        *needed_for(
            Feature.LINEAR_ON_CPU,
            use(
                "arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
                "function",
                "states are kept for the tree while passes overlap",
            ),
        ),
        # The tree: numbers for nodes, and a core beside the cache.
        use(f"{_ONE_TREE}.tree_core", "attribute", "the radix tree"),
        use(f"{_ONE_TREE}.disable", "attribute", "is there a radix tree"),
        use(f"{_CORE}.UnifiedTreeCore.node_by_id", "function", "paths", "self node_id"),
        use(f"{_CORE}.UnifiedTreeCore.is_root", "function", "whether a node is still in the tree", "self node_id"),
        use(f"{_CORE}.UnifiedTreeCore.root_node_handle", "function", "slots of a path", "self"),
        use(
            f"{_CORE}.UnifiedTreeCore.collect_full_device_indices",
            "function",
            "slots of a path",
            "self from_node_id until_node_id",
        ),
        use(
            f"{_CORE}.UnifiedTreeCore._split_node",
            "function",
            "a split leaves the old node its number and its end, which expansions are known by",
            "self key child split_len",
        ),
        use(f"{_CORE}.UnifiedTreeNode.parent", "attribute", "paths"),
        use(f"{_CORE}.UnifiedTreeNode.key", "attribute", "paths"),
        use(f"{_CORE}.UnifiedTreeNode.id", "attribute", "paths"),
        use(f"{_CORE}.UnifiedTreeNode.counter", "attribute", "numbers are not given twice"),
        use(f"{_CORE}.UnifiedTreeNode.children", "attribute", "paths"),
    ),
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
    reads=(
        Read(
            "kv_index_translator",
            "model_executor/forward_batch_deepseek_mha_mixin.py",
            "prefill over a prefix: what turns slots into rows of the pool",
        ),
    ),
    fields_of={"sglang.srt.server_args.ServerArgs": "sglang.srt.server_args._INPUT_NAMESPACES"},
)
