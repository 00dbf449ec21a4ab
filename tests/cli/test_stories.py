"""What a person reads: an incident's story, the waiting line, the demo's report."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from everstep.decide.attribution import Finding
from everstep.decide.ladder import Decision, LadderState
from everstep.decide.words import (
    Action,
    Cause,
    Confidence,
    IncidentState,
    JobPhase,
    Rung,
    RunOutcome,
    RunPhase,
    Side,
    Symptom,
    Verdict,
)
from everstep.demo.faults import row_of
from everstep.demo.report import Report, Row
from everstep.errors import ConfigurationProblem
from everstep.ledger.views import (
    ActionRow,
    IncidentDetail,
    ObservationRow,
    PhaseMark,
    RoundRow,
    RunRow,
)
from everstep.render import progress_line
from everstep.spec.agent_api import RestorePointPlan
from everstep.spec.messages import CLEARED_AGO_S, DecisionRecord, JobStatus, MachineRef, Progress
from everstep.story import Story, tell

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def run(generation: int, *, incident: str | None, restore: int | None, first_step: float) -> RunRow:
    return RunRow(
        run_id=f"job.{generation}",
        job_id="job",
        generation=generation,
        start_reason="launch",
        code_version="v1",
        incident_id=incident,
        opened_at=after(first_step - 5),
        closed_at=None,
        outcome=RunOutcome.FAILED if generation == 1 else None,
        restore_chosen=True,
        restore=None
        if restore is None
        else RestorePointPlan(step=restore, generation=1, path="/ckpt"),
        machines=(MachineRef(machine_id="m-3", address="10.0.0.3", group_rank=0),),
        phases=(
            PhaseMark(phase=RunPhase.OPENED, at=after(first_step - 5), step=None),
            PhaseMark(phase=RunPhase.FIRST_STEP, at=after(first_step), step=None),
        ),
    )


@pytest.fixture
def incident() -> IncidentDetail:
    finding = Finding(
        symptom=Symptom.KERNEL_PANIC,
        side=Side.INFRASTRUCTURE,
        cause=Cause.INFRASTRUCTURE,
        confidence=Confidence.HIGH,
        rule="machine_lost",
        reason="m-2 did not come back",
        suspects=("m-2",),
        step=37,
    )
    decision = Decision(
        rung=Rung.EVICT,
        action=Action.EVICT_MACHINE,
        row="evict",
        reason="evict m-2",
        cause=Cause.INFRASTRUCTURE,
        evict=("m-2",),
        budget_left=19,
    )
    return IncidentDetail(
        incident_id="job-1",
        job_id="job",
        number=1,
        state=IncidentState.STABLE,
        symptom=Symptom.KERNEL_PANIC,
        summary="lost",
        opened_at=after(1),
        closed_at=after(30),
        rounds_total=1,
        rounds=(
            RoundRow(
                round_number=1,
                run_id="job.1",
                symptom=Symptom.KERNEL_PANIC,
                summary="lost",
                detected_at=after(1),
                stopped_at=after(4),
                reports=[
                    {"machine_id": "m-2", "lost": True, "reachable": False},
                    {
                        "machine_id": "m-1",
                        "reachable": True,
                        "ranks": [{"rank": 0, "signal": 11, "step": 37, "log_lines": ["boom"]}],
                    },
                ],
                evidence=["m-2: silent for 3 s"],
                cut="",
            ),
        ),
        decisions=(
            DecisionRecord(
                decision_id="job-1-r1",
                incident_id="job-1",
                round_number=1,
                finding=finding,
                state_before=LadderState(),
                state_after=LadderState(),
                decision=decision,
                policy_hash="abcdef0123456789",
                decided_at=after(4.5),
            ),
        ),
        observations=(
            ObservationRow(
                round_number=1,
                position=0,
                kind="rank_exited",
                verdict=Verdict.FAULTY,
                machine_id="m-1",
                rank=0,
                age_s=0.1,
                reason="ended with signal 11",
                data={},
                observed_at=after(1),
            ),
        ),
        actions=(
            ActionRow(
                incident_id="job-1",
                step=1,
                target="m-2",
                generation=1,
                kind="evict",
                job_id="job",
                result={},
                at=after(5),
            ),
        ),
    )


def test_a_story_has_evidence_rule_decision_policy_and_times_in_order(
    incident: IncidentDetail,
) -> None:
    runs = (
        run(1, incident=None, restore=None, first_step=-60),
        run(2, incident="job-1", restore=34, first_step=12),
    )
    text = tell(Story(incident=incident, runs=runs))
    places = [
        "Incident job-1 of job job: kernel panic",
        "Round 1, run 1",
        "(+0.00 s) noticed",
        "rank 0 on m-1 (faulty, 0.1 s before) ended with signal 11",
        "(+3.00 s) all ranks ended",
        "m-2: lost",
        "SIGSEGV",
        "| boom",
        "m-2: silent for 3 s",
        "rule machine_lost: m-2 did not come back",
        "(+3.50 s) decided: evict m-2",
        "policy abcdef0123456789",
        "(+4.00 s) evict m-2",
        "run 2 on m-3, from the checkpoint of step 34",
        "(+11.00 s) first new step",
        "over: stable",
    ]
    found = [text.find(place) for place in places]
    assert -1 not in found, places[found.index(-1)]
    assert found == sorted(found)


def test_a_row_is_measured_from_the_fault(incident: IncidentDetail) -> None:
    runs = [
        run(1, incident=None, restore=None, first_step=-60),
        run(2, incident="job-1", restore=34, first_step=12),
    ]
    row = row_of("machine lost", "job", START.timestamp(), [incident], runs)
    assert (row.detect_s, row.decide_s, row.recover_s) == (1.0, 4.5, 12.0)
    assert (row.steps_lost, row.action, row.symptom) == (3, "evict m-2", "kernel_panic")
    assert row.problem == ""


def test_a_fault_without_incident_or_new_step_is_a_problem(incident: IncidentDetail) -> None:
    at = START.timestamp()
    assert row_of("x", "job", at, [], []).problem
    assert row_of(
        "x", "job", at, [incident], [run(1, incident=None, restore=None, first_step=0)]
    ).problem


def good_report() -> Report:
    report = Report(baseline_sha256="a", final_sha256="a", ettr=0.5)
    report.rows.append(Row(name="agent kill -9", job="demo", recover_s=0.4))
    report.rows.append(
        Row(name="user error", job="other", incident_id="other-1", steps_lost=None, ends_job=True)
    )
    return report


def test_the_report_file_has_the_documented_shape(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    good_report().write(path)
    data = json.loads(path.read_text())
    assert set(data) == {"faults", "baseline_sha256", "final_sha256", "weights_identical", "ettr"}
    keys = [
        "name",
        "job",
        "incident_id",
        "symptom",
        "action",
        "detect_s",
        "decide_s",
        "recover_s",
        "steps_lost",
    ]
    assert list(data["faults"][0]) == keys
    assert data["faults"][0]["symptom"] == "none"
    assert data["faults"][0]["action"] == "training went on"
    assert data["faults"][1]["ends_job"] is True
    assert data["faults"][1]["recover_s"] is None
    with pytest.raises(ConfigurationProblem, match="nowhere"):
        good_report().write(Path("/nowhere/at/all.json"))


def test_a_report_passes_only_when_everything_was_as_it_had_to_be() -> None:
    assert good_report().passed
    assert "weights: identical to an uninterrupted run" in good_report().verdict()
    other = good_report()
    other.final_sha256 = "b"
    assert not other.passed
    assert any("NOT identical" in line for line in other.verdict())
    for broken in (Report(baseline_sha256="a", final_sha256="a"), good_report(), good_report()):
        if broken.rows:
            broken.rows[0].problem = "run 2 replaced run 1"
        assert not broken.passed
    missing = good_report()
    missing.baseline_sha256 = missing.final_sha256 = None
    assert not missing.passed
    failed = good_report()
    failed.problems.append("it stood still")
    assert not failed.passed


def test_the_waiting_line_says_what_a_person_wants_to_know() -> None:
    status = JobStatus(
        job_id="job",
        phase=JobPhase.RUNNING,
        generation=3,
        machines=("m-1", "m-2"),
        world_size=4,
        progress=Progress(step=120, loss=2.3456),
        incidents_total=2,
        ettr=0.973,
        created_at=START,
    )
    line = "running · step 120 · loss 2.346 · run 3 · 2 machines · ETTR 97.3% · 2 incidents"
    assert progress_line(status) == line


def test_a_story_tells_what_probes_saw_and_what_was_ruled_out(incident: IncidentDetail) -> None:
    seen = {"probe": "kernel_log", "target": "gpu 3", "rule": "xid_79", "action": "evict_machine"}
    (number,) = incident.rounds
    report = {
        "machine_id": "m-2",
        "reachable": True,
        "healthy_probes": ["disk", "link"],
        "observations": [
            {"observation": seen | {"verdict": "faulty", "reason": "GPU 3 is gone"}, "age_s": 2.5},
            {
                "observation": seen | {"verdict": "faulty", "reason": "GPU 4 was gone"},
                "age_s": 700.0,
                "cleared_ago_s": 4.0,
            },
        ],
    }
    (decision,) = incident.decisions
    (observation,) = incident.observations
    finding = replace(
        decision.finding,
        action=Action.EVICT_MACHINE,
        ruled_out=("ranks 1, 2: lost peers, witnesses only",),
    )
    told = observation.model_copy(
        update={"kind": "probe", "rank": None, "machine_id": "m-2", "age_s": 1.5, "data": seen}
    )
    over = told.model_copy(update={"age_s": 90.0, "data": seen | {CLEARED_AGO_S: 60.0}})
    text = tell(
        Story(
            incident=incident.model_copy(
                update={
                    "rounds": (number.model_copy(update={"reports": [report]}),),
                    "observations": (told, over),
                    "decisions": (decision.model_copy(update={"finding": finding}),),
                }
            ),
            runs=(),
        )
    )
    for said in (
        "probe: m-2 (faulty, 1.5 s before)",
        "probe: m-2 (faulty, 90.0 s before, gone for 60.0 s)",
        "[kernel_log gpu 3, rule xid_79, calls for: evict machine]",
        "m-2: faulty for 2.5 s: GPU 3 is gone",
        "m-2: faulty for 12 min, gone for 4.0 s: GPU 4 was gone",
        "m-2: nothing wrong by disk, link",
        "calls for: evict machine",
        "ruled out:\n        ranks 1, 2: lost peers, witnesses only",
    ):
        assert said in text, text
