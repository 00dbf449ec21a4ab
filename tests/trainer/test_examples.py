"""The examples' files are what they claim: job specs load, the text can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.spec.job import JobSpec
from everstep.spec.load import load_job_spec
from tests.trainer.kit import EXAMPLES, load_module, run_python

faults = load_module(EXAMPLES / "faults.py")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/job.yaml")), ids=lambda p: p.parent.name)
def test_a_job_file_names_a_script_that_is_there(path: Path) -> None:
    spec = load_job_spec(path)
    assert isinstance(spec, JobSpec)
    script = next(word for word in spec.command if word.endswith(".py"))
    assert (EXAMPLES / script).is_file()
    assert (
        spec.world_size
        == {"tiny_gpt": 4, "counter_job": 4, "plain_torchrun_script": 2}[path.parent.name]
    )


def test_the_launcher_of_the_plain_script_is_taken_away() -> None:
    spec = load_job_spec(EXAMPLES / "plain_torchrun_script" / "job.yaml")
    assert "torchrun" not in spec.command
    assert (spec.machines, spec.ranks_per_machine) == (1, 2)


def test_the_text_is_what_its_grammar_makes() -> None:
    module = load_module(EXAMPLES / "tiny_gpt" / "make_corpus.py")
    text = (EXAMPLES / "tiny_gpt" / "corpus.txt").read_text(encoding="ascii")
    assert text == module.corpus()
    assert 30_000 < len(text) < 60_000
    assert len(set(text.splitlines())) > 150


def test_an_order_fires_once_at_or_after_its_step_on_its_rank(tmp_path: Path) -> None:
    faults.order(tmp_path, "nan", rank=1, step=4)
    other, first = faults.Faults(0, str(tmp_path)), faults.Faults(1, str(tmp_path))
    assert not other.before_step(4)
    assert not first.before_step(3)
    assert faults.fired(tmp_path) == {}
    assert first.before_step(6)
    assert not first.before_step(7)
    assert not faults.Faults(1, str(tmp_path)).before_step(4), "a restarted rank meets it again"
    assert faults.fired(tmp_path) == {"nan.rank1.step4": 1}


def test_an_order_that_means_nothing_stops_the_rank_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "explode.rank0.step1").touch()
    with pytest.raises(SystemExit, match="explode.rank0.step1: not an order"):
        faults.Faults(0, str(tmp_path)).before_step(1)
    with pytest.raises(ValueError, match="not an order"):
        faults.order(tmp_path, "Explode!", rank=0, step=1)


def test_without_a_directory_nothing_is_ordered(tmp_path: Path) -> None:
    assert not faults.Faults(0, "").before_step(1)
    assert not faults.Faults(0, str(tmp_path / "not there yet")).before_step(1)
    assert faults.fired(tmp_path / "not there yet") == {}


def test_the_counter_explains_itself() -> None:
    done = run_python(str(EXAMPLES / "counter_job" / "train.py"), "--help", env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert "--step-log" in done.stdout
