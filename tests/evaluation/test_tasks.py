"""The tasks: prompts hold what they ask for, at the length and depth asked for; scores mean what they say."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import pyramidbench.transformers as attention_interface
from pyramidbench.errors import UserError
from pyramidbench.evaluation import carriers, language_model
from pyramidbench.evaluation.attention import Attention
from pyramidbench.evaluation.catalogue import OWN, find_tasks, groups, task_names
from pyramidbench.evaluation.haystack import Question, ask
from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.prompting import prompts
from pyramidbench.evaluation.questions import read_questions
from pyramidbench.evaluation.task import Asked, Outcome, Sample, Task, TaskOfMany
from pyramidbench.model_files import SMOLLM2_MEMBER, models_folder, silent
from pyramidbench.texts import read_passage

SPARSE = Attention("pyramid", "top_k=1", '{"block_size": 32, "query_tile": 32, "top_k": 1}')
RETRIEVAL = groups()["retrieval"]


class Oracle(LanguageModel):
    """A model that answers as it is told, and keeps the prompt that it was given."""

    def __init__(self, model: LanguageModel, answer: str) -> None:
        self.__dict__.update(model.__dict__)
        self.answer, self.prompts = answer, list[str]()

    def generate(self, ids: Any, new_tokens: int, stop: Any = None) -> list[int]:  # noqa: ARG002 - as the model's
        self.prompts.append(self.text(ids))
        assert len(ids) + new_tokens <= 1024
        return self.ids(self.answer)[:new_tokens]


def one(name: str) -> Task:
    (task,) = find_tasks([name], None)
    return task


@pytest.mark.parametrize("name", [task.name for task in OWN])
def test_every_task_runs_sparsely_on_a_model(tiny: LanguageModel, asked: Asked, name: str) -> None:
    import pyramidbench.transformers as interface

    tiny.use(SPARSE)
    before = interface.usage()
    task = one(name)
    for sample in next(iter(task.rounds(asked))):
        outcome = task.measure(sample, asked, tiny)
        assert torch.isfinite(torch.tensor(outcome.score))
        assert outcome.tokens <= 1024
        assert outcome.tokens > 850
    used = interface.usage() - before
    assert used.sparse_calls > 0
    assert used.choice_share is not None
    assert used.choice_share > 0.5


@pytest.mark.parametrize("name", RETRIEVAL)
def test_the_right_answer_is_in_the_prompt_and_is_scored(tiny: LanguageModel, asked: Asked, name: str) -> None:
    task = one(name)
    sample = next(iter(task.rounds(asked)))[0]
    wrong = Oracle(tiny, "no idea")
    missed = task.measure(sample, asked, wrong)
    assert (missed.score, missed.partial) == (0.0, 0.0)
    assert missed.expected is not None
    answers = missed.expected.split()
    assert all(answer in wrong.prompts[0] for answer in answers)
    right = task.measure(sample, asked, Oracle(tiny, " and ".join(reversed(answers))))
    assert (right.score, right.partial) == (1.0, 1.0)
    if len(answers) > 1:
        some = task.measure(sample, asked, Oracle(tiny, " ".join(answers[:-1]) + " 9999 XXXXX zzzzz"))
        assert (some.score, some.partial) == (0.0, (len(answers) - 1) / len(answers))


@pytest.mark.parametrize("name", ["single_needle", "multi_key"])
def test_a_needle_stands_where_it_is_asked_to(tiny: LanguageModel, asked: Asked, name: str) -> None:
    places = []
    for depth in (0.0, 0.5, 1.0):
        oracle = Oracle(tiny, "")
        outcome = one(name).measure(Sample(name, 0, 0, 1024, depth), asked, oracle)
        prompt = oracle.prompts[0]
        places.append(prompt.index(str(outcome.expected)) / len(prompt))
    assert places[0] < 0.35
    assert 0.3 < places[1] < 0.7
    assert places[2] > 0.65


def test_prompts_follow_from_the_seed_alone(tiny: LanguageModel, asked: Asked) -> None:
    def prompt(seed: int) -> str:
        oracle = Oracle(tiny, "")
        one("multi_query").measure(Sample("multi_query", 0, seed, 1024), asked, oracle)
        return oracle.prompts[0]

    assert prompt(3) == prompt(3)
    assert prompt(3) != prompt(4)


def test_only_the_first_answers_count(tiny: LanguageModel) -> None:
    question = Question("", "", "", r"\d+", ("123",), 40)
    assert ask(question, [1, 2], Oracle(tiny, "it is 123.")).score == 1
    assert ask(question, [1, 2], Oracle(tiny, "it is 1234, or 123")).score == 0


def test_perplexity_is_the_models_own_loss(tiny: LanguageModel, asked: Asked, story: Any) -> None:
    tiny.use(Attention("dense", None, "{}"))
    found = one("perplexity").measure(Sample("perplexity", 1, 0, 512, text="story"), asked, tiny)
    ids = torch.tensor([tiny.ids(story.text)[512:1024]])
    with torch.no_grad():
        assert found.score == pytest.approx(float(tiny.network(ids, labels=ids).loss), rel=1e-4)
    long = one("perplexity").measure(Sample("perplexity", 0, 0, 1100, text="story"), asked, tiny)
    assert len(long.position_loss) == 2
    weighed = (1023 * long.position_loss[0] + 76 * long.position_loss[1]) / 1099
    assert long.score == pytest.approx(weighed)


def test_a_cached_prefix_changes_no_judgement(tiny: LanguageModel) -> None:
    tiny.use(Attention("dense", None, "{}"))
    prefix, middle, continuation = (tiny.ids(text) for text in ("once upon a time ", "there was", " a fox"))
    whole = tiny.judge((), [*prefix, *middle], continuation)
    for _ in range(2):
        again = tiny.judge(prefix, middle, continuation)
        assert again.log_prob == pytest.approx(whole.log_prob, rel=1e-5)
        assert again.greedy == whole.greedy


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What the packages bring, in small: 12 questions of each set."""
    monkeypatch.setenv("PYRAMIDBENCH_MODELS", str(tmp_path))
    read_questions.cache_clear()
    questions = [
        {"input": f"Who is {i}?", "target_scores": {"One": int(i % 2), "Two ": int(i % 2 == 0)}} for i in range(12)
    ]
    pairs = "Sentence 1: The rat left the hole as the _ was tight. \nAnswer1: hole. \n"
    pairs += "Sentence 2: The rat left the hole as the _ was wide. \nAnswer2: space."
    letters = [
        {"input": [{"content": f"It is {i}, so it\n\n A: rises\n B: falls"}], "ideal": "AB"[i % 2]} for i in range(12)
    ]
    for carrier in (carriers.BIGBENCH, carriers.EVALS):
        carrier.folder.mkdir(parents=True)
        for member in carrier.members:
            examples = [{"target": [pairs]}] * 6 if "winogrande" in member else questions
            text = json.dumps({"examples": examples})
            if member.endswith(".jsonl"):
                text = "\n".join(map(json.dumps, letters))
            (carrier.folder / "-".join(Path(member).parts[-2:])).write_text(text)
    yield tmp_path
    read_questions.cache_clear()


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", groups()["commonsense"])
def test_every_set_is_read_and_asked(tiny: LanguageModel, asked: Asked, name: str) -> None:
    questions = read_questions(name)
    assert len(questions) == 12
    assert len({question.right for question in questions}) == (1 if name == "winogrande" else 2)
    asked = dataclasses.replace(asked, samples=2, shots=(0, 600))
    tiny.use(SPARSE)
    bare, shot = (one(name).measure(samples[0], asked, tiny) for samples in one(name).rounds(asked))
    assert (bare.shots_given, bare.chance) == (0, 0.5)
    assert shot.shots_given is not None
    assert shot.shots_given > 1
    assert shot.tokens > bare.tokens + 100


