"""`verify`: right methods pass at every shape of its suite, each kind of fault is caught, and one that dies stops no other."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path

import pytest

from pyramidbench import cli
from pyramidbench.cell import Cell
from pyramidbench.errors import UserError
from pyramidbench.method import BlockMethod
from pyramidbench.outcome import Settings, failed
from pyramidbench.record import Record, Status
from pyramidbench.runner import Runner
from pyramidbench.suite import Suite, load_suite
from pyramidbench.verifying import PATIENCE, cells_of, every_spec, verdicts, verify

Command = Callable[..., tuple[int, str, str]]

METHOD = '''
"""A method with a fault, or none."""

from dataclasses import dataclass
import torch
from pyramidbench import BlockMethod, sparse_attention
from pyramidbench.cost import StageCost

seen = {{}}


@dataclass(frozen=True)
class Faulty(BlockMethod):
    """Keeps the K blocks with the longest mean key. Cost: reading the keys once, and the attention."""

    source = "a test"

    def select(self, q, k, problem):
        norms = [part.float().mean(2).norm(dim=-1) for part in k.split(self.block_size, dim=2)]
        scores = torch.stack(norms, dim=-1)[:, :, None]
        {select}

    def attend(self, q, k, v, selection, problem):
        out = sparse_attention(q, k, v, selection, scale=problem.scale)
        {attend}

    def cost(self, problem):
        return self.attention_and(problem, StageCost("route", 1.0, 4.0))
'''
KEPT = "return self.keep_best(scores, problem)"
FAULTS = {
    # name: (the end of select, the end of attend, the pass, a word of the reason)
    "wrong at a ragged end": (KEPT, "return out * (1 + (problem.seq_len_kv % 64 > 0))", "forward", "output error"),
    "wrong in 16 bit": (KEPT, "return out * (1 + (q.dtype is torch.float16))", "forward", "output error"),
    "wrong for groups of three": (KEPT, "return out.flip(1) if problem.group == 3 else out", "forward", "output error"),
    "looks ahead": ("return self.keep_best(scores * (1e3 * k.sum()).cos(), problem)", "return out", "forward", "look-ahead"),
    "half of all blocks": (
        "import dataclasses; m = dataclasses.replace(self, top_k=min(self.top_k, 2)); return m.keep_best(scores, problem)",
        "return out",
        "forward",
        "covers all",
    ),
    "remembers the first tensors": (
        KEPT,
        "return seen.setdefault((str(problem), str(self)), out.detach()) if not out.requires_grad else out",
        "forward",
        "look-ahead|output error",
    ),
    "a gradient too small": (KEPT, "return out.detach() + 0.5 * (out - out.detach())", "train", "of the gradient of"),
    "an output of its own for a step": (
        KEPT, "return out + (problem.direction == 'decode')", "decode", "output error",
    ),
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("cpu", "Test CPU", tmp_path / "logs", 0.0, 1)


@pytest.fixture
def small() -> Suite:
    """The suite without its longest lengths, and without fp16's longer one, which takes a CPU seconds."""
    grids = []
    for grid in load_suite("verify").grids:
        lengths = [length for length in grid.seq if length <= (65 if "float16" in grid.dtype else 577)]
        grids.append(grid.at_lengths(lengths))
    return load_suite("verify").model_copy(update={"grids": tuple(grid for grid in grids if grid.seq)})


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs `pyramidbench verify` in an empty folder, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pyramidbench.worker.working", lambda settings: nullcontext(Here(settings)))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", "verify", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return run


class Here:
    """In place of a worker."""

    def __init__(self, settings: Settings) -> None:
        self.runner = Runner(settings)

    def verify(self, cell: Cell, limit_s: float) -> Record:  # noqa: ARG002
        return self.runner.verify(cell)


def no_one(_: Record) -> None:
    """Hears of every record, and does nothing."""


