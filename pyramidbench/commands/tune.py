"""`pyramidbench tune`: the settings of a method that keep a wanted mass in the least time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from pyramidbench.errors import UserError
from pyramidbench.flags import (
    AsJson,
    Batch,
    BlockSize,
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
    Out,
    QueryTile,
    Seed,
    Seq,
    Timing,
    TopK,
)

if TYPE_CHECKING:
    from pyramidbench.tuning import Choice

Method = Annotated[str, Option("--method", help="name or name:preset", rich_help_panel="Axes")]
Vary = Annotated[list[str] | None, Option(help="a parameter and its values, as beam=1,2,4; may be repeated")]
Mass = Annotated[float, Option(min=0, max=1, help="share of the attention that a setting must keep")]


def tune(
    seq: Seq = None, method: Method = "pyramid", vary: Vary = None, mass: Mass = 0.95, input: Input = None,
    top_k: TopK = None, keep: Keep = None, levels: Levels = None, block_size: BlockSize = None,
    query_tile: QueryTile = None, heads: Heads = None, head_dim: HeadDim = None, batch: Batch = None, dtype: DType = None,
    layers: Layers = None, seed: Seed = 0, device: DeviceName = "auto", out: Out = None, fresh: Fresh = False,
    dry_run: DryRun = False, timing: Timing = "2s", cell_budget: CellBudget = "120s", json: AsJson = False,
) -> None:  # fmt: skip
    """Sweep the settings of a method, and print the fastest one of each length that keeps the wanted attention mass."""
    from pyramidbench.commands.measuring import exit_code, measured
    from pyramidbench.inputs import measures_quality
    from pyramidbench.output import console, print_json, say
    from pyramidbench.render_tools import show_choices
    from pyramidbench.tuning import USUAL_TOP_K, choose, parse_values, tuning_suite

    if seq is None:
        raise UserError("no lengths to tune for; give --seq, as 4k..32k.")
    if input is not None and not measures_quality(input):
        raise UserError(
            f"input '{input}' is random: nothing can be kept or lost of it. Use topics, needles, or a capture."
        )
    values = parse_values(vary or [], method)
    given = {
        "seq": seq, "top_k": top_k or (None if keep else USUAL_TOP_K), "keep": keep, "levels": levels, "block_size": block_size,
        "query_tile": query_tile, "heads": heads, "head_dim": head_dim, "batch": batch, "dtype": dtype, "layers": layers,
    }  # fmt: skip
    axes = {name: value for name, value in given.items() if value is not None}
    suite = tuning_suite(method, values, axes, input=[input] if input else [], seed=seed)
    run = measured(suite, None, device, out, fresh, dry_run, timing, cell_budget, json)
    if run is None:
        return
    choices = choose(run.frame, mass)
    if json:
        print_json([_json(choice, list(values)) for choice in choices])
    else:
        show_choices(console(), choices, mass, list(values))
        say(console(), f"Run: {run.path}")
    raise typer.Exit(exit_code(run.records))


def _json(choice: Choice, varied: list[str]) -> dict[str, object]:
    from pyramidbench.tuning import setting_text

    numbers = ("latency_s", "speedup", "mass_kept", "output_error")
    return {
        "seq_len_kv": choice.seq_len_kv,
        "settings": choice.settings,
        "setting": setting_text(choice.row, varied) if choice.row else None,
        **{name: (choice.row or {}).get(name) for name in numbers},
    }
