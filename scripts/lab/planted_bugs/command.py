"""Plant one bug after the other in a copy of this tree, and see whether the tests that should fail do.

    python scripts/study.py planted_bugs

First the same tests run in an untouched copy: a test that fails anyway sees nothing. Needs no GPU.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from bench.records import write_record

from lab.planted_bugs.bugs import REPOSITORY, Bug, read_bugs

app = typer.Typer(add_completion=False)

LEFT_OUT = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", ".demo", "build", "dist", "logs", "shared")
TEST_S = 300
"""A test that takes longer has failed: some bugs have a loop go on for ever."""
ALL_PASSED, SOME_FAILED = 0, 1
"""pytest's exit status."""
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGABRT}
"""What stands in its place where a bug reads memory that is not there."""


class Outcome(NamedTuple):
    """What pytest said: its exit status, the first test that failed or the signal, and all that it printed."""

    status: int
    failed: str | None
    output: str


@app.command()
def main(
    only: Annotated[list[str] | None, typer.Option(help="a part of a bug's name or file (repeatable; all)")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="bugs at a time, each in a copy of its own")] = 1,
    untouched: Annotated[bool, typer.Option(help="run the tests without a bug first")] = True,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Plant bugs, one at a time, and see whether the tests fail."""
    bugs = [bug for bug in read_bugs() if not only or any(part in f"{bug.name} {bug.file}" for part in only)]
    if not bugs:
        raise typer.BadParameter(f"no bug has {' or '.join(only or ())} in its name or file")
    for bug in bugs:
        bug.edited(REPOSITORY)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        trees: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            trees.put(copied(Path(folder) / str(job)))

        def try_one(bug: Bug) -> tuple[Outcome, float]:
            tree, begin = trees.get(), time.perf_counter()
            try:
                with bug.planted(tree):
                    return run_tests(tree, bug.tests), time.perf_counter() - begin
            finally:
                trees.put(tree)

        if untouched:
            check_untouched(trees.queue[0], bugs)
        not_seen = []
        for bug, (outcome, seconds) in zip(bugs, pool.map(try_one, bugs), strict=True):
            seen = outcome.status == SOME_FAILED or outcome.status in CRASHES
            if not seen and outcome.status != ALL_PASSED:
                print(outcome.output)
            said = f"{'seen' if seen else 'NOT SEEN':8} {seconds:4.0f} s  {bug.name}"
            print(f"{said}: {outcome.failed or bug.user}", flush=True)
            if not seen:
                not_seen.append(bug.name)
            if out:
                case = dict(bug=bug.name, file=bug.file)
                write_record(out, bench="planted_bugs", impl="hybrid_mla", case=case, seen=seen, by=outcome.failed)
    print(f"{len(bugs) - len(not_seen)} of {len(bugs)} seen")
    if not_seen:
        raise typer.Exit(1)


def copied(tree: Path) -> Path:
    """This repository as it lies there, without what is not in it."""
    shutil.copytree(REPOSITORY, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return tree


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run tests of a tree until one fails."""
    env = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{tree / 'scripts'}", "PYTHONDONTWRITEBYTECODE": "1"}
    if tests[0].startswith("tests/kernels"):
        env["TRITON_INTERPRET"] = "1"
    flags = ["-x", "-q", "-m", "not gpu", "-p", "no:cacheprovider", f"--timeout={TEST_S}"]
    command = [sys.executable, "-m", "pytest", *flags, *tests]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, flags=re.MULTILINE)
    by = failed[1] if failed else signal.Signals(-done.returncode).name if done.returncode < 0 else None
    return Outcome(done.returncode, by, done.stdout + done.stderr)


def check_untouched(tree: Path, bugs: Sequence[Bug]) -> None:
    """Run the tests of all these bugs without any.

    Raises:
        RuntimeError: one fails.
    """
    for of_kernels in (True, False):
        tests = sorted({test for bug in bugs if bug.of_kernels == of_kernels for test in bug.tests})
        # A file has its tests in it already.
        tests = [test for test in tests if "::" not in test or test.partition("::")[0] not in tests]
        if tests and (outcome := run_tests(tree, tests)).status != ALL_PASSED:
            raise RuntimeError(f"tests fail without a bug:\n{outcome.output}")
