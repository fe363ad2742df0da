"""The README's own method goes through the contract test like any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_example_method_passes_the_contract_test(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (example,) = [block for block in blocks if "(BlockMethod)" in block]
    path = tmp_path / "key_norms.py"
    path.write_text(example)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "tests/methods/test_contract.py"]
    environment = {**os.environ, "PYRAMIDBENCH_CONTRACT": str(path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 60
    skips = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("empty parameter set" in line for line in skips), "a part of the contract did not run"
