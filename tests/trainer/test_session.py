"""The session as a script sees it: with Everstep, without it, and with a broken environment."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from everstep_trainer import BadEnvironment, Session

from tests.trainer.kit import TRAINER, Job, run_python


def test_without_everstep_everything_is_a_no_op(tmp_path: Path) -> None:
    code = """
import everstep_trainer
session = everstep_trainer.attach()
assert everstep_trainer.attach() is session
assert session.load() is None and everstep_trainer.load() is None
with session.section("eval", limit_s=5):
    session.step(1, loss=float("nan"), grad_norm=1.0)
result = everstep_trainer.save(1, {"a": object()})
assert result and result.path is None and not result.complete
print(session.active, session.job_id, session.run_id, session.generation, session.start_reason,
      session.code_version, session.restore_step, session.rank, session.world_size)
"""
    done = run_python("-c", code, env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "False None None 0 None None None 0 1\n"


def test_under_torchrun_alone_rank_and_world_size_are_its_own() -> None:
    session = Session({"RANK": "3", "WORLD_SIZE": "8"})
    assert (session.active, session.rank, session.world_size) == (False, 3, 8)


def test_a_run_knows_what_it_is(tmp_path: Path) -> None:
    job = Job(tmp_path, world_size=4)
    first = job.session(2)
    assert (first.active, first.job_id, first.run_id, first.generation) == (
        True,
        "tests",
        "tests-1",
        1,
    )
    assert (first.start_reason, first.code_version) == ("launch", "v1")
    assert (first.restore_step, first.rank, first.world_size) == (None, 2, 4)
    assert first.load() is None
    second = job.session(2, generation=2, restore="step-000000000041.g000001")
    assert (second.start_reason, second.restore_step) == ("reattempt", 41)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("EVERSTEP_RUN_ID", "", "EVERSTEP_RUN_ID is not"),
        ("EVERSTEP_GENERATION", "", "EVERSTEP_GENERATION is not"),
        ("EVERSTEP_GENERATION", "two", "EVERSTEP_GENERATION='two' must be a whole number"),
        ("EVERSTEP_GENERATION", "0", "at least 1"),
        ("EVERSTEP_GENERATION", "1000000", "at most 999999"),
        ("EVERSTEP_GENERATION", " 2", "must be a whole number"),
        ("EVERSTEP_CHECKPOINT_KEEP", "0", "EVERSTEP_CHECKPOINT_KEEP='0'"),
        ("RANK", "-1", "RANK='-1'"),
        ("RANK", "9", "RANK=9 must be less than WORLD_SIZE=2"),
        ("WORLD_SIZE", "1.5", "WORLD_SIZE='1.5'"),
        ("EVERSTEP_RESTORE_PATH", "/somewhere/else", "must end in step-<12 digits>.g<6 digits>"),
        ("EVERSTEP_RESTORE_STEP", "4", "EVERSTEP_RESTORE_STEP=4 contradicts"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, name: str, value: str, message: str
) -> None:
    environ = Job(tmp_path, world_size=2).environ(restore="step-000000000003.g000001", generation=2)
    with pytest.raises(BadEnvironment) as caught:
        Session({**environ, name: value})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unhandled_refusal_ends_the_log_with_one_line_under_our_public_name(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path)
    environ = job.environ(generation=2, restore="step-000000000003.g000001")
    done = run_python("-c", "import everstep_trainer; everstep_trainer.load()", env=environ)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "everstep_trainer.CheckpointUnreadable: cannot resume from "
    )


def test_saving_and_loading_are_declared_sections(tmp_path: Path) -> None:
    """Minutes of saving must not look like a hang: another thread watches the block meanwhile."""
    job = Job(tmp_path)
    code = """
import json, os, struct, sys, threading
import everstep_trainer

def section():
    with open(os.environ["EVERSTEP_PROGRESS_FILE"], "rb") as file:
        raw = file.read()
    return [struct.unpack_from("<Q", raw, 80)[0], raw[104:168].split(b"\\0")[0].decode()]

def watch():
    while not done.is_set():
        now = section()
        if seen[-1:] != [now]:
            seen.append(now)

session = everstep_trainer.attach()
seen, done = [], threading.Event()
sys.setswitchinterval(1e-5)
watcher = threading.Thread(target=watch)
watcher.start()
DO
done.set()
watcher.join()
print(json.dumps(seen))
"""
    save = "assert session.save(1, {'blob': b'x' * 60_000_000})"
    done = run_python("-c", code.replace("DO", save), env=job.environ())
    assert done.returncode == 0, done.stderr
    assert [1, "save"] in json.loads(done.stdout)
    assert job.progress()["section_depth"] == 0
    restored = job.environ(generation=2, restore="step-000000000001.g000001")
    done = run_python("-c", code.replace("DO", "assert session.load()[0] == 1"), env=restored)
    assert done.returncode == 0, done.stderr
    assert [1, "load"] in json.loads(done.stdout)
    assert job.progress(generation=2)["section_depth"] == 0


def test_importing_it_imports_nothing_that_has_to_be_installed() -> None:
    code = """
import sys
before = set(sys.modules)
import everstep_trainer, everstep_trainer.torch_tools
session = everstep_trainer.attach()
session.step(1, loss=1.0)
session.save(1, {"a": 1})
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new - sys.stdlib_module_names - {"everstep_trainer"}))
"""
    done = run_python("-c", code, env={})
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_saving_plain_values_imports_no_torch(tmp_path: Path) -> None:
    code = """
import sys, everstep_trainer
session = everstep_trainer.attach()
assert session.save(1, {"a": [1, 2.0, "x", b"y", None]}).complete
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    job = Job(tmp_path)
    done = run_python("-c", code, env=job.environ())
    assert (done.stdout, done.stderr) == ("False False\n", "")


@pytest.mark.parametrize("path", sorted(TRAINER.rglob("*.py")), ids=lambda path: path.name)
def test_its_syntax_is_that_of_python_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert any(
        node.module == "__future__" and node.names[0].name == "annotations" for node in imports
    ), "X | Y in an annotation is evaluated by Python 3.9 without it"


def test_it_ships_its_types() -> None:
    assert (TRAINER / "everstep_trainer" / "py.typed").is_file()
