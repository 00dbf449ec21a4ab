"""Entering jobs, their phase and their end."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.decide.words import JobPhase, RunOutcome, RunPhase
from everstep.ledger import LedgerConflict
from everstep.spec import messages as m
from everstep.spec.job import JobSpec
from tests.ledger.support import Fleet, at, incident


def progress(phase: JobPhase, seconds: float | None, **changes: Any) -> m.RecordProgress:
    return m.RecordProgress(
        job_id="train", phase=phase, at=None if seconds is None else at(seconds), **changes
    )


def test_a_job_is_entered_once_and_found_again(fleet: Fleet) -> None:
    first = fleet.job(machines=2)
    fleet.origin = "wf-2"

    assert fleet.job(machines=2) == first
    assert first.problem is None
    assert first.created_at == at(0)
    row = fleet.ledger.job("train")
    assert row is not None
    assert (row.phase, row.temporal_run_id) == (JobPhase.VALIDATING, "wf-2")
    assert JobSpec.model_validate(row.spec).machines == 2
    assert fleet.ledger.policy_by_hash(row.policy_hash) is not None
    assert fleet.ledger.job("nobody") is None


@pytest.mark.parametrize(
    ("phase", "word"),
    [
        (JobPhase.SUCCEEDED, "it succeeded"),
        (JobPhase.FAILED, "it failed"),
        (JobPhase.CANCELLED, "it was cancelled"),
    ],
)
def test_a_name_that_has_ended_is_refused_with_how(
    fleet: Fleet, phase: JobPhase, word: str
) -> None:
    fleet.job()
    fleet.end(phase=phase)

    problem = fleet.job().problem

    assert problem is not None
    assert word in problem
    assert "launch it under a new name" in problem


def test_a_job_of_another_workflow_is_refused(fleet: Fleet) -> None:
    fleet.job()

    problem = fleet.job(workflow="something-else").problem

    assert problem is not None
    assert "job train belongs to workflow job-train" in problem


def test_a_live_run_is_adopted_only_with_its_own_spec(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job(machines=2)
    fleet.open()

    other = fleet.job(machines=1, ranks_per_machine=4)
    same = fleet.job(machines=2, policy={"ladder": {"stable_after": "1m"}})

    assert other.problem is not None
    assert "changed: machines, ranks_per_machine" in other.problem
    assert other.live_run is None
    assert same.problem is None
    assert same.live_run is not None


def test_incident_numbers_go_on_where_they_were(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    assert fleet.job().incidents_total == 0
    fleet.ledger.record_incident(incident(incident_id="train-4", number=4))

    assert fleet.job().incidents_total == 4


def test_boundaries_are_written_once_and_read_in_order(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    run = fleet.open().run_id

    def mark(phase: RunPhase, seconds: float, step: int | None = None) -> m.RecordPhase:
        return m.RecordPhase(run_id=run, phase=phase, at=at(seconds), step=step)

    fleet.ledger.record_progress(
        progress(
            JobPhase.RUNNING,
            9,
            phases=(mark(RunPhase.FIRST_STEP, 9, 2**40), mark(RunPhase.STARTED, 5)),
        )
    )
    fleet.ledger.record_progress(
        progress(JobPhase.RUNNING, 9, phases=(mark(RunPhase.FIRST_STEP, 99, 1),))
    )
    fleet.close(run, seconds=50)

    phases = fleet.ledger.runs("train")[0].phases
    assert [(p.phase, p.at, p.step) for p in phases] == [
        (RunPhase.OPENED, at(1), None),
        (RunPhase.STARTED, at(5), None),
        (RunPhase.FIRST_STEP, at(9), 2**40),
        (RunPhase.CLOSED, at(50), None),
    ]


def test_a_late_word_does_not_undo_a_newer_phase(fleet: Fleet) -> None:
    fleet.job()
    fleet.ledger.record_progress(progress(JobPhase.RECOVERING, 20, code_version="sha-2"))

    fleet.ledger.record_progress(progress(JobPhase.RUNNING, 10, code_version="sha-1"))

    row = fleet.ledger.job("train")
    assert row is not None
    assert (row.phase, row.phase_at, row.code_version) == (JobPhase.RECOVERING, at(20), "sha-2")


def test_nothing_undoes_the_end_of_a_job(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.end(phase=JobPhase.FAILED)

    fleet.ledger.record_progress(progress(JobPhase.RUNNING, 9999))
    fleet.end(phase=JobPhase.SUCCEEDED)

    row = fleet.ledger.job("train")
    assert row is not None
    assert (row.phase, row.ended_at, row.ettr) == (JobPhase.FAILED, at(900), 0.9)
    assert fleet.holders() == {}
    assert fleet.ledger.runs("train")[0].outcome is RunOutcome.FAILED


def test_a_job_does_not_end_in_a_phase_that_is_not_final(fleet: Fleet) -> None:
    fleet.job()

    with pytest.raises(LedgerConflict, match="running is not the end of a job"):
        fleet.end(phase=JobPhase.RUNNING)
    with pytest.raises(LedgerConflict, match="job nobody: not in this ledger"):
        fleet.end("nobody")
    with pytest.raises(LedgerConflict, match="run train.7: not in this ledger"):
        fleet.ledger.record_progress(
            progress(
                JobPhase.RUNNING,
                1,
                phases=(m.RecordPhase(run_id="train.7", phase=RunPhase.STARTED, at=at(1)),),
            )
        )


def test_jobs_are_listed_with_what_they_have(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3")
    fleet.job("alone")
    fleet.job()
    fleet.open()
    fleet.close("train.1")
    fleet.open(keep=("m1", "m2"))
    fleet.ledger.record_incident(incident())

    rows = {row.job_id: row for row in fleet.ledger.jobs()}

    assert (rows["train"].runs_total, rows["train"].incidents_total) == (2, 1)
    assert rows["train"].machines == ("m1", "m2")
    assert (rows["alone"].runs_total, rows["alone"].machines) == (0, ())


def test_code_versions_are_only_ever_added(fleet: Fleet) -> None:
    fleet.job()

    assert fleet.ledger.record_code_version("train", "sha-1", now=at(1), path="/a", author="ann")
    assert not fleet.ledger.record_code_version("train", "sha-1", now=at(2), path="/b")
    assert fleet.ledger.record_code_version("train", "sha-2", now=at(3))

    assert [(v.code_version, v.path) for v in fleet.ledger.code_versions("train")] == [
        ("sha-1", "/a"),
        ("sha-2", None),
    ]
