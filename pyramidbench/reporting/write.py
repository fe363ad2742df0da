"""Writing a report's folder: report.html (one file), every figure as PNG and SVG, summary.md, results.csv."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from pyramidbench.errors import UserError
from pyramidbench.reporting.draw import STYLES, Style, save
from pyramidbench.reporting.evidence import Evidence, Source
from pyramidbench.reporting.figure import Figure
from pyramidbench.reporting.figures import figures
from pyramidbench.reporting.markdown import summary_markdown
from pyramidbench.reporting.page import library, page
from pyramidbench.units import is_missing

__all__ = ["STYLES", "Source", "Style", "write_report"]


def write_report(sources: Sequence[Source], out: Path, style: Style = "screen") -> list[Path]:
    """Write the report of one or more runs into the folder `out`, which is made if need be; returns the files written.

    Several runs stand side by side in it: none of their rows meet in one line, average or ratio.

    Raises:
        UserError: the folder cannot be written.
    """
    evidence = Evidence(sources)
    drawn = figures(evidence)
    pictures = [figure for figure in drawn if isinstance(figure, Figure)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(1) as bundling:
            # The page's library is bundled while the figures are drawn.
            bundling.submit(library)
            images = [path for figure in pictures for path in save(figure, out, style)]
        texts = {
            "report.html": page(evidence, drawn),
            "summary.md": summary_markdown(evidence, pictures),
            "results.csv": results_csv(evidence.frame),
        }
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write the report to '{out}': {error.strerror}; give another folder.") from None
    return [*(out / name for name in texts), *images]


def results_csv(frame: pd.DataFrame) -> str:
    """One row per cell, whole numbers as such and lists as JSON, missing values empty; the columns `backward_s`, and `run`
    in front, only where some row has them."""
    lists = ["recall_by_head", "mass_kept_by_head"]
    written = frame.drop(columns=lists).convert_dtypes()
    for name in lists:
        written[name] = [None if is_missing(value) else json.dumps(list(value)) for value in frame[name]]
    kept = [name for name in frame.columns if name not in ("run", "label")]
    kept = [name for name in kept if name != "backward_s" or frame[name].notna().any()]
    several = ["run"] if frame["run"].notna().any() else []
    return str(written[[*several, *kept]].to_csv(index=False))
