"""The command line: parses, calls one function, shows. No measuring and no formatting happens here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from typer import Argument, Option

from pyramidbench.errors import UserError
from pyramidbench.flags import (
    AsJson,
    Batch,
    BlockSize,
    Causal,
    CellBudget,
    DeviceName,
    DryRun,
    DType,
    Fresh,
    HeadDim,
    Heads,
    Input,
    Keep,
    Layers,
    Levels,
    Methods,
    Out,
    Pass,
    QueryTile,
    Seed,
    Seq,
    SeqQ,
    Sparsity,
    SuiteName,
    Text,
    Timing,
    TopK,
)

if TYPE_CHECKING:
    from rich.console import Console

    from pyramidbench.plan import PlannedCell
    from pyramidbench.store import Run
    from pyramidbench.suite import Suite

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Does sparse attention pay? Sweeps attention methods, and shows speed, memory and quality in one row.",
)

USAGE_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__base__)
"""Click's UsageError, wherever it is: newer versions of typer carry a copy of click inside."""
INTERRUPTED = 130


@app.command()
def sweep(
    suite: SuiteName = None, seq: Seq = None, method: Methods = None, input: Input = None, top_k: TopK = None,
    sparsity: Sparsity = None, keep: Keep = None, levels: Levels = None, block_size: BlockSize = None,
    query_tile: QueryTile = None, heads: Heads = None, head_dim: HeadDim = None, batch: Batch = None,
    dtype: DType = None, seq_kv: SeqQ = None, layers: Layers = None, pass_: Pass = None, causal: Causal = True,
    seed: Seed = 0, device: DeviceName = "auto", out: Out = None, fresh: Fresh = False, dry_run: DryRun = False,
    timing: Timing = "2s", cell_budget: CellBudget = "120s", json: AsJson = False,
) -> None:  # fmt: skip
    """Measure methods over lengths, budgets and level counts: time, memory and quality in one row per cell."""
    from pyramidbench.suite import choose_suite

    axes = {
        "seq": seq, "method": method, "top_k": top_k, "sparsity": sparsity, "keep": keep, "levels": levels,
        "block_size": block_size, "query_tile": query_tile, "heads": heads, "head_dim": head_dim, "batch": batch,
        "dtype": dtype, "seq_kv": seq_kv, "layers": layers, "pass_": pass_,
    }  # fmt: skip
    chosen = choose_suite(suite, axes, input=input, causal=causal, seed=seed, timed=True)
    run = _measured(chosen, input if suite else None, device, out, fresh, dry_run, timing, cell_budget, json)
    if run is None:
        return
    from pyramidbench.render import show_results

    if json:
        _print_json(run.frame.to_json(orient="records"))
    else:
        console = _console()
        show_results(console, run.frame)
        _say(console, f"Run: {run.path}", *_report([run], None))
    raise typer.Exit(exit_code(run))


@app.command()
def recall(
    suite: SuiteName = None, seq: Seq = None, method: Methods = None, input: Input = None, top_k: TopK = None,
    sparsity: Sparsity = None, keep: Keep = None, levels: Levels = None, block_size: BlockSize = None,
    query_tile: QueryTile = None, layers: Layers = None, seed: Seed = 0, device: DeviceName = "auto", out: Out = None,
    fresh: Fresh = False, dry_run: DryRun = False, cell_budget: CellBudget = "120s", json: AsJson = False,
    by: Annotated[Text, Option(help="break down by: length,budget,levels,tile,block,layer,head")] = None,
) -> None:  # fmt: skip
    """Measure quality only: recall of the important blocks against exact Top-K, attention mass kept, output error."""
    from pyramidbench.recall_table import check_breakdowns
    from pyramidbench.suite import choose_suite

    breakdowns = [part.strip() for part in (by or "").split(",") if part.strip()]
    check_breakdowns(breakdowns)
    if input == "normal":
        raise UserError("input 'normal' is random: it measures no quality. Use topics, needles, or a capture.")
    axes = {
        "seq": seq, "method": method or ["pyramid,pyramid:paper,flat,flat:exact,sliding_window,exact_topk"],
        "top_k": top_k, "sparsity": sparsity, "keep": keep, "levels": levels, "block_size": block_size,
        "query_tile": query_tile, "layers": layers,
    }  # fmt: skip
    if suite is not None:
        axes["method"] = method
    chosen = choose_suite(suite, axes, input=input, causal=True, seed=seed, timed=False)
    run = _measured(chosen, input if suite else None, device, out, fresh, dry_run, "2s", cell_budget, json)
    if run is None:
        return
    from pyramidbench.render import show_recall

    if json:
        _print_json(run.frame.to_json(orient="records"))
    else:
        show_recall(_console(), run.frame, breakdowns)
        _say(_console(), f"Run: {run.path}")
    raise typer.Exit(exit_code(run))


@app.command()
def report(
    run: Annotated[Path, Argument(help="a run's folder")],
    out: Annotated[Path | None, Option(help="where the report goes; reports/<name of the run> without it")] = None,
) -> None:
    """Write report.html, the figures, summary.md and results.csv of a run."""
    from pyramidbench.store import load_run

    _say(_console(), *_report([load_run(run)], out))


