"""`python -m sglang_mla_ext.launch_server`: SGLang's launcher, with or without a GPU (adapter/launch/launch_server.py).

Spawned processes import this module again, and with it what the launcher puts in place first.
"""

from sglang_mla_ext.adapter.launch.launch_server import main

if __name__ == "__main__":
    main()
