"""Texts to run a model on: a file of the user's, or one that is on every machine."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from pyramidbench.errors import UserError

# Long modules that Python 3.11 to 3.13 keep in one file each, about 2.5 MB in all (620 000 tokens of SmolLM2).
STDLIB_FILES = (
    "argparse.py", "inspect.py", "typing.py", "asyncio/base_events.py", "subprocess.py", "tarfile.py", "pickle.py",
    "doctest.py", "pdb.py", "ipaddress.py", "difflib.py", "shutil.py", "threading.py", "logging/__init__.py",
    "statistics.py", "enum.py", "functools.py", "collections/__init__.py", "http/client.py", "unittest/mock.py",
    "socket.py", "tokenize.py", "configparser.py", "dataclasses.py", "ast.py", "codecs.py", "optparse.py", "ssl.py",
    "mailbox.py", "imaplib.py", "smtplib.py", "zipimport.py", "_pydecimal.py", "_pyio.py",
)  # fmt: skip
STDLIB_LABEL = "python-stdlib"


@dataclass(frozen=True)
class Passage:
    """A text, its label in results, and the SHA-256 of its UTF-8 bytes."""

    label: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def read_passage(path: Path | None) -> Passage:
    """The text of a UTF-8 file, labelled by its stem, or with None the built-in text.

    Raises:
        UserError: the file cannot be read as text.
    """
    if path is None:
        return Passage(STDLIB_LABEL, stdlib_text())
    try:
        return Passage(path.stem, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"text '{path}' cannot be read: {error.strerror}; give the path of a text file.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"text '{path}' is not UTF-8 at byte {error.start}; convert it, or give another file."
        ) from None


def stdlib_text() -> str:
    """Source of the Python standard library: STDLIB_FILES in their order. It differs between Python versions.

    Raises:
        UserError: this Python comes without its source.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    missing = [name for name in STDLIB_FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"this Python lacks the source of {', '.join(missing)}; give a text file instead.")
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in STDLIB_FILES)
