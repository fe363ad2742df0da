"""tests/gpu/every_kernel.py, which sanitizers run: its groups launch every kernel, and agree with the twins."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[1] / "gpu" / "every_kernel.py"


def test_its_groups_launch_every_kernel_on_every_path(device: str) -> None:
    """But those that only Hopper has: Gluon, which the interpreter does not run, and the copy engine."""
    script = loaded()
    groups = [group for group in script.GROUPS if group != "attention_hopper"]
    everywhere = {kernel for kernel in script.written() if not any(part in kernel for part in script.HOPPER)}
    assert script.run(groups, device) == everywhere


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("every_kernel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["every_kernel"] = module
    spec.loader.exec_module(module)
    return module
