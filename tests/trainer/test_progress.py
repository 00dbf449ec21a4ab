"""The progress block: what the agent reads while the rank goes on writing."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from everstep_trainer import Session

from everstep.machine.progress import ProgressReader, create
from tests.trainer.kit import TRAINER, Job, read_progress, run_python

ATTACHED, FINISHED, SAVE_FAILED = 4, 8, 16


def test_attaching_writes_a_whole_empty_block(job: Job) -> None:
    job.session(generation=7)
    block = job.progress(generation=7)
    assert block["size"] == 4096
    assert block["magic"] == b"EVSTPRG1"
    assert block["seq"] % 2 == 0
    assert (block["pid"], block["generation"]) == (os.getpid(), 7)
    assert (block["step"], block["steps"], block["nonfinite_step"]) == (-1, 0, -1)
    assert (block["committed"], block["failed"], block["error"]) == (-1, -1, "")
    assert block["flags"] == ATTACHED
    assert math.isnan(block["loss"])


def test_a_step_is_written_where_the_layout_says(job: Job) -> None:
    before = time.monotonic_ns()
    session = job.session()
    session.step(41, loss=2.5)
    session.step(42, loss=1.5, grad_norm=0.25)
    block = job.progress()
    assert (block["step"], block["loss"], block["grad_norm"]) == (42, 1.5, 0.25)
    assert block["flags"] == ATTACHED | 3
    assert block["steps"] == 2
    assert before <= block["monotonic_ns"] <= time.monotonic_ns()
    session.step(43)
    block = job.progress()
    assert block["flags"] == ATTACHED
    assert math.isnan(block["loss"])
    assert math.isnan(block["grad_norm"])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_the_first_step_that_is_not_finite_is_kept(job: Job, bad: float, what: str) -> None:
    session = job.session()
    session.step(1, loss=1.0, grad_norm=1.0)
    assert job.progress()["nonfinite_step"] == -1
    session.step(2, **{what: bad})
    session.step(3, **{what: bad})
    session.step(4, loss=1.0)
    assert job.progress()["nonfinite_step"] == 2


def test_sections_nest_and_the_outer_one_keeps_its_start(job: Job) -> None:
    session = job.session()
    with session.section("eval", limit_s=90):
        outer = job.progress()
        assert (outer["section_depth"], outer["section"]) == (1, "eval")
        assert outer["section_limit_s"] == 90.0
        with session.section("é" * 60):
            inner = job.progress()
            assert (inner["section_depth"], inner["section"]) == (2, "é" * 32)
            assert inner["section_limit_s"] == 0.0
            assert inner["section_ns"] > outer["section_ns"]
        again = job.progress()
        assert (again["section"], again["section_ns"]) == ("eval", outer["section_ns"])
    after = job.progress()
    assert (after["section_depth"], after["section"]) == (0, "")
    assert after["section_ns"] > inner["section_ns"]


def test_a_section_ends_when_its_body_raises(job: Job) -> None:
    session = job.session()
    with pytest.raises(KeyError), session.section("eval"):
        raise KeyError
    assert job.progress()["section_depth"] == 0


def test_the_agents_reader_understands_the_block(job: Job) -> None:
    path = job.progress_path(0, 1)
    create(path)
    reader = ProgressReader(path)
    assert reader.read() is None
    session = job.session()
    session.step(3, loss=0.5)
    with session.section("eval", limit_s=7.5):
        seen = reader.read()
    reader.close()
    assert seen is not None
    assert (seen.step, seen.loss, seen.grad_norm, seen.steps_reported) == (3, 0.5, None, 1)
    assert (seen.section, seen.section_max_s) == ("eval", 7.5)
    assert seen.attached
    assert not seen.finished


@pytest.mark.parametrize(
    "arguments",
    [("three", 1.0, None), (3, "low", None), (3, 1.0, "high"), (None, None, None)],
)
def test_a_wrong_argument_is_an_error_and_leaves_the_block_readable(
    job: Job, arguments: tuple[object, ...]
) -> None:
    session = job.session()
    session.step(1, loss=1.0)
    with pytest.raises(TypeError):
        session.step(*arguments)  # type: ignore[arg-type]
    assert job.progress()["seq"] % 2 == 0
    session.step(2, loss=1.0)
    assert (job.progress()["step"], job.progress()["loss"]) == (2, 1.0)


def test_a_second_program_of_the_same_rank_starts_afresh(job: Job) -> None:
    first = job.session()
    first.step(9, loss=math.nan)
    seq = job.progress()["seq"]
    job.session()
    block = job.progress()
    assert (block["step"], block["nonfinite_step"]) == (-1, -1)
    assert block["seq"] > seq


def test_training_goes_on_when_progress_cannot_be_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = Job(tmp_path).environ(EVERSTEP_PROGRESS_FILE=str(tmp_path / "no" / "such"))
    session = Session(environ)
    session.step(1, loss=1.0)
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "progress is not reported: No such file or directory (ENOENT)" in line


END = """
import os, sys, everstep_trainer
session = everstep_trainer.attach()
session.step(5, loss=1.0)
"""


@pytest.mark.parametrize(
    ("ending", "finished"),
    [
        ("", True),
        ("sys.exit(0)", True),
        ("raise RuntimeError('x')", False),
        ("os._exit(0)", False),
        ("os.kill(os.getpid(), 9)", False),
    ],
)
def test_only_an_interpreter_that_ends_by_itself_has_finished(
    job: Job, ending: str, finished: bool
) -> None:
    run_python("-c", END + ending, env=job.environ())
    block = job.progress()
    assert block["step"] == 5
    assert bool(block["flags"] & FINISHED) is finished


def test_a_forked_child_does_not_speak_for_the_rank(job: Job) -> None:
    code = (
        END
        + """
