"""NIXL on a CPU: it finds caches in the host's memory, and its polling thread is off where SGLang polls by itself, and
only there."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_mla_ext.adapter.cpu import missing_ops


@pytest.mark.parametrize("polled", [True, False])
def test_thread_of_nixl(polled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**options: Any) -> dict[str, Any]:
        return options

    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    api.nixl_agent_config = config  # type: ignore[attr-defined]
    memories = {"DRAM": "the host's", "VRAM": "a GPU's"}
    api.nixl_agent = lambda name: SimpleNamespace(name=name, nixl_mems=memories)  # type: ignore[attr-defined]
    package._api = api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(missing_ops.installed, "polls_nixl", polled)
    for _ in range(2):
        missing_ops.before_nixl()
    assert api.nixl_agent("a").nixl_mems["VRAM"] == "the host's"
    assert api.nixl_agent_config(backends=[]) == {"backends": []} | ({"enable_prog_thread": False} if polled else {})
