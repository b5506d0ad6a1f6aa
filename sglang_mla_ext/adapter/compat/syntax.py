"""Look up modules, classes, functions and attributes in the source of an installed package, without importing it.

Importing SGLang takes tens of seconds and needs its compiled packages; parsing the few files that matter takes less
than a second. Found is what a module defines or imports at its top level (also below `if` and `try`), what a class
defines in its body, what its methods assign to `self`, and the same of its base classes, wherever they come from. Names
that exist only at run time (`setattr`, `import *`) are not found.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class NotThere(LookupError):
    """The source has no such thing; the message names where the search ended."""


@dataclass(frozen=True)
class Module:
    """A parsed module.

    Attributes:
        name: dotted.
        names: what it defines or imports at its top level, the last definition of each name.
    """

    name: str
    is_package: bool
    names: dict[str, ast.AST]


@dataclass(frozen=True)
class Found:
    """The target of a dotted path.

    Attributes:
        module: where it is defined.
        node: its definition: a class, a function, the statement that assigns or declares it; None for a module.
    """

    module: Module
    node: ast.AST | None

    @property
    def kind(self) -> str:
        """`module`, `class`, `function`, `list` (a name that is assigned one) or `attribute`, properties included."""
        node = self.node
        if node is None:
            return "module"
        if isinstance(node, ast.ClassDef):
            return "class"
        if isinstance(node, Function):
            is_property = any(name.endswith(("property", ".setter")) for name in map(ast.unparse, node.decorator_list))
            return "attribute" if is_property else "function"
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List):
            return "list"
        return "attribute"


@dataclass
class SourceTree:
    """Parsed modules by their names; each file is read once.

    Attributes:
        fields_of: of classes whose fields are put together at run time, by their dotted paths: the list of the classes
            that these come from.
    """

    fields_of: Mapping[str, str] = field(default_factory=dict)
    _modules: dict[str, Module | None] = field(default_factory=dict)
    _members: dict[int, dict[str, ast.AST]] = field(default_factory=dict)
    _folders: dict[str, list[Path]] = field(default_factory=dict)

    def find(self, path: str) -> Found:
        """Follow a dotted path to a module, one of its names, or a member of a class, inherited ones included.

        Raises:
            NotThere: the path leads nowhere.
        """
        module, rest = self._longest_module(path)
        found = Found(module, None)
        where = module.name
        for name in rest:
            if found.node is None:
                found = self._in_module(found.module, name)
            elif isinstance(found.node, ast.ClassDef):
                inherited = next(self._from_class(found, name), None) or self._field(where, name)
                if inherited is None:
                    raise NotThere(f"class {where} has no {name!r}")
                found = inherited
            else:
                raise NotThere(f"{where} is neither a module nor a class")
            where = f"{where}.{name}"
        return found

    def parameters(self, found: Found) -> tuple[str, ...]:
        """Return the names of a function's parameters, or of a class's constructor's; a class method's without `cls`.

        Raises:
            NotThere: it is neither, or a class without a constructor of its own.
        """
        if isinstance(found.node, ast.ClassDef):
            constructor = next(self._from_class(found, "__init__"), None)
            if constructor is None:
                raise NotThere(f"class {found.module.name}.{found.node.name} has no constructor")
            found = constructor
        if not isinstance(found.node, Function) or found.kind != "function":
            raise NotThere("it is not a function")
        arguments = found.node.args
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        by_class = any(ast.unparse(decorator) == "classmethod" for decorator in found.node.decorator_list)
        return tuple(names[1:] if by_class else names)

    def is_installed(self, package: str) -> bool:
        """Return whether there is source of a top-level package; a stub made at run time is none."""
        return self._module(package) is not None

    def folders(self, package: str) -> list[Path]:
        """Return the folders that the modules of a package lie in.

        Args:
            package: dotted.
        """
        top, *rest = package.split(".")
        if top not in self._folders:
            self._folders[top] = _folders_of(top)
        return [folder.joinpath(*rest) for folder in self._folders[top]]

    def _longest_module(self, path: str) -> tuple[Module, list[str]]:
        parts = path.split(".")
        for count in range(len(parts), 0, -1):
            if (module := self._module(".".join(parts[:count]))) is not None:
                return module, parts[count:]
        raise NotThere(f"no package {parts[0]!r} is installed")

    def _in_module(self, module: Module, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Found:
        """Find a name of a module where it is defined; imports are followed."""
        node = module.names.get(name)
        key = (module.name, name)
        if node is None or key in seen:
            if (submodule := self._module(f"{module.name}.{name}")) is not None:
                return Found(submodule, None)
            raise NotThere(f"module {module.name} has no {name!r}")
        if isinstance(node, ast.ImportFrom):
            origin = _imported_module(module, node)
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            source = self._module(origin)
            if source is None:
                return Found(module, node)  # of another package, perhaps compiled: it is imported, and that is enough
            return self._in_module(source, original, seen | {key})
        if isinstance(node, ast.Import):
            alias = next(alias for alias in node.names if (alias.asname or alias.name.split(".")[0]) == name)
            source = self._module(alias.name if alias.asname else name)
            return Found(module, node) if source is None else Found(source, None)
        return Found(module, node)

    def _from_class(self, found: Found, name: str) -> Iterator[Found]:
        """Yield a member of a class and of its bases, nearest first. Not Python's order where bases share a base."""
        assert isinstance(found.node, ast.ClassDef)
        if (node := self._members_of(found.node).get(name)) is not None:
            yield Found(found.module, node)
        for base in found.node.bases:
            dotted = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            try:
                of_base = self.by_local_name(found.module, dotted)
            except NotThere:
                continue  # built in, or computed
            if isinstance(of_base.node, ast.ClassDef):
                yield from self._from_class(of_base, name)

    def _field(self, path: str, name: str) -> Found | None:
        """Find a field of a class that gets its fields at run time."""
        if path not in self.fields_of:
            return None
        listed = self.find(self.fields_of[path])
        if not isinstance(listed.node, ast.Assign) or not isinstance(listed.node.value, ast.List):
            raise NotThere(f"{self.fields_of[path]} is not a list")
        for element in listed.node.value.elts:
            part = self.by_local_name(listed.module, ast.unparse(element))
            if isinstance(part.node, ast.ClassDef) and (found := next(self._from_class(part, name), None)) is not None:
                return found
        return None

    def by_local_name(self, module: Module, dotted: str) -> Found:
        """Resolve a name in the code of a module.

        Raises:
            NotThere: no module has it: it is built in, or a member of something.
        """
        first, *rest = dotted.split(".")
        found = self._in_module(module, first)
        for name in rest:
            if found.node is not None:
                raise NotThere(f"{dotted} is not a module's")
            found = self._in_module(found.module, name)
        return found

    def _members_of(self, node: ast.ClassDef) -> dict[str, ast.AST]:
        if (members := self._members.get(id(node))) is None:
            members = dict(_assigned_to_self(node))
            members.update(_bindings(node.body))
            self._members[id(node)] = members
        return members

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = None
            if (file := self._file(name)) is not None:
                body = [] if file.is_dir() else ast.parse(self._read(file)).body
                self._modules[name] = Module(name, file.name == "__init__.py", _last_bindings(body))
        return self._modules[name]

    def _file(self, name: str) -> Path | None:
        for path in self.folders(name):
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file():
                    return file
            if path.is_dir():
                return path  # a package without __init__.py
        return None

    def _read(self, file: Path) -> str:
        return file.read_text(encoding="utf-8")


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause garbage collection: syntax trees are many objects without cycles, and looking at all of them again and
    again takes longer than parsing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _folders_of(package: str) -> list[Path]:
    """Return the folders of a top-level package; of a module, its file without the ending. Finding a spec imports
    nothing."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # ValueError: a module in sys.modules without a spec
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(location) for location in spec.submodule_search_locations]
    return [Path(spec.origin).with_suffix("")] if spec.has_location and spec.origin is not None else []


def _imported_module(module: Module, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that an import is from."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def _last_bindings(body: Iterable[ast.stmt]) -> dict[str, ast.AST]:
    """Return the last statement that binds each name. A class that is made into another under its own name (`Args =
    defstruct("Args", ..)`) stays the class, whose members that has."""
    names: dict[str, ast.AST] = {}
    for name, node in _bindings(body):
        if not (isinstance(names.get(name), ast.ClassDef) and isinstance(node, ast.Assign)):
            names[name] = node
    return names


def _bindings(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Yield names that statements bind, with the statement; those below `if`, `try`, `with` and loops included."""
    for node in _statements(body):
        if isinstance(node, Function | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield from ((name.id, node) for name in _targets(node) if isinstance(name, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name.split(".")[0], node) for alias in node.names)


def _assigned_to_self(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Yield attributes that the methods of a class assign to their first parameter."""
    for method in node.body:
        if not isinstance(method, Function) or not method.args.args:
            continue
        own = method.args.args[0].arg
        for inner in _statements(method.body):
            if isinstance(inner, ast.Assign | ast.AnnAssign | ast.AugAssign):
                for target in _targets(inner):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == own:
                        yield target.attr, inner


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those inside of them, but for the bodies of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            parts = ast.iter_child_nodes(node)
            yield from _statements(
                part for part in parts if isinstance(part, ast.stmt | ast.excepthandler | ast.match_case)
            )


def _targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign) -> Iterator[ast.AST]:
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        yield from (part for part in ast.walk(target) if isinstance(getattr(part, "ctx", None), ast.Store))