@app.command()
def capture(
    model: Annotated[str, Argument(help="smollm2, a Hugging Face name, a folder, or a .gguf file")],
    text: Annotated[Path | None, Option(help="a UTF-8 text; Python's own standard library without it")] = None,
    out: Annotated[Path, Option(help="the file to write, ending in .safetensors")] = Path("capture.safetensors"),
    layers: Annotated[Text, Option(help="layers, as 0,13,27; five evenly spaced ones without it")] = None,
    tokens: Annotated[str, Option(help="how much of the text, as 8k")] = "8k",
    dtype: Annotated[str, Option(help="what is stored: float16, bfloat16 or float32")] = "float16",
    gguf_file: Annotated[Text, Option(help="name of a GGUF file in a folder or repository")] = None,
    fetch_only: Annotated[bool, Option("--fetch-only", help="fetch and check the model, and stop")] = False,
) -> None:
    """Record q, k and v of a real language model's attention on a text, for `sweep --input FILE`."""
    from pyramidbench import capture as capturing
    from pyramidbench import model_files
    from pyramidbench.axes import parse_axis
    from pyramidbench.units import gibibytes

    console = _console()
    if fetch_only:
        found = model_files.find_model(model, gguf_file, lambda line: _say(console, line))
        _say(console, f"{found.name} is ready: {found.location}")
        return
    chosen = None if layers is None else parse_axis(layers, "--layers", minimum=0)
    done = capturing.capture(
        model, text, out, chosen, parse_axis(tokens, "--tokens")[0], dtype, gguf_file, progress=lambda line: _say(console, line)
    )  # fmt: skip
    _say(console, f"{done.path}: {gibibytes(done.size_bytes)} in {done.seconds:.0f} s")


@app.command("list")
def list_things(
    what: Annotated[str, Argument(help="methods, suites or inputs")],
    name: Annotated[Text, Argument(help="one of them, in full")] = None,
    json: AsJson = False,
) -> None:
    """Show the methods, suites or inputs that there are, or one of them in full."""
    from pyramidbench.catalogue import catalogue, describe_one
    from pyramidbench.errors import unknown
    from pyramidbench.render import show_methods, show_table

    if what not in ("methods", "suites", "inputs"):
        raise unknown("thing to list", what, ("methods", "suites", "inputs"))
    if name is not None:
        _say(_console(), describe_one(what, name))
        return
    entries = catalogue(what)
    if json:
        _print_json([entry.model_dump() for entry in entries])
    elif what == "methods":
        show_methods(_console(), [entry.name for entry in entries])
    else:
        show_table(
            _console(), what.capitalize(), [[entry.name, entry.text] for entry in entries], ["name", "what it is"]
        )


@app.command()
def doctor(device: DeviceName = "auto", json: AsJson = False) -> None:
    """Look at this machine: device, packages, methods, disk. Exit code 0 only if a sweep can run."""
    from pyramidbench.doctor import examine
    from pyramidbench.render import show_table

    findings = examine(device)
    if json:
        _print_json([finding.model_dump() for finding in findings])
    else:
        rows = [[f.subject, "ok" if f.fine else "NO", f.found, f.advice] for f in findings]
        show_table(_console(), "Doctor", rows, ["what", "state", "found", "reason"])
    raise typer.Exit(0 if all(finding.fine for finding in findings) else 6)


def _measured(
    suite: Suite, capture: Text, device: str, out: Path | None, fresh: bool, dry_run: bool, timing: str,
    cell_budget: str, as_json: bool,
) -> Run | None:  # fmt: skip
    """Plan and run a suite, with progress; None after a dry run."""
    from pyramidbench.axes import parse_duration
    from pyramidbench.progress import SweepProgress
    from pyramidbench.render import show_plan
    from pyramidbench.sweeping import make_plan, run_plan

    made = make_plan(
        suite, capture=capture, device=device, timing_s=parse_duration(timing, "--timing"),
        cell_budget_s=parse_duration(cell_budget, "--cell-budget"),
    )  # fmt: skip
    if dry_run and as_json:
        _print_json([_planned_json(planned) for planned in made.cells])
    elif dry_run:
        show_plan(_console(), made.cells)
    if dry_run:
        return None
    with SweepProgress(_console(error=as_json)) as progress:
        return run_plan(made, out=out, fresh=fresh, reporter=progress)


def _planned_json(planned: PlannedCell) -> dict[str, object]:
    estimate = {"seconds": planned.seconds, "memory_bytes": planned.memory_bytes}
    return {**planned.cell.model_dump(), "verdict": planned.verdict, "reason": planned.reason, **estimate}


def _report(runs: Sequence[Run], out: Path | None) -> list[str]:
    """Write the report of a run; returns a line that says where it lies."""
    from pyramidbench.report import write_report

    (run,) = runs
    folder = out or Path("reports") / run.path.resolve().name
    try:
        write_report(run.frame, run.manifest.model_dump(), run.device.model_dump(), folder)
    except OSError as error:
        raise UserError(
            f"cannot write the report to '{folder}': {error.strerror or error}; give another --out."
        ) from None
    return [f"Report: {folder / 'report.html'}"]


def exit_code(run: Run) -> int:
    """0 all fine, 3 some cells failed, 4 a gate failed, 6 nothing was measured."""
    from pyramidbench.record import MEASURED

    statuses = {record.status for record in run.records}
    if "incorrect" in statuses:
        return 4
    if not statuses & set(MEASURED):
        return 6
    return 3 if statuses & {"oom", "timeout", "crashed", "cuda_error"} else 0


def _console(*, error: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=error)


def _say(console: Console, *lines: str) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_json(value: object) -> None:
    import json

    sys.stdout.write((value if isinstance(value, str) else json.dumps(value, indent=1)) + "\n")


def main() -> None:
    """Entry point of the command: a user's mistake is one line on stderr and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except UserError as error:
        code = _fail(str(error), error.exit_code)
    except USAGE_ERROR as error:
        code = _fail(error.format_message(), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        _fail("interrupted; what was measured is safe, and the same command goes on from there.", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code
