"""What compiles without a GPU: each kernel, each shape that the suites launch, each step of decoding."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def compiler() -> None:
    """Triton decides at import whether it interprets, and then nothing compiles."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
