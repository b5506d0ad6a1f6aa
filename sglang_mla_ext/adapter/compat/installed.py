"""The installed release of SGLang: one object, with a member for everything that differs between releases."""

from __future__ import annotations

from sglang_mla_ext.adapter.compat.contract import line
from sglang_mla_ext.adapter.compat.releases import classes
from sglang_mla_ext.adapter.compat.sglang_0_5_17 import Release0517


def choose() -> Release0517:
    """Make the object for the installed version, which may be one between the supported ones (`contract.line`)."""
    return classes()[line()]()


installed = choose()
"""Chosen once in a process, and imported as `from sglang_mla_ext.adapter.compat import installed`. Each release's class
is derived from the oldest one's, which declares all members."""
