"""A faster source of block mass: it widens the judged tiles and must agree; without one nothing changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyramidbench import inputs, oracle
from pyramidbench.cell import Cell
from pyramidbench.oracle import OracleDisagreement, TileMass, block_mass, sample_tiles, widened
from pyramidbench.outcome import Settings
from pyramidbench.problem import Problem
from pyramidbench.record import Record
from pyramidbench.registry import create, mass_source
from pyramidbench.runner import Runner
from pyramidbench.tiling import Tiling

MakeTensors = Callable[..., tuple[Tensor, Tensor, Tensor]]
TILING = Tiling(1000, 1000, 16, 16, True)


@dataclass(frozen=True)
class Source:
    """Stands in for a kernel: the oracle's own mass of the tiles that it is asked for, times `factor`; None: cannot run."""

    tiling: Tiling
    factor: float | None = 1.0

    def fast_mass(self, q: Tensor, k: Tensor, problem: Problem, tiles: Tensor) -> Tensor | None:
        if self.factor is None:
            return None
        sizes = {"block_size": self.tiling.block_size, "query_tile": self.tiling.query_tile}
        return self.factor * block_mass(q, k, **sizes, causal=problem.causal, scale=problem.scale, tiles=tiles)


def widen(tensors: MakeTensors, factor: float | None, count: int = 4) -> TileMass | None:
    q, k, _ = tensors(queries=1000, heads=4, kv_heads=2, dtype=torch.float32)
    tiles = sample_tiles(TILING, 4, 1, q.device, fewest=count)
    checked = TileMass(tiles, block_mass(q, k, block_size=16, query_tile=16, tiles=tiles))
    return widened(q, k, Problem.of(q, k, causal=True, scale=None), TILING, Source(TILING, factor), checked)


def test_all_tiles_are_judged_where_they_fit(tensors: MakeTensors) -> None:
    found = widen(tensors, 1.0)
    assert found is not None
    assert torch.equal(found.tiles, torch.arange(TILING.tiles))
    assert found.mass.shape == (1, 4, TILING.tiles, TILING.blocks)


def test_checked_tiles_are_among_those_that_fit(tensors: MakeTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "MASS_ELEMENTS", 10 * 4 * TILING.blocks)
    found = widen(tensors, 1.0, count=3)
    assert found is not None
    assert 10 <= len(found.tiles) <= 13
    assert bool(torch.isin(sample_tiles(TILING, 4, 1, torch.device("cpu"), fewest=3), found.tiles).all())
    assert bool((found.tiles.diff() > 0).all())


def test_nothing_changes_where_nothing_faster_runs(tensors: MakeTensors) -> None:
    assert widen(tensors, None) is None
    q, k, _ = tensors(queries=64, dtype=torch.float32)
    problem = Problem.of(q, k, causal=True, scale=None)
    assert mass_source(TILING).fast_mass(q, k, problem, torch.arange(4)) is None


@pytest.mark.parametrize("factor", [1.0001, 0.0, float("nan")])
def test_a_source_that_disagrees_is_an_error(tensors: MakeTensors, factor: float) -> None:
    with pytest.raises(OracleDisagreement, match="from the oracle's on 4 tiles"):
        widen(tensors, factor)


def judged(folder: Path, monkeypatch: pytest.MonkeyPatch, factor: float | None) -> Record:
    """A cell of pyramid, with 2 of 16 tiles sampled by the oracle."""
    monkeypatch.setattr("pyramidbench.judging.mass_source", lambda tiling: Source(tiling, factor))
    cell = Cell(method="pyramid", parameters={"top_k": 2, "block_size": 16, "query_tile": 16}, seq_len=1000,
                seq_len_kv=1000, head_dim=16, head_dim_v=16, timed=False)  # fmt: skip
    settings = Settings("cpu", "here", folder, 0.01, 1)
    return Runner(settings).measure(cell)


def test_a_cell_is_judged_on_all_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, all_tiles = (judged(tmp_path, monkeypatch, factor) for factor in (None, 1.0))
    assert (few.sampled_tiles, all_tiles.sampled_tiles) == (16, 63)
    assert few.output_error == all_tiles.output_error
    assert all_tiles.recall is not None
    assert all_tiles.mass_kept != few.mass_kept


def test_a_disagreement_ends_the_cell_without_quality(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = judged(tmp_path, monkeypatch, 1.1)
    assert record.status == "crashed"
    assert "OracleDisagreement" in (record.reason or "")
    assert record.recall is None


def test_exact_top_k_says_what_runs() -> None:
    pytest.importorskip("triton")
    gpu = Problem(1, 4, 2, 1000, 1000, 64, 64, "bfloat16", True, 0.125, device="cuda")
    assert create("exact_topk").backend(gpu) == "triton"
    assert create("exact_topk", {"query_tile": 256}).backend(gpu) == "reference+triton"
    assert create("exact_topk", {"implementation": "reference"}).backend(gpu) == "reference"
    asked = create("exact_topk", {"query_tile": 256, "implementation": "triton"})
    assert "query tiles up to 128" in (asked.unsupported(gpu) or "")
    assert "CUDA device" in (asked.unsupported(replace(gpu, device="cpu")) or "")


def test_judging_on_a_cpu_never_imports_the_kernel() -> None:
    code = (
        "import sys, torch\n"
        "from pyramidbench.problem import Problem\n"
        "from pyramidbench.registry import mass_source\n"
        "from pyramidbench.tiling import Tiling\n"
        "q = torch.randn(1, 1, 128, 16)\n"
        "of = Problem.of(q, q, causal=True, scale=None)\n"
        "assert mass_source(Tiling(128, 128, 16, 16, True)).fast_mass(q, q, of, torch.arange(2)) is None\n"
        "assert 'pyramidbench.kernels.mass' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_another_pass_on_the_same_tensors_does_not_make_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    whole = inputs.load_inputs

    def noted(cell: Cell, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        made.append(f"{cell.direction} {cell.seed}")
        return whole(cell, device)

    monkeypatch.setattr(inputs, "load_inputs", noted)
    runner = Runner(Settings("cpu", "a CPU", tmp_path, 0.01, 1 << 20))
    cell = Cell(method="flat", seq_len=96, seq_len_kv=96, head_dim=16, head_dim_v=16, input="normal", timed=False)
    passes = [cell.model_copy(update={"direction": direction}) for direction in ("forward", "train", "backward")]
    assert len({each.group for each in passes}) == 3
    for each in [*passes, cell, cell.model_copy(update={"seed": 1}), passes[1]]:
        assert runner.judge(each).status == "ok"
        assert runner.loaded is not None
        assert runner.loaded.problem.direction == each.direction
        for held, expected in zip(runner.loaded.tensors, whole(each, torch.device("cpu"))):
            assert torch.equal(held, expected)
    assert made == ["forward 0", "forward 1", "train 0"]
