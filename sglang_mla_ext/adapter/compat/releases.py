"""The supported releases of SGLang: each is a folder beside this file, `sglang_X_Y_Z`, and there is no other list.

A folder has CHANGES, what that release has otherwise than the one before (table.py), and the functions that differ
(installed.py). Importing one loads neither SGLang nor torch.
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module
from types import ModuleType

from sglang_mla_ext.adapter import compat
from sglang_mla_ext.adapter.compat.table import Release


def folders() -> dict[str, ModuleType]:
    """Version -> its folder's module, the newest one last."""
    found = (re.fullmatch(r"sglang_(\d+(?:_\d+)*)", each.name) for each in pkgutil.iter_modules(compat.__path__))
    versions = sorted((tuple(map(int, match[1].split("_"))), match[0]) for match in found if match)
    return {".".join(map(str, version)): import_module(f"{compat.__name__}.{name}") for version, name in versions}


def supported() -> dict[str, Release]:
    """Version -> what is used of that release, the newest one last."""
    releases, release = {}, Release()
    for version, folder in folders().items():
        release = releases[version] = release.after(folder.CHANGES)
    return releases
