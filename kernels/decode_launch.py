"""How the launches of a decoding step follow each other: begun before the one before ends, and the last program of many.

`after_previous` stands in every kernel of a step before it reads what an earlier launch wrote, or writes anything. On Hopper
and later a launch for few queries has begun by then (programmatic dependent launch): its programs have their multiprocessor
and their arguments, and wait here. Behind the wait the next launch may begin in its turn, so two of them overlap at most, and
what the second reads before its own wait was written before the first one's.
`is_last` lets one launch do the work of two: the program that comes last does what needs the results of all.
Source: PTX ISA, "griddepcontrol"; CUDA C++ programming guide, "programmatic dependent launch".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP_ITEMS = 16
"""(sequence, set, query) triples up to which launches overlap: batches of one and two. H200, K 32, µs of a step with, without
(third version, docs/performance.md). Eight triples: 33.6 and 34.1 at 16k, 37.8 and 38.7 at 32k, 55.9 and 56.5 at 256k, 74.8
and 72.4 at 1M; with a start at up to 2 048 nodes 32.9 and 33.8, 33.6 and 35.2, 47.5 and 51.1, 68.3 and 69.0. 64 triples, 128k:
130 to 149 and 126; 120 to 125 and 117 (likely since the programs of a launch of many waves begin behind each other anyway,
and each pays the wait). Between 8 and 64 nothing was measured."""


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


def overlap(device: torch.device, items: int) -> dict[str, bool]:
    """The constant and the launch option by which launches over so many items overlap, where it pays and the device can."""
    pays = items <= OVERLAP_ITEMS
    overlaps = pays and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAPS": overlaps, "launch_pdl": overlaps}
