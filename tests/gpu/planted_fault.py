"""A kernel that writes one element past its tensor: whether a sanitizer sees that is what `sanitize.sh` asks first.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/planted_fault.py

It needs PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that the tensor fills an allocation of its own to the last byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _planted_fault(out_ptr, size):
    tl.store(out_ptr + size, 1.0)


if __name__ == "__main__":
    out = torch.zeros(1 << 20, device="cuda")
    _planted_fault[(1,)](out, out.numel())
    torch.cuda.synchronize()
