"""`pyramidbench profile`: one cell in depth."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pyramidbench.errors import UserError
from pyramidbench.flags import (
    AsJson,
    Batch,
    BlockSize,
    Causal,
    DeviceName,
    DType,
    HeadDim,
    Heads,
    Input,
    Keep,
    Layers,
    Levels,
    Pass,
    QueryTile,
    Seed,
    Seq,
    SeqQ,
    Sparsity,
    Text,
    TopK,
)

if TYPE_CHECKING:
    import torch

    from pyramidbench.cell import Cell
    from pyramidbench.profiling.profile import Profile

INCORRECT = 4
RunFolder = Annotated[Path | None, Argument(metavar="[RUN]", help="a run; with --cell, one of its cells is profiled")]
CellName = Annotated[Text, Option("--cell", help="the cell's identity in RUN, or its beginning (column `cell`)")]
Method = Annotated[Text, Option("--method", help="name, name:preset or file.py", rich_help_panel="Axes")]
Out = Annotated[Path | None, Option(help="the profile's folder; profiles/<time>-<method>-<length> without it")]
Timing = Annotated[str, Option("--timing", help="time of repeated calls for each kind of time, as 2s")]
Ncu = Annotated[
    bool, Option("--ncu", help="hardware counters: print Nsight Compute's command, run it where it is, read them")
]
Once = Annotated[bool, Option("--once", hidden=True, help="what --ncu runs: one warm call between profiler marks")]


def profile(
    run: RunFolder = None, cell: CellName = None, seq: Seq = None, method: Method = None, input: Input = None,
    top_k: TopK = None, sparsity: Sparsity = None, keep: Keep = None, levels: Levels = None, block_size: BlockSize = None,
    query_tile: QueryTile = None, heads: Heads = None, head_dim: HeadDim = None, batch: Batch = None, dtype: DType = None,
    seq_kv: SeqQ = None, layers: Layers = None, pass_: Pass = None, causal: Causal = True, seed: Seed = 0,
    device: DeviceName = "auto", out: Out = None, timing: Timing = "2s", ncu: Ncu = False, once: Once = False,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Profile one cell: time, launches and rates of its stages and kernels, a trace for Perfetto, and a roofline."""
    from pyramidbench.axes import parse_duration
    from pyramidbench.device import pick_device
    from pyramidbench.profiling.choosing import cell_of_flags, cell_of_run

    axes = {
        "seq": seq, "method": [method] if method else ["pyramid"], "top_k": top_k, "sparsity": sparsity, "keep": keep,
        "levels": levels, "block_size": block_size, "query_tile": query_tile, "heads": heads, "head_dim": head_dim,
        "batch": batch, "dtype": dtype, "seq_kv": seq_kv, "layers": layers, "pass_": pass_,
    }  # fmt: skip
    if (run is None) != (cell is None):
        raise UserError("a run and --cell belong together; give both, or the axes of one cell, such as --seq 8k.")
    if run is not None and cell is not None:
        given = {name: value for name, value in axes.items() if name != "method"} | {"method": method, "input": input}
        chosen = cell_of_run(run, cell, given)
    else:
        chosen = cell_of_flags(axes, input=input, causal=causal, seed=seed)
    target = pick_device(device)
    if once:
        _call_once(chosen, target)
        return
    _profile(chosen, target, out, parse_duration(timing, "--timing"), ncu, json)


def _profile(cell: Cell, device: torch.device, out: Path | None, budget_s: float, ncu: bool, json: bool) -> None:
    from pyramidbench.gate import GateFailure
    from pyramidbench.output import console, print_json, say
    from pyramidbench.profiling.files import counters_in, profile_folder, with_counters, write_profile
    from pyramidbench.profiling.profile import profile_cell
    from pyramidbench.render_tools import show_profile

    folder = out or profile_folder(cell)
    try:
        counters_in(folder)  # what cannot be read is said before minutes of work, and not after
        made = profile_cell(cell, device, folder, budget_s)
        told = _counters(made, folder) if ncu else []
        made = with_counters(made, folder)
        told += _read(made, folder)
        files = write_profile(made, folder)
    except GateFailure as failure:
        say(console(error=True), f"error: {cell.method} is wrong on this cell, so it has no speed: {failure}")
        raise typer.Exit(INCORRECT) from None
    except OSError as error:
        raise UserError(f"cannot write to '{folder}': {error.strerror or error}; give another --out.") from None
    if json:
        print_json(made.model_dump_json(indent=1))
    else:
        show_profile(console(), made)
    say(console(error=json), *told, f"Profile: {folder} ({', '.join(path.name for path in files)})")
    say(console(error=json), f"Trace: open {files[0]} at ui.perfetto.dev, or in chrome://tracing")


def _counters(made: Profile, folder: Path) -> list[str]:
    """Collect hardware counters where that is possible; lines that say how, and what came of it."""
    from pyramidbench.profiling import ncu
    from pyramidbench.profiling.files import COUNTERS

    log = folder / COUNTERS
    flags = [flag for flag in sys.argv[1:] if flag not in ("--ncu", "--json")]
    program = [sys.executable, "-m", "pyramidbench", *flags, "--once"]
    lines = [f"Counters: {ncu.printed(program, log)}"]
    if made.device.kind != "cuda":
        return [*lines, "Counters: none on a CPU; the command is for a machine with an NVIDIA GPU."]
    failed = None if log.is_file() else ncu.collect(program, log)
    if failed:
        return [
            *lines,
            f"Counters: {failed}. Run that command where it works, then this one again with --out {folder}.",
        ]
    return lines


def _read(made: Profile, folder: Path) -> list[str]:
    """How many kernels have counters, where there are any to read."""
    from pyramidbench.profiling.files import COUNTERS

    if not (folder / COUNTERS).is_file():
        return []
    rows = sum(kernel.source == "ncu" for kernel in made.kernels)
    return [f"Counters: read from {folder / COUNTERS}, of {rows} of the {len(made.kernels)} rows of kernels"]


def _call_once(cell: Cell, device: torch.device) -> None:
    from pyramidbench.profiling.call import ProfiledCall
    from pyramidbench.profiling.spans import call_between_marks

    call_between_marks(ProfiledCall.of(cell, device), device)
