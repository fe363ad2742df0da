"""The shape of the source tree: what is packaged, and which part may import which."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from pyramidbench.registry import method_names

ROOT = Path(__file__).parent.parent
ENGINE = sorted((ROOT / "pyramidbench").rglob("*.py"))
FACADE = ("__init__", "api")
METHODS = sorted((ROOT / "methods").glob("[!_]*.py"))
KERNELS = sorted((ROOT / "kernels").glob("*.py"))


def imported(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; `from a import b` counts as both a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            assert node.module is not None
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def of(package: str, names: set[str]) -> set[str]:
    return {name for name in names if name == package or name.startswith(f"{package}.")}


def test_every_folder_with_code_is_packaged() -> None:
    """A nested package would be missing from the wheel without a word."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = {name: setuptools["package-dir"].get(name, name.replace(".", "/")) for name in setuptools["packages"]}
    holding = {path.parent for folder in ("pyramidbench", "methods", "kernels", "suites") for path in code_in(folder)}
    assert {str(folder.relative_to(ROOT)) for folder in holding} == set(listed.values())
    assert all((ROOT / folder / "__init__.py").is_file() for folder in listed.values())


def code_in(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("path", [path for path in ENGINE if path.stem not in FACADE], ids=lambda path: path.stem)
def test_the_engine_imports_no_kernel_and_no_method(path: Path) -> None:
    """The registry finds methods by name; only the facade puts kernels and engine together."""
    names = imported(path)
    assert not of("pyramidbench.kernels", names)
    assert not of("pyramidbench.methods", names)
    assert not of("pyramidbench.api", names)


@pytest.mark.parametrize("path", [*ENGINE, *KERNELS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_only_methods_import_the_functions_of_other_packages(path: Path) -> None:
    """The engine meets a method, and never what is behind it."""
    assert "upstream" in path.parts or not of("pyramidbench.upstream", imported(path))


def test_no_optional_package_is_imported_before_it_is_asked_for() -> None:
    """Listing methods costs no import of any of them, and none is named at the top of a file."""
    optional = {
        "flash_attn",
        "fa3_fwd_interface",
        "flash_attn_interface",
        "fla",
        "fastvideo_kernel",
        "flash_moba",
        "llsa",
    }
    for path in [*METHODS, *(ROOT / "pyramidbench" / "upstream").glob("*.py")]:
        assert not {name.partition(".")[0] for name in imported(path)} & (optional | {"block_sparse_attn"}), path


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.stem)
def test_no_method_imports_another(path: Path) -> None:
    assert not of("pyramidbench.methods", imported(path))


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_no_kernel_imports_a_method(path: Path) -> None:
    assert not of("pyramidbench.methods", imported(path))


def test_the_oracle_shares_no_code_with_the_kernels() -> None:
    assert not of("pyramidbench.kernels", imported(ROOT / "pyramidbench" / "oracle.py"))


@pytest.mark.parametrize("path", [*ENGINE, *METHODS, *KERNELS], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_files_open_with_a_docstring(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_a_methods_file_is_its_name() -> None:
    assert tuple(path.stem for path in METHODS) == method_names()
