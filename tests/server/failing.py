"""Makes parts of the extension fail in a server of the tests, on demand. Run in the server before anything else of it
(fork_server.py); nothing of it is in the package.

A file in the folder `FAILING` holds a number: the part of its name fails so many times.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

FAILING = "FAILING_OF_TESTS"
"""The environment variable that names the folder."""

PAUSE = 2
"""Forward passes without sharing after a first failure."""


def takes(folder: Path, name: str) -> bool:
    """Whether this call is one of those that fail."""
    file = folder / name
    if not file.exists():
        return False
    left = int(file.read_text()) - 1
    if left:
        file.write_text(str(left))
    else:
        file.unlink()
    return True


def fails(owner: type, method: str, name: str, folder: Path) -> None:
    works: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(works)
    def called(*args: Any, **kwargs: Any) -> Any:
        if takes(folder, name):
            raise MemoryError(f"{name}: a test wants it")
        return works(*args, **kwargs)

    setattr(owner, method, called)


def changes_plans(name: str, folder: Path) -> None:
    """What ranks have agreed to share is something else on the second of them."""
    from sglang_mla_ext.prefix.sharded.member import Member

    agree = Member.agree

    @functools.wraps(agree)
    def called(member: Any, *args: Any) -> Any:
        plan = agree(member, *args)
        if member.rank == 1 and plan.segments and takes(folder, name):
            return replace(plan, segments=plan.segments[:-1], names=plan.names[:-1])
        return plan

    Member.agree = called


def install(folder: Path) -> None:
    """The names, and what of the extension fails under them."""
    from sglang_mla_ext.adapter.cpu.latent_torch import TorchLatent
    from sglang_mla_ext.adapter.prefill.expander import Expander
    from sglang_mla_ext.adapter.step import steps
    from sglang_mla_ext.kernels.naive.attention import TorchSharedAttention
    from sglang_mla_ext.observe import Metrics
    from sglang_mla_ext.prefix.sharing import Sharing

    steps.FIRST_PAUSE = PAUSE
    fails(Expander, "expand_slots", "expanding", folder)
    fails(Sharing, "forget", "forgetting", folder)
    fails(Sharing, "idle", "idle", folder)
    fails(TorchLatent, "plan", "writing", folder)
    fails(TorchLatent, "begin_step", "preparing", folder)
    fails(TorchLatent, "run", "absorb", folder)
    fails(TorchSharedAttention, "run", "attention", folder)
    fails(TorchSharedAttention, "merge", "merging", folder)
    fails(Metrics, "publish", "metrics", folder)
    changes_plans("changing", folder)


if __name__ == "__main__":
    install(Path(os.environ[FAILING]))
