"""The protocol of SGLang's own backend as ours owns it: for prefill, and for decode where nothing can be shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class Stock(Protocol):
    """What is asked of SGLang's own backend beside its interface.

    Attributes:
        backend: SGLang's.
        decodes: whether it can read the pool, and so decode.
    """

    backend: AttentionBackend
    decodes: bool

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
    ) -> Any:
        """A prefill step's attention, of whole queries and keys: `out`, or `(out, lse)` with a natural logarithm where
        SGLang asks for it."""
        ...

    def affordable(self, prefix_lens: Sequence[int]) -> int:
        """Cached tokens that SGLang itself would expand in a prefill step."""
        ...

    def can_finish(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        """Whether a prefill step can attend to what expanded parts of `covered` tokens leave, and give its lse."""
        ...
