"""Tables that the demo prints: the answers, and what the server shared meanwhile."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from demo_model.conversation import Chat
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.segment import Mode


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
    """The start of a text on one line, without unprintable characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= length else line[: length - 1] + "…"


def attention_ms(cost: CostModel, requests: int, tokens: int) -> tuple[float, float]:
    """Predicted attention to a prefix in all layers of a step, in milliseconds: without sharing, and shared."""
    absorb, naive = (cost.seconds(mode, requests, tokens) for mode in (Mode.ABSORB, Mode.NAIVE))
    return 1e3 * absorb * cost.dims.num_layers, 1e3 * naive * cost.dims.num_layers


def sharing_table(
    snapshots: list[Any], before: Any, after: Any, cost: CostModel, accept_length: float | None = None
) -> Table:
    """Return what the server shared between two readings of its counters, and the largest groups seen in between.

    Args:
        cost: of the server's model on its device.
        accept_length: tokens of a request and verification step since the server's start; None without speculation.
    """
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
    if accept_length is not None:
        table.add_row("accept length: tokens of a request in a step", f"{accept_length:.2f}")
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
        saving = 1 - cost.dims.naive_macs / cost.dims.absorb_macs
        table.add_row("[bold]multiply-adds on the prefix saved[/bold]", f"[bold]{saving:.0%}[/bold]")
        steps = gained("steps_naive")
        without, shared = attention_ms(cost, round((read + saved) / read), read // steps)
        said = f"{without:.2f} → {shared:.2f} ms" + (" (so few do not pay)" if shared > without else "")
        table.add_row(f"attention to it in a step, predicted for {cost.rates.name}", said)
        table.add_row(
            f"[bold]time saved in {steps} steps, predicted[/bold]", f"[bold]{steps * (without - shared):.0f} ms[/bold]"
        )
    return table
