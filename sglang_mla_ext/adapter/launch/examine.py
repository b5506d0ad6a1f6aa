"""Examine whether a launch line runs with `hybrid_mla`: SGLang resolves its arguments as at start, with our plug-in.

Nothing is loaded but configurations; on a machine without a GPU the line is examined as on Hopper.
"""

from __future__ import annotations

import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch

from sglang_mla_ext.adapter.compat import contract, installed
from sglang_mla_ext.adapter.compat.contract import ContractError, installed_version
from sglang_mla_ext.adapter.compat.findings import Finding
from sglang_mla_ext.adapter.compat.syntax import without_collector
from sglang_mla_ext.adapter.cpu import fake_gpu
from sglang_mla_ext.adapter.launch import (
    checkpoints,
    feature_findings,
    hardware,
    launch_line,
    limits,
    prefix_memory_report,
    tested_configurations,
)
from sglang_mla_ext.adapter.launch.import_stubs import Unchanged
from sglang_mla_ext.adapter.launch.launch_line import MODEL_FLAGS, LaunchLine
from sglang_mla_ext.adapter.launch.limits import Refusal
from sglang_mla_ext.adapter.launch.remedies import apply, in_words, said_by_sglang
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.options import HybridMLAOptions, OptionError

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

WORKS, CHANGED, REFUSED, CANNOT_TELL = "works", "works with a change", "refused", "cannot tell"

DRAFT_FLAGS = ("--speculative-draft-model-path", "--speculative-draft-model")

SET_BY_ITSELF = ("page_size", "speculative_draft_attention_backend", "speculative_attention_mode")
"""Fields of ServerArgs that `limits` sets where the user did not."""


class Examination(NamedTuple):
    """Result of examining a launch line.

    Attributes:
        outcome: WORKS, CHANGED, REFUSED, or CANNOT_TELL where a model's configuration cannot be read, arguments have
            placeholders, or the image has an SGLang that is not known.
        findings: obstacles, each with what to change.
        changes: the changes that make the line work, in words, in the order of the findings that have a remedy.
        line: the line that was examined, with our backend and the changes.
        settings: flags that are set without being asked for.
        models: names of the known models that the line was examined with, by the path that the line gives.
        warnings: what the server works without, what may end it, and that its release of SGLang was not tested.
        tested: how far such a server was tested; None where it does not start.
        memory_report: how much of a prompt its prefix memory holds, with DP attention.
        elsewhere: a note if the image has another SGLang than the line was examined with.
        caveat: a note if decode gains nothing, though the line works.
    """

    outcome: str
    findings: list[Finding]
    changes: list[str]
    line: LaunchLine
    settings: list[str]
    models: dict[str, str]
    warnings: Sequence[str] = ()
    tested: tested_configurations.Tested | None = None
    memory_report: str | None = None
    elsewhere: str | None = None
    caveat: str | None = None


@contextmanager
def examiner() -> Iterator[Callable[[LaunchLine], Examination]]:
    """Make a function that examines one LaunchLine; entering takes as long as importing SGLang."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of what SGLang finds no GPU for
        stack.enter_context(without_collector())
        # As a decorator in SGLang's modules it imports the compiler, for a second.
        stack.enter_context(patch.object(torch, "compile", Unchanged))
        if not torch.cuda.is_available():
            stack.enter_context(fake_gpu.hopper())
        from sglang.srt.plugins import load_plugins

        with _silence():
            load_plugins()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        yield lambda line: _examine(line, Path(folder))


def _examine(line: LaunchLine, folder: Path) -> Examination:
    if before := _before_resolving(line):
        outcome = CANNOT_TELL if all(each.code in UNKNOWN for each in before) else REFUSED
        elsewhere = _elsewhere(line) if before[0].code == MODEL else None
        return Examination(outcome, before, [], line, [], {}, elsewhere=elsewhere)
    line = line._replace(arguments=launch_line.with_backend(line.arguments))
    findings: list[Finding] = []
    changes: list[str] = []
    while True:
        known = _known_models(line)
        folders = {named: str(checkpoints.write_config(model, folder)) for named, model in known.items()}
        server, found = _resolve(line, folders)
        new = [each for each in found if each not in findings]
        findings += new
        for each in new:
            if each.remedy is not None and (changed := apply(each.remedy, line)) != line:
                changes.append(in_words(each.remedy, line))
                line = changed
        if server is not None:
            outcome = CHANGED if changes else WORKS
        elif not any(each.remedy for each in new):
            outcome = REFUSED
        else:
            continue
        examination = Examination(outcome, findings, changes, line, [], known, elsewhere=_elsewhere(line))
        return examination._replace(**server or {})


MODEL, PLACEHOLDER, NEWER = UNKNOWN = ("model", "placeholder", "SGLang is newer")
"""Codes of what keeps a line from being examined; all others refuse it."""


def _before_resolving(line: LaunchLine) -> list[Finding]:
    """List what the installed SGLang cannot be asked about: another machine, another release, values that are not
    there."""
    found = hardware.findings(line) + _release_findings(line)
    if any(each.code not in UNKNOWN for each in found):
        return found
    if places := launch_line.placeholders(line.arguments):
        text = f"{', '.join(places)}: give the values that take the place of these."
        return [*found, Finding(PLACEHOLDER, text)]
    if found:
        return found
    known = _known_models(line)
    with patch.dict(os.environ, line.environment):
        unread = [checkpoints.out_of_reach(path) for path in _models_of(line) if path not in known]
    return [Finding(MODEL, why) for why in unread if why is not None]


def _release_findings(line: LaunchLine) -> list[Finding]:
    """Return a finding if the line's image has a release of SGLang that is not supported."""
    there = launch_line.version_in(line.image or "")
    if there is None or contract.is_supported(there):
        return []
    oldest, *_, newest = contract.SUPPORTED
    text = f"{line.image} has SGLang {there}, and {oldest} to {newest} are supported"
    if contract.is_too_old(there) and launch_line.is_sglangs(line.image or ""):
        return [Finding("SGLang is too old", f"{text}: use lmsysorg/sglang:v{newest}.")]
    why = "newer" if not contract.is_too_old(there) else "if that is its release"
    return [Finding(NEWER, f"{text} ({why}): run doctor in the image, which compares what is used of SGLang there.")]


