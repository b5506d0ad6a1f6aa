"""Settles once, at start, what all ranks of a server must have in common.

Ranks decide alike because they decide by the same rules from the same data. The rules are checked here: nodes are
started one by one, and may have other options, GPUs or releases. Where they do, ranks would wait for each other in
different places, or attend to different tokens for each other.
"""

from __future__ import annotations

import logging
import platform
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext import __version__
from sglang_mla_ext.adapter.compat.contract import installed_version
from sglang_mla_ext.adapter.failure import several_ranks
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.sharded.names import KEY_BYTES

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from sglang_mla_ext.adapter.server import Server
    from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates

logger = logging.getLogger(__name__)


class RanksDifferError(RuntimeError):
    """Ranks of one server would decide by different rules; the message has the values of each."""


def tp_group() -> GroupCoordinator:
    """Return the group of all ranks: where each has requests of its own, the ranks with sharded prefixes."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()


def rules(options: HybridMLAOptions, rates: GpuRates, mixed_tokens: int) -> dict[str, object]:
    """Return what a rank decides by, by name.

    Args:
        options: with defaults that follow the memory.
        mixed_tokens: that a step may have; the default follows the GPU's name.
    """
    asked = HybridMLAOptions.from_env()
    return {
        "sglang-mla-ext": __version__,
        "sglang": installed_version(),
        "Python": ".".join(platform.python_version_tuple()[:2]),  # `sum` of floats is not the same in all
        **{"--hybrid-mla-" + each.name.replace("_", "-"): getattr(asked, each.name) for each in fields(asked)},
        "rates of the GPU": f"{rates.name} ({blake2b(repr(rates).encode(), digest_size=4).hexdigest()})",
        "mixed tokens in a step": mixed_tokens,
        "memory for expanded prefixes": "some" if options.may_expand else "none",
    }


def check_alike(mine: Mapping[str, object]) -> None:
    """Compare values with those of all other ranks, which call this at the same time.

    Raises:
        RanksDifferError: on all ranks.
    """
    if differences := differing(_gathered({name: str(value) for name, value in mine.items()})):
        raise RanksDifferError(
            f"hybrid_mla: the ranks of this server differ. {'; '.join(differences)}. Start all nodes with the same "
            "options, on the same kind of GPU, with the same releases."
        )


def is_alike(mine: object) -> bool:
    """Return whether a value is the same on all ranks, as a string. All of them call this at the same time."""
    return not differing(_gathered({"value": str(mine)}))


def _gathered(mine: dict[str, str]) -> list[dict[str, str]]:
    """Return what all ranks give, which call this at the same time."""
    if not several_ranks():
        return [mine]
    group = tp_group()
    of_ranks: list[dict[str, str]] = [{} for _ in range(group.world_size)]
    torch.distributed.all_gather_object(of_ranks, mine, group=group.cpu_group)
    return of_ranks


def differing(of_ranks: list[dict[str, str]]) -> list[str]:
    """Return a line for each name whose values are not the same on all ranks."""
    lines = []
    for name in dict.fromkeys(name for values in of_ranks for name in values):
        having: dict[str, list[int]] = {}
        for rank, values in enumerate(of_ranks):
            having.setdefault(values.get(name, "not known"), []).append(rank)
        if len(having) > 1:
            lines.append(f"{name}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in having.items()))
    return lines


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def drawn_key(group: GroupCoordinator) -> bytes:
    """Return a secret of this server, drawn by the first rank of the group; all of them call this at the same time."""
    key = torch.frombuffer(bytearray(secrets.token_bytes(KEY_BYTES)), dtype=torch.uint8)
    torch.distributed.broadcast(key, group.ranks[0], group.cpu_group)
    return key.numpy().tobytes()


def all_ranks_agree(group: GroupCoordinator | None = None) -> Callable[[bool], bool]:
    """Return a function that ranks call with their own answers, and that says whether all said yes. What is expanded
    may differ after a failure on one, and with it what each would rather do.

    Args:
        group: of them; by default those with heads of the same requests.
    """
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = group or get_attn_tp_group()
    if group.world_size == 1:
        return bool

    def agree(answer: bool) -> bool:
        least = torch.tensor(int(answer))
        torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group.cpu_group)
        return bool(least)

    return agree


def sharding_in_reach(server: Server) -> HybridMLAOptions:
    """Return a server's options, without sharded prefixes where ranks were to find out whether they reach each other's
    memory, and one of them does not. All ranks call this at the same time: they are of one host, and have the same
    options."""
    options = server.options
    if options.prefix_sharding != "auto" or server.ranks.sharding == 1:
        return options
    obstacle = _reach_each_other(tp_group())
    if all_ranks_agree(tp_group())(obstacle is None):
        return options
    logger.warning(
        "hybrid_mla: prefixes are not sharded, because ranks do not reach each other's memory (%s). With "
        "--hybrid-mla-prefix-sharding nccl they exchange by NCCL, which takes longer.",
        obstacle or "see another rank's log",
    )
    return replace(options, prefix_sharding="off")


def _reach_each_other(group: GroupCoordinator) -> Exception | None:
    """Return what keeps this rank from storing into the memory of all others; all of them have to ask at once."""
    from sglang_mla_ext.kernels.naive.peers import symmetric_mailbox

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        symmetric_mailbox(group.device_group, 1, torch.uint8, device)
    except Exception as error:
        return error
    return None
