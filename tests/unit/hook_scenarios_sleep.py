"""What our hooks do when SGLang gives its memory back and takes it again (release_memory_occupation).

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from hook_scenarios_step import check_decode_step, check_expanded
from hooked_worker import BUDGET, PAGE, PROMPT, Server
from release import weight_updater
from torch.utils._python_dispatch import TorchDispatchMode

Saved = list[tuple[str, torch.Tensor]]


class Recorded(TorchDispatchMode):
    """Notes every tensor that is made."""

    def __init__(self, note: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._note(made)
        return made


class Saver:
    """SGLang's adapter of torch_memory_saver: what is allocated in a region loses its contents when it is paused."""

    def __init__(self) -> None:
        self.saved: Saved = []
        self.asleep: set[str] = set()
        self._inside = False

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        assert not self._inside and not enable_cpu_backup
        self._inside = True
        with Recorded(lambda tensor: self.saved.append((tag, tensor))):
            yield
        self._inside = False

    def pause(self, tag: str) -> None:
        self.asleep.add(tag)
        self._spoil(tag)

    def resume(self, tag: str) -> None:
        """With other contents than a pause leaves, and whoever wrote in between wrote to nothing."""
        self.asleep.remove(tag)
        self._spoil(tag)

    def _spoil(self, tag: str) -> None:
        for of_tag, tensor in self.saved:
            if of_tag == tag:
                tensor.view(torch.uint8).fill_(0xFF)  # NaN, or -1

    def bytes(self, tag: str) -> int:
        """Of tensors that are there once, however many operations made them."""
        return sum({t.data_ptr(): t.nbytes for of_tag, t in self.saved if of_tag == tag}.values())


def updater(
    server: Server, saver: Saver, flush: Callable[..., bool] | None = None, update: Callable[[], None] = lambda: None
) -> Any:
    """SGLang's part of the scheduler that releases and resumes, and updates weights."""
    torch.distributed.barrier = lambda group=None: None
    return weight_updater(update, saver, flush or server.scheduler.flush_cache, server.scheduler.is_fully_idle)


def asked(*tags: str) -> Any:
    return SimpleNamespace(tags=list(tags) or None)


def scenario_large_buffers_are_in_the_region_of_the_kv_cache() -> None:
    saver = Saver()
    server = Server(saver=saver)
    (buffers,) = server.buffers
    assert {tag for tag, _ in saver.saved} == {"kv_cache"}
    assert buffers.bytes < saver.bytes("kv_cache") == server.session.memory.bytes <= BUDGET
    inside = {tensor.data_ptr() for _, tensor in saver.saved}
    assert {part.data_ptr() for part in (buffers.k_nope, buffers.v_t, buffers.k_rope)} < inside
    assert buffers.k_scale.data_ptr() not in inside, "what is written once stays"
    stays = buffers.k_scale.nbytes + buffers.v_scale.nbytes + server.backend._shared._shared_lse.nbytes
    assert stays < BUDGET // 50


def scenario_what_is_expanded_is_forgotten_in_sleep_and_steps_are_right_after_it() -> None:
    for dtype in ("bf16", "fp8_e4m3"):
        saver = Saver()
        server = Server(saver=saver, prefix_dtype=dtype) if dtype == "fp8_e4m3" else Server(saver=saver)
        manager = updater(server, saver)
        for tags in ((), ("kv_cache",), ("kv_cache", "weights", "cuda_graph")):
            requests = server.run(PROMPT + "-a", "else", PROMPT + "-bcd")
            server.forward("DECODE", requests)
            assert server.pool.used_chunks == 4 and server.shares()
            check_expanded(server, requests[0])
            server.tree.finish(*requests)
            manager.release_memory_occupation(asked(*tags))
            assert "kv_cache" in saver.asleep
            assert server.pool.used_chunks == 0 and not server.shares() and server.prefixes.plan.segments == ()
            manager.resume_memory_occupation(asked(*tags))
            assert not saver.asleep
            for _, tensor in saver.saved:
                assert not tensor.view(torch.uint8).any()
            server.tree.free_slots = list(server.tree.rows)  # it was flushed
            for buffer in server.kv.kv_buffer:
                buffer.normal_()
            requests = server.run(PROMPT + "-x", PROMPT + "-y", "more")
            if dtype == "bf16":
                check_decode_step(server, requests)
            else:
                server.forward("DECODE", requests)
            check_expanded(server, requests[0])
            assert not server.counters.fallbacks
            server.tree.finish(*requests)
            server.scheduler.flush_cache()
            server.tree.free_slots = list(server.tree.rows)


def scenario_it_is_forgotten_also_where_sglang_does_not_flush() -> None:
    saver = Saver()
    server = Server(saver=saver)
    manager = updater(server, saver, flush=lambda: False)
    server.forward("DECODE", server.run(PROMPT + "-a", PROMPT + "-b"))
    manager.release_memory_occupation(asked("kv_cache"))
    assert server.pool.used_chunks == 0 and not server.shares()


def scenario_weights_and_graphs_sleep_without_the_expanded_prefixes() -> None:
    saver = Saver()
    server = Server(saver=saver)
    manager = updater(server, saver)
    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    manager.release_memory_occupation(asked("weights", "cuda_graph"))
    manager.resume_memory_occupation(asked("weights", "cuda_graph"))
    assert server.shares() and server.pool.used_chunks == 4
    check_expanded(server, requests[0])
    (segment,) = server.coming.plan.segments
    assert segment.tokens == 13 * PAGE


def scenario_memory_may_sleep_before_there_is_a_backend() -> None:
    """And without torch_memory_saver nothing is lost."""
    from sglang_mla_ext.adapter.step.session import process

    manager = updater(
        SimpleNamespace(scheduler=SimpleNamespace(is_fully_idle=lambda **_: True, flush_cache=bool)), Saver()
    )
    assert process.session is None
    manager.release_memory_occupation(asked())
    manager.resume_memory_occupation(asked())
    server = Server()
    assert server.session.memory.bytes > server.buffers[0].bytes
    server.forward("DECODE", server.run(PROMPT + "-a", PROMPT + "-b"))
    assert server.shares()