def _of_server(line: LaunchLine, args: ServerArgs) -> dict[str, Any]:
    """Describe a line that works, within its own environment: fields of its Examination."""
    server = Server.of(args, HybridMLAOptions.from_env())
    version = launch_line.version_in(line.image or "") or str(installed_version())
    prefix_memory = prefix_memory_report.predicted(server)
    return {
        "settings": _settings(line, server),
        "warnings": limits.warnings(server) + [said for said in [contract.untested()] if said and line.image is None],
        "tested": tested_configurations.tested(tested_configurations.parts_of(server), version),
        "memory_report": None if prefix_memory is None else f"predicted {prefix_memory}",
        "caveat": prefix_memory_report.caveat(server),
    }


def _elsewhere(line: LaunchLine) -> str | None:
    if line.image is None or (there := launch_line.version_in(line.image)) == (here := installed_version()):
        return None
    what = f"SGLang {there}" if there else "an SGLang whose release its name does not tell"
    if there and contract.is_supported(there) and there not in contract.SUPPORTED:
        what = f"{what}, which was not tested"
    return f"{line.image} has {what}; examined with {here}, which is installed here: run doctor in the image, too"


def _known_models(line: LaunchLine) -> dict[str, str]:
    """Return known models of a line that are not at hand, by the paths that it gives."""
    known = {path: checkpoints.known_as(path) for path in _models_of(line) if not Path(path).is_dir()}
    return {path: name for path, name in known.items() if name is not None}


def _models_of(line: LaunchLine) -> list[str]:
    """Paths of models that a line names, but for a draft model where drafts are refused whatever it is."""
    refused = feature_findings.way_of_drafting(launch_line.value_of(line.arguments, "--speculative-algorithm"))
    flags = MODEL_FLAGS if refused else MODEL_FLAGS + DRAFT_FLAGS
    named = [path for flag in flags if (path := launch_line.value_of(line.arguments, flag))]
    return named + [path for flag, path in _in_config(line).items() if flag in flags]


def _in_config(line: LaunchLine) -> dict[str, str]:
    """Return the models that the file of `--config` names, and the line does not, by their flags."""
    import yaml  # type: ignore[import-untyped]

    if (file := launch_line.value_of(line.arguments, "--config")) is None:
        return {}
    try:
        said = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # SGLang says what is wrong with it
        return {}
    values = {f"--{key}".replace("_", "-"): value for key, value in said.items()} if isinstance(said, dict) else {}
    return {
        flag: values[flag]
        for flags in (MODEL_FLAGS, DRAFT_FLAGS)
        if launch_line.value_of(line.arguments, *flags) is None
        for flag in flags
        if isinstance(values.get(flag), str)
    }


def _resolve(line: LaunchLine, folders: dict[str, str]) -> tuple[dict[str, Any] | None, list[Finding]]:
    """Resolve a line: return the description of its server, or None and the findings that prevent it.

    Args:
        folders: of configurations, by the model path that each replaces.
    """
    from sglang.srt.server_args import prepare_server_args

    pairs = (word.split("=", 1) if re.match(r"--[\w-]+=", word) else [word] for word in line.arguments)
    words = [folders.get(word, word) for pair in pairs for word in pair]
    for flag, path in _in_config(line).items():
        words += [flag, folders[path]] if path in folders else []
    with patch.dict(os.environ, line.environment), _silence() as said:
        try:
            args = prepare_server_args(words)
            installed.resolve(args)
            args.check_server_args()  # what SGLang refuses next
        except Refusal as error:
            return None, error.findings
        except ContractError as error:
            return None, [Finding("contract", text) for text in error.differences or [str(error)]]
        except OptionError as error:
            return None, [Finding("option", str(error))]
        except SystemExit:
            return None, said_by_sglang(said.getvalue())
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            return None, [Finding("SGLang", f"SGLang itself: {reason}")]
        return _of_server(line, args), []


def _settings(line: LaunchLine, server: Server) -> list[str]:
    """List the settings that `limits` makes where the line does not name them."""
    values = {f"--{name.replace('_', '-')}": getattr(server.args, name, None) for name in SET_BY_ITSELF}
    found = [
        f"{flag} {value}"
        for flag, value in values.items()
        if launch_line.value_of(line.arguments, flag) is None and value not in (None, "prefill")
    ]
    if "--disable-prefill-cuda-graph" not in line.arguments and server.prefill.graphs == "disabled":
        found.append("--disable-prefill-cuda-graph")
    return found


@contextmanager
def _silence() -> Iterator[io.StringIO]:
    """Keep what SGLang prints and logs."""
    kept = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(kept), redirect_stdout(kept):
            yield kept
    finally:
        logging.disable(before)
