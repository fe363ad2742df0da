"""How a cell that failed is filed, by the words in which each library reports it."""

from __future__ import annotations

import pytest
import torch

from pyramidbench.outcome import classify


class AcceleratorError(RuntimeError):
    """Named like torch's, which has no constructor here."""


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"), "oom"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "oom"),
        (AcceleratorError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (AcceleratorError("CUDA error: device-side assert triggered"), "cuda_error"),
        (AcceleratorError("in words that nobody knows"), "cuda_error"),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "cuda_error"),
        (RuntimeError("CUDA driver error: invalid argument"), "cuda_error"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "cuda_error"),
        (RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"), "cuda_error"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), "crashed"),
        (ValueError("shapes do not match"), "crashed"),
        (SystemExit(3), "crashed"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value)[:40],
)
def test_a_failure_is_filed_by_its_words(error: BaseException, status: str) -> None:
    filed, reason = classify(error)
    assert filed == status
    assert reason
    assert "\n" not in reason
