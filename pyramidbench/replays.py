"""Steps of decoding by their replays as a CUDA graph, as engines that generate run them, wherever times are compared.

A step is a few kernels of microseconds, and a call of it lasts as long as the host needs to launch them: by that clock all
methods take the same time, and none beats dense attention.
"""

from __future__ import annotations

import pandas as pd

TIMES = ("latency_s", "latency_low_s", "latency_high_s", "speedup", "speedup_low", "speedup_high", "dense_method")
RATES = ("useful_flops_per_s",)
"""What falls as the time grows."""


def is_replayed(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which rows of a summary are steps of decoding that were replayed too."""
    return (rows["pass"] == "decode") & rows["graph_latency_s"].notna()


def as_replayed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a summary with the times, speed-ups and rates of the replay in the place of the call's, where there is one.
    Stages cannot be replayed one by one, so the rows that are changed have none."""
    replayed = is_replayed(rows)
    times = {name: rows[name].where(~replayed, rows[f"graph_{name}"]) for name in TIMES}
    faster = rows["latency_s"] / times["latency_s"]
    rates = {name: (rows[name] * faster).where(replayed, rows[name]) for name in RATES}
    stages = {name: rows[name].mask(replayed) for name in ("build_s", "route_s", "index_s", "append_s", "attend_s")}
    return rows.assign(**times, **rates, **stages)
