"""The protocol of SGLang's own backend as ours owns it: for prefill, and for decode where nothing can be shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from torch import Tensor


class PrefillTails(Protocol):
    """Attention of a prefill pass's rows in the latent space to what each request has beside shared prefixes: its last
    tokens, the new ones among them. New tokens are causal among themselves."""

    def plan(self, batch: ForwardBatch, starts: Sequence[int]) -> None:
        """Prepare a pass. Does not wait for the device.

        Args:
            batch: an EXTEND batch.
            starts: `[requests]` tokens before each request's tail; all of them are cached.
        """
        ...

    def run(self, layer: RadixAttention, q_absorbed: Tensor, q_rope: Tensor, out: Tensor, lse: Tensor) -> None:
        """Attend in one layer.

        Args:
            q_absorbed: `[rows, heads, kv_lora_rank]`; q_rope: `[rows, heads, qk_rope_head_dim]`; one row per new token.
            out: `[rows, heads, kv_lora_rank]`, written; lse: `[rows, heads]` float32, natural log, written.
        """
        ...


class Stock(Protocol):
    """Methods that are required of SGLang's own backend beside its interface.

    Attributes:
        backend: SGLang's.
        decodes: whether it can read the pool, and so decode.
        plain: SGLang's backend of decode graphs without sharing (graph_variants.py), which takes queries in two parts;
            None until `make_plain`, or where there is none.
    """

    backend: AttentionBackend
    decodes: bool
    plain: AttentionBackend | None

    def make_plain(self, runner: ModelRunner) -> bool:
        """Make `plain`, and return whether there is one here."""
        ...

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool
    ) -> Any:
        """Attend in a prefill step, with whole queries and keys: `out`, or `(out, lse)` with a natural logarithm where
        SGLang asks for it."""
        ...

    def affordable(self, prefix_lens: Sequence[int]) -> int:
        """Cached tokens that SGLang itself would expand in a prefill step."""
        ...

    def prefill_tails(self) -> PrefillTails:
        """Attention in the latent space for prefill passes, see PrefillTails."""
        ...

    def can_finish(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        """Return whether a prefill step can attend to the tokens behind the expanded parts of `covered` tokens, and
        return its lse."""
        ...
