"""The contract with SGLang: which releases are supported, and whether the installed one is as expected.

SGLang has no stable plug-in interface for attention inside a model, so each name in a release's tables could change in
the next one. A difference is reported by name at start instead of failing somewhere in a forward pass.

The source is read and not imported (syntax.py), so the check takes less than a second, and it is the same in
`sglang-mla doctor`, in the launching process and in the workers. What is used of `sgl_kernel` is not checked where that
is absent: on a CPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from sglang_mla_ext.adapter.compat import releases
from sglang_mla_ext.adapter.compat.syntax import NotThere, SourceTree, without_collector
from sglang_mla_ext.adapter.compat.table import Release, Use

logger = logging.getLogger(__name__)

SUPPORTED: Mapping[str, Release] = releases.supported()
"""What is used of each supported release, the newest one last."""


class ContractError(RuntimeError):
    """SGLang is not what this package was written for."""


def installed_version(package: str = "sglang") -> str | None:
    """Version of an installed package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def line() -> str:
    """The supported release that the installed one is taken for: itself; of others the next newer one, or the newest;
    the newest where none is installed."""
    have = _numbers(installed_version())
    return next((each for each in SUPPORTED if have and have <= _numbers(each)), list(SUPPORTED)[-1])


def release() -> Release:
    """What is used of the installed release."""
    return SUPPORTED[line()]


def untested() -> str | None:
    """What to say of a release that this package was not tested with, where it is not too old; None where it was."""
    have = installed_version()
    if have is None or have in SUPPORTED or _is_too_old(have):
        return None
    return f"sglang {have} was not tested with this release, which works with {', '.join(SUPPORTED)}"


def mismatches() -> list[str]:
    """Compare the installed SGLang with what is used of it.

    Returns:
        one line for each difference; empty where all is as expected.
    """
    have = installed_version()
    if have is None or _is_too_old(have):
        return [f"sglang is {have or 'not installed'}; this release works with {', '.join(SUPPORTED)}"]
    with without_collector():
        return _differences(release())


def _numbers(installed: str | None) -> tuple[int, ...]:
    """0.5.23.post1 -> (0, 5, 23)"""
    found = re.match(r"[\d.]*\d", installed or "")
    return tuple(map(int, found.group().split("."))) if found else ()


def _is_too_old(have: str) -> bool:
    return _numbers(have) < _numbers(next(iter(SUPPORTED)))


def _differences(release: Release) -> list[str]:
    tree = SourceTree(release.fields_of)
    differences = ((use, difference(use, tree)) for use in release.uses)
    return [f"{use.path} ({use.why}): {what}" for use, what in differences if what is not None]


def difference(use: Use, tree: SourceTree) -> str | None:
    """How one thing differs from what is expected; None where it does not."""
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


def check() -> None:
    """Compare, and warn of a release that was not tested. What was as expected is not compared again by this process.

    Raises:
        ContractError: with every difference.
    """
    _check(installed_version(), release())


@cache  # by what it depends on
def _check(have: str | None, release: Release) -> None:
    if (warning := untested()) is not None:
        logger.warning("hybrid_mla: %s; what it uses of SGLang is compared with the source.", warning)
    if found := mismatches():
        raise ContractError(
            "--attention-backend hybrid_mla cannot run on this SGLang:\n  "
            + "\n  ".join(found)
            + f"\nInstall a supported version (pip install sglang=={list(SUPPORTED)[-1]}) or choose another "
            "--attention-backend."
        )