def file_of(folder: Path, select: str, attend: str) -> str:
    path = folder / "faulty.py"
    path.write_text(METHOD.format(select=select, attend=attend))
    return str(path)


def checked(cells: list[Cell], settings: Settings) -> list[Record]:
    return verify(cells, Here(settings), settings, no_one)


def test_the_suite_has_every_kind_of_shape() -> None:
    cells = cells_of(load_suite("verify"), ["pyramid"], None)
    assert {cell.direction for cell in cells} == {"forward", "train", "decode"}
    assert {cell.dtype for cell in cells} == {"float32", "bfloat16", "float16"}
    assert {cell.heads // cell.kv_heads for cell in cells} >= {1, 2, 3, 8, 16}
    assert any(cell.seq_len < cell.seq_len_kv for cell in cells if cell.direction == "forward")
    assert any(cell.seq_len > cell.seq_len_kv for cell in cells)
    assert any(not cell.causal for cell in cells)
    made = [cell.make_method() for cell in cells if cell.direction != "decode"]
    blocks = [method for method in made if isinstance(method, BlockMethod)]
    assert any(method.query_tile > method.block_size for method in blocks)
    assert any(method.query_tile == 1 for method in blocks)
    assert max(method.walked_levels(cell.problem("cpu")) or 0 for method, cell in zip(made, cells)) >= 2


def test_every_method_and_preset_is_asked() -> None:
    specs = every_spec()
    assert {"dense:math", "pyramid", "pyramid:fast", "exact_topk", "fla_nsa"} <= set(specs)
    assert {cell.method for cell in cells_of(load_suite("verify"), specs, ["forward"])} == set(specs)


@pytest.mark.parametrize("method", ["dense:math", "pyramid", "flat:exact"])
def test_a_right_method_is_right_everywhere(method: str, small: Suite, settings: Settings) -> None:
    (verdict,) = verdicts(checked(cells_of(small, [method], None), settings))
    assert not verdict.faults, verdict.faults
    assert all(right == made > 0 for right, made in verdict.right.values())
    assert set(verdict.right) == {"forward", "train", "decode"}
    assert not verdict.refusals
    made = sum(made for _, made in verdict.right.values())
    assert verdict.sparse > made / 2 or method == "dense:math", (
        "most calls leave nothing out, so that any choice is right"
    )
    assert verdict.nearest is not None
    assert 0 < verdict.nearest <= 1
    assert len(verdict.backends) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_each_kind_of_fault_is_caught(fault: str, small: Suite, settings: Settings, tmp_path: Path) -> None:
    select, attend, direction, reason = FAULTS[fault]
    cells = cells_of(small, [file_of(tmp_path, select, attend)], [direction])
    one_by_one = map(Here(settings).verify, cells, repeat(1.0))
    first = next(record for record in one_by_one if record.status not in ("ok", "unsupported"))
    assert first.status == "incorrect"
    assert re.search(reason, first.reason or ""), first.reason


def test_without_a_fault_the_same_method_passes(small: Suite, settings: Settings, tmp_path: Path) -> None:
    records = checked(cells_of(small, [file_of(tmp_path, KEPT, "return out")], ["forward", "decode"]), settings)
    assert {record.status for record in records} == {"ok"}


@pytest.mark.parametrize("end", PATIENCE)
def test_a_method_that_keeps_ending_badly_is_given_up(end: Status, settings: Settings) -> None:
    class Dying:
        def verify(self, cell: Cell, limit_s: float) -> Record:  # noqa: ARG002
            return failed(cell, settings, end if cell.method == "flat" else "ok", "as told")

    cells = cells_of(load_suite("verify"), ["flat", "pyramid"], ["forward"])
    records = verify(cells, Dying(), settings, no_one)
    assert [record.cell for record in records] == [cell.identity for cell in cells]
    ends = [record for record in records if record.method == "flat"]
    assert sum(record.status == end for record in ends) == PATIENCE[end]
    assert {record.status for record in ends} == {end, "skipped"}
    assert all(
        str(record.reason).endswith(f"before it ended as {end}") for record in ends if record.status == "skipped"
    )
    assert {record.status for record in records if record.method == "pyramid"} == {"ok"}


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    """A user's own suite: two lengths, forward and as a step."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\n[[grid]]\nseq = "64,100"\ninput = "normal"\nheads = "4:2"\nhead_dim = 16\ntop_k = 1\n'
        'pass = "forward,decode"\nmethods = ["flat", "dense:math"]\n'
    )
    return str(path)


def test_the_command_tells_what_is_right(command: Command, shapes: str) -> None:
    code, out, err = command(shapes)
    assert code == 0
    assert [line.split() for line in out.splitlines()[2:5]] == [
        ["method", "forward", "decode", "sparse", "refused", "nearest", "backend"],
        ["dense:math", "2/2", "2/2", "0", "0", out.splitlines()[3].split()[5], "sdpa-math"],
        ["flat", "2/2", "2/2", "0", "0", out.splitlines()[4].split()[5], "reference"],
    ]
    assert "8 calls of 2 methods on " in out
    assert out.rstrip().endswith("all right.")
    assert err == ""


def test_the_command_names_what_is_wrong(command: Command, shapes: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, KEPT, "return out * (1 + (problem.seq_len_kv == 100))")
    code, out, _ = command(shapes, "--method", f"dense:math,{path}", "--pass", "forward")
    assert code == 4
    assert "4:2 heads of 16, 100 keys, float32, tile 64, block 64, K 1" in out
    assert out.rstrip().endswith("1 not right.")
    assert "decode" not in out


def test_json_has_a_record_for_each_call(command: Command, shapes: str) -> None:
    code, out, _ = command(shapes, "--json", "--method", "flat", "--pass", "decode")
    assert code == 0
    assert [(row["method"], row["pass"], row["seq_len_kv"], row["status"]) for row in json.loads(out)] == [
        ("flat", "decode", 64, "ok"),
        ("flat", "decode", 100, "ok"),
    ]


def test_what_cannot_run_here_is_no_success(command: Command, shapes: str) -> None:
    code, out, _ = command(shapes, "--method", "llsa")
    assert code == 6
    assert "0 calls of 0 methods" in out
    assert "llsa refuses 4: " in out


def test_a_broken_file_is_one_line_and_the_others_go_on(command: Command, shapes: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name\n")
    code, out, err = command(shapes, "--method", f"flat,{path}")
    assert code == 3
    assert err.count("\n") == 1
    assert "nothing_of_that_name" in err
    assert "4 calls of 1 methods" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "flatt"), "Did you mean 'flat'?"),
        (("--pass", "foward"), "Did you mean 'forward'?"),
        (("verifyy",), "Did you mean 'verify'?"),
        (("smoke", "--pass", "decode"), "has no cell in --pass decode"),
        (("demo",), "give --input FILE.safetensors"),
        (("smoke", "--input", "a.safetensors"), "asks for no capture"),
        (("--device", "tpu"), "accepted: auto, cpu, cuda"),
    ],
)
def test_a_mistake_is_one_line(command: Command, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = command(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err


def test_a_method_that_kills_its_process_leaves_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shapes: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, KEPT, "import os; print('last words', flush=True); os.abort()")
    arguments = ["pyramidbench", "verify", shapes, "--method", f"{path},flat", "--pass", "forward", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code == 3
    assert "the worker died of SIGABRT" in printed.out
    assert "flat" in printed.out
    folder = Path(printed.err.strip().removeprefix("Logs of what ended badly: "))
    assert "last words" in "".join(log.read_text() for log in folder.iterdir())


def test_a_method_that_does_not_exist_is_a_user_error() -> None:
    with pytest.raises(UserError, match="unknown method"):
        cells_of(load_suite("verify"), ["nothing"], None)
