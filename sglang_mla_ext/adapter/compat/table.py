"""Tables of what is used of SGLang, and of what SGLang reads of an attention backend: their entries, and how a
release's table is made from that of the one before. Checked by contract.py, see there.

Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum


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
        uses: what is used besides, or otherwise than before.
        renamed: old path -> new path, of things and of what they are in.
        gone: paths of what is used no more, with all below them.
        reads: what SGLang reads of a backend besides.
        fields_of: see SourceTree; None where it is as before.
    """

    uses: tuple[Use, ...] = ()
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
        gone, again = [dotted(path) for path in changes.gone], {use.path for use in changes.uses}
        kept = [use for use in kept if use.path not in again and not any(_is_in(use.path, path) for path in gone)]
        return Table(
            uses=(*kept, *changes.uses),
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


# ---- entries in few words


def dotted(path: str) -> str:
    """A path with the package's name."""
    return path if path.split(".")[0] in ("sglang", "sgl_kernel") else f"sglang.srt.{path}"


def use(path: str, kind: str, why: str, params: str = "", keywords: str = "") -> Use:
    """One entry; parameters as words."""
    return Use(dotted(path), kind, why, tuple(params.split()), tuple(keywords.split()))


def function(path: str, params: str, why: str, keywords: str = "") -> tuple[Use]:
    """A function; parameters as words."""
    return (use(path, "function", why, params, keywords),)


def attributes(owner: str, names: str, why: str, kind: str = "attribute") -> tuple[Use, ...]:
    """Attributes, as words, of a class or module."""
    return tuple(use(f"{owner}.{name}", kind, why) for name in names.split())


def methods(owner: str, names: str, why: str) -> tuple[Use, ...]:
    """Methods, as words, that take no argument."""
    return tuple(use(f"{owner}.{name}", "function", why, "self") for name in names.split())


def needed_for(feature: Feature, *uses: Use) -> tuple[Use, ...]:
    """Entries that only a server with this feature needs."""
    return tuple(replace(each, feature=feature) for each in uses)
