"""`-m gpu` without a Hopper GPU is an error, not a silent pass; without the option the gpu tests are deselected. So are
those about what another release of SGLang has, whose mark gives the reason."""

from __future__ import annotations

import pytest
from hypothesis import settings

from sglang_mla_ext.adapter.compat import contract

# A case that takes long on a machine that does other things as well is no failure.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = "gpu" in config.getoption("-m")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if asked and "not gpu" not in config.getoption("-m"):
        import torch

        if gpu_items and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0)):
            raise pytest.UsageError("-m gpu needs a Hopper GPU, and this machine has none")
    left_out = [] if asked else gpu_items
    left_out += [item for item in items if (mark := item.get_closest_marker("release")) and not is_of(*mark.args)]
    for item in left_out:
        items.remove(item)
    config.hook.pytest_deselected(items=left_out)


def is_of(line: str) -> bool:
    """Return whether the installed SGLang is this release, or from it on (`0.5.23+`)."""
    installed, named = (tuple(map(int, each.rstrip("+").split("."))) for each in (contract.line(), line))
    return installed >= named if line.endswith("+") else installed == named
