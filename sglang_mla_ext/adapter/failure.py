"""Rerun a forward pass with nothing shared if our part of a layer fails.

An allocation or a compile error may come in the middle of a layer, when nothing but the whole pass can be done by plain
absorb: how a prefill step attends was chosen before, and what is left of a decode step's attention is not all of it. So
what is ours in a layer raises one class of errors (`our_part`), and SGLang's runner of passes without a CUDA graph is
asked a second time, as is that of prefill graphs, which call us between their segments. Latent rows are written where
they were written before, with the same values.

What is not ours passes as it is. In the same way a failure stays one

- while a CUDA graph is captured: the launch ends with SGLang's message, which has ours in it;
- where several ranks compute together: the others are in the middle of the pass, and wait for this one in a collective;
- in the second run, which is plain absorb.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch

from sglang_mla_ext.reasons import Fallback

Method = Callable[..., Any]


class Running(Protocol):
    """The session, as functions that are hooks themselves see it.

    Attributes:
        steps: of the process, which is told of failures.
        repeats: whether a pass may be run again.
    """

    steps: Any
    repeats: bool


class OurPartFailedError(RuntimeError):
    """Failure of our part of a layer or a pass.

    Attributes:
        what: the part that has failed; cause: the original error.
    """

    def __init__(self, what: Fallback, cause: Exception) -> None:
        super().__init__(f"hybrid_mla: {what.value}: {type(cause).__name__}: {cause}")
        self.what, self.cause = what, cause


class our_part:
    """Context, entered often, in every layer, that turns an error inside of it into an OurPartFailedError. Nothing that
    is SGLang's is called in it."""

    def __init__(self, what: Fallback) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, OurPartFailedError):
            raise OurPartFailedError(self._what, error) from error


def guarded(what: Fallback, *, only_shows: bool = False, loses_memory: bool = False) -> Callable[[Method], Method]:
    """Return a decorator of what SGLang calls in a running server: what it raises does not reach SGLang. It returns
    None then. An error of `our_part` does reach it where there are other ranks, which go on with another pass.

    Args:
        what: has failed then. The method's first argument has the process's `steps`: a method of the session or of its
            admission, or a function that gets the session.
        only_shows: what is shared stays so; otherwise it is forgotten, and nothing is shared for a while.
        loses_memory: the session's memory has to be cleared before it is used again.
    """

    def guard(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                if isinstance(error, OurPartFailedError):
                    if several_ranks():
                        raise
                    error = error.cause
                if only_shows:
                    self.steps.counters.fall_back(what, error)
                else:
                    self.steps.fail(what, error, self.memory.clear if loses_memory else None)

        return call

    return guard


def around_pass(
    session: Running, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run `EagerRunner.execute` or `PrefillCudaGraphRunner.execute`, and once more where our part fails."""
    try:
        return original(runner, forward_batch, *args, **kwargs)
    except OurPartFailedError as failure:
        if not session.repeats or several_ranks():
            raise
        session.steps.fail(failure.what, failure.cause)
    # Not inside of `except`: the error's frames hold tensors.
    again = copy.copy(forward_batch)
    again.forward_metadata_ready = False  # a verify step is prepared before it, with what was shared
    return original(runner, again, *args, **kwargs)


def several_ranks() -> bool:
    """Return whether other ranks compute together with this process."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
