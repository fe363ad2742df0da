"""What runs at 256k tokens on a GPU, as far as a CPU can tell: the suite's cells fit, and the scripts around it work."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pyramidbench.axes import parse_axis
from pyramidbench.capture_file import CaptureMetadata, CaptureWriter
from pyramidbench.kernels import backends
from pyramidbench.passes import Training
from pyramidbench.rope_scaling import RopeScaling
from pyramidbench.suite import load_suite

SCRIPTS = Path(__file__).parent / "gpu"
LONGEST = 262144
BY_RULE_IN_TORCH = {
    "nsa", "infllm2", "vertical_slash", "xattention", "xattention:top_k", "spargeattn", "spargeattn:top_k", "flexprefill",
    "subblock", "sliding_window", "random_blocks",
}  # fmt: skip


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not backends.HAS_TRITON, reason="without Triton no kernel is planned for a GPU")
def test_the_suite_methods_fits_one_gpu_on_a_capture_of_256k_tokens() -> None:
    """Every cell can run, with a few GiB besides its tensors; walks and attention in kernels, only rules of torch in torch."""
    held = script("compile_suite").described("9:3", 64)
    cells = load_suite("methods").cells(lambda _: held, capture="any.safetensors")
    assert {cell.seq_len for cell in cells} == {16384, 65536, LONGEST}
    for cell in cells:
        method, problem = cell.make_method(), cell.problem("cuda")
        assert method.unsupported(problem) is None
        assert method.cost(problem).workspace_bytes < 8 * 2**30
        if method.kind == "dense" or cell.method in ("flex", "fa4_blocks"):
            continue
        in_torch = method.backend(problem) == "reference+triton"
        assert in_torch or method.backend(problem) == "triton"
        assert in_torch == (cell.method in BY_RULE_IN_TORCH)


def test_compile_suite_calls_each_cell_once(tmp_path: Path) -> None:
    compiling = script("compile_suite")
    path = tmp_path / "two.toml"
    path.write_text(
        'name = "two"\n[[grid]]\nseq = "128, 256"\ninput = "capture"\ntop_k = [1, 2]\nquery_tile = 64\n'
        'methods = ["dense:flash", "flat", {method = "xattention", top_p = 0.9}]\n'
    )
    cells = load_suite(str(path)).cells(lambda _: compiling.described("4:2", 16), capture="any.safetensors")
    groups = compiling.grouped(cells)
    assert sorted(cell.identity for group in groups for cell in group) == sorted(cell.identity for cell in cells)
    assert [len(group) for group in groups] == [4, 2, 2]
    assert compiling.compile_cells((groups[0], "cpu")).startswith("flat, tile 64: 4 of 4 cells called")
    broken = [groups[0][0].model_copy(update={"kv_heads": 3})]
    assert compiling.compile_cells((broken, "cpu")).startswith("flat, tile 64: ")
    assert "called" not in compiling.compile_cells((broken, "cpu"))


@pytest.mark.parametrize("direction", ["train", "backward", "decode"])
def test_compile_suite_makes_a_cells_own_pass(direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradients of the passes that have them, and a step's choice by itself."""
    compiling = script("compile_suite")
    path = tmp_path / "passes.toml"
    path.write_text(
        f'name = "passes"\n[[grid]]\nseq = "256"\npass = "{direction}"\ninput = "normal"\nheads = "2:1"\nhead_dim = 16\n'
        'top_k = 2\nmethods = ["pyramid"]\n'
    )
    (cell,) = load_suite(str(path)).cells()
    made: list[str] = []
    for owner, name in ((Training, "backward"), (Training, "train"), (type(cell.make_method()), "select")):
        whole = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, name=name, whole=whole: made.append(name) or whole(*given))
    assert list(compiling.calls([cell], "cpu")) == [cell]
    assert made[0] == "select"
    assert (direction in made) is (direction != "decode")


def test_position_loss_is_the_models_own_loss() -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(50, (1, 40))
    losses = script("position_loss").token_losses(model, ids)
    with torch.no_grad():
        whole = model(ids, labels=ids).loss
    assert losses.shape == (39,)
    torch.testing.assert_close(losses.mean().float(), whole)


