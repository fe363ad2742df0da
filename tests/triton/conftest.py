"""Kernel tests run twice: on the CPU in Triton's interpreter (see test_interpreter.py), and on a GPU under `-m gpu`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture
def device() -> str:
    """Where Triton kernels can run in this process."""
    if INTERPRETED:
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    pytest.skip("needs a CUDA device, or the interpreter (tests/triton/test_interpreter.py runs this file in it)")


@pytest.fixture(autouse=True)
def nan_filled() -> Iterator[None]:
    """Memory from torch.empty holds NaN (or the largest integer), so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with warnings.catch_warnings():
        # Of operations that have no such version on CUDA, as a cumsum of floats: it is the filling that is wanted here.
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation", UserWarning)
        yield
    torch.use_deterministic_algorithms(False)
