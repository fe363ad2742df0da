"""A profile on a CUDA device: kernels of its stages, device times, NVTX-marked spans, and counters where they are allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyramidbench.cell import Cell
from pyramidbench.profiling.files import write_profile
from pyramidbench.profiling.profile import profile_cell

CELL = Cell(
    method="pyramid:fast", parameters={"top_k": 16}, heads=8, kv_heads=2, seq_len=16384, seq_len_kv=16384, head_dim=128,
    head_dim_v=128, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def nan_filled() -> None:
    """Not here: filled memory and deterministic algorithms are more work than what is profiled has."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direction", ["forward", "train"])
def test_a_cell_on_a_gpu(tmp_path: Path, direction: str) -> None:
    made = profile_cell(CELL.model_copy(update={"direction": direction}), torch.device("cuda"), tmp_path)
    stages = {stage.path: stage for stage in made.stages}
    assert {"build", "route", "index", "attend"} <= set(stages)
    assert any(path.startswith("route/level") for path in stages)
    assert made.device_s is not None
    assert 0 < made.busy_s <= 1.2 * made.device_s
    assert all(stage.device_s is not None for stage in made.stages)
    route, attend = stages["route"], stages["attend"]
    assert route.device_s is not None
    assert route.device_s <= 1.2 * route.wall_s
    assert {kernel.path.split("/")[0] for kernel in made.kernels} >= {"build", "route", "attend"}
    assert 0.5 < sum(stages[name].kernels_s for name in ("build", "route", "index", "attend")) / made.busy_s < 1.5 or (
        direction == "train"
    )
    assert {kernel.source for kernel in made.kernels} & {"arguments", "formula"}
    assert attend.roof_share is not None
    if direction == "train":
        assert stages["backward"].kernels_s > 0
    assert {path.name for path in write_profile(made, tmp_path)} >= {"roofline.png", "stages.png", "trace.json.gz"}
