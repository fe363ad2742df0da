"""How the launches of a decoding step follow each other: begun before the one before ends, and the last program of many.

`after_previous` stands in every kernel of a step before it reads what an earlier launch wrote, or writes anything. On Hopper
and later the launch has begun by then (programmatic dependent launch): its programs have their multiprocessor and their
arguments, and wait here. Behind the wait the next launch may begin in its turn, so two of them overlap at most, and what
the second reads before its own wait was written before the first one's.
`is_last` lets one launch do the work of two: the program that comes last does what needs the results of all.
Source: PTX ISA, "griddepcontrol"; CUDA C++ programming guide, "programmatic dependent launch".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP = True
"""Whether launches overlap where the device can; tests/gpu/bench_decode.py times both."""


@triton.jit
def after_previous(OVERLAPS: tl.constexpr):
    """All that earlier launches wrote is visible behind this."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_for(at):
    """Have L2 fetch the lines of 128 bytes that pointers lie in, without waiting; what is written later is not missed."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def is_last(arrivals_ptr, programs):
    """Whether `programs` have come here with this one; if so, what they stored before is visible, and the counter 0 again."""
    # The counter is moved by one thread, for all of the program's.
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(arrivals_ptr, 0)
    return last


def overlap(device: torch.device) -> dict[str, bool]:
    """The constant and the launch option by which launches overlap, where the device can."""
    overlaps = OVERLAP and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}
