"""Names in the source of a package are found without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_mla_ext.adapter.compat.syntax import NotThere, SourceTree

FILES = {
    "__init__.py": "from .base import Base as Reexported\nraise RuntimeError('imported')\n",
    "base.py": """
import collections.abc

class Grandparent:
    inherited = []

    def method(self, a, /, b, *args, c=1, **kwargs): ...

class Base(Grandparent, collections.abc.Sized):
    declared: int

    def __init__(self, size):
        self.size, (self.a, *self.rest) = size, (1, 2)
        other.not_mine = 1
        if size:
            with open("f") as file:
                self.conditional: int = 1
        else:
            match size:
                case 1:
                    self.matched += 1

        def inner(self):
            self.of_another = 1

    @property
    def computed(self): return 1

    @classmethod
    def made(cls, x, y): ...

    @staticmethod
    def static(x): ...
""",
    "sub/__init__.py": "",
    "sub/derived.py": """
from typing import Generic
from .. import base
from package_of_test import base as renamed, Reexported
from .circle import looped
import package_of_test.base
import json

try:
    from absent_package import thing
except ImportError:
    thing = None
else:
    CHOICES = ["a", "b"]

if True:
    def conditional(): ...

class Derived(base.Base, Generic[int]):
    @decorated
    def method(own, z):
        own.more = 1

class Computed(make_base()):
    class Nested:
        value = 1
""",
    "sub/circle.py": "from .derived import looped\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    for name, text in FILES.items():
        file = tmp_path / "package_of_test" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return SourceTree(_folders={"package_of_test": [tmp_path / "package_of_test"]})


DERIVED = "sub.derived.Derived"


@pytest.mark.parametrize(
    ("path", "kind", "params"),
    [
        ("base", "module", None),
        ("sub.derived", "module", None),
        ("Reexported", "class", ("self", "size")),
        ("Reexported.inherited", "list", None),
        (f"{DERIVED}", "class", ("self", "size")),
        (f"{DERIVED}.method", "function", ("own", "z")),
        ("base.Base.method", "function", ("self", "a", "b", "c")),
        (f"{DERIVED}.made", "function", ("x", "y")),
        (f"{DERIVED}.static", "function", ("x",)),
        (f"{DERIVED}.computed", "attribute", None),
        (f"{DERIVED}.declared", "attribute", None),
        (f"{DERIVED}.size", "attribute", None),
        (f"{DERIVED}.a", "attribute", None),
        (f"{DERIVED}.conditional", "attribute", None),
        (f"{DERIVED}.matched", "attribute", None),
        (f"{DERIVED}.more", "attribute", None),
        ("sub.derived.renamed.Base", "class", ("self", "size")),
        ("sub.derived.base", "module", None),
        ("sub.derived.package_of_test.base.Base", "class", ("self", "size")),
        ("sub.derived.json.dumps", "function", ("obj", "skipkeys", "ensure_ascii")),
        ("sub.derived.thing", "attribute", None),
        ("sub.derived.CHOICES", "list", None),
        ("sub.derived.conditional", "function", ()),
        ("sub.derived.Computed.Nested.value", "attribute", None),
    ],
)
def test_found(tree: SourceTree, path: str, kind: str, params: tuple[str, ...] | None) -> None:
    found = tree.find(f"package_of_test.{path}")
    assert found.kind == kind
    if params is None:
        with pytest.raises(NotThere):
            tree.parameters(found)
    else:
        assert tree.parameters(found)[: len(params)] == params


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("package_of_test.absent", "module package_of_test has no 'absent'"),
        ("package_of_test.base.Base.not_mine", r"class package_of_test.base.Base has no 'not_mine'"),
        ("package_of_test.base.Base.of_another", "no 'of_another'"),
        ("package_of_test.base.Base.size.real", "size is neither a module nor a class"),
        ("package_of_test.sub.derived.looped", "has no 'looped'"),
        ("package_of_test.sub.derived.Computed.anything", "no 'anything'"),
        ("package_of_test_that_is_not_there.thing", "no package 'package_of_test_that_is_not_there' is installed"),
    ],
)
def test_not_found(tree: SourceTree, path: str, message: str) -> None:
    with pytest.raises(NotThere, match=message):
        tree.find(path)


def test_a_class_without_a_constructor_has_no_parameters(tree: SourceTree) -> None:
    with pytest.raises(NotThere, match=r"class package_of_test.base.Grandparent has no constructor"):
        tree.parameters(tree.find("package_of_test.base.Grandparent"))


def test_what_is_installed(tree: SourceTree) -> None:
    assert tree.is_installed("package_of_test") and tree.is_installed("json") and tree.is_installed("textwrap")
    assert tree.parameters(tree.find("textwrap.dedent")) == ("text",)
    assert not tree.is_installed("package_of_test_that_is_not_there")
