"""Every import contract bites: broken on purpose, in a copy, each is reported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.packaging.conftest import CHECKOUT

PACKAGES = ("everstep", "workflows", "activities", "workers", "trainer")

BREAKS = {
    "Dependencies point downwards, from processes to pure knowledge": (
        "everstep/spec/base.py",
        "import everstep.ledger",
    ),
    "Decisions are pure: they see neither the world nor its clocks, dice and libraries": (
        "everstep/decide/words.py",
        "import time",
    ),
    "Workflows know activities by their contract only": (
        "workflows/page.py",
        "import activities.detection",
    ),
    "Workflows reach no library that does I/O, not even through others": (
        "everstep/spec/base.py",
        "import httpx",
    ),
    "Workflows take time, randomness and files from Temporal or not at all": (
        "workflows/page.py",
        "import random",
    ),
    "Users' side reaches workflows by name": (
        "everstep/client.py",
        "import workflows.page",
    ),
    "The trainer library imports nothing of ours and nothing that has to be installed": (
        "trainer/everstep_trainer/__init__.py",
        "import numpy",
    ),
    "Nothing of ours imports the trainer library": (
        "workers/__init__.py",
        "import everstep_trainer",
    ),
}
"""Name of the contract, and a line that breaks it when it is added to a file."""

LINT = """
import sys
from importlinter.cli import lint_imports_command

sys.path[:0] = [".", "trainer"]
lint_imports_command(["--no-cache"])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architecture")
    for name in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / name, folder / name, ignore=ignore)
    shutil.copy(CHECKOUT / "pyproject.toml", folder)
    return folder


def broken(folder: Path) -> set[str]:
    """Names of the contracts that do not hold there."""
    done = subprocess.run(
        [sys.executable, "-c", LINT],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    kept = {name for name in BREAKS if f"{name} KEPT" in done.stdout}
    found = {name for name in BREAKS if f"{name} BROKEN" in done.stdout}
    assert kept | found == set(BREAKS), done.stdout + done.stderr
    return found


def test_the_breaks_are_for_the_contracts_there_are() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    assert {contract["name"] for contract in project["tool"]["importlinter"]["contracts"]} == set(
        BREAKS
    )


def test_an_untouched_copy_keeps_all(copy: Path) -> None:
    assert broken(copy) == set()


@pytest.mark.parametrize("name", BREAKS)
def test_each_contract_bites(copy: Path, name: str) -> None:
    path, line = BREAKS[name]
    target = copy / path
    before = target.read_text()
    target.write_text(f"{before}\n{line}\n")
    try:
        assert name in broken(copy)
    finally:
        target.write_text(before)
