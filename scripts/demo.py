"""The Python part of demo.sh: the demo model, a real server with hybrid_mla, chats that share a system prompt."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import AsyncOpenAI
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from server_process import ServerFailedError, free_port, running_server, server_info, work_folder

from sglang_mla_ext.prefix.cost_model import ModelDims

MODEL = Path(__file__).resolve().parents[1] / "configs" / "demo_model"
SYSTEM_PROMPT = MODEL / "system_prompt.txt"  # a table of stations and their codes, and a chapter of a novel

STATIONS = ("Quedrom", "Fimer", "Zokam", "Kapai")
WORD_QUESTIONS = [
    "Explain the word shadow.",
    "What part of speech is quickly?",
    "Who are you?",
    "What is the opposite of increase?",
    "Define ocean.",
    "What does courage mean?",
    "Define the word justice.",
    "What is the meaning of hunger?",
]
OTHER_QUESTIONS = ["Define river.", "What part of speech is slowly?"]


@dataclass
class Chat:
    """One conversation and how it went."""

    question: str
    system: str | None
    expected: str | None = None  # what a right answer contains
    answer: str = ""
    prompt_tokens: int = 0
    first_token_s: float | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.question}]


def main(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="Port of the server; 0 takes a free one.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    system_prompt_file: Annotated[Path | None, typer.Option(exists=True, help="Your own system prompt.")] = None,
    model: Annotated[Path | None, typer.Option(exists=True, help="An MLA checkpoint of your own.")] = None,
) -> None:
    """Show SGLang serving chats that share a system prompt with --attention-backend hybrid_mla."""
    console = Console() if sys.stdout.isatty() else Console(width=110)
    try:
        run(console, keep, port or free_port(), answer_tokens, system_prompt_file, model)
    except ServerFailedError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopped.")
        raise typer.Exit(130) from None


def run(
    console: Console, keep: bool, port: int, answer_tokens: int, system_prompt_file: Path | None, model: Path | None
) -> None:
    """All of the demo."""
    folder = work_folder()
    model = model or MODEL
    system = (system_prompt_file or SYSTEM_PROMPT).read_text()
    shared = [Chat(question, system) for question in WORD_QUESTIONS]
    if not system_prompt_file:
        shared[: len(STATIONS)] = lookups(system)
    chats = [*shared, *(Chat(question, None) for question in OTHER_QUESTIONS)]

    arguments = server_arguments(model)
    console.print("Starting the server with", " ".join(arguments), highlight=False)
    with running_server(arguments, port, folder / "server.log", console) as base_url:
        console.print("Sending one chat, so that the system prompt is in the server's prefix cache.")
        asyncio.run(talk(base_url, [Chat("Hello?", system)], answer_tokens=2))
        console.print(f"Sending {len(chats)} chats at once, {len(shared)} of them with the system prompt.")
        before = server_info(base_url)["hybrid_mla"]
        snapshots = asyncio.run(talk(base_url, chats, answer_tokens, console))
        after = server_info(base_url)["hybrid_mla"]

        console.print(answers_table(chats))
        if looked_up := [chat for chat in shared if chat.expected]:
            right = sum(chat.expected in chat.answer for chat in looked_up)
            console.print(f"{right} of {len(looked_up)} codes are those of the table in the system prompt.")
        console.print(sharing_table(snapshots, before, after, ModelDims.from_json(model)))
        if keep:
            console.print(f"The server answers at [bold]{base_url}/v1[/bold] until Ctrl-C. Try:")
            console.print(f"  curl {base_url}/server_info", highlight=False)
            while True:
                time.sleep(3600)


def lookups(system: str) -> list[Chat]:
    """Questions that only the table in the system prompt answers."""
    codes = dict(line[2:].split(": ") for line in system.splitlines() if line.startswith("- "))
    return [Chat(f"What is the code of {name}?", system, codes[name]) for name in STATIONS]


def server_arguments(model: Path) -> list[str]:
    """Flags of the server. Mode naive: the demo shows sharing also where so few requests do not pay for it."""
    return [
        *("--model-path", str(model)),
        *("--served-model-name", "demo"),
        *("--attention-backend", "hybrid_mla"),
        *("--hybrid-mla-mode", "naive"),
        *("--hybrid-mla-min-prefix-len", "32"),
        *("--max-total-tokens", "65536"),
    ]


async def talk(base_url: str, chats: list[Chat], answer_tokens: int, console: Console | None = None) -> list[Any]:
    """Send the chats at once and stream their answers.

    Returns:
        what `/server_info` said of hybrid_mla, several times a second meanwhile.
    """
    client = AsyncOpenAI(base_url=f"{base_url}/v1", api_key="none", timeout=600)
    progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    task = progress.add_task("answers", total=len(chats))
    display = Live(progress, console=console, transient=True) if console else contextlib.nullcontext()
    with display:
        async with watched(base_url) as snapshots:
            await asyncio.gather(
                *(answer(client, chat, answer_tokens, lambda: progress.advance(task)) for chat in chats)
            )
    await client.close()
    return snapshots


async def answer(client: AsyncOpenAI, chat: Chat, answer_tokens: int, done: Callable[[], None]) -> None:
    """Stream one answer into its chat."""
    start = time.perf_counter()
    stream = await client.chat.completions.create(
        model="demo",
        messages=chat.messages,
        max_tokens=answer_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            chat.first_token_s = chat.first_token_s or time.perf_counter() - start
            chat.pieces.append(piece)
        if chunk.usage:
            chat.prompt_tokens = chunk.usage.prompt_tokens
    chat.answer = "".join(chat.pieces)
    done()


@contextlib.asynccontextmanager
async def watched(base_url: str, period_s: float = 0.2) -> AsyncIterator[list[Any]]:
    """Collect `/server_info`'s hybrid_mla entry while the context lasts."""
    snapshots: list[Any] = []

    async def watch() -> None:
        while True:
            snapshots.append((await asyncio.to_thread(server_info, base_url)).get("hybrid_mla"))
            await asyncio.sleep(period_s)

    watcher = asyncio.create_task(watch())
    try:
        yield snapshots
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def answers_table(chats: list[Chat]) -> Table:
    table = Table(title="Answers", title_justify="left")
    for name in ("system\nprompt", "question", "answer", "prompt\ntokens", "first\ntoken ms"):
        table.add_column(name, justify="right" if name[-1] == "s" else "left")
    for chat in chats:
        table.add_row(
            "shared" if chat.system else "none",
            chat.question,
            Text(printable(chat.answer, 100)),  # Text: a bracket in it is no markup
            f"{chat.prompt_tokens:,}",
            f"{(chat.first_token_s or 0) * 1e3:,.0f}",
        )
    return table


