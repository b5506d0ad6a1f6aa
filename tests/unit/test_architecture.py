"""The arrows between the rooms of the house: import-linter's contracts in pyproject.toml, and what those cannot say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "sglang_mla_ext"
FIRST_SEEN = ("cli", "options", "configs", "observe", "status", "top")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which `kernels` is a package like others: it is a link without __init__.py, which grimp skips."""
    root = tmp_path_factory.mktemp("package")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    shutil.copytree(REPOSITORY / PACKAGE, root / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in (root / PACKAGE / "kernels", *(root / PACKAGE / "kernels").rglob("*/")):
        (folder / "__init__.py").touch()
    return root


def test_contracts(package: Path) -> None:
    command = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    env = {**os.environ, "PYTHONPATH": str(package)}  # before the installed package
    ran = subprocess.run([sys.executable, "-c", command], cwd=package, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_import_circle(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """import-linter compares packages; here it is modules."""
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    assert {PACKAGE, f"{PACKAGE}.adapter.step.backend", f"{PACKAGE}.kernels.merge"} <= graph.modules
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(edges).prepare()  # a CycleError names the circle


def test_kernels_do_not_shadow_a_package() -> None:
    """A checkout on sys.path must not shadow the top-level package `kernels` that SGLang imports."""
    assert not list((REPOSITORY / "kernels").rglob("__init__.py"))


def test_only_releases_are_imported_by_name() -> None:
    """The linter sees statements alone."""
    files = [*(REPOSITORY / PACKAGE).rglob("*.py"), *(REPOSITORY / "kernels").rglob("*.py")]
    found = {file.name for file in files if any(name in file.read_text() for name in ("import_module", "__import__"))}
    assert found == {"releases.py"}


def test_what_is_seen_first_loads_little() -> None:
    predictions = (f"predict.{file.stem}" for file in (REPOSITORY / PACKAGE / "predict").glob("[!_]*.py"))
    modules = ", ".join(f"{PACKAGE}.{name}" for name in (*FIRST_SEEN, *predictions))
    heavy = ("sglang", "sgl_kernel", "torch", "triton", "matplotlib")
    code = f"import sys, {modules}; sys.exit(str([name for name in {heavy} if name in sys.modules] or ''))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert not ran.stderr.strip(), ran.stderr
