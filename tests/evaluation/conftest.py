"""A tiny random model with one token per byte, in a folder as transformers saves it, and a text for its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pyramidbench.evaluation.language_model import LanguageModel
from pyramidbench.evaluation.task import Asked
from pyramidbench.model_files import silent
from pyramidbench.texts import Passage

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 4 query heads on 2 key/value heads of dimension 16, 2 048 positions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "tiny"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LanguageModel:
    return LanguageModel.load(str(tiny_folder), None, torch.device("cpu"), silent)


@pytest.fixture(scope="session")
def story() -> Passage:
    """Sentences of different words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [a + b + c + d for a in letters[:6] for b in "aeiou" for c in letters[6:16] for d in "aeiou"]
    sentences = [" ".join(words[at : at + 8]).capitalize() + "." for at in range(0, len(words), 8)]
    return Passage("story", " ".join(sentences))


@pytest.fixture
def asked(story: Passage) -> Asked:
    return Asked((story,), lengths=(1024,), depths=(0.0, 1.0), samples=1, shots=(0,), seed=0)
