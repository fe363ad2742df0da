"""`pyramidbench compare`: two runs, or two methods of one run, and exit code 5 for a regression."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from pyramidbench.errors import UserError
from pyramidbench.flags import AsJson, Text

if TYPE_CHECKING:
    from pyramidbench.comparing.comparison import Comparison
    from pyramidbench.comparing.verdicts import Margins

REGRESSION = 5
A = Annotated[str, Argument(metavar="A", help="the run to compare with: its folder, or a reference's name")]
B = Annotated[Text, Argument(metavar="[B]", help="the run to judge; without it, two methods of A by --method")]
Method = Annotated[Text, Option(help="two methods of one run, as dense,pyramid; of two runs, the only ones compared")]
Margin = Annotated[str, Option(help="times and memory that differ by less are the same")]
QualityMargin = Annotated[float, Option(min=0, help="recall, mass and error that differ by less are the same")]
Allow = Annotated[list[str] | None, Option(help="what may differ all the same: device, shape, input, clock")]
FailOn = Annotated[
    list[str] | None, Option(help="exit with code 5 on slower:5%, memory:10% or quality:0.01, or a lost cell")
]
AsMarkdown = Annotated[bool, Option("--markdown", help="print Markdown, for a pull request")]


def compare(
    a: A, b: B = None, method: Method = None, margin: Margin = "2%", quality_margin: QualityMargin = 0.01,
    allow: Allow = None, fail_on: FailOn = None, markdown: AsMarkdown = False, json: AsJson = False,
) -> None:  # fmt: skip
    """Compare two runs cell by cell, or two methods of one run: faster, slower, same or unclear, with intervals."""
    from pyramidbench.comparing import table
    from pyramidbench.comparing.thresholds import parse_share, parse_thresholds
    from pyramidbench.comparing.verdicts import Margins
    from pyramidbench.output import console, print_json, say
    from pyramidbench.render_tools import show_comparison

    thresholds = parse_thresholds(fail_on or [])
    margins = Margins(parse_share(margin, "--margin"), quality_margin)
    methods, allowed = _split([method] if method else []), _split(allow or [])
    made = _compared(a, b, methods, allowed, margins)
    if json:
        print_json(made.frame.to_json(orient="records"))
    elif markdown:
        say(console(), table.markdown(made).rstrip("\n"))
    else:
        show_comparison(console(), made)
    broken = made.broken(thresholds)
    if broken:
        say(console(error=True), *(f"regression: {table.regression(*found)}" for found in broken))
        raise typer.Exit(REGRESSION)


def _compared(a: str, b: str | None, methods: list[str], allow: list[str], margins: Margins) -> Comparison:
    from pyramidbench.comparing.comparison import compare_methods, compare_runs, open_run

    if b is not None:
        return compare_runs(open_run(a), open_run(b), methods=methods, allow=allow, margins=margins)
    if len(methods) != 2:
        raise UserError(
            "one run and no two methods; give two runs (`compare A B`), or --method with two methods, as dense,pyramid."
        )
    return compare_methods(open_run(a), methods[0], methods[1], allow=allow, margins=margins)


def _split(texts: list[str]) -> list[str]:
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]
