"""Lets `import torchvision` work on a CPU in processes that are not ours, as `python -m sglang.bench_serving`.

scripts/environment.sh has each Python of its environment import this module at start, so it imports little.
"""

import importlib.abc
import sys


class _Torchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Declare the operators before the module is looked for, by others."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            from sglang_mla_ext.adapter.cpu import stubs

            stubs.declare_torchvision_operators()


sys.meta_path.insert(0, _Torchvision())
