"""Training a small decoder: batches ask what they hide, arms share everything but the attention, runs resume exactly."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pyramidbench.errors import UserError
from pyramidbench.training import __main__ as training_command
from pyramidbench.training import corpus as corpora
from pyramidbench.training import probes
from pyramidbench.training.__main__ import main, run
from pyramidbench.training.arms import PARAMETERS, Arm, Attention, parse_arms
from pyramidbench.training.batches import PAIRS, pair_batch, training_batch
from pyramidbench.training.corpus import MARK, Corpus
from pyramidbench.training.decoder import Decoder, Size
from pyramidbench.training.loop import Recipe, Training, learning_rate, losses_of
from pyramidbench.training.probes import probe_all

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of two windows, not sixteen."""
    monkeypatch.setattr(probes, "WINDOWS", 2)
    monkeypatch.setattr(probes, "AT_ONCE", 2)


TINY = Size(layers=2, width=32, heads=2, kv_heads=1, head_dim=16, hidden=32)


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of repeating tokens, in place of the text."""
    made = tmp_path_factory.mktemp("corpus") / "corpus.safetensors"
    tokens = (torch.arange(30_000) * 7 % 300).to(torch.int16)
    save_file({"train": tokens, "held_out": tokens[:6000].clone()}, made, {"text_sha256": "0" * 64})
    return made


@pytest.fixture(scope="session")
def text(path: Path) -> Corpus:
    return corpora.load(path)


def recipe(steps: int) -> Recipe:
    return Recipe(steps, batch=2, length=256, size=TINY, tiny=4)


def test_what_is_asked_at_the_end_was_hidden_before(text: Corpus) -> None:
    batch = pair_batch(text.train, 3, 512, torch.Generator().manual_seed(1))
    for row in range(3):
        tokens = batch.tokens[row]
        assert tokens.shape == (513,)
        for asked, hidden in zip(batch.asked[row].tolist(), batch.hidden[row].tolist()):
            assert tokens[hidden] == MARK
            assert torch.equal(tokens[hidden : hidden + 3], tokens[asked - 2 : asked + 1])
            assert hidden + 3 <= 513 - 3 * PAIRS
        assert len(set(batch.hidden[row].tolist())) == PAIRS


def test_a_batch_follows_from_seed_and_step(text: Corpus) -> None:
    first = training_batch(text.train, 4, 512, 0, 5).tokens
    assert torch.equal(first, training_batch(text.train, 4, 512, 0, 5).tokens)
    assert not torch.equal(first, training_batch(text.train, 4, 512, 0, 6).tokens)
    assert not torch.equal(first, training_batch(text.train, 4, 512, 1, 5).tokens)


def test_the_loss_of_the_pairs_is_that_of_the_asked_values(text: Corpus) -> None:
    torch.manual_seed(0)
    model, attention = Decoder(TINY), Attention("dense", CPU)
    batch = training_batch(text.train, 2, 256, 0, 0)
    with torch.no_grad():
        whole, pairs = losses_of(model, batch, attention, CPU)
        log_probs = model.logits(model(batch.tokens[:, :-1], attention)).log_softmax(-1)
    asked = batch.asked[0]
    torch.testing.assert_close(pairs, -log_probs[0, asked - 1, batch.tokens[0, asked]].mean())
    picked = log_probs.gather(2, batch.tokens[:, 1:, None])
    torch.testing.assert_close(whole, -picked.mean())


def test_the_decoder_is_causal_and_has_the_size_that_is_told() -> None:
    torch.manual_seed(0)
    model = Decoder(TINY).eval()
    tokens = torch.randint(4096, (1, 80), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        before = model(tokens, Attention("dense", CPU))
        tokens[0, 50:] = 7
        after = model(tokens, Attention("dense", CPU))
    assert torch.equal(before[0, :50], after[0, :50])
    assert not torch.allclose(before[0, 50:], after[0, 50:])
    assert 10e6 < sum(weight.numel() for weight in Decoder(Size()).parameters()) < 30e6


@pytest.mark.parametrize("method", PARAMETERS)
def test_the_loss_falls_with_every_attention(text: Corpus, method: str) -> None:
    torch.manual_seed(0)
    model, attention = Decoder(TINY), Attention(method, CPU, 4)
    batch = training_batch(text.train, 2, 256, 0, 0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        loss, _ = losses_of(model, batch, attention, CPU)
        loss.backward()
        for layer in model.layers:
            assert layer.qkv.weight.grad.abs().max() > 0
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert attention.choice_share(256) == (0 if method == "dense" else 0.4375)


def test_the_pyramid_walks_several_levels_at_the_trained_length() -> None:
    q = torch.zeros(1, 2, 4096, 16)
    attention = Attention("pyramid", CPU)
    assert attention.method.walked_levels(attention._problem(q, q[:, :1], q[:, :1])) == 3  # type: ignore[attr-defined]
    assert attention.choice_share(4096) > 0.8


def test_training_in_two_goes_is_training_in_one(text: Corpus, tmp_path: Path) -> None:
    whole = Training(Arm("pyramid", 0), recipe(6), tmp_path / "whole", CPU)
    whole.folder.mkdir()
    assert whole.run(text, float("inf"))
    folder = tmp_path / "parts"
    folder.mkdir()
    first = Training(Arm("pyramid", 0), recipe(6), folder, CPU)
    for _ in range(3):
        first.one_step(text)
        first.step += 1
    first.save()
    second = Training(Arm("pyramid", 0), recipe(6), folder, CPU)
    assert second.step == 3
    assert second.run(text, float("inf"))
    for one, other in zip(whole.model.parameters(), second.model.parameters()):
        assert torch.equal(one, other)


def test_one_command_trains_and_probes_all_arms_and_resumes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PARAMETERS", {})

    def go() -> None:
        run(path, tmp_path, "dense:0,pyramid:0", 1.0, 2, 2, 1024, None, True, "cpu")

    go()
    files = {item.name for item in tmp_path.iterdir()}
    arms = ("dense-0", "pyramid-0")
    assert files == {"plan.json", *(f"{arm}{end}" for arm in arms for end in (".pt", ".csv", "-evaluations.csv"))}
    with (tmp_path / "pyramid-0.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [row["step"] for row in rows] == ["2"]
    assert rows[0]["backend"] == "reference"
    assert json.loads((tmp_path / "plan.json").read_text())["recipe"]["steps"] == 2
    log = (tmp_path / "pyramid-0.csv").read_text()
    go()
    assert (tmp_path / "pyramid-0.csv").read_text() == log
    with pytest.raises(UserError, match=r"holds another training \(2 steps\)"):
        run(path, tmp_path, "dense:0", 1.0, 9, 2, 1024, None, True, "cpu")


def test_probes_cover_every_attention_length_and_depth(text: Corpus, tmp_path: Path) -> None:
    torch.manual_seed(0)
    arm = Arm("flat", 0)
    probe_all(Decoder(TINY).eval(), arm, 0, text, Recipe(1, 2, 1024, TINY, 4), CPU, tmp_path)
    with (tmp_path / "flat-0-evaluations.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["used"] for row in rows} == set(PARAMETERS)
    assert {row["length"] for row in rows} == {"256", "512", "1024", "2048"}
    assert {row["what"] for row in rows} == {"loss", "pairs"}
    untrained = [float(row["value"]) for row in rows if row["what"] == "loss"]
    assert all(abs(value - 8.32) < 0.3 for value in untrained)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates[0] < rates[50] < rates[99] == max(rates)
    assert rates[99:] == sorted(rates[99:], reverse=True)
    assert rates[-1] == pytest.approx(2e-4, rel=0.01)


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown arm 'dens'. Did you mean 'dense'"):
        parse_arms("dens:0")
    with pytest.raises(UserError, match="the seed is no whole number"):
        parse_arms("dense:x")
    with pytest.raises(UserError, match=r"corpus '.*' does not exist; make it with"):
        corpora.load(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"xx")
    with pytest.raises(UserError, match="is damaged"):
        corpora.load(tmp_path / "bad")


def test_arms_side_by_side_are_processes_of_the_same_command(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def wait(self) -> int:
            return int(started[-1][-1] == "flat:0" and len(started) == 2)

    monkeypatch.setattr(training_command, "Popen", Process)
    words = ["run", str(path), "--out", str(tmp_path), "--steps", "2", "--batch", "2", "--length", "1024", "--tiny"]
    monkeypatch.setattr(sys, "argv", ["training", *words, "--arms", "dense:0,dense:1,flat:0", "--side-by-side"])
    main()
    assert [command[-1] for command in started] == ["dense:0", "dense:1", "flat:0"]
    assert all(command[3 : 3 + len(words)] == words and "--side-by-side" not in command for command in started)
    assert json.loads((tmp_path / "plan.json").read_text())["recipe"]["steps"] == 2
    started.clear()
    monkeypatch.setattr(sys, "argv", ["training", *words, "--arms", "dense:0,flat:0", "--side-by-side"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
