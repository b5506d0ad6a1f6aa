"""Data-parallel ranks that keep prompts together: `--hybrid-mla-dp-routing prefix`.

SGLang's own ways to deal out requests (`--load-balance-method`) do not look at prompts, and the process that deals them
out loads no plug-ins in 0.5.17. But it obeys a rank that stands in the request (`routed_dp_rank`), and requests pass
through the tokenizer manager of the launching process, which does. So the rank is chosen there, where it is also known
which requests are not finished.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.prefix.affinity import PromptAffinity

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

DISPATCH = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"
LOOK_INTERVAL_S = 0.01


class Router:
    """Chooses ranks for the requests of one tokenizer manager."""

    def __init__(self, ranks: int, min_prefix_len: int) -> None:
        self._affinity = PromptAffinity(ranks, min_prefix_len=min_prefix_len)
        self._looked = 0.0

    def before_dispatch(self, manager: TokenizerManager, message: Any) -> None:
        """Put a rank into each request to generate, unless its sender has named one."""
        for request in getattr(message, "batch", (message,)):
            if getattr(request, "input_ids", None) is None or not hasattr(request, "sampling_params"):
                continue  # a control message, or input embeddings
            self._look_who_is_finished(manager.rid_to_state)
            salt = f"{getattr(request, 'extra_key', None)} {getattr(request, 'lora_id', None)}"
            named = request.routed_dp_rank
            request.routed_dp_rank = self._affinity.assign(request.rid, request.input_ids, salt, named)

    def _look_who_is_finished(self, unfinished: dict[str, Any]) -> None:
        if (now := time.monotonic()) - self._looked < LOOK_INTERVAL_S:
            return
        self._looked = now
        for rid in self._affinity.unfinished:
            if rid not in unfinished:
                self._affinity.finish(rid)


def install(ranks: int, min_prefix_len: int) -> None:
    """Choose ranks from now on, in this process; called before SGLang builds its tokenizer manager."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(DISPATCH, Router(ranks, min_prefix_len).before_dispatch, HookType.BEFORE)
    HookRegistry.apply_hooks()