child = os.fork()
if child == 0:
    session.step(99, loss=float("nan"))
    with session.section("in the child"):
        sys.exit(0)
os.waitpid(child, 0)
block = open(os.environ["EVERSTEP_PROGRESS_FILE"], "rb").read()
os.write(1, block)
os._exit(0)
"""
    )
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(TRAINER), **job.environ()},
        capture_output=True,
        check=True,
        timeout=60,
    )
    copy = job.root / "copy"
    copy.write_bytes(done.stdout)
    block = read_progress(copy)
    assert (block["step"], block["nonfinite_step"], block["section_depth"]) == (5, -1, 0)
    assert not block["flags"] & FINISHED


def test_a_spawned_child_that_attaches_does_not_speak_for_the_rank(job: Job) -> None:
    """It imports the script anew, as every worker of a data loader does where nothing is forked."""
    script = job.root / "script.py"
    script.write_text(
        """
import multiprocessing, os
import everstep_trainer
session = everstep_trainer.attach()
session.step(5 if __name__ == "__main__" else 99, loss=1.0)
def work(): pass
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
    os._exit(0)
"""
    )
    done = run_python(str(script), env=job.environ())
    assert done.returncode == 0, done.stderr
    assert (job.progress()["step"], job.progress()["steps"]) == (5, 1)


def test_a_reader_never_sees_half_a_report(job: Job) -> None:
    """A rank writes as fast as it can; loss and gradient norm are functions of the step."""
    code = """
import os, everstep_trainer
session = everstep_trainer.attach()
step = 7
while not os.path.exists(os.environ["STOP"]):
    for step in range(step, step + 20_000):
        session.step(step, loss=step * 0.5, grad_norm=step * 2.0)
    with session.section("eval", limit_s=step):
        pass
"""
    path, stop = job.progress_path(0, 1), job.root / "stop"
    create(path)
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    environ = {**kept, "PYTHONPATH": str(TRAINER), "STOP": str(stop), **job.environ()}
    seen: set[int] = set()
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as rank:
        reader = ProgressReader(path)
        try:
            while len(seen) < 500:
                progress = reader.read()
                if progress is None or progress.step is None:
                    continue
                assert progress.step >= 7
                assert progress.loss == progress.step * 0.5
                assert progress.grad_norm == progress.step * 2.0
                assert progress.nonfinite_step is None
                seen.add(progress.step)
        finally:
            stop.touch()
            reader.close()
    assert rank.returncode == 0
