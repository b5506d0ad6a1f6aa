"""Read launch commands out of Kubernetes manifests and compose files, or pieces of them, in YAML or JSON."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LAUNCHES = re.compile(r"sglang[\w.]*\.launch_server|sglang\s+serve|dynamo\.sglang|(^|\s)--model(-path)?\b")
"""A command that may launch a server."""

COMMAND_KEYS = ("entrypoint", "command", "args")
"""Keys of a container's command, in the order in which they are run."""


class Launched(NamedTuple):
    """A container's command: variables in front, then its words."""

    words: list[str]
    image: str | None


def read(text: str) -> list[Launched]:
    """Commands of a manifest that may launch a server; none where the text is something else, as a command.

    Args:
        text: the manifest itself, a list of words as one of its keys has it, or the path of a file.
    Raises:
        ValueError: a shell could not take a command apart, or the file is not text.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:  # SGLang's own requirements bring it
        return []
    path = Path(text.strip())
    if path.suffix in (".yaml", ".yml", ".json") and os.path.isfile(path):  # of a name of any length
        text = path.read_text(encoding="utf-8")
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, ValueError, RecursionError):  # also of a date that there is not, and of many brackets
        return []
    try:
        return [found for document in documents for found in _found_in(document)]
    except RecursionError:  # an alias of what it is in
        return []


def _found_in(document: Any) -> Iterator[Launched]:
    if isinstance(document, list) and all(isinstance(each, str | int | float) for each in document):
        yield from _launched({"args": document})
    elif isinstance(document, list):
        for each in document:
            yield from _found_in(each)
    elif isinstance(document, Mapping):
        if any(isinstance(document.get(key), str | list) for key in COMMAND_KEYS):
            yield from _launched(document)
        else:
            for value in document.values():
                yield from _found_in(value) if isinstance(value, Mapping | list) else ()


def _launched(container: Mapping[str, Any]) -> Iterator[Launched]:
    words = [word for key in COMMAND_KEYS for word in _words(container.get(key))]
    if LAUNCHES.search(" ".join(words)):
        image = container.get("image")
        yield Launched([*_variables(container), *words], None if image is None else str(image))


def _words(given: Any) -> list[str]:
    if isinstance(given, str):
        return shlex.split(given.replace("\\\n", " "))
    return [str(each) for each in given] if isinstance(given, Sequence) else []


def _variables(container: Mapping[str, Any]) -> list[str]:
    """Assignments, from `env` of Kubernetes or `environment` of a compose file. Those without a value are left out."""
    given = container.get("env") or container.get("environment") or {}
    if isinstance(given, Mapping):
        return [f"{name}={value}" for name, value in given.items() if value is not None]
    if not isinstance(given, list):
        return []
    listed = [each for each in given if isinstance(each, str) and "=" in each]
    named = [each for each in given if isinstance(each, Mapping) and "name" in each and "value" in each]
    return [*listed, *(f"{each['name']}={each['value']}" for each in named)]
