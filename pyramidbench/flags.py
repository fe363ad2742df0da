"""Flags of the command line that several commands share: name, help text and panel of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

Text = str | None
SuiteName = Annotated[Text, Argument(metavar="[SUITE]", help="a suite's name, or a TOML file; without it, axes below")]
Seq = Annotated[
    Text,
    Option(
        help="lengths in tokens: 4k..256k, 4k..64k:x4, 1k,4k,16k; of a suite, some of its own", rich_help_panel="Axes"
    ),
]
SeqQ = Annotated[
    Text, Option("--seq-kv", help="key lengths, paired with --seq, where they differ", rich_help_panel="Axes")
]
Methods = Annotated[
    list[str] | None, Option("--method", help="name, name:preset or file.py, comma-separated", rich_help_panel="Axes")
]
Input = Annotated[Text, Option(help="normal, topics, needles, or a capture (FILE.safetensors)", rich_help_panel="Axes")]
TopK = Annotated[Text, Option(help="blocks kept by rank: 8,16", rich_help_panel="Budget (one of three)")]
Sparsity = Annotated[Text, Option(help="share of causal pairs to drop: 0.9", rich_help_panel="Budget (one of three)")]
Keep = Annotated[Text, Option(help="2048tok, 64blk or 5%", rich_help_panel="Budget (one of three)")]
Levels = Annotated[Text, Option(help="levels of the pyramid: 1,2,4,full,auto", rich_help_panel="Axes")]
BlockSize = Annotated[Text, Option(help="keys in a block", rich_help_panel="Axes")]
QueryTile = Annotated[Text, Option(help="queries that share a set; 1 is token level", rich_help_panel="Axes")]
Heads = Annotated[Text, Option(help="query heads, or query:key/value heads, as 32:8", rich_help_panel="Axes")]
HeadDim = Annotated[Text, Option(help="dimension of a head", rich_help_panel="Axes")]
Batch = Annotated[Text, Option(help="sequences in a call", rich_help_panel="Axes")]
DType = Annotated[Text, Option(help="float32, bfloat16 or float16", rich_help_panel="Axes")]
Layers = Annotated[Text, Option(help="layers of a capture; all without it", rich_help_panel="Axes")]
Pass = Annotated[Text, Option("--pass", help="forward, backward, or train (both in one call)", rich_help_panel="Axes")]
Causal = Annotated[bool, Option("--causal/--no-causal", help="whether queries see later keys", rich_help_panel="Axes")]
Seed = Annotated[int, Option(min=0, help="seed of the inputs", rich_help_panel="Axes")]
DeviceName = Annotated[str, Option("--device", help="auto, cpu or cuda")]
Out = Annotated[Path | None, Option(help="the run's folder; the same command goes on there")]
PartOf = Annotated[Text, Option("--part", help="only part I of N, as 2/8; `merge` joins the runs of all parts")]
Fresh = Annotated[bool, Option("--fresh", help="start over; an existing folder is renamed, not deleted")]
DryRun = Annotated[bool, Option("--dry-run", help="print the plan and stop")]
Timing = Annotated[str, Option("--timing", help="time of repeated calls per cell, as 2s")]
CacheState = Annotated[
    str,
    Option("--cache", help="the L2 before each timed call: cold (overwritten), or warm (as a call like it leaves it)"),
]
CellBudget = Annotated[str, Option("--cell-budget", help="cells predicted to take longer are skipped, as 60s or 10m")]
AsJson = Annotated[bool, Option("--json", help="print JSON for scripts")]
