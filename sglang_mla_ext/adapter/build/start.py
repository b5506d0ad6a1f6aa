"""Start of a worker process: the backend's factory, and the hooks that run before a server serves.

What fails here ends the start, with its message: a server that does not do what it was told to would lie.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.build import budget
from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.adapter.launch import limits, mixed_steps, models
from sglang_mla_ext.adapter.launch.resolved import asked_for
from sglang_mla_ext.adapter.ranks.ranks import sharding_in_reach
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.adapter.step.layer import accept_query_parts
from sglang_mla_ext.adapter.step.session import Session, process
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.options import HybridMLAOptions

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

hooked: dict[str, Feature] = {}
"""Hooked targets, and the feature that needs each."""


def assert_installed(asked: Collection[Feature] = (Feature.BASE,)) -> None:
    """
    Args:
        asked: the features whose hooks are needed.
    Raises:
        ContractError: one is not in place; SGLang's log has the reason.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    contract.check(asked)  # of what SGLang does not have, no hook was registered
    missing = [target for target, feature in hooked.items() if feature in asked and target not in HookRegistry._patched]
    if missing or not hooked:
        raise contract.ContractError(
            f"--attention-backend {BACKEND_NAME}: hooks are not in place: {', '.join(missing) or 'all of them'}. "
            "The log above says why. Is SGLANG_PLUGINS set to a list without hybrid_mla?"
        )


def create_backend(runner: ModelRunner) -> AttentionBackend:
    """The factory that SGLang calls for `--attention-backend hybrid_mla`: for the model, and for its draft where that
    has no backend of its own. It makes the session of this process."""
    assert_installed()
    fp8 = runner.kv_cache_dtype == FP8  # the checkpoint may ask for it
    if runner.is_draft_worker:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

        name = limits.draft_backend(runner.server_args, mla=runner.use_mla_backend, fp8=fp8)
        return ATTENTION_BACKENDS[name](runner)
    assert_installed(asked_for(runner.server_args) | ({Feature.FP8} if fp8 else set()))
    limits.check_dtypes(runner.server_args, runner.dtype, fp8_cache=fp8)
    if process.options is None or process.budget_bytes is None:
        raise contract.ContractError("SGLang built its attention backend before it sized its KV cache")
    from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE

    from sglang_mla_ext.adapter.build.assemble import build

    # SGLang releases what is allocated in such a context with its KV cache while it sleeps. It comes back at the same
    # addresses with other contents. Without --enable-memory-saver the context does nothing.
    region = functools.partial(runner.memory_saver_adapter.region, GPU_MEMORY_TYPE_KV_CACHE)
    options, memory = process.options, Memory(region)
    accept_query_parts(not models.scales_queries(runner.server_args))
    backend, steps, rule = build(runner, options, process.budget_bytes, memory)
    if steps.sharded is not None:
        assert_installed([Feature.SHARDED, Feature.MIXED])
    if steps.plain_graphs:
        steps.plain_graphs = _is_there("plain graphs", [Feature.GRAPH_VARIANTS])
    if rule.tokens:
        asked = options.mixed_tokens is not None or runner.server_args.enable_mixed_chunk
        needed = [Feature.MIXED, *([Feature.PAIRED] if rule.query_tokens > 1 else [])]
        rule.tokens = rule.tokens if _is_there("mixed steps", needed, asked=asked) else 0
    if process.scheduler is not None:  # otherwise nobody tells of batches, and every step is plain absorb
        # A second time, the states of linear attention would take their tokens twice.
        repeats = installed.linear_layers(runner.server_args) is None
        process.session = Session(
            process.scheduler, backend, steps, rule, pool=runner.token_to_kv_pool, memory=memory, repeats=repeats
        )
    return backend


def _is_there(what: str, features: Sequence[Feature], asked: bool = False) -> bool:
    """Return whether SGLang has what an optional part needs, and warn if it has not.

    Args:
        what: name of the part; asked: whether the user asked for it.
    Raises:
        ContractError: it has not, and the user asked for it.
    """
    try:
        assert_installed(features)
    except contract.ContractError as error:
        if asked:
            raise
        logger.warning("hybrid_mla: no %s: %s", what, error)
        return False
    return True


def around_scheduler_init(original: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any) -> None:
    """Initialize the scheduler, in which SGLang builds the backend, its cache and graphs; then begin the session."""
    process.scheduler, process.session = scheduler, None
    original(scheduler, *args, **kwargs)
    if process.session is None:
        raise contract.ContractError(f"--attention-backend {BACKEND_NAME}: SGLang did not build the backend")
    process.session.begin()
    logger.info("hybrid_mla: ready; %s", process.session.steps.reports.description)


def after_profile_bytes(available: int, configurator: KVCacheConfigurator, *args: Any, **kwargs: Any) -> int:
    """Take what we allocate out of what SGLang has for its KV cache. A draft model's is sized by the model's."""
    options = sharding_in_reach(Server.of(configurator.server_args, HybridMLAOptions.from_env()))
    process.options = budget.with_default(available, configurator, options)
    process.budget_bytes = budget.reserve(available, configurator, process.options)
    return available - process.budget_bytes


def after_graph_sizes(
    sizes: tuple[list[int], list[int]], runner: ModelRunner, *args: Any, **kwargs: Any
) -> tuple[list[int], list[int]] | None:
    """Add sizes of decode graphs up to the rows of a step with new tokens: SGLang itself captures none of more rows
    than it has places for requests."""
    if runner.is_draft_worker:
        return None
    server = Server.of(runner.server_args, HybridMLAOptions.from_env())
    most = budget.step_rows(sizes[0][-1], server) // server.query_tokens
    return mixed_steps.graph_sizes(sizes[0], most, server.query_tokens), sizes[1]


def around_eager_registry(session: Session, original: Callable[..., Any], **kwargs: Any) -> Any:
    """Enlarge the buffers of passes without a graph, which hold as many rows as there are requests: without a GPU new
    tokens are rows of such passes."""
    return original(**{**kwargs, "max_bs": kwargs["max_bs"] + session.admission.rule.tokens})


def before_kv_manager(session: Session, manager: Any, args: Any, *others: Any, **more: Any) -> None:
    """Name our rows in the arguments that a prefill or decode server tells its peers."""
    from sglang_mla_ext.adapter.latent import pool as latent_pool

    args.kv_cache_dtype_str = latent_pool.dtype_for_peers(args.kv_cache_dtype_str, session.pool)
