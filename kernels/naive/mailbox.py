"""Memory that the ranks of a host store into, and where each finds that of the others."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mailbox:
    """One rank's side of one exchange; see signals.py.

    Attributes:
        received: `[n]`, what ranks store into this rank's memory.
        buffers: `[R]` int64 on the device, the address of each rank's `received`, a multiple of 16.
        counts: `[R]` int32, programs of each rank that have stored into it; 0 between exchanges.
        signals: `[R]` int64 on the device, the address of each rank's `counts`.
        me: this rank.
    """

    received: Tensor
    buffers: Tensor
    counts: Tensor
    signals: Tensor
    me: int

    @property
    def ranks(self) -> int:
        return len(self.counts)
