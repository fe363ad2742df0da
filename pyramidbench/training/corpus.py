"""The corpus: text with clear licences as tokens, prepared once into one small file that a machine without a network can use.

Source code of the Python standard library (PSF License) without its tests, and Jane Austen's novels (public domain,
from Debian's r-cran-janeaustenr). The tokens are byte-level BPE with a vocabulary of its own, learned on the text. Every
16th part is held out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pyramidbench.errors import UserError
from pyramidbench.evaluation.novels import NOVELS, read_novel

VOCABULARY = 4096
MARK = VOCABULARY - 1
"""The token before a hidden pair; text never holds it."""
PART_CHARACTERS = 1 << 16
HELD_OUT_EVERY = 16
SKIPPED = ("test", "tests", "idle_test", "site-packages", "lib2to3", "__pycache__")


@dataclass(frozen=True)
class Corpus:
    """Tokens, int64 on the CPU: `train` and `held_out`. sha256: of the text that they come from."""

    train: Tensor
    held_out: Tensor
    sha256: str


def prepare(path: Path) -> Corpus:
    """Write the corpus to a .safetensors file, about 10 MB, and return it. Needs the package tokenizers (extra `hf`).

    Raises:
        UserError: tokenizers is missing, or the novels were not fetched.
    """
    texts = list(_texts())
    encode = _tokenizer(texts)
    parts = [text[at : at + PART_CHARACTERS] for text in texts for at in range(0, len(text), PART_CHARACTERS)]
    ids = [torch.tensor(encode(part), dtype=torch.int16) for part in parts]
    held = [part for number, part in enumerate(ids) if number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    kept = [part for number, part in enumerate(ids) if number % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"train": torch.cat(kept), "held_out": torch.cat(held)}, path, {"text_sha256": digest})
    return load(path)


def load(path: Path) -> Corpus:
    """Read a corpus.

    Raises:
        UserError: no such file, or no corpus.
    """
    if not path.is_file():
        raise UserError(
            f"corpus '{path}' does not exist; make it with `python -m pyramidbench.training prepare {path}`."
        )
    try:
        with safe_open(path, framework="pt") as file:
            train, held_out = file.get_tensor("train").long(), file.get_tensor("held_out").long()
            return Corpus(train, held_out, (file.metadata() or {})["text_sha256"])
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(f"corpus '{path}' is damaged ({error}); delete it and prepare it again.") from None


def _texts() -> Iterator[str]:
    """Novels between equal shares of the standard library, file by file in the order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in sorted(root.rglob("*.py")) if not set(path.relative_to(root).parts[:-1]) & set(SKIPPED)]
    share = -(-len(files) // len(NOVELS))
    for number, name in enumerate(NOVELS):
        yield read_novel(name).text
        yield "\n".join(_read(path) for path in files[number * share : (number + 1) * share])


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def _tokenizer(texts: list[str]):  # type: ignore[no-untyped-def]  # tokenizers has no types
    """A byte-level BPE learned on the texts; returns what turns a text into token numbers below MARK."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError("preparing a corpus needs the package tokenizers: pip install 'pyramidbench[hf]'.") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=MARK, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return lambda text: tokenizer.encode(text).ids