def test_equal_mass_refuses_a_part_of_what_stands_only_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dynamic.safetensors"
    metadata = CaptureMetadata(
        model="m", model_sha256=None, text="t", text_sha256="", tokens=64, layers=(0,), heads=2, kv_heads=1, head_dim=16,
        head_dim_v=16, rope_theta=None, scale=0.25, created_by="test", rope_scaling=RopeScaling("dynamic", 1.0, 32),
    )  # fmt: skip
    with CaptureWriter(path, 1) as writer:
        writer.add(0, torch.randn(1, 2, 64, 16), torch.randn(1, 1, 64, 16), torch.randn(1, 1, 64, 16))
        writer.finish(metadata)
    monkeypatch.setattr(sys, "argv", ["bench_equal_mass.py", str(path), "--tokens", "48", "--device", "cpu"])
    with pytest.raises(SystemExit, match="stands only as a whole"):
        script("bench_equal_mass").main()


def test_the_one_visit_says_how_it_is_called() -> None:
    called = subprocess.run(["sh", str(SCRIPTS / "long_context.sh")], capture_output=True, text=True, check=False)
    assert (called.returncode, called.stdout) == (2, "")
    assert called.stderr.startswith("usage: ")


PYTHON = """#!/bin/sh
echo "$*" >>"{log}"
case "$*" in
*" capture "*)
    while [ "$1" != --out ]; do shift; done
    {make} "$2"
    ;;
esac
"""


def one_visit(folder: Path, make: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The script with a stand-in of Python, and what that was asked."""
    log, python = folder / "log", folder / "python"
    python.write_text(PYTHON.format(log=log, make=make))
    python.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(python), "CAPTURES": str(folder)}
    command = ["sh", str(SCRIPTS / "long_context.sh"), str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done, [
        line.replace(f"{folder}/", "").removeprefix("-m pyramidbench ") for line in log.read_text().splitlines()
    ]


def test_each_length_comes_from_the_smallest_capture_that_holds_it(tmp_path: Path) -> None:
    done, asked = one_visit(tmp_path, "touch")
    assert done.returncode == 0, done.stderr
    files = [f"long-context-{tokens}-layer-13.safetensors" for tokens in ("64k", "256k")]
    told = [" ".join(line.split()[:6]) for line in asked if "compile_suite" not in line and "bench_" not in line]
    assert told == [
        "capture smollm2 --tokens 64k --layers 13",
        "capture smollm2 --tokens 256k --layers 13",
        f"sweep methods --input {files[0]} --seq 64k",
        f"sweep methods --input {files[1]} --seq 256k",
        f"sweep methods --input {files[0]} --seq 16k",
        *(f"report out/methods-{length} --out out/report-{length}" for length in ("64k", "256k", "16k")),
    ]
    assert [line.split()[1:4] for line in asked if "bench_equal_mass" in line] == [
        [files[0], "--tokens", "64k"], [files[1], "--tokens", "256k"],
    ]  # fmt: skip
    for length in ("16k", "64k", "256k"):
        load_suite("methods").at_lengths(parse_axis(length, "--seq"))
    again = one_visit(tmp_path, "false")[1][len(asked) :]
    assert sorted(again) == sorted(line for line in asked if not line.startswith("capture"))


def test_nothing_is_measured_without_a_capture(tmp_path: Path) -> None:
    done, asked = one_visit(tmp_path, "false")
    assert done.returncode == 1
    assert "no capture of 64k tokens" in done.stderr
    assert not any("sweep" in line for line in asked)


def test_a_runs_manifest_names_no_folder_of_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where folders are given as relative ones, so are they handed on: what a recorded run must have."""
    monkeypatch.chdir(tmp_path)
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(PYTHON.format(log=log, make="touch"))
    python.chmod(0o755)
    (tmp_path / "captures").mkdir()
    environment = {**os.environ, "PYTHON": str(python), "CAPTURES": "captures", "EQUAL_MASS": ""}
    subprocess.run(["sh", str(SCRIPTS / "long_context.sh"), "out"], check=True, env=environment, capture_output=True)
    asked = [line for line in log.read_text().splitlines() if line.startswith("-m pyramidbench")]
    assert sum(" sweep " in line for line in asked) == 3
    assert not any(word.startswith("/") for line in asked for word in line.split())
    assert not any("bench_equal_mass" in line for line in log.read_text().splitlines())
