"""`pyramidbench recall`: quality only, with its breakdowns."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from pyramidbench.errors import UserError
from pyramidbench.flags import (
    AsJson,
    BlockSize,
    CellBudget,
    DeviceName,
    DryRun,
    Fresh,
    Input,
    Keep,
    Layers,
    Levels,
    Methods,
    Out,
    QueryTile,
    Seed,
    Seq,
    Sparsity,
    SuiteName,
    Text,
    TopK,
)

By = Annotated[Text, Option(help="break down by: length,budget,levels,tile,block,layer,head")]


def recall(
    suite: SuiteName = None, seq: Seq = None, method: Methods = None, input: Input = None, top_k: TopK = None,
    sparsity: Sparsity = None, keep: Keep = None, levels: Levels = None, block_size: BlockSize = None,
    query_tile: QueryTile = None, layers: Layers = None, seed: Seed = 0, device: DeviceName = "auto", out: Out = None,
    fresh: Fresh = False, dry_run: DryRun = False, cell_budget: CellBudget = "120s", json: AsJson = False,
    by: By = None,
) -> None:  # fmt: skip
    """Measure quality only: recall of the important blocks against exact Top-K, attention mass kept, output error."""
    from pyramidbench.commands.measuring import exit_code, measured
    from pyramidbench.output import console, print_json, say
    from pyramidbench.recall_table import check_breakdowns
    from pyramidbench.render import show_recall
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
    run = measured(chosen, input if suite else None, device, out, fresh, dry_run, "2s", cell_budget, json)
    if run is None:
        return
    if json:
        print_json(run.frame.to_json(orient="records"))
    else:
        show_recall(console(), run.frame, breakdowns)
        say(console(), f"Run: {run.path}")
    raise typer.Exit(exit_code(run.records))
