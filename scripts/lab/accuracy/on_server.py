"""The study of the demo model, asked of real servers: the same prose, questions and look-ups (trained.py), over HTTP.

Prose is scored in decode steps that are forced to take the next token of the text (forced.py), over a prefix that the
server has prefilled before. Questions are answered by greedy decoding; the server prefills them, as always. Every
request is sent twice at the same time, since a prefix is shared from two requests on; the first answer counts.

Two controls are servers of a copy of this package whose kernels for GPUs have an error that real systems have made.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from aiohttp import ClientSession
from bench.client import HYBRID, sharing_between
from bench.generate import body, flush, post, session
from bench.server import ON_GPU, STOCK, ServerFailedError, Started, free_port, python_path, server_info, started_server
from demo_model.checkpoint import DRAFTING
from rich.console import Console

import sglang_mla_ext
from lab.accuracy import forced
from lab.accuracy.served import BASELINE
from lab.accuracy.trained import Plan, Prompt, Record, Task, Window, compared, tasks_of
from lab.training.batches import Data

STUDY = "served"
TWICE = 2
ANSWER_S = 3600
"""Longest time of a request: thousands of forced tokens take long on a CPU."""
WINDOWS_AT_ONCE, PROMPTS_AT_ONCE = (64, 8) if ON_GPU else (2, 2)
COMMON = (
    *("--max-total-tokens", "400000" if ON_GPU else "24576"),
    *("--chunked-prefill-size", "-1", "--enable-custom-logit-processor"),
    *(("--mem-fraction-static", "0.85", "--cuda-graph-max-bs-decode", str(TWICE * WINDOWS_AT_ONCE)) if ON_GPU else ()),
)
OURS = (
    *("--attention-backend", HYBRID, "--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", "16"),
    *("--hybrid-mla-prefix-memory-gb", "3" if ON_GPU else "0.3", "--hybrid-mla-expand-tokens-per-step", "400000"),
)
FP8_PREFIX = ("--hybrid-mla-prefix-dtype", "fp8_e4m3")
FP8_CACHE = ("--kv-cache-dtype", "fp8_e4m3")


class Change(NamedTuple):
    """Replacement of a text in a file of the package, as often as it occurs."""

    file: str
    old: str
    new: str
    times: int


CONSUMERS = "kernels/naive/sm90_parts/consumers.py"
RESCALED = "acc * gl.convert_layout(rescale, OUT_ROWS)[:, None]"
SUMS_IN_PLACE = (
    Change(CONSUMERS, "no_out, use_acc=False, is_async=True)", f"{RESCALED}, is_async=True)", times=2),
    Change(CONSUMERS, f"acc = {RESCALED} + added", "acc = added", times=2),
)
WRONG_BASE = (Change("kernels/merge.py", "tail_lse * LOG2E)", "tail_lse)", times=1),)


class Setup(NamedTuple):
    """A server of the study."""

    arguments: tuple[str, ...]  # of its launch, beside COMMON and the model
    changes: tuple[Change, ...] = ()  # to the package, for a control


SETUPS: dict[str, Setup] = {
    BASELINE: Setup(("--attention-backend", STOCK)),
    "hybrid_mla": Setup(OURS),
    "hybrid_mla_fp8_prefix": Setup((*OURS, *FP8_PREFIX)),
    "hybrid_mla_fp8_rows": Setup(("--attention-backend", HYBRID, "--hybrid-mla-mode", "absorb", *FP8_CACHE)),
    "hybrid_mla_fp8_cache": Setup((*OURS, *FP8_CACHE)),
    "hybrid_mla_speculative": Setup((*OURS, *DRAFTING)),
    "sglang_fp8": Setup(("--attention-backend", STOCK, *FP8_CACHE)),
    "biased_sums": Setup((*OURS, *FP8_PREFIX), SUMS_IN_PLACE),
    "wrong_lse_base": Setup(OURS, WRONG_BASE),
}


def changed_package(folder: Path, changes: Iterable[Change]) -> Path:
    """A copy of this package with changes, for the front of PYTHONPATH.

    Raises:
        RuntimeError: a text is not there so often.
    """
    package = Path(sglang_mla_ext.__file__).parent
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    for change in changes:
        file = folder / package.name / change.file
        text = file.read_text()
        if text.count(change.old) != change.times:
            raise RuntimeError(f"{change.file} has {text.count(change.old)} times {change.old!r}, not {change.times}")
        file.write_text(text.replace(change.old, change.new))
    return folder


def served_study(
    model: Path, data: Data, plan: Plan, impls: Sequence[str], folder: Path, console: Console
) -> Iterator[Record]:
    """Records as `trained.demo` makes them, of servers that all run at the same time.

    Args:
        impls: names in SETUPS; the baseline is asked in any case.
        folder: for logs and changed packages.
    Raises:
        ServerFailedError: the baseline's server does not run, or none of the others does; or some do not, after the
            records of those that do.
    """
    tasks = list(tasks_of(data, plan))
    names = list(dict.fromkeys([BASELINE, *impls]))
    with contextlib.ExitStack() as stack:
        started = {name: stack.enter_context(start(name, model, folder, console)) for name in names}
        urls = {}
        for name, server in started.items():
            try:
                urls[name] = server.url(600)
            except ServerFailedError as error:
                console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
        if BASELINE not in urls or len(urls) == 1:
            raise ServerFailedError("there is nothing to compare")
        found = asyncio.run(ask_all(urls, tasks, console))
    for place, task in enumerate(tasks):
        sums = {name: of_tasks[place] for name, of_tasks in found.items() if of_tasks[place] is not None}
        for name, case, metrics in compared(sums, task.counts, plan, task.case, task.metric):
            yield name, case | {"study": STUDY}, metrics
    if missing := [name for name in names if name not in urls]:
        raise ServerFailedError(f"not studied, because their servers do not run: {', '.join(missing)}")


def start(name: str, model: Path, folder: Path, console: Console) -> AbstractContextManager[Started]:
    """Start a server of SETUPS."""
    setup = SETUPS[name]
    changed = [str(changed_package(folder / name, setup.changes))] if setup.changes else []
    # Safe: the working directory, which holds the package as it is, does not come first.
    environment = {"PYTHONPATH": python_path(*changed), "PYTHONSAFEPATH": "1"}
    arguments = ["--model-path", str(model), *COMMON, *setup.arguments]
    return started_server(arguments, free_port(), folder / f"{name}.log", console, environment)


async def ask_all(urls: dict[str, str], tasks: Sequence[Task], console: Console) -> dict[str, list[np.ndarray | None]]:
    """Return by server, for each task, the sums of losses or right answers of each place.

    None is for prose where drafts are verified: such a step takes several tokens, which forced.py cannot.
    """

    async def of_server(name: str, url: str) -> list[np.ndarray | None]:
        before, drafts = await asyncio.to_thread(server_info, url), {*DRAFTING} <= {*SETUPS[name].arguments}
        async with session(ANSWER_S) as client:
            sums = [None if drafts and task.metric == "perplexity" else await ask(client, url, task) for task in tasks]
        sharing = sharing_between(before, await asyncio.to_thread(server_info, url))
        console.print(f"{name}: {'asked' if sharing is None else sharing}", markup=False, highlight=False)
        return sums

    return dict(zip(urls, await asyncio.gather(*(of_server(*one) for one in urls.items())), strict=True))


async def ask(client: ClientSession, url: str, task: Task) -> np.ndarray:
    """The sums of one task, `[places]`."""
    sums = np.zeros(len(task.counts))
    one, size = (loss_of, WINDOWS_AT_ONCE) if task.metric == "perplexity" else (right_of, PROMPTS_AT_ONCE)
    for begin in range(0, len(task.asked), size):
        flight = task.asked[begin : begin + size]
        await flush(client, url)
        values = await asyncio.gather(*(one(client, f"{url}/generate", asked) for _, asked in flight))
        for (place, _), value in zip(flight, values, strict=True):
            sums[place] += value
    return sums


async def loss_of(client: ClientSession, url: str, window: Window) -> float:
    """Sum over the predicted tokens of a window."""
    await post(client, url, body(window.prefix, 1))
    tokens = window.tokens[1:]
    asked = forced.request([*window.prefix, window.tokens[0]], tokens)
    responses = await asyncio.gather(*(post(client, url, asked) for _ in range(TWICE)))
    return -sum(forced.logprobs_of(responses[0], tokens))


async def right_of(client: ClientSession, url: str, prompt: Prompt) -> float:
    """Questions that greedy decoding answers with one of the accepted answers."""
    await post(client, url, body(prompt.prefix, 1))
    asked = [body([*prompt.prefix, *question.tokens], max(map(len, question.answers))) for question in prompt.questions]
    responses = await asyncio.gather(*(post(client, url, one) for one in asked for _ in range(TWICE)))
    return sum(
        any(response["output_ids"][: len(answer)] == answer for answer in question.answers)
        for question, response in zip(prompt.questions, responses[::TWICE], strict=True)
    )
