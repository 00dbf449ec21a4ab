"""The one lock is complete, exact, and is what runs here."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.conftest import CHECKOUT


def lock() -> dict[str, str]:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pairs = [line.partition("==")[::2] for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def project() -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    return table


def needed() -> dict[str, set[str]]:
    """All that ``everstep[dev]`` needs here, directly or not, and who asks for it."""
    seen: set[tuple[str, str]] = set()
    asked: dict[str, set[str]] = {}
    todo = [("everstep", ""), ("everstep", "dev")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for wanted in map(Requirement, requires):
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                key = canonicalize_name(wanted.name)
                asked.setdefault(key, set()).add(name)
                todo += [(key, more) for more in ("", *wanted.extras)]
    asked.pop("everstep", None)
    return asked


def test_every_version_is_exact_and_without_a_local_part() -> None:
    text = (CHECKOUT / "constraints.txt").read_text()
    entries = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert entries
    assert not [line for line in entries if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", line)]
    assert "torch==2.13.0" in entries


def test_everything_that_is_needed_is_locked() -> None:
    assert {name: sorted(by) for name, by in needed().items() if name not in lock()} == {}


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11) or sys.platform != "linux",
    reason="the lock is resolved on Linux with Python 3.11; others need a little less or more",
)
def test_nothing_is_locked_that_nobody_needs() -> None:
    assert set(lock()) - set(needed()) == set()


def test_what_runs_here_is_what_is_locked() -> None:
    locked = lock()
    here = {name: distribution(name).version.partition("+")[0] for name in needed()}
    assert here == {name: locked[name] for name in here}


def test_the_build_backend_is_locked_to_the_version_that_it_names() -> None:
    system = project()["build-system"]
    assert isinstance(system, dict)
    for wanted in map(Requirement, system["requires"]):
        assert str(wanted.specifier) == f"=={lock()[canonicalize_name(wanted.name)]}"
