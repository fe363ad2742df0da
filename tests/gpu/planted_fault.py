"""A kernel that writes behind its tensor: whether a sanitizer sees that is what `sanitize.sh` asks first.

    compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 python tests/gpu/planted_fault.py next

"next" writes the element behind the last one, and wants PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that the tensor fills an
allocation of its own to the last byte; "far" writes 1 MiB behind it. Said are whether a sanitizer has loaded itself into
this process, and how far the kernel came: where a sanitizer finds the fault, waiting for the kernel fails.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton
import triton.language as tl

BEHIND = {"next": 0, "far": (1 << 20) // 4}
"""Elements of fp32 between the tensor's end and what is written."""


@triton.jit
def _planted_fault(out_ptr, offset):
    tl.store(out_ptr + offset, 1.0)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in BEHIND:
        raise SystemExit(f"usage: {sys.argv[0]} {'|'.join(BEHIND)}")
    out = torch.zeros(1 << 20, device="cuda")
    loaded = "anitizer" in Path("/proc/self/maps").read_text()
    say(f"{sys.executable}: {'a' if loaded else 'no'} sanitizer's library is loaded")
    _planted_fault[(1,)](out, out.numel() + BEHIND[sys.argv[1]])
    say("the kernel is launched")
    torch.cuda.synchronize()
    say("the kernel has ended without an error")


def say(text: str) -> None:
    print(f"planted fault: {text}", flush=True)


if __name__ == "__main__":
    main()
