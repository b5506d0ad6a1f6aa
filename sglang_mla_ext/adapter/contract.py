"""What this package uses of SGLang: the one table, checked when the backend is asked for.

SGLang has no stable plug-in interface for attention inside a model, so each name below could change in any
release. A difference is reported by name at start instead of failing somewhere in a forward pass. Not in the table is
what cannot be imported without a GPU, FlashMLA's backend: that one fails by name where it is imported.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VERSIONS = ("0.5.17",)


class ContractError(RuntimeError):
    """SGLang is not what this package was written for."""


@dataclass(frozen=True)
class Use:
    """One thing used of SGLang.

    Attributes:
        path: dotted path to the object.
        params: the leading parameter names that we rely on, in order; None for a thing that is not called.
        why: what for.
        launcher: also used in the launching process, which should not import the model's code.
        kind: its class, where that matters.
    """

    path: str
    params: tuple[str, ...] | None
    why: str
    launcher: bool = False
    kind: type | None = None


CONTRACT = (
    Use("sglang.srt.plugins.hook_registry.HookRegistry.register", ("target", "hook", "hook_type"), "hooks", True),
    Use("sglang.srt.plugins.hook_registry.HookRegistry._patched", None, "which hooks are in place", True),
    Use("sglang.srt.server_args.ServerArgs.add_cli_args", ("parser",), "our flags", True),
    Use("sglang.srt.server_args.ServerArgs.from_cli_args", ("args",), "our flags", True),
    Use("sglang.srt.server_args.ServerArgs.__post_init__", ("self",), "page size; unsupported features", True),
    Use("sglang.srt.server_args.ServerArgs.get_attention_backends", ("self",), "is the backend asked for", True),
    Use("sglang.srt.server_args.add_attention_backend_choices", ("choices",), "the backend's name", True),
    Use("sglang.srt.server_args.add_chunked_prefix_cache_attention_backend", ("backend_name",), "prefill", True),
    Use(
        "sglang.srt.layers.attention.attention_registry.register_attention_backend", ("name",), "the backend's factory"
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register",
        ("backend_name", "handler_func"),
        "which forward method a phase takes",
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler",
        ("backend_name",),
        "FlashMLA's choice of a forward method",
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_backend_handler.AttnForwardMethod.MHA_CHUNKED_KV",
        None,
        "prefill over expanded prefixes",
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_backend_handler.is_in_tc_piecewise_cuda_graph",
        (),
        "no such prefill inside a graph",
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_backend_handler.is_in_breakable_cuda_graph",
        (),
        "no such prefill inside a graph",
    ),
    Use("sglang.srt.managers.scheduler.Scheduler.__init__", ("self", "server_args"), "the radix tree"),
    Use("sglang.srt.managers.scheduler.Scheduler.is_fully_idle", ("self",), "when expansions may be dropped"),
    Use("sglang.srt.managers.scheduler.Scheduler.flush_cache", ("self",), "dropping expansions"),
    Use("sglang.srt.managers.scheduler.Scheduler.on_idle", ("self",), "dropping expansions"),
    Use("sglang.srt.managers.scheduler.Scheduler.get_internal_state", ("self", "recv_req"), "/server_info"),
    Use(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager._observe_weight_load",
        ("self", "source"),
        "dropping expansions",
    ),
    Use(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes",
        ("self", "pre_model_load_memory"),
        "taking our memory out of the KV budget",
    ),
    Use(
        "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_mla_kv_pool",
        ("self", "max_total_num_tokens"),
        "the FP8 pool: also server_args, use_mla_backend, kv_cache_dtype, pool_page_size, layer_info",
    ),
    Use(
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
        ("self", "kvc", "num_layers"),
        "the size of a row of the FP8 pool",
    ),
    Use(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.__init__",
        ("self", "size", "page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num", "device"),
        "the FP8 pool: also kv_buffer, start_layer",
    ),
    Use("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool._create_buffers", ("self",), "the FP8 pool"),
    Use(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_kv_buffer",
        ("self", "layer", "loc_info", "cache_k", "cache_v"),
        "the FP8 pool",
    ),
    Use(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.set_mla_kv_buffer",
        ("self", "layer", "loc", "cache_k_nope", "cache_k_rope"),
        "keys in two parts; the FP8 pool",
    ),
    Use(
        "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_mla_kv_buffer",
        ("self", "layer", "loc", "dst_dtype"),
        "the FP8 pool",
    ),
    Use("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_key_buffer", ("self", "layer_id"), "the FP8 pool"),
    Use("sglang.srt.mem_cache.memory_pool.MLATokenToKVPool.get_value_buffer", ("self", "layer_id"), "the FP8 pool"),
    Use("sglang.srt.mem_cache.memory_pool.unwrap_write_loc", ("loc_info",), "the FP8 pool"),
    Use("sglang.srt.runtime_context.get_exec", (), "the FP8 pool: features.enable_memory_saver"),
    Use(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        ("batch", "model_runner"),
        "the requests of a step",
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin._split_q_nope_pe",
        ("self", "q", "latent_cache"),
        "the query before it is absorbed",
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        None,
        "query and key in two parts: forward_absorb_core gives q_rope and k_rope to backends in this list",
        kind=list,
    ),
    Use(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin"
        "._chunked_prefix_attn_mha",
        ("self", "q", "accum_output", "accum_lse", "forward_batch"),
        "prefill over expanded prefixes",
    ),
    Use(
        "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
        ".prepare_chunked_prefix_cache_info",
        ("self", "device"),
        "what prefill is left with: prefix_chunk_starts, prefix_chunk_starts_cpu, extend_prefix_lens",
    ),
    Use(
        "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin.ForwardBatchDeepSeekMHAMixin"
        ".prepare_chunked_kv_indices",
        ("self", "device"),
        "the same",
    ),
    Use(
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA",
        None,
        "kv_a_layernorm, kv_b_proj, o_proj, sizes, chunked_prefix_cache_threshold",
    ),
    Use("sglang.srt.mem_cache.radix_cache.TreeNode", None, "parent, key, lock_ref"),
    Use("sglang.srt.mem_cache.radix_cache.RadixCache._split_node", ("self", "key", "child", "split_len"), "see docs"),
)


def installed_version(package: str = "sglang") -> str | None:
    """A package's version, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def mismatches(launcher_only: bool = False) -> list[str]:
    """Compare SGLang with the table.

    Args:
        launcher_only: check only what the launching process uses.
    Returns:
        one line for each difference; empty where all is as expected.
    """
    found = []
    have = installed_version()
    if have not in SUPPORTED_VERSIONS:
        found.append(f"sglang is {have or 'not installed'}; this release works with {', '.join(SUPPORTED_VERSIONS)}")
    for use in CONTRACT:
        if launcher_only and not use.launcher:
            continue
        try:
            thing = pkgutil.resolve_name(use.path)
        except (ImportError, AttributeError) as error:
            found.append(f"{use.path} ({use.why}): {error}")
            continue
        if use.kind is not None and not isinstance(thing, use.kind):
            found.append(f"{use.path} ({use.why}): is a {type(thing).__name__}, expected a {use.kind.__name__}")
        if use.params is None:
            continue
        # A hooked function is a wrapper; the contract is about what it wraps. Bound class methods lose `cls`.
        params = tuple(inspect.signature(inspect.unwrap(thing)).parameters)
        params = params[1:] if params[:1] == ("cls",) else params
        if params[: len(use.params)] != use.params:
            found.append(f"{use.path} ({use.why}): takes {params}, expected {use.params} first")
    return found


def check(launcher_only: bool = False) -> None:
    """Raise ContractError with every difference, if there is one."""
    found = mismatches(launcher_only)
    if found:
        raise ContractError(
            "--attention-backend hybrid_mla cannot run on this SGLang:\n  "
            + "\n  ".join(found)
            + "\nInstall a supported version (pip install sglang==0.5.17) or choose another --attention-backend."
        )
