"""Every hook into SGLang, called through SGLang's own registry, and what it makes of the parts behind it.

A fork of a process with SGLang installs the hooks (hooked_worker.py), and is forked into a child for each scenario of
hook_scenarios_*.py. Run as a program, this file is that process.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import hook_scenarios_draft
import hook_scenarios_failure
import hook_scenarios_host
import hook_scenarios_mixed
import hook_scenarios_paired
import hook_scenarios_shadow
import hook_scenarios_sleep
import hook_scenarios_speculative
import hook_scenarios_start
import hook_scenarios_step
import hooked_worker
import pytest
from fork_server import ForkServer

SCENARIOS: dict[str, Callable[[], None]] = {
    name.removeprefix("scenario_"): run
    for module in (
        *(hook_scenarios_start, hook_scenarios_step, hook_scenarios_sleep),
        *(
            hook_scenarios_speculative,
            hook_scenarios_draft,
            hook_scenarios_failure,
            hook_scenarios_host,
            hook_scenarios_mixed,
            hook_scenarios_paired,
            hook_scenarios_shadow,
        ),
    )
    for name, run in vars(module).items()
    if name.startswith("scenario_")
}


def main(out: Path, names: list[str]) -> None:
    """Run each scenario in a child; `out/NAME` has its error, and is empty where it went through. `out/NAME.called`
    lists what was hooked and called, `out/hooked` all that is hooked."""
    hooked_worker.replace_bodies()
    (out / "hooked").write_text("\n".join(hooked_worker.install()))
    for name in names:
        if not (child := os.fork()):
            error = "it did not end"
            try:
                SCENARIOS[name]()
                error = ""
            except BaseException:
                error = traceback.format_exc()
            finally:
                (out / f"{name}.called").write_text("\n".join(hooked_worker.CALLED))
                (out / name).write_text(error)
                os._exit(0)
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, forks: ForkServer) -> Callable[[str], str]:
    """What the process wrote to a file, by the file's name."""
    folder = tmp_path_factory.mktemp("hooks")
    printed = forks.run([sys.executable, __file__, str(folder), *SCENARIOS], folder / "log", timeout_s=600)

    def outcome(name: str) -> str:
        path = folder / name
        return path.read_text() if path.exists() else printed or "it did not begin"

    return outcome


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, outcomes: Callable[[str], str]) -> None:
    error = outcomes(name)
    assert not error, error


def test_every_hook_is_called(outcomes: Callable[[str], str]) -> None:
    """A hook that is added needs a scenario."""
    called = {target for name in SCENARIOS for target in outcomes(f"{name}.called").splitlines()}
    assert called == set(outcomes("hooked").splitlines())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
