"""`python -m sglang_mla_ext.launch_server`: SGLang's own launcher, with the CPU stand-ins put in place first.

With a GPU it does the same as `python -m sglang.launch_server`. Spawned processes import this module again, so the
stand-ins are in place there too.
"""

import runpy

from sglang_mla_ext.adapter.cpu import stubs

if stubs.needed():
    stubs.install()


def main() -> None:
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