@pytest.mark.usefixtures("packages")
def test_a_model_that_knows_the_answer_is_right(
    tiny: LanguageModel, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {question.contexts[0]: question.continuations[question.right] for question in read_questions("social_iqa")}

    def judge_all(_prefix: Any, asked: list[tuple[list[int], list[int]]]) -> Any:
        from pyramidbench.evaluation.language_model import Judged

        return [Judged(-1.0 if tiny.text(end) == right[tiny.text(start)] else -9.0, False) for start, end in asked]

    monkeypatch.setattr(tiny, "judge_all", judge_all, raising=False)
    asked = dataclasses.replace(asked, samples=4)
    task = one("social_iqa")
    outcomes: list[Outcome] = [task.measure(sample, asked, tiny) for sample in next(iter(task.rounds(asked)))]
    assert [outcome.score for outcome in outcomes] == [1.0] * 4
    assert all(outcome.answered == outcome.expected for outcome in outcomes)


@pytest.mark.usefixtures("packages")
def test_both_sentences_of_a_pair_are_asked() -> None:
    first, second = read_questions("winogrande")[:2]
    assert first.contexts == ("The rat left the hole as the hole", "The rat left the hole as the space")
    assert first.continuations == (" was tight.",) * 2
    assert second.example == "The rat left the hole as the space was wide."


def test_mistakes(tiny: LanguageModel, asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"unknown task 'single_needl'. Did you mean 'single_needle'"):
        find_tasks(["single_needl"], None)
    with pytest.raises(UserError, match="3000 tokens are more than the 2048 positions of tiny"):
        one("single_needle").measure(Sample("single_needle", 0, 0, 3000, 0.5), asked, tiny)
    with pytest.raises(UserError, match="has no room for a text besides the question"):
        one("single_needle").measure(Sample("single_needle", 0, 0, 64, 0.5), asked, tiny)
    with pytest.raises(UserError, match=r"text 'story' has \d+ tokens, window 9 of 2000 needs 20000"):
        one("perplexity").measure(Sample("perplexity", 9, 0, 2000, text="story"), asked, tiny)
    monkeypatch.setenv("PYRAMIDBENCH_MODELS", str(tmp_path / "none"))
    read_questions.cache_clear()
    with pytest.raises(
        UserError, match=r"package bigbench are not on this disk: `pyramidbench evaluate --fetch bigbench`"
    ):
        next(iter(one("social_iqa").rounds(asked)))


def test_prompts_are_data_and_complete() -> None:
    assert set(prompts("retrieval")) == {"places", *RETRIEVAL}
    assert len(task_names()) == len(set(task_names()))
    brought = {member for carrier in carriers.CARRIERS.values() for member in carrier.members}
    for told in prompts("commonsense").values():
        assert sum(member.endswith(told["member"]) for member in brought) == 1


KEEPS_FOUR = Attention("pyramid", "top_k=4", '{"top_k": 4}')


@pytest.fixture(scope="module")
def real() -> LanguageModel:
    if not (models_folder() / SMOLLM2_MEMBER).is_file():
        pytest.skip("the SmolLM2 weights are not here; run `make model`")
    return LanguageModel.load("smollm2", None, torch.device("cpu"), silent)


@pytest.fixture
def real_asked() -> Asked:
    return Asked((read_passage(None),), (1024,), (0.5,), 1, (0,), 0)


@pytest.mark.model
def test_the_real_model_finds_a_needle_and_keeps_it_with_a_pyramid(real: LanguageModel, real_asked: Asked) -> None:
    """Measured at 2 000 tokens of a novel: dense right at every depth; here 1 024 tokens of source code."""
    (sample,) = next(iter(one("single_needle").rounds(real_asked)))
    for attention in (Attention("dense", None, "{}"), KEEPS_FOUR):
        real.use(attention)
        outcome = one("single_needle").measure(sample, real_asked, real)
        assert outcome.answered is not None
        assert (outcome.score, outcome.answered[:7]) == (1.0, outcome.expected)


@pytest.mark.model
def test_the_real_model_reads_source_code_and_loses_a_little_with_four_blocks(
    real: LanguageModel, real_asked: Asked
) -> None:
    """Random weights lose 10.8 nats (a vocabulary of 49 152); three windows of 8k lost 1.7, and .08 more at 5 %."""
    (sample,) = next(iter(one("perplexity").rounds(real_asked)))
    losses = []
    for attention in (Attention("dense", None, "{}"), KEEPS_FOUR):
        real.use(attention)
        losses.append(one("perplexity").measure(sample, real_asked, real).score)
    assert 1 < losses[0] < 3
    assert abs(losses[1] - losses[0]) < 0.3
    assert losses[1] != losses[0]


@pytest.mark.parametrize("attention", [Attention("dense", None, "{}"), SPARSE])
def test_side_by_side_is_one_by_one(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch, attention: Attention) -> None:
    prefix = tiny.ids("once upon a time there was a fox, " * 12)
    texts = [("who ran", " up"), ("who ate", " an"), ("who", " slept"), ("what", "?")]
    asked = [(tiny.ids(middle), tiny.ids(end)) for middle, end in texts]
    tiny.use(attention)
    alone = tiny.judge_all(prefix, asked)
    monkeypatch.setattr(tiny, "side_by_side", 2)
    steps: list[int] = []
    step = tiny._step
    monkeypatch.setattr(tiny, "_step", lambda ids, cache: (steps.append(len(ids)), step(ids, cache))[1])
    together = tiny.judge_all(prefix, asked)
    assert steps == [2, 1, 1]
    for one, other in zip(alone, together, strict=True):
        assert other.log_prob == pytest.approx(one.log_prob, rel=1e-4)
        assert other.greedy == one.greedy


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize("name", ["social_iqa", "winogrande", "associative_recall"])
def test_a_round_at_once_has_the_outcomes_of_its_samples(
    tiny: LanguageModel, asked: Asked, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked, task = dataclasses.replace(asked, samples=3, shots=(400,)), one(name)
    assert isinstance(task, TaskOfMany)
    tiny.use(SPARSE)
    samples = next(iter(task.rounds(asked)))
    alone = [task.measure(sample, asked, tiny) for sample in samples]
    monkeypatch.setattr(tiny, "side_by_side", 8)
    assert task.measure_all(samples, asked, tiny) == alone


def test_an_answer_ends_where_all_is_told(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    letters = iter(tiny.ids("it is 123, no, 4567 or 89"))
    head = torch.nn.functional.one_hot
    monkeypatch.setattr(tiny, "_head", lambda _: head(torch.tensor(next(letters)), 256).float())
    tiny.use(Attention("dense", None, "{}"))
    question = Question("", "", "", r"\d+", ("123", "4567"), 60)
    outcome = ask(question, tiny.ids("well"), tiny)
    assert (outcome.score, outcome.answered) == (1.0, "it is 123, no, 4567")


def test_an_overflow_is_an_error_and_no_score(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_head", lambda states: torch.full((*states.shape[:-1], 256), torch.inf))
    with pytest.raises(UserError, match="tiny overflows in float32; give another --dtype"):
        tiny.token_losses([1, 2, 3])


def test_lengths_depths_and_shots_all_come_before_any_comes_again(asked: Asked) -> None:
    asked = dataclasses.replace(asked, samples=2, lengths=(512, 1024))
    for task in OWN:
        order = [samples[0].index for samples in task().rounds(asked)]
        assert order == sorted(order)


def test_an_answer_is_made_of_steps(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token behind the first is a step of the method's decoder in each layer, and the answer is that without."""
    monkeypatch.setattr(tiny, "_stops", set)
    tiny.use(Attention("pyramid", "top_k=1", json.dumps({"block_size": 8, "query_tile": 8, "top_k": 1})))
    prompt = tiny.ids("once upon a time there was a block of keys that nobody had ranked " * 4)
    attention_interface.reset_usage()
    stepped = tiny.generate(prompt, 5)
    used = attention_interface.usage()
    assert used.step_calls == 4 * tiny.network.config.num_hidden_layers
    monkeypatch.setattr(attention_interface, "decoding_cache", lambda *_: None)
    assert tiny.generate(prompt, 5) == stepped


def test_answers_have_room_in_whole_steps(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a decoding step are compiled for a room, so prompts of about one length must share it."""
    rooms = []
    monkeypatch.setattr(attention_interface, "decoding_cache", lambda _, room: rooms.append(room))
    monkeypatch.setattr(language_model, "STEP_ROOM", 64)
    for tokens in (9, 62, 63, 100, 126):
        tiny.generate(tiny.ids("x" * tokens), 2)
    assert rooms == [64, 64, 128, 128, 128]


@pytest.mark.filterwarnings("ignore")
def test_a_model_with_layers_of_another_kind_answers_with_its_own_cache(tiny_folder: Path, tmp_path: Path) -> None:
    """Its convolutions keep a state, which is no cache of keys; its attention layers stay sparse."""
    config = transformers.Lfm2Config(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], max_position_embeddings=2048, bos_token_id=None,
        eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    model = LanguageModel.load(str(tmp_path), None, torch.device("cpu"), silent)
    model.use(Attention("pyramid", "top_k=1", json.dumps({"block_size": 8, "query_tile": 8, "top_k": 1})))
    attention_interface.reset_usage()
    assert len(model.generate(model.ids("once upon a time there was a block of keys"), 3)) == 3
    used = attention_interface.usage()
    assert (used.sparse_calls, used.step_calls) == (3, 0)
    with pytest.raises(UserError, match="the model has layers of type conv, which hold no keys and values"):
        attention_interface.decoding_cache(model.network, 64)
