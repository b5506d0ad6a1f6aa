"""A launch command as people write it: environment variables, a launcher, the server's arguments. Plain Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from sglang_mla_ext import BACKEND_NAME

LAUNCHERS = ("sglang.launch_server", "sglang_mla_ext.launch_server")
"""Modules that `python -m` runs; `sglang serve` is the same."""

BACKEND_FLAGS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELL = re.compile(r"\d?>|[|;&]")
"""How a word begins that is the shell's and not the server's."""

_IMAGE = re.compile(r"(?!/)[\w./-]*sglang[\w./-]*(?::[\w.-]+)?(?:@sha256:\w+)?")
"""A container's image with SGLang in it, by the last part of its name."""


class LaunchLineError(ValueError):
    """There is no launch of a server in it."""


class LaunchLine(NamedTuple):
    """What a launch command comes to.

    Attributes:
        image: of the container that it is run in.
    """

    environment: dict[str, str]
    arguments: list[str]
    image: str | None = None


def read(words: Sequence[str]) -> LaunchLine:
    """Take a launch command apart; what comes before the launcher (`nohup`, `docker run ...`) and what the shell does
    with its output is left out.

    Args:
        words: as the shell hands them over, or the whole command as one word. A launcher may be missing.
    Raises:
        LaunchLineError: it launches something else.
    """
    if len(words) == 1 and re.search(r"\s", words[0].strip()):
        words = shlex.split(words[0].replace("\\\n", " "))
    start = _start(words)
    environment = {match[1]: match[2] for word in words[:start] if (match := _ASSIGNMENT.fullmatch(word))}
    arguments = list(words[start:])
    for index, word in enumerate(arguments):
        if _SHELL.match(word):
            del arguments[index:]
            break
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--model-path", arguments[0]]  # as `sglang serve MODEL`
    return LaunchLine(environment, arguments, _image(words[:start]))


def _image(words: Sequence[str]) -> str | None:
    """The last word before a launcher that may be an image, where something runs containers."""
    if not any(re.search(r"docker|podman|nerdctl", word) for word in words):
        return None
    return next((word for word in reversed(words) if _IMAGE.fullmatch(word) and re.search("[:/]", word)), None)


def version_in(image: str) -> str | None:
    """The release of SGLang that an image's tag names (`v0.5.23-cu129`); None for others (`latest`)."""
    found = re.search(r":v?(\d+\.\d+\.\d+(?:\.?post\d+)?)", image)
    return found[1] if found else None


def _start(words: Sequence[str]) -> int:
    """Index of the first argument of the server."""
    for index, (word, following) in enumerate(pairwise(words)):
        if (word == "-m" and following in LAUNCHERS) or (word.rpartition("/")[2] == "sglang" and following == "serve"):
            return index + 2
    start = next((index for index, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    if start == len(words) or not words[start].startswith("--"):
        raise LaunchLineError(
            "there is no launch of SGLang in it: give `python -m sglang.launch_server ...`, `sglang serve ...`, or the "
            "server's arguments."
        )
    return start


def value_of(arguments: Sequence[str], *flags: str) -> str | None:
    """The last value that is given to a flag, by any of its names; None where there is none."""
    found = None
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in flags:
            following = arguments[index + 1 : index + 2]
            found = value if equals else (following[0] if following else None)
    return found


def without(arguments: Sequence[str], flags: Iterable[str]) -> list[str]:
    """The arguments without some flags and their values."""
    flags, kept, dropping = set(flags), [], False
    for word in arguments:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in flags
        if not dropping:
            kept.append(word)
    return kept


def with_backend(arguments: Sequence[str]) -> list[str]:
    """The arguments with our backend in place of others, unless they name it themselves. One that is named for prefill
    alone stays."""
    if BACKEND_NAME in (value_of(arguments, flag) for flag in BACKEND_FLAGS):
        return list(arguments)
    others = [flag for flag in BACKEND_FLAGS if flag != "--prefill-attention-backend"]
    return [*without(arguments, others), "--attention-backend", BACKEND_NAME]


def text(line: LaunchLine) -> str:
    """A command for a shell."""
    environment = [f"{name}={shlex.quote(value)}" for name, value in line.environment.items()]
    return " ".join([*environment, "python", "-m", LAUNCHERS[0], shlex.join(line.arguments)])
