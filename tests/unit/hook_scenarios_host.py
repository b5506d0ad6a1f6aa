"""What our hooks do for SGLang's cache on the host (HiCache).

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import Server
from release import OLDEST, host_pool


def scenario_rows_on_the_host_are_as_long_as_on_the_device() -> None:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host import base

    from sglang_mla_ext.adapter.cpu import host_cache
    from sglang_mla_ext.adapter.latent.pool import LatentPool

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # whoever else runs here
    host_cache.before_host_pool()
    fp8 = torch.float8_e4m3fn
    for kind, dtype, row_bytes in ((LatentPool, fp8, 656), (MLATokenToKVPool, fp8, 576)):
        pool = kind(64, 4, dtype, 512, 64, 2, "cpu", enable_memory_saver=False)
        host = host_pool(pool, 2.0, 4)
        assert host.token_stride_size == row_bytes and host.kv_buffer.shape == (2, 132, 1, row_bytes)


def scenario_a_copy_to_the_device_waits_for_the_step_before() -> None:
    from sglang.srt.managers.cache_controller import HiCacheController

    waited: list[str] = []

    class Stop(Exception):
        pass

    def begin() -> None:
        raise Stop

    controller: Any = object.__new__(HiCacheController)
    controller.load_queue, controller.load_stream = [], SimpleNamespace(wait_stream=waited.append)
    controller.layer_done_counter = SimpleNamespace(update_producer=begin)
    if not OLDEST:  # SGLang's part does
        events = SimpleNamespace(start_event=SimpleNamespace(record=lambda: None), complete=None)
        controller.layer_done_counter = SimpleNamespace(update_producer=lambda: 0, events=[events])
        controller._move_op_indices = lambda op: (None, None, None)
        controller._l2_load_transfers = lambda *args: []
        streams = SimpleNamespace(wait_stream=waited.append)
        controller.load_fence_stream, controller.transfer_layer_id_max = "steps", 2
        controller.l2_transfer_engine = SimpleNamespace(
            host_to_device_stream=streams, submit_host_to_device=lambda *args, **given: begin()
        )
    server = Server()
    server.scheduler.forward_stream = "steps"
    assert controller.start_loading() == -1 and waited == [], "there is nothing to copy"
    controller.load_queue = ["rows"]
    with contextlib.suppress(Stop):
        controller.start_loading()
        raise AssertionError("SGLang's own part is called")
    assert waited == ["steps"]
