"""`python -m pyramidbench.training`: prepare a corpus, then train and probe all arms in one go.

python -m pyramidbench.training prepare .model/data/corpus.safetensors
python -m pyramidbench.training run .model/data/corpus.safetensors --out OUT --minutes 1.5
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import Popen
from typing import Annotated

import torch
import typer
from typer import Argument, Option

from pyramidbench.device import fingerprint, pick_device, synchronize
from pyramidbench.errors import UserError
from pyramidbench.folder import write_whole
from pyramidbench.training import corpus as corpora
from pyramidbench.training.arms import Arm, parse_arms
from pyramidbench.training.corpus import Corpus
from pyramidbench.training.decoder import Size
from pyramidbench.training.loop import Recipe, Training
from pyramidbench.training.probes import probe_all

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=(__doc__ or "").partition("\n")[0])
CALIBRATION_STEPS = 5
SIDE_BY_SIDE = "--side-by-side"
DEFAULT_ARMS = "dense:0,flat:0,pyramid:0,dense:1"
CorpusPath = Annotated[Path, Argument(metavar="CORPUS", help="the corpus, a .safetensors file")]


@app.command()
def prepare(path: CorpusPath) -> None:
    """Turn the text into tokens, once; the file can be carried to a machine without a network."""
    made = corpora.prepare(path)
    _say(f"{path}: {len(made.train)} tokens to train on, {len(made.held_out)} held out, text {made.sha256[:12]}")


@app.command()
def run(
    path: CorpusPath,
    out: Annotated[Path, Option(help="folder of checkpoints and CSVs; the same command goes on there")],
    arms: Annotated[str, Option(help="method:seed, in this order")] = DEFAULT_ARMS,
    minutes: Annotated[
        float, Option(help="time that the slowest arm may train for; it decides the steps of all")
    ] = 1.5,
    steps: Annotated[int | None, Option(min=1, help="steps of each arm, instead of a time")] = None,
    batch: Annotated[int, Option(min=2, help="windows in a step")] = 8,
    length: Annotated[int, Option(min=1024, help="tokens of a window")] = 4096,
    checkpoints: Annotated[
        Path | None, Option(help="folder of the checkpoints, 170 MB an arm; --out without it")
    ] = None,
    tiny: Annotated[bool, Option(hidden=True, help="a decoder and blocks small enough for tests")] = False,
    device: Annotated[str, Option(help="auto, cpu or cuda")] = "auto",
    dense: Annotated[str, Option(help="the dense method, as dense:flash")] = "dense",
    side_by_side: Annotated[
        bool, Option(SIDE_BY_SIDE, help="all arms at once, each in a process of its own, on one device")
    ] = False,
) -> None:
    """Train every arm from the same weights on the same batches, as many steps each, and probe it."""
    chosen, place, text = parse_arms(arms), pick_device(device), corpora.load(path)
    for folder in (out, checkpoints or out):
        folder.mkdir(parents=True, exist_ok=True)
    size = Size(layers=2, width=64, heads=2, kv_heads=1, head_dim=32, hidden=64) if tiny else Size()
    recipe = Recipe(1, batch, length, size, 4 if tiny else 1, dense)
    sharing = len(chosen) if side_by_side else 1
    recipe = replace(recipe, steps=_steps(out, chosen, recipe, text, place, steps, 60 * minutes / sharing))
    if side_by_side:
        _side_by_side(chosen)
        return
    for arm in chosen:
        training = Training(arm, recipe, out, place, checkpoints)
        # Half as much again as was planned: an arm that is stopped goes on when the command is repeated.
        done = training.run(text, 90 * minutes if steps is None else float("inf"))
        _say(f"{arm.name}: step {training.step} of {recipe.steps} after {training.seconds:.0f} s of training")
        if done:
            probe_all(training.model.eval(), arm, training.step, text, recipe, place, out)
    _say(f"CSVs: {out}")


@app.command()
def report(
    folder: Annotated[Path, Argument(help="the --out of a training")],
    out: Annotated[Path | None, Option(help="where the report goes; reports/<name of the folder> without it")] = None,
) -> None:
    """Write summary.md and figures of a training."""
    from pyramidbench.training.drawing import write_training_report

    _say(f"Report: {write_training_report(folder, out or Path('reports') / folder.resolve().name)}")


def _steps(
    out: Path,
    arms: tuple[Arm, ...],
    recipe: Recipe,
    text: Corpus,
    device: torch.device,
    steps: int | None,
    seconds: float,
) -> int:
    """The steps of every arm: those that were decided before in this folder, those asked for, or what the time allows.

    Raises:
        UserError: the folder holds another recipe.
    """
    shared = json.loads(json.dumps({**asdict(recipe), "steps": None, "text_sha256": text.sha256}))
    plan = out / "plan.json"
    if plan.is_file():
        before = json.loads(plan.read_text())
        decided: int = before["recipe"].pop("steps")
        if {**before["recipe"], "steps": None} != shared or steps not in (None, decided):
            raise UserError(f"'{out}' holds another training ({decided} steps); give another --out.")
        return decided
    methods = dict.fromkeys(replace(arm, seed=0) for arm in arms)
    decided = steps or max(1, int(seconds / max(_step_seconds(arm, recipe, text, device, out) for arm in methods)))
    told = {
        "argv": sys.argv[1:], "device": fingerprint(device, peaks=False).model_dump(),
        "recipe": {**shared, "steps": decided},
    }  # fmt: skip
    write_whole(plan, json.dumps(told, indent=1))
    _say(f"{decided} steps of {recipe.batch} × {recipe.length} tokens for each of {len(arms)} arms")
    return decided


def _side_by_side(arms: tuple[Arm, ...]) -> None:
    """Every arm by this command in a process of its own; the plan that they share is made already.

    Raises:
        UserError: some of them failed; what they said stands above.
    """
    command = [sys.executable, "-m", "pyramidbench.training", *(word for word in sys.argv[1:] if word != SIDE_BY_SIDE)]
    running = {arm: Popen([*command, "--arms", f"{arm.method}:{arm.seed}"]) for arm in arms}
    failed = [arm.name for arm, process in running.items() if process.wait()]
    if failed:
        raise UserError(f"{', '.join(failed)} failed, see above; the same command goes on from their checkpoints.")


def _step_seconds(arm: Arm, recipe: Recipe, text: Corpus, device: torch.device, out: Path) -> float:
    """Time of a step without what the first ones compile; nothing of it is kept."""
    training = Training(arm, replace(recipe, steps=10**6), out / "calibration", device)
    for _ in range(CALIBRATION_STEPS):
        training.one_step(text)
    synchronize(device)
    started = time.perf_counter()
    for _ in range(CALIBRATION_STEPS):
        training.one_step(text)
    synchronize(device)
    return (time.perf_counter() - started) / CALIBRATION_STEPS


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Entry point: a user's mistake is one line on stderr and exit code 2."""
    try:
        app(standalone_mode=False)
    except (UserError, typer.BadParameter) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
