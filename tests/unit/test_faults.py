"""Whatever of ours fails in a running server, once or for good: no answer changes, SGLang sees no error, it is counted,
logged once for each reason, and sharing comes back.

The places are taken from the code: every function of the package, and every operation on tensors in it, that runs in
the life of a worker process (fault_life.py). So none can be forgotten; those that may end the process are listed here
with the reason, and each of them has to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import fault_life
import hook_scenarios_host  # noqa: F401
import hooked_worker
import pytest
from faults import MESSAGE, Fault, Watch


def main(out: Path) -> None:
    """Live once to see what runs; then once with each failure. Writes what came of it."""
    import conftest  # noqa: F401  stand-ins on a machine without a GPU, before SGLang is imported
    import sglang.srt.managers.scheduler
    import sglang.srt.models.deepseek_v2  # noqa: F401

    from sglang_mla_ext.observe import Metrics

    hooked_worker.replace_bodies()
    hooked_worker.install()
    fault_life.shorten_pauses()
    metrics = Metrics({"of": "tests"})
    start, watch = Watch(), Watch()
    with start.on():
        life = fault_life.Life(metrics)
    with watch.on():
        life.until_a_flush()
        life.until_it_shares()
    assert not life.counters.fallbacks and life.counters.steps_naive > 12 and life.counters.prefills_naive == 3, life.counters
    outcomes: dict[str, Any] = {}
    places = {**watch.functions, **dict.fromkeys(watch.operations)}
    begin = time.time()
    for place, code in places.items():
        for once in (True, False):
            outcomes[f"{place} {'once' if once else 'for good'}"] = outcome(place, code, metrics, once=once)
    print(len(places), time.time() - begin, file=sys.stderr)
    found = {"start": [*start.functions, *start.operations], "life": list(places), "outcomes": outcomes}
    out.write_text(json.dumps(found))


def outcome(place: str, code: Any, metrics: Any, *, once: bool) -> str:
    """Of a life with a failure; empty where it was as it should be."""
    import logging
    life = fault_life.Life(metrics)
    fault = Fault(place, code, once=once)
    logged = fault_life.Logged()
    logger = logging.getLogger("sglang_mla_ext")
    logger.addHandler(logged)
    try:
        with fault.on():
            life.until_a_flush()
            strikes = fault.strikes
            fault.lift()
        life.until_it_shares()
    except BaseException as error:
        return "ended: " + "".join(traceback.format_exception(error))
    finally:
        logger.removeHandler(logged)
    if not strikes:
        return "it did not fail"
    if not life.counters.fallbacks:
        return "it was not counted"
    if sum(logged.messages.values()) != len(life.counters.fallbacks):
        return f"logged {dict(logged.messages)}, counted {dict(life.counters.fallbacks)}"
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
