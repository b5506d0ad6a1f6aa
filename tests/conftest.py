"""`-m gpu` without a Hopper GPU is an error, not a silent pass; without the option the gpu tests are deselected."""

from __future__ import annotations

import pytest
from hypothesis import settings

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
    elif not asked:
        for item in gpu_items:
            items.remove(item)
        config.hook.pytest_deselected(items=gpu_items)
