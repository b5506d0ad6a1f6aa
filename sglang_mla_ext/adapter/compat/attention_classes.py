"""Find which classes of attention layers SGLang builds a model from, by the source of its models.

SGLang has MLA for many models in one class, which is the one that we know. Others have a class of their own, or one
derived from it. What is derived may do more (a gate on what goes to the output projection, no rotation), as long as the
seams are where they were: a query that is split before it is absorbed, and a result that goes to the output projection
as it comes from `w_vc`. The source is followed from the model's class, by the names in its code and those of its bases,
as far as SGLang's models go.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from sglang_mla_ext.adapter.compat.contract import table
from sglang_mla_ext.adapter.compat.syntax import Found, NotThere, SourceTree, without_collector

MODELS = "sglang.srt.models"
KNOWN = f"{MODELS}.deepseek_v2.DeepseekV2AttentionMLA"
"""The known class of attention layers, by its name in the oldest release."""

SEAMS = {
    *("_apply_gated", "apply_attention_output_gate", "_split_q_nope_pe", "_chunked_prefix_attn_mha"),
    *("forward_absorb_core", "forward_absorb_prepare"),
}
"""Methods with which a derived class would compute otherwise between the seams; the gates are in front of the output
projection."""

ATTENTION = "RadixAttention"
"""Name of the class that calls the attention backend: a class that uses it is that of an attention layer."""


@cache
def strange_layers(architecture: str) -> list[str]:
    """Name the attention layers of a model that are of other classes than the one we know, or move its seams.

    Args:
        architecture: the class of the model, as its configuration names it.
    Returns:
        empty where all are known, or where SGLang itself has no such model.
    """
    with without_collector():
        return _Reading(SourceTree()).strange_layers(architecture)


class _Reading:
    def __init__(self, tree: SourceTree) -> None:
        self._tree = tree
        self._known = tree.find(table().path_of(KNOWN)).node
        self._seen: set[int] = set()
        self._uses_known = False
        self._derived: set[str] = set()
        self._others: set[str] = set()

    def strange_layers(self, architecture: str) -> list[str]:
        for found in self._models(architecture):
            self._read(found)
        return sorted(self._derived or (set() if self._uses_known else self._others))

    def _models(self, name: str) -> Iterator[Found]:
        """Yield the classes of this name in SGLang's models."""
        for folder in self._tree.folders(MODELS):
            for file in sorted(folder.rglob("*.py")):
                if re.search(rf"^class {re.escape(name)}\b", file.read_text(encoding="utf-8"), re.MULTILINE):
                    module = ".".join((MODELS, *file.relative_to(folder).with_suffix("").parts))
                    yield self._tree.find(f"{module}.{name}")

    def _read(self, found: Found) -> None:
        node = found.node
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or id(node) in self._seen:
            return
        self._seen.add(id(node))
        names = set(_names(node))
        parts = [part for name in sorted(names) if (part := self._model_part(found, name)) is not None]
        if isinstance(node, ast.ClassDef):
            bases = [self._model_part(found, ast.unparse(base)) for base in node.bases]
            if any(base is not None and base.node is self._known for base in bases):
                moved = SEAMS & {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                self._uses_known |= not moved
                self._derived |= {node.name} if moved else set()
                return
            if node is self._known:
                self._uses_known = True
                return
            if ATTENTION in names:
                self._others.add(node.name)
        for part in parts:
            self._read(part)

    def _model_part(self, found: Found, name: str) -> Found | None:
        """Resolve a name in the code of a class or function; None where it is no part of SGLang's models."""
        node = found.module.names.get(name.partition(".")[0])
        if isinstance(node, ast.ImportFrom) and not node.level and not str(node.module).startswith(MODELS):
            return None  # found at once: parsing what is imported from elsewhere takes longer than all else
        try:
            part = self._tree.by_local_name(found.module, name)
        except NotThere:
            return None
        return part if part.module.name.startswith(f"{MODELS}.") else None


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names in code, also dotted ones, but for those of types alone."""
    if isinstance(node, ast.Name | ast.Attribute):
        yield ast.unparse(node)
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST):
                    yield from _names(part)
