"""`pyramidbench evaluate`: what a language model still can do with its attention swapped for a method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pyramidbench.flags import AsJson, DeviceName, DryRun, Fresh, Text


def evaluate(
    tasks: Annotated[str, Argument(help="perplexity, retrieval, commonsense, a task's name, lm-eval:NAME; a list")] = (
        "perplexity,single_needle"
    ),
    model: Annotated[str, Option(help="smollm2, a Hugging Face name, a folder, or a .gguf file")] = "smollm2",
    method: Annotated[list[str] | None, Option(help="name, name:preset or file.py, comma-separated")] = None,
    keep: Annotated[Text, Option(help="budgets: 5%,10%, 1024tok, 16blk", rich_help_panel="Budget")] = None,
    top_k: Annotated[Text, Option(help="blocks kept by rank: 8,16", rich_help_panel="Budget")] = None,
    keep_of: Annotated[
        str, Option(help="tokens that a share is of, however long the prompt", rich_help_panel="Budget")
    ] = "8k",
    query_tile: Annotated[
        int | None, Option(min=1, help="queries that share a set; the method's own without it")
    ] = None,
    dense_layers: Annotated[Text, Option(help="layers that keep dense attention, as 0,1")] = None,
    length: Annotated[str, Option(help="lengths of texts and prompts in tokens: 1k..8k")] = "2k",
    depths: Annotated[int, Option(min=1, help="depths of a needle, evenly spaced from start to end")] = 5,
    samples: Annotated[int, Option(min=1, help="samples per text, length and depth, or questions of a set")] = 1,
    shots: Annotated[str, Option(help="tokens of worked examples before a commonsense question: 0,4k,7k")] = "0",
    text: Annotated[
        str, Option(help="texts: python-stdlib, a novel of Jane Austen such as emma, or files")
    ] = "python-stdlib",
    seed: Annotated[int, Option(min=0, help="seed of every draw")] = 0,
    gguf_file: Annotated[Text, Option(help="name of a GGUF file in a folder or repository")] = None,
    task_path: Annotated[Path | None, Option(help="a folder with YAML tasks of your own for lm-eval")] = None,
    device: DeviceName = "auto",
    out: Annotated[Path | None, Option(help="the evaluation's folder; the same command goes on there")] = None,
    fresh: Fresh = False,
    dry_run: DryRun = False,
    fetch: Annotated[Text, Option(help="fetch data: bigbench, evals, r-cran-janeaustenr, or all; and stop")] = None,
    json: AsJson = False,
) -> None:
    """Ask a language model questions with its attention swapped: perplexity, retrieval, recall, commonsense."""
    from pyramidbench.evaluation.request import Request, fetch_data, prepare
    from pyramidbench.output import console, print_json, say

    told = console(error=json)
    if fetch is not None:
        fetch_data(fetch, lambda line: say(told, line))
        return
    request = Request(
        tasks=tasks, model=model, method=tuple(method or ["dense,pyramid,flat,sliding_window"]), keep=keep, top_k=top_k,
        keep_of=keep_of, query_tile=query_tile, dense_layers=dense_layers, length=length, depths=depths, samples=samples,
        shots=shots, text=text, seed=seed, gguf_file=gguf_file, task_path=task_path, device=device, out=out, fresh=fresh,
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
    say(told, f"Evaluation: {done.path}", f"Report: {write_report(done)}")
