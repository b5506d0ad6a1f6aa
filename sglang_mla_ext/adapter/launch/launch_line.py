"""A launch command as people write it: environment variables, a launcher, the server's arguments. Plain Python."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, zip_longest
from typing import NamedTuple

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.launch import manifests

LAUNCHERS = ("sglang.launch_server", "sglang_mla_ext.launch_server")
"""Modules that `python -m` runs; `sglang serve` is the same."""

BACKEND_FLAGS = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")

MODEL_FLAGS = ("--model-path", "--model")

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SHELL = re.compile(r"\d?>|[|;&]")
"""Beginnings of words that belong to the shell and not to the server."""

_IMAGE = re.compile(r"(?!/)(?:[\w.-]+:\d+/)?[\w./-]*(?:sglang|sgl-dev)[\w./-]*(?::[\w.-]+)?(?:@sha256:\w+)?")
"""A container's image with SGLang in it, by the last part of its name."""

_CONTAINERS = re.compile(r"(.*/)?(docker|podman|nerdctl)")

_PLACEHOLDER = re.compile(r"\$\(\w+\)|\$\{?\w+|\{\{|<[A-Za-z][\w .-]*>")
"""Names that Kubernetes, a shell, Helm or a reader replaces by a value."""

_SECRET = re.compile(r"(?i)(?:^|_)(?:\w*(?:token|secret|password|passwd|apikey|credentials?)|key|pass|auth|pat)(?:_|$)")
"""Names of variables whose values are not shown."""

_SECRET_FLAG = re.compile(r"(?i)(?:^|-)(?:api-key|password|secret)$")

HIDDEN = "***"

NO_LAUNCH = (
    "there is no launch of SGLang in it: give `python -m sglang.launch_server ...`, `sglang serve ...`, the server's "
    "arguments, or a Kubernetes manifest or compose file: its path, or a container's command and args in single quotes."
)
DYNAMO = (
    "python -m dynamo.sglang takes SGLang's arguments among its own: paste SGLang's alone, as in `sglang-mla doctor "
    "--model-path ... --tp 8`."
)


class LaunchLineError(ValueError):
    """Text without a launch of a server."""


class LaunchLine(NamedTuple):
    """Launch command in its parts.

    Attributes:
        image: of the container that the command runs in.
        container: words in front of the arguments where something runs a container: `docker run ... image python3 -m
            sglang.launch_server`; empty elsewhere.
        script: words in front of the arguments where the container runs `sh -c "..."`, with which `container` ends.
    """

    environment: dict[str, str]
    arguments: list[str]
    image: str | None = None
    container: tuple[str, ...] = ()
    script: tuple[str, ...] = ()


def read(words: Sequence[str]) -> LaunchLine:
    """Take a launch command apart; what comes before the launcher (`nohup`, `docker run ...`) and what the shell does
    with its output is no argument.

    Args:
        words: as the shell hands them over, or as one word the whole command, a manifest (manifests.py) or its path. A
            launcher may be missing.
    Raises:
        LaunchLineError: it launches something else.
    """
    image = None
    with _quotes_that_end():
        launched = manifests.read(words[0]) if len(words) == 1 else []
    if launched:
        if len(launched) > 1:
            raise LaunchLineError(f"there are {len(launched)} launches in it: give one container's command and args.")
        words, image = launched[0]
    elif len(words) == 1 and re.search(r"\s", words[0].strip()):
        words = _split(words[0])
    outer, inner = _unwrapped(words)
    start = _start(inner)
    arguments = inner[start:]
    for index, word in enumerate(arguments):
        if _SHELL.match(word):
            del arguments[index:]
            break
    if arguments and not arguments[0].startswith("-"):
        arguments[:1] = ["--model-path", arguments[0]]  # as `sglang serve MODEL`
    before = [*outer, *inner[:start]]
    line = LaunchLine(_environment(before), arguments, image)
    if not any(_CONTAINERS.fullmatch(word) for word in before):
        return line
    line = line._replace(image=image or _image(before), container=tuple(outer or before))
    return line._replace(script=tuple(inner[:start])) if outer else line


@contextmanager
def _quotes_that_end() -> Iterator[None]:
    """Refuse text that a shell could not take apart."""
    try:
        yield
    except ValueError as error:
        raise LaunchLineError(f"the shell could not read it: {error}.") from None


def _split(text: str) -> list[str]:
    with _quotes_that_end():
        return shlex.split(text.replace("\\\n", " "))


