"""`sglang-mla top`: show the status page's data in a terminal. It asks a server over HTTP; SGLang need not be here."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

PATIENCE_S = 10
STYLES = {"naive": "bold blue", "grouped_absorb": "bold cyan", "kept": "dim"}
IDLE = "idle"
NO_STATUS, REFUSALS = 404, (401, 403)


class NoAnswerError(RuntimeError):
    """The server gives no status; the message says why."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The key goes to the server that was named, and to no other."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def ask(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The answer of `/hybrid_mla/status`, see docs/status.schema.json.

    Args:
        url: of the server; without a scheme it is HTTP.
    Raises:
        NoAnswerError: there is none.
    """
    url = url if "://" in url else f"http://{url}"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/hybrid_mla/status", headers=headers)
        with opener.open(request, timeout=PATIENCE_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code in REFUSALS:
            said = "it refuses this --api-key" if api_key else "it asks for its --api-key"
        elif error.code == NO_STATUS:
            said = "it has no /hybrid_mla/status: was it started with --attention-backend hybrid_mla?"
        else:
            said = f"it answers {error.code}"
        raise NoAnswerError(f"{url}: {said}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # no connection, address, JSON or HTTP; cut off
        raise NoAnswerError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    if not isinstance(found, dict) or "ranks" not in found:
        raise NoAnswerError(f"{url}: it is not a server with hybrid_mla")
    return found


def show(console: Console, url: str, api_key: str | None, interval_s: float) -> None:
    """Show it until Ctrl-C; a server that goes away is waited for."""
    before: dict[str, Any] | None = None
    picture: RenderableType = Text("asking")
    with Live(picture, console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                status = ask(url, api_key)
                picture, before = render(status, before), status
                live.update(picture, refresh=True)
            except NoAnswerError as error:
                live.update(Group(Text(f"no answer: {error}", style="red"), picture), refresh=True)
            time.sleep(interval_s)


def render(status: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> RenderableType:
    """An answer as a picture.

    Args:
        before: an earlier answer, for rates.
    """
    return Group(*(_rank(rank, len(status["ranks"]) > 1, _rates(status, before, rank)) for rank in status["ranks"]))


def _rates(
    status: Mapping[str, Any], before: Mapping[str, Any] | None, rank: Mapping[str, Any]
) -> dict[str, float | None]:
    """Return how much the shown counters grow per second; None where there is nothing to compare with, or the server
    was restarted."""
    was = next((each for each in before["ranks"] if each["rank"] == rank["rank"]), None) if before else None
    seconds = status["time"] - before["time"] if before else 0
    rates: dict[str, float | None] = {}
    for name in ("shared_tokens_saved", "prefill_tokens_saved", "tokens_mixed"):
        grown = rank["counters"][name] - was["counters"][name] if was else -1
        rates[name] = grown / seconds if grown >= 0 and seconds > 0 else None
    return rates


def tokens_saved(rank: Mapping[str, Any]) -> int:
    """Return the tokens that a rank's last decode step did not read again."""
    return sum(segment["tokens_saved"] for segment in rank["segments"])


def _rank(rank: Mapping[str, Any], named: bool, rates: Mapping[str, float | None]) -> Panel:
    counters, segments = rank["counters"], rank["segments"]
    facts = Table.grid(padding=(0, 2))
    facts.add_row("requests", f"{rank['requests']:,}", "in the last decode step")
    reads = counters["shared_tokens_read"] + counters["shared_tokens_saved"]
    avoided = f"{counters['shared_tokens_saved'] / reads:.1%}" if reads else "…"
    facts.add_row("saved", avoided, "of shared prompts' reads in decode")
    facts.add_row("", f"{tokens_saved(rank):,}", "tokens a step not read again")
    for label, name, what in (
        ("", "shared_tokens_saved", "tokens in decode"),
        ("", "prefill_tokens_saved", "tokens in prefill"),
        ("mixed", "tokens_mixed", "prompt tokens computed in decode steps"),
    ):
        rate = rates[name]
        facts.add_row(label, "…" if rate is None else f"{rate:,.0f}/s", what)
    bar = ProgressBar(total=max(rank["budget_bytes"], 1), completed=rank["expanded_bytes"], width=40)
    facts.add_row("memory", size(rank["expanded_bytes"]), f"expanded of a budget of {size(rank['budget_bytes'])}")
    steps = ", ".join(f"{counters[f'steps_{way}']:,} {way}" for way in ("naive", "grouped", "absorb"))
    parts: list[RenderableType] = [
        facts,
        Columns([bar]),  # a line of its own
        Text(f"steps: {steps}; {counters['expansions']:,} expansions, {counters['evictions']:,} evictions"),
        Text(
            f"prompt tokens in decode graphs: {counters['steps_mixed']:,} mixed steps, "
            f"{counters['prefills_mixed']:,} prefill passes"
        ),
    ]
    if rank.get("avg_spec_accept_length") is not None:
        parts.append(Text(f"{rank['avg_spec_accept_length']:.2f} tokens accepted a verify step"))
    if rank["tokens_without_memory"]:
        parts.append(Text(f"{rank['tokens_without_memory']:,} tokens worth expanding found no memory", style="yellow"))
    if rank["pause"]:
        parts.append(Text(f"paused after a failure, for {rank['pause']:,} forward passes", style="yellow"))
    for name, what, style in (("fallbacks", "fallback", "yellow"), ("not_mixed", "prefill pass not mixed", "dim")):
        reasons = counters[name].items()
        parts += [Text(f"{what}: {count:,} × {_printable(reason)}", style=style) for reason, count in reasons]
    parts += [_tree(segments), Text(_printable(rank["description"]), style="dim")]
    title = f"hybrid_mla, rank {rank['rank']}" if named else "hybrid_mla"
    return Panel(Group(*parts), title=title, title_align="left")


def _tree(segments: Sequence[Mapping[str, Any]]) -> Tree:
    root = Tree("shared segments" if segments else "shared segments: none now")
    branches: dict[int | None, Tree] = {}
    ends: dict[int | None, int] = {}
    for each in segments:  # parents come first
        again = max(ends.get(each["parent"], 0) - each["start"], 0)
        branches[each["id"]] = branches.get(each["parent"], root).add(Text.assemble(*_segment(each, again)))
        ends[each["id"]] = each["start"] + each["tokens"]
    return root


def _segment(each: Mapping[str, Any], again: int) -> Iterator[str | tuple[str, str]]:
    """
    Args:
        again: so many of its first tokens are those of the segment that it continues, too.
    """
    yield f"{each['tokens']:,} tokens "
    mode = IDLE if each["mode"] == "kept" else each["mode"]
    yield _printable(mode).replace("_", " "), STYLES.get(each["mode"], "")
    yield f", #{each['id']}, from token {each['start']:,}"
    yield f", {each['holders']} holder{'s' if each['holders'] != 1 else ''}"
    if again:
        yield f", its first {min(again, each['tokens']):,} stored twice"
    if each["expanded_bytes"]:
        yield f", {size(each['expanded_bytes'])} expanded"
    if each["tokens_saved"]:
        yield f", saves {each['tokens_saved']:,} tokens a step ({size(each['bytes_saved'])})"


def _printable(text: str) -> str:
    """Replace what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def size(count: float) -> str:
    """Bytes in the largest unit that leaves at least one."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    unit = 0
    while count >= 1024 and unit < len(units) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.{1 if unit and count < 100 else 0}f} {units[unit]}"
