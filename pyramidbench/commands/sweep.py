"""`pyramidbench sweep`: time, memory and quality of methods over lengths, budgets and level counts."""

from __future__ import annotations

import typer

from pyramidbench.flags import (
    AsJson,
    Batch,
    BlockSize,
    CacheState,
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
    PartOf,
    Pass,
    QueryTile,
    Seed,
    Seq,
    SeqQ,
    Sparsity,
    SuiteName,
    Timing,
    TopK,
)


def sweep(
    suite: SuiteName = None, seq: Seq = None, method: Methods = None, input: Input = None, top_k: TopK = None,
    sparsity: Sparsity = None, keep: Keep = None, levels: Levels = None, block_size: BlockSize = None,
    query_tile: QueryTile = None, heads: Heads = None, head_dim: HeadDim = None, batch: Batch = None,
    dtype: DType = None, seq_kv: SeqQ = None, layers: Layers = None, pass_: Pass = None, causal: Causal = True,
    seed: Seed = 0, device: DeviceName = "auto", out: Out = None, fresh: Fresh = False, dry_run: DryRun = False,
    timing: Timing = "2s", cache: CacheState = "cold", cell_budget: CellBudget = "120s", part: PartOf = None,
    json: AsJson = False,
) -> None:  # fmt: skip
    """Measure methods over lengths, budgets and level counts: time, memory and quality in one row per cell."""
    from pyramidbench.commands.measuring import exit_code, measured
    from pyramidbench.commands.report import write
    from pyramidbench.output import console, print_json, say
    from pyramidbench.render import show_results
    from pyramidbench.suite import choose_suite

    axes = {
        "seq": seq, "method": method, "top_k": top_k, "sparsity": sparsity, "keep": keep, "levels": levels,
        "block_size": block_size, "query_tile": query_tile, "heads": heads, "head_dim": head_dim, "batch": batch,
        "dtype": dtype, "seq_kv": seq_kv, "layers": layers, "pass_": pass_,
    }  # fmt: skip
    chosen = choose_suite(suite, axes, input=input, causal=causal, seed=seed, timed=True)
    run = measured(
        chosen, input if suite else None, device, out, fresh, dry_run, timing, cell_budget, json, cache, part
    )
    if run is None:
        return
    if json:
        print_json(run.frame.to_json(orient="records"))
    else:
        shown_on = console()
        show_results(shown_on, run.frame)
        say(shown_on, f"Run: {run.path}")
        say(shown_on, f"Report: {write([run], None)}")
    raise typer.Exit(exit_code(run.records))
