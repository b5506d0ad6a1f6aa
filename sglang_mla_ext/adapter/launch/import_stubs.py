"""Stubs for packages that SGLang and transformers import for a name or two that no answer here depends on.

A process that only examines a launch line takes a fifth of the time with them.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("torch._dynamo", "scipy", "IPython")
"""torch's compiler, for decorators of torchvision and transformers; the assignment of a loss; notebooks."""


@contextmanager
def stub_imports() -> Iterator[None]:
    """Import empty modules in place of these packages, unless they are there. What they decorate stays as it is."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds their modules, all empty."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        ours = any(name == package or name.startswith(f"{package}.") for package in PACKAGES)
        return ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    """Whatever is asked of it is a decorator that changes nothing, and may be a base class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unchanged


class _Decorator(type):
    def __call__(cls, decorated: Any = None, *args: Any, **options: Any) -> Any:
        return decorated if callable(decorated) else cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Unchanged(metaclass=_Decorator):
    """A decorator that changes nothing, with arguments or without."""
