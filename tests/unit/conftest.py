"""SGLang's prefix tree is what some tests here run on, without a GPU: its stand-ins go in before SGLang is imported.

Test files import SGLang inside fixtures and tests, not at their top: importing it imports Triton, and the tests of
tests/kernels, when they run in the same process, must do that first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fork_server import ForkServer, environment_without_sglangs
from release import published_arguments
from trees import Tree, TreeOfNodes

from sglang_mla_ext.adapter.cpu import stubs

if stubs.needed():
    stubs.install()


@pytest.fixture(scope="session")
def new_tree(published: None) -> Callable[[int], TreeOfNodes]:
    """Makes a tree with a page size."""
    return Tree


@pytest.fixture
def any_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one release refuses beside the others is let through: test_limits.py has a test of its own for that."""
    from sglang_mla_ext.adapter.launch import limits

    monkeypatch.setattr(limits.installed, "further_findings", lambda args: [])


@pytest.fixture(scope="session")
def published() -> Iterator[None]:
    """See release.published_arguments."""
    with published_arguments():
        yield


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch, new_tree: Any) -> Any:
    """`make_world(**options)`: a `decode_world.World`, with no pass that runs, before and after."""
    from decode_world import World

    from sglang_mla_ext.adapter.step.passes import passes

    passes.end()
    yield lambda **options: World(monkeypatch, new_tree, **options)
    passes.end()


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runs programs of this folder in a process that has imported SGLang, and this file before it."""
    environment = environment_without_sglangs([os.path.dirname(__file__), *sys.path])
    environment |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    modules = ("conftest", "sglang.srt.managers.scheduler", "sglang.srt.models.deepseek_v2")
    server = ForkServer(tmp_path_factory.mktemp("forks") / "log", environment, modules)
    yield server
    server.close()
