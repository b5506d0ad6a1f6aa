"""SGLang's entry point into this package (`sglang.srt.plugins`), called once in every process that SGLang starts.

The launching process gets the flags and the backend's name. Whether the backend is asked for is known when SGLang
has parsed its arguments; that is noted in the environment, and the processes spawned from then on install the rest.
Where it is not asked for, nothing but the flags and the name is there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.adapter.cpu import stubs
from sglang_mla_ext.adapter.launch import dp_routing, limits, sharded_prefixes, status_routes
from sglang_mla_ext.adapter.launch.resolved import asked_for, resolved
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.options import HybridMLAOptions, OptionError, add_flags, flags_to_env, given

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

ASKED_VARIABLE = "SGLANG_HYBRID_MLA_ASKED"
"""Set to 1 by the launching process where the backend is asked for; an internal matter of this package."""

SERVER_ARGS = "sglang.srt.server_args.ServerArgs"


def register() -> None:
    """Called by SGLang in each process, before it parses arguments or builds anything."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices, add_chunked_prefix_cache_attention_backend

    add_attention_backend_choices([BACKEND_NAME])
    add_chunked_prefix_cache_attention_backend(BACKEND_NAME)
    HookRegistry.register(f"{SERVER_ARGS}.add_cli_args", _after_add_cli_args, HookType.AFTER)
    HookRegistry.register(f"{SERVER_ARGS}.from_cli_args", _before_from_cli_args, HookType.BEFORE)
    HookRegistry.register(f"{SERVER_ARGS}.{installed.RESOLVED_BY}", _around_resolution, HookType.AROUND)
    if os.environ.get(stubs.INSTALLED_VARIABLE) == "1":
        from sglang_mla_ext.adapter.cpu import hooks as cpu_hooks

        cpu_hooks.install()
    if os.environ.get(ASKED_VARIABLE) == "1":
        from sglang_mla_ext.adapter.step import hooks

        hooks.install()


def _after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    add_flags(parser)


def _before_from_cli_args(cls: type[ServerArgs], args: argparse.Namespace) -> None:
    flags_to_env(args)
    if not isinstance(sys.excepthook, _Refusals):
        sys.excepthook = _Refusals(sys.excepthook)


class _Refusals:
    """Exception hook of a launch from the command line: if nobody catches a refusal, its message is printed alone."""

    def __init__(self, otherwise: Callable[..., None]) -> None:
        self._otherwise = otherwise

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, OptionError | contract.ContractError):
            print(f"error: {error}", file=sys.stderr)
        else:
            self._otherwise(kind, error, traceback)


def _around_resolution(original: Callable[..., None], server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    if installed.is_resolved(server_args):
        return original(server_args, *args, **kwargs)
    asked = limits.is_asked_for(server_args)
    if asked:
        contract.check(asked_for(server_args))
        options = HybridMLAOptions.from_env()
        limits.set_defaults(server_args)
    original(server_args, *args, **kwargs)
    if asked:
        contract.check(asked_for(resolved(server_args)))  # SGLang may have asked for more
        limits.set_draft_backend(server_args)
        server = Server.of(server_args, options)
        limits.check(server)
        for warning in limits.warnings(server):
            logger.warning("hybrid_mla: %s", warning)
        if server.ranks.sharding > 1:
            contract.check([Feature.SHARDED, Feature.MIXED])  # the latter asks ranks before each pass, too
            if server.device.on_gpu:
                sharded_prefixes.set_environment(os.environ)
        os.environ[ASKED_VARIABLE] = "1"
        status_routes.install()
        if options.dp_routing == "prefix":
            contract.check([Feature.ROUTING])
            if dp_routing.ranks(server_args) > 1:
                limits.check_dp_routing(server_args)
                dp_routing.install()
    else:
        os.environ.pop(ASKED_VARIABLE, None)
        if in_vain := given(os.environ):
            logger.warning("%s: no effect without --attention-backend %s.", ", ".join(in_vain), BACKEND_NAME)
