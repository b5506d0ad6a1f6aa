"""Servers for a soak: the one that is tried, where everything is short, and a stock server that knows the answers."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import requests
import torch
import typer
from demo_model.checkpoint import Settings, make
from packaging.version import Version
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from bench.client import HYBRID
from bench.server import ON_GPU, STOCK, ServerFailedError, free_port, started_server, work_folder

WEIGHTS_FILE = "model.safetensors"
# SGLang's own way to test retraction: every so many steps it takes requests back as if its cache were full.
TAKING_BACK = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
# It also lets in more requests than its cache holds, so that it fills up and some have to give way.
LETTING_IN = ("--schedule-conservativeness", "0.1")
POISONED = ("-m", "bench.poisoned_server")


class Sizes(NamedTuple):
    """Sizes of the server that is tested.

    Attributes:
        tokens: of its KV cache; chunk: of its prefill.
        prefix_gb: for expanded prefixes: the room of one and a half.
        min_prefix: the shortest prefix that is shared.
    """

    tokens: int
    chunk: int
    prefix_gb: float
    min_prefix: int


# Prefill passes that share (SGLang 0.5.23 and newer) need buffers of 0.033 GiB before the first chunk.
ON_CPU_GB = 0.031 if Version(version("sglang")) < Version("0.5.23") else 0.064
SIZES = Sizes(65_536, 2048, 2.0, 64) if ON_GPU else Sizes(2048, 256, ON_CPU_GB, 32)


@contextlib.contextmanager
def servers(console: Console) -> Iterator[Callable[..., str]]:
    """Yield what starts a server of the small model and returns its URL: `serve(name, arguments, **more)`, `more` as of
    `started_server`. Raises typer.Exit where one fails; in the end all are stopped."""
    with contextlib.ExitStack() as stack:

        def serve(name: str, arguments: list[str], **more: Any) -> str:
            arguments = ["--model-path", str(small_model(work_folder())), *arguments]
            return stack.enter_context(started_server(arguments, free_port(), log_of(name), console, **more)).url()

        try:
            yield serve
        except (ServerFailedError, requests.RequestException) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            raise typer.Exit(1) from None


def log_of(name: str) -> Path:
    """Return the file that takes a server's output."""
    return work_folder() / "logs" / f"{name}.log"


def pressed(backend: str) -> list[str]:
    """Arguments of the server that is tried: hardly any memory, prefill in chunks, slow expansion."""
    arguments = ["--attention-backend", backend, "--max-total-tokens", str(SIZES.tokens)]
    arguments += ["--chunked-prefill-size", str(SIZES.chunk), *LETTING_IN, "--enable-return-hidden-states"]
    if backend == HYBRID:
        arguments += ["--hybrid-mla-mode", "naive", "--hybrid-mla-min-prefix-len", str(SIZES.min_prefix)]
        arguments += ["--hybrid-mla-prefix-memory-gb", str(SIZES.prefix_gb)]
        arguments += ["--hybrid-mla-expand-tokens-per-step", "1024" if ON_GPU else "100"]
    return arguments


def vocabulary(model: Path) -> np.ndarray:
    """The ids that prompts are drawn from; the first ones are special in all models of this kind."""
    return np.arange(10, AutoConfig.from_pretrained(model).vocab_size)


def at_ease() -> list[str]:
    """Arguments of the stock server that knows the answers: nothing is short. In BF16, what it found in its cache would
    be rounded otherwise than what it computes."""
    arguments = ["--attention-backend", STOCK, "--max-total-tokens", str(8 * SIZES.tokens)]
    return [*arguments, "--disable-radix-cache"] if ON_GPU else arguments


def small_model(folder: Path) -> Path:
    """A random checkpoint of DeepSeek-V3's attention, as large as the device likes."""
    layers, heads, hidden, q_lora_rank = (4, 16, 1024, 1536) if ON_GPU else (2, 4, 128, 64)
    settings = Settings(layers, heads, hidden, 512, q_lora_rank, 2048, 32768, seed=0, config_only=False)
    out = folder / f"soak_{layers}x{heads}"
    make(out, settings)
    return out


def other_weights(model: Path, out: Path) -> Path:
    """The same checkpoint with weights that are a little different: enough for other answers."""
    if not (out / WEIGHTS_FILE).exists():
        shutil.copytree(model, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS_FILE, "*.png"))
        torch.manual_seed(0)
        tensors = load_file(model / WEIGHTS_FILE)
        changed = {name: _near(x) if x.dim() == 2 and x.is_floating_point() else x for name, x in tensors.items()}
        save_file(changed, out / WEIGHTS_FILE, metadata={"format": "pt"})
    return out


def _near(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.float()
    return (values + 0.1 * values.std() * torch.randn_like(values)).to(tensor.dtype).contiguous()