def _unwrapped(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words up to `sh -c`, if that is what launches a server, and those that it runs."""
    for index, word in enumerate(words):
        if index and re.fullmatch(r"-\w*c", words[index - 1]) and manifests.LAUNCHES.search(word):
            lexer = shlex.shlex(word.replace("\\\n", " "), posix=True, punctuation_chars=";&|")
            lexer.whitespace_split, lexer.commenters = True, ""
            with _quotes_that_end():
                return list(words[:index]), list(lexer)
    return [], list(words)


def _environment(words: Sequence[str]) -> dict[str, str]:
    """Variables that are set in front of a launcher, by the shell or for a container."""
    found = {}
    for index, word in enumerate(words):
        if index and words[index - 1].startswith("--") and words[index - 1] != "--env":
            continue  # the value of an option, as `--mount type=bind`
        if match := _ASSIGNMENT.fullmatch(word.removeprefix("--env=")):
            found[match[1]] = match[2]
    return found


def _image(container: Sequence[str]) -> str | None:
    """The last word before a launcher that may be an image."""
    return next((word for word in reversed(container) if _IMAGE.fullmatch(word) and re.search("[:/]", word)), None)


def version_in(image: str) -> str | None:
    """The release of SGLang that an image's tag names (`v0.5.23-cu129`); None for others (`latest`)."""
    found = re.search(r":v?(\d+\.\d+\.\d+(?:\.?post\d+)?)", image)
    return found[1] if found else None


def is_sglangs(image: str) -> bool:
    """Return whether an image is SGLang's own, whose tag is SGLang's release; another's tag may be anything."""
    return re.match(r"([\w.-]+(:\d+)?/)*(lmsysorg/)?sglang[:@]", image) is not None and (
        "/" not in image or "lmsysorg/" in image
    )


def placeholders(arguments: Sequence[str]) -> list[str]:
    """Flags with what stands in place of their values."""
    found, flag = [], ""
    for word in arguments:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = name
            if not equals:
                continue
        else:
            value = word
        if _PLACEHOLDER.search(value) and not _SECRET_FLAG.search(flag):
            found.append(f"{flag} {value}".strip())
    return found


def _start(words: Sequence[str]) -> int:
    """Index of the first argument of the server."""
    for index, (word, following) in enumerate(pairwise(words)):
        if (word == "-m" and following in LAUNCHERS) or (word.rpartition("/")[2] == "sglang" and following == "serve"):
            return index + 2
        if following == "dynamo.sglang":
            raise LaunchLineError(DYNAMO)
    start = next((index for index, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    if start == len(words) or not words[start].startswith("--"):
        raise LaunchLineError(NO_LAUNCH)
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
    """A command for a shell, in the container that runs it, without the values of what looks like a secret."""
    arguments = list(_arguments_shown(line.arguments))
    if not line.container:
        environment = [f"{name}={_of_shell(_value_shown(name, value))}" for name, value in line.environment.items()]
        return " ".join([*environment, "python", "-m", LAUNCHERS[0], *map(_of_shell, arguments)])
    container = " ".join(map(_of_shell, _before_shown(line.container, line.environment)))
    inside = " ".join(map(_of_shell, [*_before_shown(line.script, line.environment), *arguments]))
    return f"{container} {shlex.quote(inside) if line.script else inside}"


def _before_shown(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the words in front of the arguments, without variables that the line no longer has, and without secrets."""
    set_here = _environment(words)
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        assignment = following if word in ("-e", "--env") else word
        match = _ASSIGNMENT.fullmatch(assignment.removeprefix("--env="))
        if match is None or set_here.get(match[1]) != match[2]:
            yield word
        elif match[1] in environment:
            yield word if word != assignment else f"{word.removesuffix(match[2])}{_value_shown(match[1], match[2])}"


def _arguments_shown(arguments: Sequence[str]) -> Iterator[str]:
    hide = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            yield HIDDEN
            hide = False
            continue
        secret = word.startswith("--") and _SECRET_FLAG.search(name) is not None
        hide = secret and not equals
        yield f"{name}={HIDDEN}" if secret and equals else word


def _value_shown(name: str, value: str) -> str:
    if _SECRET.search(name) and not value.startswith("$"):
        return HIDDEN
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]+@", rf"\1{HIDDEN}@", value)


def _of_shell(word: str) -> str:
    """A word in quotes where it needs them; what the shell itself reads, as `&&`, `~` and variables, stays as it is."""
    if HIDDEN not in word and re.fullmatch(r"(?:[\w@%+=:,./~*-]|\$\w+|\$\{\w+\})+|[;&|]+", word):
        return word
    return shlex.quote(word)
