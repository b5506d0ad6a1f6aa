"""Data-parallel ranks that keep prompts together: `--hybrid-mla-dp-routing prefix`.

SGLang's own ways to deal out requests (`--load-balance-method`) do not look at prompts, and the process that deals them
out loads no plug-ins in 0.5.17. But it obeys a rank that stands in the request (`routed_dp_rank`), and requests pass
through the tokenizer manager of the launching process, which does. So the rank is chosen there, where it is also known
which requests are not finished.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.launch import limits
from sglang_mla_ext.adapter.launch.resolved import resolved
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.affinity import PromptAffinity

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.server_args import ServerArgs

DISPATCH = "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler"
CHECK_INTERVAL_S = 0.01


class Router:
    """Chooses ranks for the requests of one tokenizer manager."""

    def __init__(self, ranks: int, min_prefix_len: int) -> None:
        self._affinity = PromptAffinity(ranks, min_prefix_len=min_prefix_len)
        self._checked_at = 0.0

    def route(self, message: Any, unfinished: Container[str]) -> None:
        """Put a rank into each request to generate, unless its sender has named one, or SGLang checks all ranks by it.

        Args:
            message: to SGLang's schedulers, a request or several, or something else.
            unfinished: ids of requests.
        """
        from sglang.srt.managers.utils import is_health_check_generate_req

        for request in getattr(message, "batch", (message,)):
            if is_health_check_generate_req(request):
                continue
            if getattr(request, "input_ids", None) is None or not hasattr(request, "sampling_params"):
                continue  # a control message, or input embeddings
            self._drop_finished(unfinished)
            salt = f"{installed.namespace(request)} {request.lora_id}"
            named = request.routed_dp_rank
            request.routed_dp_rank = self._affinity.assign(request.rid, request.input_ids, salt, named)

    def _drop_finished(self, unfinished: Container[str]) -> None:
        if (now := time.monotonic()) - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        for rid in self._affinity.unfinished:
            if rid not in unfinished:
                self._affinity.finish(rid)


def ranks(args: ServerArgs) -> int:
    """Data-parallel ranks, of replicas or of DP attention, which newer releases count by a flag of its own."""
    return max(int(args.dp_size), int(installed.dp_attention_ranks(resolved(args))))


_routers: WeakKeyDictionary[TokenizerManager, Router | None] = WeakKeyDictionary()


def before_dispatch(manager: TokenizerManager, message: Any) -> None:
    """A hook: ranks for the requests of a manager whose server asks for it."""
    if manager not in _routers:
        args, options = manager.server_args, HybridMLAOptions.from_env()
        wanted = limits.is_asked_for(args) and ranks(args) > 1 and options.dp_routing == "prefix"
        _routers[manager] = Router(ranks(args), options.min_prefix_len) if wanted else None
    if router := _routers[manager]:
        router.route(message, manager.rid_to_state)


def install() -> None:
    """Choose ranks from now on, in this process; called before SGLang builds its tokenizer manager."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target, _ = contract.targets([DISPATCH])[DISPATCH]
    if target not in HookRegistry._patched:
        HookRegistry.register(target, before_dispatch, HookType.BEFORE)
        HookRegistry.apply_hooks()
