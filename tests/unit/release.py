"""What tests build of SGLang in another way with each of its releases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from sglang_mla_ext.adapter.compat import contract

OLDEST = contract.line() == "0.5.17"


@contextmanager
def published_arguments(**given: Any) -> Iterator[None]:
    """In this context the process has published the arguments of a server of one rank, and who it is. SGLang's pools
    and its tree read them from 0.5.23 on."""
    from sglang.srt.runtime_context import get_context, get_parallel

    rank: dict[str, Any] = dict(attn_dcp_rank=0, tp_group=SimpleNamespace(cpu_group=None))
    if not OLDEST:
        rank["dp_rank"] = None
    with get_context().override_server_args(device="cpu", **given), get_parallel().override(**rank):
        yield


@contextmanager
def data_parallel_rank(scheduler: Any, rank: int) -> Iterator[None]:
    """Make this process the scheduler of a rank while the context lasts."""
    from sglang.srt.runtime_context import get_parallel

    if OLDEST:
        before, scheduler.ps = scheduler.ps, SimpleNamespace(dp_rank=rank)
        yield
        scheduler.ps = before
    else:
        with get_parallel().override(dp_rank=rank):
            yield


def index_translator(req_to_token: Any, pool: Any, page_size: int) -> Any:
    """What a ModelRunner of 0.5.23 translates slots with; None before."""
    if OLDEST:
        return None
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    pools = dict(req_to_token=req_to_token, token_to_kv_pool_allocator=None, token_to_kv_pool=pool)
    return KVIndexTranslator(**pools, page_size=page_size, device="cpu")


def host_pool(pool: Any, ratio: float, page_size: int) -> Any:
    """SGLang's pool on the host for one of latent rows, as it builds it beside the tree."""
    if OLDEST:
        from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

        return MLATokenToKVPoolHost(pool, ratio, 0, page_size, "layer_first")
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _build_mha_mla_host_pool

    kind = dict(layout="layer_first", allocator_type="default", pool_label="kv")
    return _build_mha_mla_host_pool(pool=pool, host_to_device_ratio=ratio, page_size=page_size, **kind)


def pool_class() -> dict[str, Any]:
    """Which pool SGLang's configurator has chosen, where it says so to what builds one of latent rows."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return {} if OLDEST else {"mla_pool_class": MLATokenToKVPool}


def prefill_runs(backend: Any) -> None:
    """Names the backend that a model's prefill with keys per head asks for, in this process from now on."""
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

    setattr(forward_mha, "_resolve_attn_backend" if OLDEST else "resolve_attn_backend", lambda forward_batch: backend)


def draft_backends(name: str | None, decode: Any, extend: Any) -> Any:
    """SGLang's factory of a draft model's backends, given one for each of three steps and one for prefill."""
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.speculative import draft_utils

    draft_utils.get_spec = lambda: SimpleNamespace(speculative_attention_mode="decode")
    draft_utils._assert_draft_needs_no_conv_sidecar = lambda runner: None
    draft_utils.attention_backends = lambda: ("flashmla", "flashmla")
    for wrap in ("attn_backend_wrapper_for_draft_extend", "attn_backend_wrapper_for_draft_decode"):
        setattr(attention_registry, wrap, lambda runner, backend: backend)
    if OLDEST:
        args = SimpleNamespace(
            speculative_draft_attention_backend=name,
            decode_attention_backend="flashmla",
            prefill_attention_backend="flashmla",
        )
        factory = draft_utils.DraftBackendFactory(args, None, 1, 3)
    else:
        factory = draft_utils.DraftBackendFactory(SimpleNamespace(draft_attention_backend=name), 1, 3)
    made_of = (lambda backend: backend) if OLDEST else (lambda backend: ("flashmla", backend))
    factory._create_flashmla_decode_backend = lambda: made_of(decode)
    factory._create_flashmla_prefill_backend = lambda: made_of(extend)
    return factory


class UpdatedWorker:
    """A worker whose weights are updated by a function without arguments, whichever way they come."""

    def __init__(self, update: Callable[[], None]) -> None:
        def updated(*args: Any, **given: Any) -> tuple[bool, str]:
            update()
            return True, "done"

        self.model, self.server_args = torch.nn.Identity(), SimpleNamespace(weight_cache_mode="off")
        self.model_runner = self
        if OLDEST:
            self.update_weights_from_disk = self.update_weights_from_distributed = updated
            self.update_weights_from_tensor = self.update_weights_from_ipc = updated
            return
        self.weight_updater = SimpleNamespace(
            begin_weight_update=lambda: None,
            end_weight_update=lambda run_post_load: updated() if run_post_load else None,
            receive_weights_from_distributed=lambda **given: [],
            load_weights_from_distributed=updated,
            update_weights_from_disk=updated,
            update_weights_from_tensor=updated,
            update_weights_from_ipc=updated,
        )
        self.weight_update_runners = lambda: [("target", self)]
        self.deserialize_own_rank = lambda tensors: tensors


def weight_updater(update: Callable[[], None], saver: Any = None, flush: Any = None, is_fully_idle: Any = None) -> Any:
    """SGLang's part of the scheduler that updates weights, and gives memory back."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    scheduler = SimpleNamespace(
        record_weight_version_change=lambda new_version: None, _engine_paused=False, disaggregation_mode=None
    )
    given: dict[str, Any] = {"tp_cpu_group": None} if OLDEST else {"scheduler": scheduler}
    return SchedulerWeightUpdaterManager(
        tp_worker=UpdatedWorker(update),
        draft_worker=None,
        memory_saver_adapter=saver,
        flush_cache=flush,
        is_fully_idle=is_fully_idle,
        **given,
    )


class UpdateRequest:
    """A request to update weights, without a flush; what else SGLang reads of it is None."""

    flush_cache, disable_draft_model, selector = False, True, "all"

    def __getattr__(self, name: str) -> None:
        return None
