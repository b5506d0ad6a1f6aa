"""Arguments of a launch, as SGLang 0.5.17 keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from sglang_mla_ext.adapter.compat.findings import Finding

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class Arguments0517:
    """Server arguments, and the model that they name; see Release0517.

    Attributes:
        RESOLVED_BY: the method of SGLang's server arguments that turns what the user gave into what the server does.
        tree_of_linear_layers: the prefix cache of a model that has some; None where it is the one that TreeView reads.
    """

    RESOLVED_BY: ClassVar[str] = "__post_init__"
    tree_of_linear_layers: ClassVar[str | None] = "MambaRadixCache"

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

    def draft_tokens(self, args: ServerArgs) -> int:
        """Return the query tokens of a request in a verify step, the last accepted one among them; 1 without
        speculative decoding. `args` are resolved."""
        args = self.resolved(args)
        if args.speculative_algorithm is None:
            return 1
        return int(args.speculative_num_draft_tokens or 1)

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
