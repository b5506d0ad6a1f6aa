"""The supported releases of SGLang: each is a folder beside this file, `sglang_X_Y_Z`, and there is no other list.

A folder has a class `ReleaseXYZ`, derived from that of the release before: its methods, and its CHANGES (table.py), are
what that release has otherwise. Importing one loads neither SGLang nor torch.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.compat.table import Table

if TYPE_CHECKING:
    from sglang_mla_ext.adapter.compat.sglang_0_5_17 import Release0517


def classes() -> dict[str, type[Release0517]]:
    """Return the class of each version, the newest one last."""
    found = (
        re.fullmatch(r"sglang_(\d+(?:_\d+)*)", each.name)
        for each in pkgutil.iter_modules(sys.modules[__package__].__path__)
    )
    versions = sorted(tuple(map(int, match[1].split("_"))) for match in found if match)
    return {".".join(map(str, version)): _class_of(version) for version in versions}


def _class_of(version: tuple[int, ...]) -> type[Release0517]:
    folder = import_module(f"{__package__}.sglang_{'_'.join(map(str, version))}")
    found: type[Release0517] = getattr(folder, f"Release{''.join(map(str, version))}")
    return found


def supported() -> dict[str, Table]:
    """Return the table of each version, the newest one last."""
    tables, table = {}, Table()
    for version, release in classes().items():
        table = tables[version] = table.after(release.CHANGES)
    return tables
