"""`GET /hybrid_mla/status` and the page `GET /hybrid_mla`, on SGLang's own app and behind its own API key.

SGLang looks at its app's protection just before it serves: with a key it adds a middleware, without one it asks whether
any route needs it. Hooks on the two give us the app, and neither makes SGLang import anything earlier than it would.

A browser cannot send the key with an address that is typed in. So where SGLang refuses to show the page, the refusal,
whose status stays 401, has the page for its body: that asks for the key, and for the data with it. There is nothing in
the page itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from sglang_mla_ext import status
from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.launch import limits

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

PAGE_PATH, STATUS_PATH = "/hybrid_mla", "/hybrid_mla/status"
WITH_KEY = "sglang.srt.utils.auth.add_api_key_middleware"
WITHOUT_KEY = "sglang.srt.utils.auth.app_has_admin_force_endpoints"

FRESH_S = 0.5
"""An answer is given again for so long: however many look, schedulers are asked twice a second at most."""

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def install() -> None:
    """Add the routes when SGLang is about to serve, in this process; called before."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {WITH_KEY: after_key_is_asked_for, WITHOUT_KEY: after_app_is_looked_at}
    targets = contract.targets(hooks)
    if missing := hooks.keys() - targets.keys():
        logger.warning("hybrid_mla: no status page: this SGLang has no %s", ", ".join(sorted(missing)))
    elif targets[WITH_KEY][0] not in HookRegistry._patched:
        for path, (target, _) in targets.items():
            HookRegistry.register(target, hooks[path], HookType.AFTER)
        HookRegistry.apply_hooks()


def after_app_is_looked_at(result: bool, app: FastAPI) -> None:
    _try(add_routes, app)


def after_key_is_asked_for(result: None, app: FastAPI, **keys: Any) -> None:
    _try(add_routes, app)
    _try(app.add_middleware, PageOfRefusal)  # outside of SGLang's, so that it sees what that answers


def _try(function: Callable[[Any], Any], argument: Any) -> None:
    """Call a function, and log what it raises: a server that cannot show its status serves all the same."""
    try:
        function(argument)
    except Exception:
        logger.exception("hybrid_mla: no status page")


def add_routes(app: FastAPI) -> None:
    """Add the routes, once for each app, if its server has our backend: a process may launch one after another."""
    from fastapi.responses import HTMLResponse

    if not limits.is_asked_for(_tokenizer_manager().server_args):
        return
    if any(getattr(route, "path", None) == STATUS_PATH for route in app.routes):
        return
    asking = Asking()

    # Load balancers and monitors ask for the head alone; the server leaves out the body.
    @app.head(STATUS_PATH, response_model=None, include_in_schema=False)
    @app.get(STATUS_PATH, summary="What the attention backend hybrid_mla shares now.")
    async def hybrid_mla_status() -> status.Status:
        return await asking.status()

    @app.head(PAGE_PATH, response_model=None, include_in_schema=False)
    @app.get(PAGE_PATH, response_model=None, response_class=HTMLResponse, summary="The same as a page.")
    async def hybrid_mla_page() -> HTMLResponse:
        return HTMLResponse(page(), headers=HEADERS)


def page() -> bytes:
    """The page's HTML."""
    return files("sglang_mla_ext").joinpath("status.html").read_bytes()


def _tokenizer_manager() -> TokenizerManager:
    """Return the tokenizer manager of the server that this process runs."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().tokenizer_manager


class Asking:
    """Asks the schedulers, once for all who ask at the same time."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._last: status.Status | None = None
        self._asked = 0.0

    async def status(self) -> status.Status:
        async with self._lock:
            if self._last is None or time.monotonic() - self._asked > FRESH_S:
                states = await _tokenizer_manager().get_internal_state()
                self._last, self._asked = status.status(states, time.time()), time.monotonic()
            return self._last


class PageOfRefusal:
    """Puts the page into an answer 401 to the request for it; see the module."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _asks_for_page(scope):
            await self._app(scope, receive, send)
            return
        refused = False

        async def sends(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                refused = message["status"] == 401
                if not refused:
                    await send(message)
            elif not refused:
                await send(message)

        await self._app(scope, receive, sends)
        if refused:
            from starlette.responses import HTMLResponse

            await HTMLResponse(page(), status_code=401, headers=HEADERS)(scope, receive, send)


def _asks_for_page(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] in ("GET", "HEAD") and path == PAGE_PATH
