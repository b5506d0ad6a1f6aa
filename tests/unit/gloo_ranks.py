"""Several ranks in processes of their own, which exchange by Gloo as a server's do. Run by test_ranks.py, in a process
that has no threads to lose in a fork.

    python gloo_ranks.py FOLDER RANKS...
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import sharded_ranks
import torch
from sharded_ranks import OTHER, SYSTEM, Rank, member_of

from sglang_mla_ext.adapter.ranks import ranks
from sglang_mla_ext.adapter.ranks.sharded import gather_over

FAULTY_STEP, STEPS = 6, 8


def main(rank: int, count: int, file: str) -> dict[str, Any]:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=count, timeout=timedelta(seconds=60)
    )
    group: Any = SimpleNamespace(world_size=count, ranks=list(range(count)), cpu_group=torch.distributed.group.WORLD)
    ranks.tp_group = lambda: group
    found: dict[str, Any] = {}
    ranks.check_alike({"alike": 1, "as well": None})
    try:
        ranks.check_alike({"--hybrid-mla-min-prefix-len": 2048 if rank else 32, "alike": 1})
    except ranks.RanksDifferError as error:
        found["differ"] = str(error)
    sharded_ranks.KEY = ranks.drawn_key(group)
    found["key"] = sharded_ranks.KEY.hex()
    meeting: Any = SimpleNamespace(gather=lambda of_rank: gather_over(group))
    one = Rank(rank, meeting, member_of(rank, count), [SYSTEM])
    agree, found["steps"] = one.member.agree, []
    for step in range(STEPS):
        if step == FAULTY_STEP:
            one.running.append(OTHER)
            if rank == count - 1:
                one.member.agree = lambda *args: replace(agree(*args), segments=(), names=())
        else:
            one.member.agree = agree
        plan = one.step([len(one.running)] * count)
        found["steps"].append(
            one.refused.code if one.refused else [(each.start, each.end, each.rows) for each in plan.segments]
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found | {"failures": one.failures}


if __name__ == "__main__":
    folder, *counts = sys.argv[1:]
    for count in map(int, counts):
        with ProcessPoolExecutor(count, multiprocessing.get_context("fork")) as processes:
            file = f"{folder}/meeting-{count}"
            print(json.dumps(list(processes.map(main, range(count), [count] * count, [file] * count))), flush=True)
