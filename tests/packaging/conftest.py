"""A wheel of this checkout, installed the way a stranger would, without the network.

The environment is new and holds nothing but the wheel; the libraries that the wheel depends on come
from the environment that runs the tests, by one path file. Path files of *that* environment (the
editable install of this checkout, above all) do not count from there.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]

HOSTILE_MODULES = ("config", "workflows", "workers", "activities", "everstep_jobs", "examples")
"""Top-level packages of somebody else's training project."""


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment with the wheel in it."""

    prefix: Path
    python: Path
    everstep: Path
    site_packages: Path

    def environment(self, **more: str) -> dict[str, str]:
        """What a shell of an ordinary user would have, and ``more``."""
        kept = ("PATH", "HOME", "LANG", "TMPDIR")
        return {**{k: os.environ[k] for k in kept if k in os.environ}, **more}

    def run(self, *command: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of this environment to its end."""
        return subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env=self.environment(**more),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


def tree(folder: Path) -> dict[str, bytes]:
    """Names and contents of all files below ``folder``, byte code aside."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def write_hostile(folder: Path) -> None:
    """Write somebody's project whose packages have the names that ours have, and answer to them."""
    for name in HOSTILE_MODULES:
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"OWNER = 'the user, {name}'\n")
        for module in ("controller", "agent", "contracts", "training_job", "models"):
            (package / f"{module}.py").write_text(f"OWNER = 'the user, {name}.{module}'\n")
    (folder / "config" / "policy.yaml").write_text("theirs: true\n")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it."""
    out = tmp_path_factory.mktemp("dist")
    # A build that fails leaves its half-made archive in the temporary directory.
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("build"))}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(CHECKOUT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """The wheel."""
    (path,) = built.glob("everstep-*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in an environment of its own, beside a hostile project that came first."""
    prefix = tmp_path_factory.mktemp("wheel") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(prefix)], check=True)
    python = prefix / "bin" / "python"
    site_packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(prefix), "platbase": str(prefix)})
    )
    libraries = sysconfig.get_path("purelib")
    assert libraries in site.getsitepackages()
    (site_packages / "libraries-of-the-test-run.pth").write_text(f"{libraries}\n")
    write_hostile(site_packages)
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, timeout=110)
    return Installed(prefix, python, prefix / "bin" / "everstep", site_packages)
