"""The trainer library drops into any training image: one package, nothing to install beside it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT

PACKAGE = CHECKOUT / "trainer" / "everstep_trainer"
LATE = {"torch", "numpy"}
"""May be imported, but only inside a function: the training script has it where that is called."""


def imports(path: Path) -> list[tuple[str, bool]]:
    """Top-level names that a module imports, and whether it does so as soon as it is imported."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    late = {
        id(inner)
        for outer in ast.walk(module)
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(outer)
    }
    typing_only = {
        id(inner)
        for outer in ast.walk(module)
        if isinstance(outer, ast.If) and "TYPE_CHECKING" in ast.unparse(outer.test)
        for inner in ast.walk(outer)
    }
    found: list[tuple[str, bool]] = []
    for node in ast.walk(module):
        at_once = id(node) not in late | typing_only
        if isinstance(node, ast.Import):
            found += [(alias.name.partition(".")[0], at_once) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            name = "everstep_trainer" if node.level else (node.module or "").partition(".")[0]
            found.append((name, at_once))
    return found


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem) for path in sorted(PACKAGE.rglob("*.py"))]
)
def test_every_import_is_of_the_standard_library(path: Path) -> None:
    allowed = sys.stdlib_module_names | {"everstep_trainer"}
    foreign = [
        name
        for name, at_once in imports(path)
        if name not in allowed and (at_once or name not in LATE)
    ]
    assert not foreign


def test_it_imports_without_any_installed_package() -> None:
    # -S: no site-packages. -I: nothing from the environment either.
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); import everstep_trainer as e"
    )
    program += "; print(e.__name__, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["everstep_trainer", "False"], done.stderr


def test_it_builds_alone_without_dependencies(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel"]
    command += ["--outdir", str(tmp_path), str(PACKAGE.parent)]
    subprocess.run(command, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("everstep_trainer-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        assert "Requires-Dist" not in archive.read(metadata).decode()
        top = {name.partition("/")[0] for name in archive.namelist()}
    assert top == {"everstep_trainer", metadata.partition("/")[0]}


def test_it_has_the_version_of_everstep() -> None:
    versions = [
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
        for folder in (CHECKOUT, PACKAGE.parent)
    ]
    assert versions[0] == versions[1]
