"""Arguments of a launch, as SGLang 0.5.23 keeps them: those that the user gave, and beside them what was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.compat.findings import Finding, unsupported
from sglang_mla_ext.adapter.compat.sglang_0_5_17.arguments import Arguments0517

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class Arguments0523(Arguments0517):
    """See Arguments0517, also for each method."""

    RESOLVED_BY = "resolve_once"
    tree_of_linear_layers = None  # one tree is for all models

    def is_resolved(self, args: ServerArgs) -> bool:
        """See Arguments0517. Whoever publishes the arguments calls RESOLVED_BY, in every process."""
        return bool(getattr(args, "_resolution_finished", False))

    def resolve(self, args: ServerArgs) -> None:
        args.resolve_once()

    def resolved(self, args: ServerArgs) -> Any:
        """See Arguments0517. `args` may be what this returns."""
        from sglang.srt.arg_groups.overrides import ResolvedView, resolved_view

        return args if isinstance(args, ResolvedView) else resolved_view(args)

    def attention_backends(self, args: ServerArgs) -> tuple[str | None, str | None]:
        from sglang.srt.arg_groups.overrides import attention_backends_of

        prefill, decode = attention_backends_of(self.resolved(args))
        return prefill, decode

    def dp_attention_ranks(self, args: ServerArgs) -> int:
        """See Arguments0517. When SGLang resolves its arguments, --enable-dp-attention becomes a number of its own."""
        return int(args.dp_size if args.enable_dp_attention else args.attn_dp_size)

    def infiniband_check(self) -> tuple[Any, str]:
        from sglang.srt.arg_groups import validation_hook

        return validation_hook, "validate_ib_devices"

    def other_trees(self) -> list[str]:
        """See Arguments0517. There are none."""
        return []

    def further_findings(self, args: ServerArgs) -> list[Finding]:
        """See Arguments0517. SGLang keeps rows of NEXTN's drafts beside the model's on the host, which must be as long
        (check_packed_kv_rows, mem_cache/hybrid_cache/host_pool_config.py:268): 576 bytes beside 656 with an FP8 cache.
        A captured preparation of decode graphs would not bring a new plan to the device, and there is one for all
        variants of a graph (_glue_key, model_executor/runner/decode_cuda_graph_runner.py).
        """
        from sglang.srt.environ import envs

        drafts_on_host = args.enable_hierarchical_cache and args.speculative_algorithm is not None
        over_fp8 = drafts_on_host and args.kv_cache_dtype == "fp8_e4m3"
        backup = args.disaggregation_decode_retraction_backup
        flags = {
            "--enable-hierarchical-cache beside drafts over an FP8 cache": over_fp8,
            "--enable-unified-cache-external-linker": args.enable_unified_cache_external_linker,
            "--enable-layernorm-sp": args.enable_layernorm_sp,
            "--enable-kv-cache-sharding": args.enable_kv_cache_sharding,
            "--enable-nvidia-megakernel": args.enable_nvidia_megakernel,
            "--enable-pd-role-switch": args.enable_pd_role_switch,
            "--disaggregation-decode-retraction-backup host_pool": backup == "host_pool",
            "SGLANG_ENABLE_METADATA_GLUE_GRAPH": envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get(),
        }
        return unsupported(flags)

    def uses_mla(self, args: ServerArgs) -> bool:
        from sglang.srt.arg_groups.overrides import use_mla_backend

        return bool(use_mla_backend(args))

    def _model_config(self, args: ServerArgs) -> Any:
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(args)
