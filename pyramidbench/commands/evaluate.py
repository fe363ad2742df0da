"""`pyramidbench evaluate`: what a language model still can do with its attention swapped for a method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pyramidbench.flags import AsJson, DeviceName, DryRun, Fresh, Out, Seed, Text

Tasks = Annotated[str, Argument(help="perplexity, retrieval, commonsense, a task's name, lm-eval:NAME; a list")]
Model = Annotated[str, Option(help="smollm2, a Hugging Face name, a folder, or a .gguf file")]
Methods = Annotated[list[str] | None, Option("--method", help="name, name:preset or file.py, comma-separated")]
Keep = Annotated[Text, Option(help="budgets: 5%,10%, 1024tok, 16blk", rich_help_panel="Budget (one of two)")]
TopK = Annotated[Text, Option(help="blocks kept by rank: 8,16", rich_help_panel="Budget (one of two)")]
KeepOf = Annotated[str, Option(help="tokens that a share is of, however long the prompt")]
QueryTile = Annotated[int | None, Option(min=1, help="queries that share a set; the method's own without it")]
DenseLayers = Annotated[Text, Option(help="layers that keep dense attention, as 0,1")]
Length = Annotated[str, Option(help="lengths of texts and prompts in tokens: 1k..8k")]
Depths = Annotated[int, Option(min=1, help="depths of a needle, evenly spaced from start to end")]
Samples = Annotated[int, Option(min=1, help="samples per text, length and depth, or questions of a set")]
Shots = Annotated[str, Option(help="tokens of worked examples before a commonsense question: 0,4k,8k")]
TextName = Annotated[str, Option(help="texts: python-stdlib, a novel of Jane Austen such as emma, or files")]
GgufFile = Annotated[Text, Option(help="name of a GGUF file in a folder or repository")]
TaskPath = Annotated[Path | None, Option(help="a folder with YAML tasks of your own for lm-eval")]
Dtype = Annotated[str, Option(help="of weights and activations: auto, float32, float16, bfloat16")]
Minutes = Annotated[float | None, Option(min=0, help="stop after so long; the same command goes on there")]
Fetch = Annotated[Text, Option(help="fetch data: bigbench, evals, r-cran-janeaustenr, or all; and stop")]

Report = Annotated[
    list[Path] | None, Option(help="write one report of these evaluations' folders, and stop; repeatable")
]

Times = Annotated[Path | None, Option(help="with --report: an evaluation made alone on the device, for the times")]


def evaluate(
    tasks: Tasks = "perplexity,single_needle", model: Model = "smollm2", method: Methods = None, keep: Keep = None,
    top_k: TopK = None, keep_of: KeepOf = "8k", query_tile: QueryTile = None, dense_layers: DenseLayers = None,
    length: Length = "2k", depths: Depths = 5, samples: Samples = 1, shots: Shots = "0", text: TextName = "python-stdlib",
    seed: Seed = 0, gguf_file: GgufFile = None, task_path: TaskPath = None, device: DeviceName = "auto",
    dtype: Dtype = "auto", minutes: Minutes = None, out: Out = None, fresh: Fresh = False, dry_run: DryRun = False,
    fetch: Fetch = None, report: Report = None, times: Times = None, json: AsJson = False,
) -> None:  # fmt: skip
    """Ask a language model questions with its attention swapped: perplexity, retrieval, recall, commonsense."""
    from pyramidbench.evaluation.request import Request, fetch_data, prepare
    from pyramidbench.output import console, print_json, say

    told = console(error=json)
    if fetch is not None:
        fetch_data(fetch, lambda line: say(told, line))
        return
    if report:
        from pyramidbench.evaluation.journal import load_evaluation
        from pyramidbench.evaluation.report import write_report

        timed = None if times is None else load_evaluation(times)
        say(told, f"Report: {write_report([load_evaluation(folder) for folder in report], out, timed)}")
        return
    request = Request(
        tasks=tasks, model=model, method=tuple(method or ["dense,pyramid,flat,sliding_window"]), keep=keep, top_k=top_k,
        keep_of=keep_of, query_tile=query_tile, dense_layers=dense_layers, length=length, depths=depths, samples=samples,
        shots=shots, text=text, seed=seed, gguf_file=gguf_file, task_path=task_path, device=device, dtype=dtype,
        minutes=minutes, out=out, fresh=fresh,
    )  # fmt: skip
    plan = prepare(request)
    if dry_run:
        say(told, *plan.describe())
        return
    done = plan.run(lambda line: say(told, line))
    from pyramidbench.evaluation.report import show, write_report

    if json:
        print_json(done.frame.to_json(orient="records"))
        return
    show(told, done)
    say(told, f"Evaluation: {done.path}", f"Report: {write_report([done])}")
