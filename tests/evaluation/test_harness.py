"""Tasks of lm-eval run through our model class, on data that lie on this disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pyramidbench.transformers as interface
from pyramidbench.errors import UserError
from pyramidbench.evaluation.attention import Attention
from pyramidbench.evaluation.catalogue import find_tasks
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.task import Asked

pytest.importorskip("lm_eval", reason="the extra 'hf' is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

YAML = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
    train: {data}
test_split: test
fewshot_split: train
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{right}}"
metric_list:
  - metric: acc
"""
GENERATE = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["Q"]
  max_gen_toks: 5
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    docs = [{"question": f"Is {i} odd?", "choices": ["yes", "no"], "right": 1 - i % 2} for i in range(8)]
    (made / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    for name, rest in (("local_choice", CHOICE), ("local_generate", GENERATE)):
        (made / f"{name}.yaml").write_text(YAML.format(name=name, data=made / "docs.jsonl") + rest)
    return made


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))


@pytest.mark.parametrize("name", ["local_choice", "local_generate"])
def test_a_local_task_runs_with_a_sparse_method(tiny: LanguageModel, asked: Asked, folder: Path, name: str) -> None:
    (task,) = find_tasks([f"lm-eval:{name}"], folder)
    tiny.use(Attention("pyramid", "top_k=1", '{"block_size": 16, "query_tile": 16, "top_k": 1}'))
    before = interface.usage()
    (samples,) = task.rounds(asked)
    outcome = task.measure(samples[0], asked, tiny)
    assert outcome.score in (0.0, 1.0)
    assert (interface.usage() - before).sparse_calls > 0


def test_log_probabilities_are_those_of_the_model(tiny: LanguageModel) -> None:
    from lm_eval.api.instance import Instance

    from pyramidbench.evaluation.harness_model import HarnessModel

    tiny.use(Attention("dense", None, "{}"))
    asked = [Instance("loglikelihood", {}, ("Who is it? ", "a fox"), 0)]
    ((found, _),) = HarnessModel(tiny).loglikelihood(asked)
    ids = torch.tensor([tiny.ids("Who is it? a fox")])
    with torch.no_grad():
        log_probs = tiny.network(ids).logits[0].log_softmax(-1)
    expected = sum(float(log_probs[at - 1, ids[0, at]]) for at in range(10, ids.shape[1]))
    assert found == pytest.approx(expected, rel=1e-4)
    (rolled,) = HarnessModel(tiny).loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("a fox",), 0)])
    assert rolled < 0


def test_a_task_whose_data_are_not_here_says_how_to_get_them(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "far.yaml").write_text("task: far_away\ndataset_path: nobody/far_away\ntest_split: test\n" + CHOICE)
    (task,) = find_tasks(["lm-eval:far_away"], tmp_path)
    message = r"data of lm-eval:far_away \(dataset nobody/far_away\) are not on this disk .* run the command once with"
    with pytest.raises(UserError, match=message):
        next(iter(task.rounds(asked)))


def test_an_unknown_task_of_lm_eval(asked: Asked) -> None:
    (task,) = find_tasks(["lm-eval:hellaswagg"], None)
    with pytest.raises(UserError, match=r"unknown task of lm-eval 'hellaswagg'. Did you mean 'hellaswag'"):
        next(iter(task.rounds(asked)))
