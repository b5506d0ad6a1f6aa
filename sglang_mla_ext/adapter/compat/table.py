"""Tables of what is used of SGLang, and of what SGLang reads of an attention backend: their entries, and how a
release's table is made from that of the one before. Checked by contract.py, see there.

Imports nothing of SGLang.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from textwrap import dedent


class Feature(Enum):
    """A feature that needs something of SGLang; the value is its name in messages."""

    BASE = "every server"
    GPU = "a GPU"
    CPU = "a CPU"
    DRAFTS = "--speculative-algorithm"
    HOST_CACHE = "--enable-hierarchical-cache"
    DISAGGREGATION = "--disaggregation-mode"
    FP8 = "--kv-cache-dtype fp8_e4m3"
    MEMORY_SAVER = "--enable-memory-saver"
    MIXED = "--hybrid-mla-mixed-tokens"
    PAIRED = "mixed steps with drafts"
    PREFILL_GRAPH = "prefill in CUDA graphs"
    SHARDED = "--hybrid-mla-prefix-sharding auto"
    GRAPH_VARIANTS = "decode graphs without sharing"
    ROUTING = "--hybrid-mla-dp-routing prefix"
    # A server runs without these, whatever it is asked for.
    SMALL_DRAFTS = "drafts of small models"
    LINEAR_ON_CPU = "linear attention on a CPU"
    STATUS = "the status page"
    EXAMINING = "examining a launch command"


@dataclass(frozen=True)
class Use:
    """One thing used of SGLang.

    Attributes:
        path: dotted path to it.
        kind: what it has to be: `class`, `function`, `attribute`, or `list` (an attribute that holds a list).
        why: what for.
        params: the leading parameter names that we rely on, in order; a class's are its constructor's.
        keywords: further parameters that we pass by name.
        feature: what needs it.
    """

    path: str
    kind: str
    why: str
    params: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    feature: Feature = Feature.BASE


@dataclass(frozen=True)
class Read:
    """An attribute or method that SGLang reads (or sets) on an attention backend for an MLA model. A backend that owns
    another one forwards these by name.

    Attributes:
        name: of the attribute.
        reader: path of one of the files that read it, below `sglang/srt`.
        why: when.
        optional: SGLang asks whether the backend has it.
    """

    name: str
    reader: str
    why: str
    optional: bool = False


@dataclass(frozen=True)
class Changes:
    """The differences of a release from the one before; of the oldest, all that there is. Paths are dotted, below
    `sglang.srt` where they do not begin with a package's name.

    Attributes:
        uses: what is used besides, or otherwise than before, by the feature that needs it; see `read_uses`.
        renamed: old path -> new path, of things and of what they are in.
        gone: paths of what is used no more, with all below them.
        reads: what SGLang reads of a backend besides.
        fields_of: see SourceTree; None where it is as before.
    """

    uses: Mapping[Feature, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    gone: tuple[str, ...] = ()
    reads: tuple[Read, ...] = ()
    fields_of: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Table:
    """The contract with one release: what is used of it, and what it reads of an attention backend.

    Attributes:
        fields_of: see SourceTree.
        renamed: what names of the oldest release have become.
    """

    uses: tuple[Use, ...] = ()
    read_of_backend: tuple[Read, ...] = ()
    fields_of: Mapping[str, str] = field(default_factory=dict, hash=False)
    renamed: tuple[tuple[str, str], ...] = ()

    def after(self, changes: Changes) -> Table:
        """Return the table of the release that follows on this one."""
        renamed = tuple((dotted(old), dotted(new)) for old, new in changes.renamed.items())
        kept = [replace(use, path=_renamed(use.path, renamed)) for use in self.uses]
        new = [use for feature, text in changes.uses.items() for use in read_uses(feature, text)]
        gone, again = [dotted(path) for path in changes.gone], {use.path for use in new}
        kept = [use for use in kept if use.path not in again and not any(_is_in(use.path, path) for path in gone)]
        return Table(
            uses=(*kept, *new),
            read_of_backend=(*self.read_of_backend, *changes.reads),
            fields_of=self.fields_of if changes.fields_of is None else changes.fields_of,
            renamed=(*self.renamed, *renamed),
        )

    def path_of(self, path: str) -> str:
        """Return the path in this release of what has this one in the oldest."""
        return _renamed(path, self.renamed)


def _renamed(path: str, renamed: tuple[tuple[str, str], ...]) -> str:
    for old, new in renamed:
        if _is_in(path, old):
            path = new + path[len(old) :]
    return path


def _is_in(path: str, outer: str) -> bool:
    return f"{path}.".startswith(f"{outer}.")


def dotted(path: str) -> str:
    """Return a path with the package's name."""
    return path if path.split(".")[0] in ("sglang", "sgl_kernel") else f"sglang.srt.{path}"


_NAME = re.compile(r"(class\s+)?(\w+)(\[\]|\(([^)]*)\))?")


def read_uses(feature: Feature, text: str) -> Iterator[Use]:
    """Yield the entries of a table: reasons, and behind or below each of them owners with their names.

        storing keys: mem_cache.memory_pool.MLATokenToKVPool: dtype set_kv_buffer(self, layer, *, cache_k)
        who is let in
            managers.schedule_policy: class PrefillAdder
            managers.schedule_policy.PrefillAdder: can_run_list[]

    A name is an attribute's; `name[]` one that holds a list; `class name`; or a function, with the leading parameters
    that we rely on, and behind a star others that we pass by name. The names of an owner may go on in further lines.
    """
    apart = re.sub(r"^(\S.*): ([\w.]+: )", r"\1\n    \2", dedent(text).strip(), flags=re.MULTILINE)
    for block in re.split(r"\n(?=\S)", apart):
        why, *owners = re.split(r"\n {4}(?=\S)", block)
        for owner, _, names in (each.partition(":") for each in owners):
            for is_class, name, given, params in _NAME.findall(names):
                leading, _, by_name = params.partition("*")
                kind = "class" if is_class else "list" if given == "[]" else "function" if given else "attribute"
                path, params_of = dotted(f"{owner}.{name}"), re.compile(r"\w+").findall
                yield Use(path, kind, why, tuple(params_of(leading)), tuple(params_of(by_name)), feature)
