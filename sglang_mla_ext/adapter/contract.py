"""The contract with SGLang: which releases are supported, and whether the installed one is as expected.

SGLang has no stable plug-in interface for attention inside a model, so each name in uses.py could change in any
release. A difference is reported by name at start instead of failing somewhere in a forward pass.

The source is read and not imported (source.py), so the check takes less than a second, and it is the same in
`sglang-mla doctor`, in the launching process and in the workers. What is used of `sgl_kernel` is not checked where that
is absent: on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

from sglang_mla_ext.adapter.source import NotThere, SourceTree, without_collector
from sglang_mla_ext.adapter.uses import SGLANG_0_5_17, Release, Use

SUPPORTED: Mapping[str, Release] = {"0.5.17": SGLANG_0_5_17}
"""What is used of each supported release, the newest one last."""


class ContractError(RuntimeError):
    """SGLang is not what this package was written for."""


def installed_version(package: str = "sglang") -> str | None:
    """Version of an installed package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release() -> Release:
    """What is used of the installed release; of the newest supported one where another is installed, or none."""
    return SUPPORTED.get(installed_version() or "", list(SUPPORTED.values())[-1])


def mismatches() -> list[str]:
    """Compare the installed SGLang with what is used of it.

    Returns:
        one line for each difference; empty where all is as expected.
    """
    found = []
    have = installed_version()
    if have not in SUPPORTED:
        found.append(f"sglang is {have or 'not installed'}; this release works with {', '.join(SUPPORTED)}")
    if have is None:
        return found
    with without_collector():
        return found + _differences(release().uses)


def _differences(uses: Iterable[Use]) -> list[str]:
    tree = SourceTree()
    differences = ((use, difference(use, tree)) for use in uses)
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
    """
    Raises:
        ContractError: with every difference.
    """
    if found := mismatches():
        raise ContractError(
            "--attention-backend hybrid_mla cannot run on this SGLang:\n  "
            + "\n  ".join(found)
            + f"\nInstall a supported version (pip install sglang=={list(SUPPORTED)[-1]}) or choose another "
            "--attention-backend."
        )