def printable(text: str, length: int) -> str:
    """The start of a text in one line, whatever a model writes."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= length else line[: length - 1] + "…"


def sharing_table(snapshots: list[Any], before: Any, after: Any, dims: ModelDims) -> Table:
    """What the server shared between two readings of its counters, and the largest groups seen in between."""
    table = Table(title="What was shared", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")

    groups = [group for snapshot in snapshots if snapshot for group in snapshot["groups"]]
    if groups:
        largest = max(groups, key=lambda group: group["requests"])
        table.add_row("largest group seen", f"{largest['requests']} requests")
        table.add_row("its shared prefix", f"{largest['prefix_len']:,} tokens")
        table.add_row("attended to by", largest["mode"])
    expanded = max(snapshot["expanded_bytes"] for snapshot in [*snapshots, after] if snapshot)
    table.add_row("expanded prefix", f"{expanded / 2**20:.1f} of {after['budget_bytes'] / 2**20:.0f} MiB")

    def gained(name: str) -> int:
        difference: int = after["counters"][name] - before["counters"][name]
        return difference

    table.add_row("decode steps naive + absorb", f"{gained('steps_naive')} + {gained('steps_absorb')}")
    if tokens := gained("prefill_tokens_saved"):
        table.add_row("prefix tokens that prefill did not expand again", f"{tokens:,}")
    for reason, count in after["counters"]["fallbacks"].items():
        table.add_row(f"fell back to absorb: {reason}", str(count))
    read, saved = gained("shared_tokens_read"), gained("shared_tokens_saved")
    table.add_section()
    table.add_row("prefix tokens read, once for each group and step", f"{read:,}")
    table.add_row("the same once for each request, as without sharing", f"{read + saved:,}")
    if read:
        table.add_row("[bold]reads of the prefix saved[/bold]", f"[bold]{saved / (read + saved):.0%}[/bold]")
        saving = 1 - dims.naive_macs / dims.absorb_macs
        table.add_row("[bold]multiply-adds on the prefix saved[/bold]", f"[bold]{saving:.0%}[/bold]")
    return table


if __name__ == "__main__":
    typer.run(main)
