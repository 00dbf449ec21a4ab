"""The wheel takes no generic name, and works beside a project that uses all of them."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from everstep import _bootstrap
from tests.packaging.conftest import CHECKOUT, HOSTILE_MODULES, Installed, tree, write_hostile

APPLICATION = ("workflows", "activities", "workers", "config", "examples")


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_puts_nothing_generic_into_site_packages(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in names(wheel)}
    version = wheel.name.split("-")[1]
    assert top == {"everstep", "everstep_trainer", f"everstep-{version}.dist-info"}


@pytest.mark.parametrize("folder", ["workflows", "activities", "workers", "config", "everstep"])
def test_the_wheel_carries_every_module_and_every_data_file(wheel: Path, folder: str) -> None:
    place = "everstep" if folder == "everstep" else f"everstep/_app/{folder}"
    here = {f"{place}/{name}" for name in tree(CHECKOUT / folder)}
    assert here
    assert here <= names(wheel)


def test_the_wheel_carries_the_trainer_and_the_examples(wheel: Path) -> None:
    here = {f"everstep_trainer/{name}" for name in tree(CHECKOUT / "trainer" / "everstep_trainer")}
    assert {"everstep_trainer/__init__.py"} <= here <= names(wheel)
    examples = {f"everstep/_app/examples/{name}" for name in tree(CHECKOUT / "examples")}
    assert examples <= names(wheel)


def test_the_wheel_carries_no_rubbish(wheel: Path) -> None:
    rubbish = ("__pycache__", ".pyc", "/tests/", "conftest", ".venv", ".git", "constraints.txt")
    assert not [name for name in names(wheel) if any(bad in name for bad in rubbish)]


def test_the_wheel_is_typed_and_licensed(wheel: Path) -> None:
    wanted = {
        "everstep/py.typed",
        "everstep_trainer/py.typed",
        *(f"everstep/_app/{name}/py.typed" for name in ("workflows", "activities", "workers")),
    }
    assert wanted <= names(wheel)
    assert [name for name in names(wheel) if name.endswith("dist-info/licenses/LICENSE")]


def test_the_source_distribution_builds_by_itself(built: Path, wheel: Path) -> None:
    # `python -m build` made the wheel from it, so it is complete.
    (archive,) = built.glob("everstep-*.tar.gz")
    with tarfile.open(archive) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "hatch_build.py", "constraints.txt"} <= inside
    assert wheel.exists()


@pytest.mark.parametrize("where", ["/", "hostile"])
@pytest.mark.parametrize(
    ("command", "answer"),
    [
        pytest.param(("version",), "0.1.0", id="version"),
        pytest.param(("controller", "--help"), "--temporal", id="controller"),
        pytest.param(("agent", "--help"), "--machine-id", id="agent"),
    ],
)
def test_commands_run_from_anywhere(
    installed: Installed, tmp_path: Path, where: str, command: tuple[str, ...], answer: str
) -> None:
    cwd = Path("/")
    more = {}
    if where == "hostile":
        cwd = tmp_path / "project"
        write_hostile(cwd)
        more = {"PYTHONPATH": str(cwd)}
    done = installed.run(installed.everstep, *command, cwd=cwd, **more, COLUMNS="120")
    assert done.returncode == 0, done.stderr
    assert answer in done.stdout


def test_processes_of_ours_import_ours(installed: Installed, tmp_path: Path) -> None:
    write_hostile(tmp_path)
    program = (
        "from everstep._bootstrap import app_root, ensure_app_path; ensure_app_path();"
        "import activities.contracts, workers, workflows;"
        "places = {m.__file__.startswith(str(app_root())) for m in"
        " (activities, activities.contracts, workers, workflows)};"
        "print(app_root(), places, (app_root() / 'config' / 'policy.yaml').is_file())"
    )
    done = installed.run(installed.python, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == [
        str(installed.site_packages / "everstep" / "_app"), "{True}", "True",
    ], done.stderr  # fmt: skip


def test_importing_everstep_changes_nobodys_path(installed: Installed) -> None:
    program = "import sys; before = list(sys.path); import everstep; print(sys.path == before)"
    done = installed.run(installed.python, "-c", program, cwd=Path("/"))
    assert done.stdout.strip() == "True", done.stderr


def test_other_peoples_modules_stay_theirs(installed: Installed, tmp_path: Path) -> None:
    # In site-packages, which had them before our wheel came ...
    untouched = tmp_path / "as written"
    write_hostile(untouched)
    theirs = {
        name: body
        for name, body in tree(installed.site_packages).items()
        if name.partition("/")[0] in HOSTILE_MODULES
    }
    assert theirs == tree(untouched)
    # ... and by import, also in a process that uses the SDK.
    program = (
        "import config, workflows.models, examples; import everstep, everstep_trainer;"
        "print(config.OWNER, '|', workflows.models.OWNER, '|', examples.OWNER)"
    )
    done = installed.run(installed.python, "-c", program, cwd=Path("/"))
    owners = "the user, config | the user, workflows.models | the user, examples"
    assert done.stdout.strip() == owners, done.stderr


def test_a_checkout_is_its_own_application_folder() -> None:
    assert _bootstrap.app_root() == CHECKOUT
    assert {path.name for path in CHECKOUT.iterdir()} >= set(APPLICATION)
