"""Tuning: what is varied, which setting is chosen, and the command on a small sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pyramidbench import cli
from pyramidbench.errors import UserError
from pyramidbench.record import columns
from pyramidbench.tuning import choose, parse_values, setting_text, tuning_suite


def row(
    latency_s: float | None, mass: float | None, *, beam: float = 1.0, seq_len: int = 1024, layer: int = 0, **more: Any
) -> dict[str, Any]:
    record: dict[str, Any] = dict.fromkeys(columns())
    return record | {
        "cell": "c", "status": "ok", "method": "pyramid", "kind": "selection", "device": "X", "batch": 1, "heads": 1,
        "kv_heads": 1, "head_dim": 64, "dtype": "float32", "causal": True, "pass": "forward", "input": "topics",
        "layer": layer, "seed": 0,
        "seq_len": seq_len, "seq_len_kv": seq_len, "block_size": 64, "top_k": 8, "levels": 2, "query_tile": 64,
        "parameters": json.dumps({"top_k": 8, "beam": beam}), "latency_s": latency_s, "mass_kept": mass,
    } | more  # fmt: skip


def frame(*rows: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=columns())


def test_the_fastest_setting_that_keeps_enough_is_chosen_at_each_length() -> None:
    found = choose(
        frame(
            row(1e-3, 0.90, beam=1.0), row(2e-3, 0.96, beam=2.0), row(3e-3, 0.99, beam=4.0),
            row(5e-3, 0.97, beam=1.0, seq_len=2048), row(4e-3, 0.80, beam=2.0, seq_len=2048),
            row(1e-4, 1.0, kind="dense", method="dense"), row(1e-9, 1.0, beam=9.0, status="incorrect"),
        ),
        0.95,
    )  # fmt: skip
    assert [(c.seq_len_kv, c.row and setting_text(c.row, ["beam"]), c.settings) for c in found] == [
        (1024, "top_k=8 beam=2", 3), (2048, "top_k=8 beam=1", 2),
    ]  # fmt: skip


def test_layers_count_by_their_mean() -> None:
    (choice,) = choose(
        frame(row(1e-3, 0.99), row(1e-3, 0.89, layer=7), row(2e-3, 0.96, beam=2.0), row(2e-3, 0.96, beam=2.0, layer=7)),
        0.95,
    )
    assert choice.row is not None
    assert choice.row["latency_s"] == 2e-3


def test_where_none_keeps_enough_the_one_that_keeps_most_is_named() -> None:
    (choice,) = choose(frame(row(1e-3, 0.5), row(2e-3, 0.7, beam=2.0)), 0.95)
    assert choice.row is None
    assert choice.most["mass_kept"] == 0.7
    with pytest.raises(UserError, match="no setting has both"):
        choose(frame(row(None, 0.9), row(1e-3, None, beam=2.0)), 0.95)


def test_values_are_read_and_multiplied() -> None:
    values = parse_values(["beam=1,2.5", "leaf_candidates=2,none"], "pyramid:fast")
    assert values == {"beam": (1, 2.5), "leaf_candidates": (2, None)}
    (grid,) = tuning_suite("pyramid:fast", values, {"seq": "1k", "top_k": "4"}).grids
    assert [spec.method for spec in grid.methods] == ["dense"] + 4 * ["pyramid:fast"]
    assert [spec.parameters for spec in grid.methods[1:]] == [
        {"beam": 1.0, "leaf_candidates": 2}, {"beam": 1.0, "leaf_candidates": None},
        {"beam": 2.5, "leaf_candidates": 2}, {"beam": 2.5, "leaf_candidates": None},
    ]  # fmt: skip
    assert set(parse_values([], "pyramid")) == {"beam", "leaf_candidates"}
    assert parse_values([], "sliding_window") == {}
    assert len(tuning_suite("sliding_window", {}, {"seq": "1k"}).cells()) == 2


@pytest.fixture
def tune(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    no_workers: None,  # noqa: ARG001
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pyramidbench", "tune", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, printed.out, printed.err

    return call


def test_a_small_sweep_is_tuned(tune: Callable[..., tuple[int, str, str]]) -> None:
    axes = (
        "--seq", "256", "--method", "flat", "--vary", "score=mean,exact", "--top-k", "1", "--head-dim", "16",
        "--block-size", "16", "--query-tile", "16", "--device", "cpu", "--timing", "20ms", "--out", "run",
    )  # fmt: skip
    code, out, _ = tune(*axes, "--mass", "0.01", "--json")
    (choice,) = json.loads(out)
    assert code == 0
    assert choice["settings"] == 2
    assert choice["setting"] in ("top_k=1 score=mean", "top_k=1 score=exact")
    assert 0.01 <= choice["mass_kept"] <= 1
    code, out, _ = tune(*axes, "--mass", "1")
    assert code == 0
    assert "none keeps 1; this one keeps most" in out
    assert "Run: run" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give --seq"),
        (["--seq", "64", "--input", "normal"], "random"),
        (["--seq", "64", "--vary", "beam"], "as beam=1,2,4"),
        (["--seq", "64", "--vary", "beem=1"], "Did you mean 'beam'"),
        (["--seq", "64", "--vary", "beam=0"], "beam = 0"),
        (["--seq", "64", "--vary", "top_k=1,2"], "give --top-k 1,2"),
        (["--seq", "64", "--method", "pyramyd"], "Did you mean 'pyramid'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(tune: Callable[..., tuple[int, str, str]], arguments: list[str], told: str) -> None:
    code, out, err = tune(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err
