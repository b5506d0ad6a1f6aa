"""The Python part of demo.sh: the demo model, a real server with hybrid_mla, chats that share a system prompt."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from bench.server import ServerFailedError, console_of, free_port, started_server, work_folder
from demo_model.checkpoint import DRAFTING
from demo_model.conversation import OTHER_QUESTIONS, STATIONS, WORD_QUESTIONS, Chat, answers_table, lookups, talk
from rich.console import Console

from sglang_mla_ext import top

MODEL = Path(__file__).resolve().parents[1] / "configs" / "demo_model"
SYSTEM_PROMPT = MODEL / "system_prompt.txt"  # a table of stations and their codes, and a chapter of a novel


def main(
    keep: Annotated[bool, typer.Option("--keep", help="Leave the server running until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(help="Port of the server; 0 picks a free one.")] = 0,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 64,
    system_prompt_file: Annotated[Path | None, typer.Option(exists=True, help="Your own system prompt.")] = None,
    model: Annotated[Path | None, typer.Option(exists=True, help="An MLA checkpoint of your own.")] = None,
    speculative: Annotated[
        bool,
        typer.Option(
            "--speculative",
            help="Speculative decoding with the model's own draft layer, three tokens a step.",
        ),
    ] = False,
) -> None:
    """Show SGLang serving chats that share a system prompt with --attention-backend hybrid_mla."""
    console = console_of(width=110)
    system = (system_prompt_file or SYSTEM_PROMPT).read_text()
    shared = [Chat(question, system) for question in WORD_QUESTIONS]
    if not system_prompt_file:
        shared[: len(STATIONS)] = lookups(system)
    arguments = server_arguments(model or MODEL, speculative)
    console.print("Starting the server with", " ".join(arguments), highlight=False)
    port = port or free_port()
    log = work_folder() / f"server-{port}.log"  # by its port, so that servers beside each other have their own
    try:
        with started_server(arguments, port, log, console) as server:
            base_url = server.url()
            send_chats(console, base_url, shared, answer_tokens)
            show_where_to_look(console, base_url, keep)
            if keep:
                server.wait_for_end()
    except ServerFailedError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        console.print("Stopped.")
        raise typer.Exit(130) from None


def send_chats(console: Console, base_url: str, shared: list[Chat], answer_tokens: int) -> None:
    """Send chats with a common system prompt, and others, and print the answers and what was shared."""
    chats = [*shared, *(Chat(question, None) for question in OTHER_QUESTIONS)]
    console.print("Sending one chat, so that the system prompt is in the server's prefix cache.")
    asyncio.run(talk(base_url, [Chat("Hello?", shared[0].system)], answer_tokens=2))
    console.print(f"Sending {len(chats)} chats at once, {len(shared)} of them with the system prompt.")
    before = top.ask(base_url)
    seen = [*asyncio.run(talk(base_url, chats, answer_tokens, console)), top.ask(base_url)]

    console.print(answers_table(chats))
    if looked_up := [chat for chat in shared if chat.expected]:
        right = sum(chat.expected in chat.answer for chat in looked_up)
        console.print(f"{right} of {len(looked_up)} codes are those of the table in the system prompt.")
    console.print("What was shared when it was most, as in sglang-mla top:", highlight=False)
    most = max(reversed(seen), key=lambda status: sum(map(top.tokens_saved, status["ranks"])))
    console.print(top.render(most, before))


def show_where_to_look(console: Console, base_url: str, keep: bool) -> None:
    """Print where a running server shows the same."""
    if keep:
        console.print(f"The server answers at [bold]{base_url}/v1[/bold] until Ctrl-C. What it shares:")
    else:
        console.print("With --keep the server keeps running, and shows what it shares:")
    for what, where in (
        ("in a browser", f"{base_url}/hybrid_mla"),
        ("in a terminal", f"sglang-mla top --url {base_url}"),
        ("as JSON", f"curl {base_url}/hybrid_mla/status"),
        ("as metrics", f"curl {base_url}/metrics"),
        ("with SGLang's own state", f"curl {base_url}/server_info   # in it: internal_states[0].hybrid_mla"),
    ):
        console.print(f"  {what + ':':<25}{where}", markup=False, highlight=False, soft_wrap=True)
    console.print("To predict the gain for your model and GPUs: sglang-mla plan --help", highlight=False)


def server_arguments(model: Path, speculative: bool) -> list[str]:
    """Flags of the server. Mode naive, so that sharing shows although so few requests would not pay for it."""
    return [
        *("--model-path", str(model)),
        *("--served-model-name", "demo"),
        *("--attention-backend", "hybrid_mla"),
        *("--hybrid-mla-mode", "naive"),
        *("--hybrid-mla-min-prefix-len", "32"),
        *("--max-total-tokens", "65536"),
        "--enable-metrics",
        *(DRAFTING if speculative else ()),
    ]


if __name__ == "__main__":
    typer.run(main)
