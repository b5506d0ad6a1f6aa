"""`-m gpu` on a machine without a GPU is an error, not a silent pass; without it the gpu tests are deselected."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = "gpu" in config.getoption("-m")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if asked and "not gpu" not in config.getoption("-m"):
        import torch

        if gpu_items and not torch.cuda.is_available():
            raise pytest.UsageError("-m gpu needs a CUDA device, and this machine has none")
    elif not asked:
        for item in gpu_items:
            items.remove(item)
        config.hook.pytest_deselected(items=gpu_items)
