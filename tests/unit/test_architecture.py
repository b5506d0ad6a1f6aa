"""The rooms of the house and the arrows between them, read from the syntax trees of all modules.

Every import counts: at the top of a module, inside a function, and for types only. What is loaded at start is another
question (tests/unit/test_cli.py).
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "sglang_mla_ext"
USER_FACING = ("cli", "options", "configs", "observe", "status", "top")


@dataclass(frozen=True)
class Import:
    """One import statement's module, or a name in it that may be one.

    Attributes:
        target: absolute dotted path.
        at_top: whether it runs when the importing module does.
    """

    target: str
    line: int
    at_top: bool


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file, of all modules of the package; `kernels` lies at the top of the repository."""
    found = {}
    for root, name in ((REPOSITORY / PACKAGE, PACKAGE), (REPOSITORY / "kernels", f"{PACKAGE}.kernels")):
        for file in sorted(root.rglob("*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            if root.name == PACKAGE and parts[0] == "kernels":
                continue
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            found[".".join((name, *parts))] = file
    return found


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    file = modules()[module]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lazy = {id(inner) for node in ast.walk(tree) if runs_later(node) for inner in ast.walk(node) if inner is not node}
    found = []
    for node in ast.walk(tree):
        at_top = id(node) not in lazy
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, at_top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")
            package = package[: len(package) - node.level + (file.name == "__init__.py")] if node.level else []
            origin = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            found += [Import(f"{origin}.{alias.name}", node.lineno, at_top) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            assert isinstance(node.args[0], ast.Constant), f"{file}:{node.lineno}: which module?"
            found.append(Import(str(node.args[0].value), node.lineno, at_top))
    return tuple(found)


def runs_later(node: ast.AST) -> bool:
    """Whether what is inside runs when the module has been imported, if at all."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return True
    return isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"


def is_in(path: str, rooms: tuple[str, ...]) -> bool:
    return any(f"{path}.".startswith(f"{room}.") for room in rooms)


def trespasses(room: str, forbidden: tuple[str, ...], *, at_top_only: bool = False) -> list[str]:
    """Imports of `forbidden` in the modules of a room, as `file:line imports what`."""
    return [
        f"{modules()[module].relative_to(REPOSITORY)}:{found.line} imports {found.target}"
        for module in modules()
        if is_in(module, (room,))
        for found in imports_of(module)
        if is_in(found.target, forbidden) and (found.at_top or not at_top_only)
    ]


def ours(*names: str) -> tuple[str, ...]:
    return tuple(f"{PACKAGE}.{name}" for name in names)


SGLANG = ("sglang", "sgl_kernel")


def test_every_module_is_seen() -> None:
    names = set(modules())
    assert {PACKAGE, *ours("cli", "configs", "adapter.step.backend", "prefix.planner", "kernels.merge")} <= names
    # A checkout on sys.path must not shadow the top-level package `kernels` that SGLang imports.
    assert not list((REPOSITORY / "kernels").rglob("__init__.py"))


def test_only_the_adapter_knows_sglang() -> None:
    assert [found for found in trespasses(PACKAGE, SGLANG) if not found.startswith(f"{PACKAGE}/adapter/")] == []


ROOMS = {
    "latent": ("compat",),
    "cpu": ("latent", "compat"),
    "launch": ("cpu", "compat"),
    "step": ("launch", "latent", "cpu", "compat"),
    "compat": (),
}
"""Of the adapter, with the rooms that each knows. Its door, plugin.py, may know all."""


@pytest.mark.parametrize("room", ROOMS)
def test_the_adapters_rooms_know_those_below_them(room: str) -> None:
    forbidden = ours(*(f"adapter.{other}" for other in {*ROOMS, "plugin"} - {room, *ROOMS[room]}))
    assert trespasses(f"{PACKAGE}.adapter.{room}", forbidden) == []


def test_every_file_of_the_adapter_is_in_a_room() -> None:
    loose = {path.stem for path in (REPOSITORY / PACKAGE / "adapter").glob("*.py")}
    folders = {path.parent.name for path in (REPOSITORY / PACKAGE / "adapter").glob("*/__init__.py")}
    assert loose == {"__init__", "plugin"} and folders == set(ROOMS)


def test_segments_and_rows_are_plain_python() -> None:
    """The words between the planner and the kernels, which neither need to load the other."""
    assert trespasses(f"{PACKAGE}.segment", (*SGLANG, "torch", "triton", "numpy", PACKAGE)) == []
    assert (
        trespasses(f"{PACKAGE}.rows", (*SGLANG, "torch", "triton", "numpy", *ours("adapter", "prefix", "kernels")))
        == []
    )


def test_kernels_know_nothing_above_them() -> None:
    above = ours("adapter", "prefix", "launch_server", *USER_FACING)
    assert trespasses(f"{PACKAGE}.kernels", above) == []


def test_the_planner_is_pure_python() -> None:
    above = ours("adapter", "kernels", "cli", "launch_server")
    assert trespasses(f"{PACKAGE}.prefix", (*SGLANG, "torch", "triton", *above)) == []


def test_predictions_are_pure_python() -> None:
    above = ours("adapter", "cli", "launch_server")
    assert trespasses(f"{PACKAGE}.predict", (*SGLANG, "torch", "triton", "numpy", *above)) == []
    assert trespasses(f"{PACKAGE}.predict", ("matplotlib",), at_top_only=True) == []
    assert trespasses(f"{PACKAGE}.prefix", ours("predict")) == []


@pytest.mark.parametrize("module", USER_FACING)
def test_what_the_user_sees_first_loads_little(module: str) -> None:
    heavy = (*SGLANG, "torch", "triton", *ours("kernels"))
    assert trespasses(f"{PACKAGE}.{module}", heavy, at_top_only=True) == []


@pytest.mark.parametrize("module", USER_FACING[1:])
def test_what_the_user_sees_does_not_know_the_adapter(module: str) -> None:
    assert trespasses(f"{PACKAGE}.{module}", ours("adapter", "kernels")) == []


def graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports. `from package import name` is an import of `package.name` where
    that is a module, and otherwise of `package`."""
    edges: dict[str, set[str]] = {}
    for module in modules():
        edges[module] = set()
        for found in imports_of(module):
            target = found.target
            while target and target not in modules():
                target = target.rpartition(".")[0]
            if target and target != module:
                edges[module].add(target)
    return edges


def test_no_import_circle() -> None:
    TopologicalSorter(graph()).prepare()  # a CycleError names the circle
