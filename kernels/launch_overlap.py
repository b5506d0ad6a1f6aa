"""Launches that overlap: programs of a kernel start while the launch in front of it, in the stream, still runs.

CUDA calls it programmatic dependent launch. Otherwise a launch begins when the one before has ended, to its last
program, and its own programs then begin by reading where their work is. Here the kernel in front says early that the
next may start (`gdc_launch_dependents`), and that one, launched with `launch_pdl=True`, sets itself up and waits
(`gdc_wait`) until the other has ended and what it wrote can be seen. It starts where multiprocessors become free, and
not before all programs of the one in front run. Decoding over the FP8 cache is such a chain:

| launch | starts | before it waits |
|---|---|---|
| quantize_query | as any launch: all before it has ended | |
| absorb, once or twice | early | barriers, work list, page table, keys into the ring |
| merge | early | which partials a row has |

What makes that correct:

- A wait is for the launch in front alone. So every program of a kernel in the chain waits before it ends, with or
  without work: then it has not ended before those in front of it.
- The first of the chain starts as any launch. So what came before it has ended when the others start, and they read
  it without waiting: keys, page table and work list of the step. They may write, too, what others have read before it.
- A role that reads what the launch in front wrote waits itself, or for a role that did, by a barrier.
- Both instructions do nothing where a launch is not of the chain. `launch_pdl` is only for who knows what is in front:
  for the function that launches the chain.

Source: CUDA C++ Programming Guide, programmatic dependent launch; PTX ISA, griddepcontrol.
"""

from __future__ import annotations

import torch


def can_overlap(device: torch.device) -> bool:
    """Whether a GPU knows such launches: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
