"""Sparse attention trains: the loss falls and gradients arrive, and docs/training says what its curves say."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
import torch

FOLDER = Path(__file__).parent.parent / "docs" / "training"
CURVES = pd.read_csv(FOLDER / "curves.csv")
LAST = CURVES[CURVES["step"] == CURVES["step"].max()]
DECODER = Path(__file__).parents[1] / "results" / "reference" / "trained-decoder"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
ATTENTIONS = ("dense", "pyramid", "pyramid tile 16", "pyramid tile 16, all exact", "sliding_window")


@pytest.fixture(scope="module")
def recall() -> ModuleType:
    """docs/training/associative_recall.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("associative_recall", FOLDER / "associative_recall.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def table() -> list[list[str]]:
    """The cells of the page's table of results."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("layout", ["topics", "scattered"])
def test_every_question_has_its_answer_in_the_block_that_the_batch_names(recall: ModuleType, layout: str) -> None:
    batch = recall.draw_batch(3, layout, torch.Generator().manual_seed(5))
    assert batch.tokens.shape == (3, recall.TOKENS)
    blocks = batch.tokens.unflatten(1, (-1, recall.BLOCK_SIZE))
    for row in range(3):
        asked = batch.tokens[row, -recall.ASKED :]
        for key, answer, block in zip(asked.tolist(), batch.answers[row].tolist(), batch.blocks[row].tolist()):
            held = blocks[row, block].tolist()
            assert held[held.index(key) + 1] == recall.KEYS + answer
    again = recall.draw_batch(3, layout, torch.Generator().manual_seed(5))
    assert torch.equal(batch.tokens, again.tokens)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_loss_falls_and_gradients_reach_the_projections_of_every_layer(recall: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    model, attention = recall.Model(), recall.Attention(name)
    batch = recall.draw_batch(2, "topics", torch.Generator().manual_seed(1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(6):
        optimiser.zero_grad()
        loss = recall.loss_of(model, attention, batch)
        loss.backward()
        losses.append(loss.item())
        for layer in model.layers:
            for projection in (layer.q, layer.k, layer.v):
                assert torch.isfinite(projection.weight.grad).all()
                assert projection.weight.grad.abs().max() > 0
        optimiser.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.2


def test_every_question_has_a_choice(recall: ModuleType) -> None:
    assert all(recall.Attention(name).choice() == 1 for name in ATTENTIONS if name != "dense")


def test_the_page_quotes_the_last_points_of_the_curves() -> None:
    quoted = {tuple(row[:3]): tuple(row[3:]) for row in table() if row[0] in ("topics", "scattered")}
    rounded = {
        (last["layout"], last["attention"], str(last["seed"])): (
            f"{last['accuracy']:.1%}",
            f"{last['answer_block_kept']:.1%}",
            f"{last['loss']:.3f}",
        )
        for _, last in LAST.iterrows()
    }
    assert quoted == rounded


def test_the_page_quotes_the_held_out_loss_of_the_small_decoder() -> None:
    """Part 0 is the whole window; each arm with its own attention."""
    arms = [arm.stem for arm in DECODER.glob("*-evaluations.csv")]
    rows = pd.concat([pd.read_csv(DECODER / f"{arm}.csv") for arm in arms])
    whole = rows[(rows["what"] == "loss") & (rows["part"] == 0) & (rows["used"] == rows["method"])].sort_values(
        "length"
    )
    rounded = {
        (arm, str(seed)): tuple(f"{loss:.3f}" for loss in own["value"])
        for (arm, seed), own in whole.groupby(["method", "seed"])
    }
    assert len(rounded) == 4
    assert rounded == {tuple(row[:2]): tuple(row[2:]) for row in table() if tuple(row[:2]) in rounded}


def test_the_page_tells_how_far_from_dense_the_attentions_that_fall_short_are() -> None:
    accuracy = LAST[LAST["seed"] == 0].set_index(["layout", "attention"])["accuracy"]
    short = (accuracy["scattered", "dense"] - accuracy["scattered", "pyramid"]) * 100
    tiled = (accuracy["topics", "dense"] - accuracy["topics", "pyramid tile 16"]) * 100
    text = " ".join(PAGE.split())
    assert f"with scattered pairs `pyramid` ends {short:.1f} points below dense" in text
    assert f"tiles of 16 questions end {tiled:.1f} points below it on topics" in text
    assert f"does not learn the task ({accuracy['topics', 'sliding_window'] * 100:.1f} %;" in text
    assert f"which its 4 cannot hold ({accuracy['scattered', 'pyramid tile 16'] * 100:.1f} %)" in text


def test_the_curves_are_those_that_the_script_draws(recall: ModuleType) -> None:
    kept = CURVES[["layout", "attention", "seed"]].drop_duplicates()
    assert tuple(kept.itertuples(index=False, name=None)) == recall.CURVES
    assert tuple(CURVES.columns) == tuple(field.name for field in dataclasses.fields(recall.Point))


def test_attentions_start_from_the_same_weights() -> None:
    """Before the first step they differ by their attention alone, which at random weights matters little."""
    first = CURVES[CURVES["step"] == 0].groupby(["layout", "seed"])["loss"]
    assert (first.max() - first.min()).max() < 0.03


@pytest.mark.parametrize("seed", [0, 1])
def test_the_pyramid_of_each_token_reaches_dense_within_a_point(seed: int) -> None:
    accuracy = LAST[(LAST["layout"] == "topics") & (LAST["seed"] == seed)].set_index("attention")["accuracy"]
    assert accuracy["pyramid"] >= accuracy["dense"] - 0.01


def test_a_window_of_the_same_budget_does_not() -> None:
    accuracy = LAST[(LAST["layout"] == "topics") & (LAST["seed"] == 0)].set_index("attention")["accuracy"]
    assert accuracy["sliding_window"] < accuracy["dense"] - 0.5
