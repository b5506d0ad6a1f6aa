"""The contract with SGLang: the supported releases, and a check that the installed one is as expected.

SGLang has no stable plug-in interface for attention inside a model, so each name in a release's tables could change in
the next one. A difference is reported by name at start instead of failing somewhere in a forward pass.

The source is read and not imported (syntax.py), so the check takes less than a second, and it is the same in
`sglang-mla doctor`, in the launching process and in the workers. A server is refused for what it would use itself;
`doctor` warns of differences that only other features need. What is used of `sgl_kernel` is not checked where that is
absent: on a CPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from sglang_mla_ext.adapter.compat import releases
from sglang_mla_ext.adapter.compat.syntax import NotThere, SourceTree, without_collector
from sglang_mla_ext.adapter.compat.table import Feature, Table, Use

logger = logging.getLogger(__name__)

SUPPORTED: Mapping[str, Table] = releases.supported()
"""Names that are used of SGLang, by supported release, the newest one last."""


class ContractError(RuntimeError):
    """SGLang is not what this package was written for.

    Attributes:
        differences: one line for each, where SGLang was compared.
    """

    def __init__(self, text: str, differences: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.differences = differences


def installed_version(package: str = "sglang") -> str | None:
    """Return the version of an installed package, None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def line() -> str:
    """Return the supported release that the installed one is treated as: itself, or else the next newer one, or else
    the newest; the newest, too, where none is installed."""
    have = _numbers(installed_version())
    return next((each for each in SUPPORTED if have and have <= _numbers(each)), list(SUPPORTED)[-1])


def table() -> Table:
    """Return what is used of the installed release."""
    return SUPPORTED[line()]


def untested() -> str | None:
    """Return a warning of a release that this package was not tested with; None where it was, or is too old."""
    have = installed_version()
    if have is None or have in SUPPORTED or is_too_old(have):
        return None
    return f"sglang {have} was not tested with this release, which works with {', '.join(SUPPORTED)}"


def mismatches(asked: Iterable[Feature] = Feature) -> list[str]:
    """Compare the installed SGLang with what some features use of it, by default all.

    Returns:
        one line for each difference; empty where all is as expected.
    """
    return [line for lines in compare(asked).values() for line in lines]


def compare(asked: Iterable[Feature] = Feature) -> dict[Feature, list[str]]:
    """Return these differences by feature; without SGLang, or with one that is too old, nothing but that."""
    have = installed_version()
    if have is None or is_too_old(have):
        return {Feature.BASE: [f"sglang is {have or 'not installed'}; this release works with {', '.join(SUPPORTED)}"]}
    of, wanted = table(), frozenset(asked)
    tree = SourceTree(of.fields_of)
    found: dict[Feature, list[str]] = {}
    with without_collector():
        for use in of.uses:
            if use.feature in wanted and (what := difference(use, tree)) is not None:
                found.setdefault(use.feature, []).append(f"{use.path} ({use.why}): {what}")
    return found


def targets(paths: Iterable[str]) -> dict[str, tuple[str, Feature]]:
    """Find where hooks go in the installed release, and which feature needs them there.

    Args:
        paths: as the oldest release has them.
    Returns:
        by these paths. What only some servers need is left out where this release does not have it: `check` refuses
        those, and the others start without.
    """
    of = table()
    needed_for, tree = {use.path: use.feature for use in of.uses}, SourceTree(of.fields_of)

    def is_there(path: str) -> bool:
        try:
            return bool(tree.find(path))
        except NotThere:
            return False

    found = {path: of.path_of(path) for path in paths}
    with without_collector():
        return {
            path: (here, feature)
            for path, here in found.items()
            if (feature := needed_for.get(here, Feature.BASE)) is Feature.BASE or is_there(here)
        }


def _numbers(installed: str | None) -> tuple[int, ...]:
    """Return the numbers of a version: 0.5.23.post1 -> (0, 5, 23)."""
    found = re.match(r"[\d.]*\d", installed or "")
    return tuple(map(int, found.group().split("."))) if found else ()


def is_too_old(have: str) -> bool:
    """Return whether a release came before all supported ones."""
    return _numbers(have) < _numbers(next(iter(SUPPORTED)))


def is_supported(have: str) -> bool:
    """Return whether a release is one of the supported ones, or between them."""
    return not is_too_old(have) and _numbers(have) <= _numbers(list(SUPPORTED)[-1])


def difference(use: Use, tree: SourceTree) -> str | None:
    """Return how one thing differs from what is expected; None where it does not."""
    if use.path.startswith("sgl_kernel.") and not tree.is_installed("sgl_kernel"):
        return None
    try:
        found = tree.find(use.path)
        if found.kind != use.kind:
            return f"is {_with_article(found.kind)}, expected {_with_article(use.kind)}"
        if not use.params and not use.keywords:
            return None
        params = tree.parameters(found)
    except NotThere as error:
        return str(error)
    if params[: len(use.params)] != use.params:
        return f"takes {params}, expected {use.params} first"
    if missing := [name for name in use.keywords if name not in params]:
        return f"takes {params}, expected also {', '.join(missing)}"
    return None


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


_as_expected: set[tuple[str | None, Table, Feature]] = set()
"""Features that were as expected, with the installed version and the tables that they were compared by."""


def check(asked: Iterable[Feature] = Feature) -> None:
    """Compare what some features use, and warn of a release that was not tested. What was as expected is not compared
    again by this process.

    Raises:
        ContractError: with every difference.
    """
    have, of = installed_version(), table()
    new = [feature for feature in asked if (have, of, feature) not in _as_expected]
    if Feature.BASE in new and (warning := untested()) is not None:
        logger.warning("hybrid_mla: %s; all that it uses of SGLang is compared with the installed source.", warning)
    if found := mismatches(new) if new else []:
        raise ContractError(
            "--attention-backend hybrid_mla cannot run on this SGLang:\n  "
            + "\n  ".join(found)
            + f"\nInstall a supported version (pip install sglang=={list(SUPPORTED)[-1]}) or choose another "
            "--attention-backend.",
            found,
        )
    _as_expected.update((have, of, feature) for feature in new)
