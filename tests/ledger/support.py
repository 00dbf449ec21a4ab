"""Short ways to say what tests do to a ledger, with instants of their own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from everstep.decide.attribution import Finding, MachineReport, RankReport
from everstep.decide.ladder import Decision, LadderState
from everstep.decide.words import (
    Action,
    Cause,
    Confidence,
    IncidentState,
    JobPhase,
    RankState,
    Rung,
    RunOutcome,
    Side,
    Symptom,
    Verdict,
)
from everstep.ledger import Ledger, MachineStanding
from everstep.ledger.database import Database
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind, Registration
from everstep.spec.job import JobSpec
from everstep.spec.policy import PolicySnapshot

T0 = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """An instant of the test's clock."""
    return T0 + timedelta(seconds=seconds)


def database(ledger: Ledger) -> Database:
    """The database behind a ledger, for raw statements."""
    return ledger._database


class Fleet:
    """A ledger, and a request counter as a workflow has one."""

    def __init__(self, ledger: Ledger, policy: PolicySnapshot, origin: str = "wf") -> None:
        self.ledger = ledger
        self.policy = policy
        self.origin = origin
        self.requests = 0

    def machine(
        self,
        machine_id: str,
        *,
        seconds: float = 0,
        slots: int = 2,
        boot: str = "boot-1",
        jobs: dict[str, int] | None = None,
        **changes: Any,
    ) -> MachineStanding:
        """Register a machine."""
        return self.ledger.register_machine(
            Registration(
                api_version=1,
                machine_id=machine_id,
                agent_boot_id=boot,
                url=changes.pop("url", f"http://{machine_id}:7001"),
                address=f"10.0.0.{sum(machine_id.encode()) % 250}",
                slots=slots,
                version="0.1.0",
                jobs=jobs or {},
                **changes,
            ),
            now=at(seconds),
        )

    def machines(self, *machine_ids: str, seconds: float = 0) -> None:
        """Register several."""
        for machine_id in machine_ids:
            self.machine(machine_id, seconds=seconds)

    def job(
        self, name: str = "train", *, workflow: str | None = None, **spec: Any
    ) -> m.RegisteredJob:
        """Register a job."""
        return self.ledger.register_job(
            m.RegisterJob(
                job_id=name,
                workflow_id=workflow or f"job-{name}",
                temporal_run_id=self.origin,
                spec=JobSpec(name=name, command=("python", "train.py"), **spec),
            ),
            self.policy,
            now=at(0),
        )

    def request(self, job: str = "train", **changes: Any) -> m.OpenRun:
        """The next request to open a run."""
        self.requests += 1
        seconds = changes.pop("seconds", 1)
        return m.OpenRun(
            **{
                "request_key": f"{self.origin}/{self.requests}",
                "job_id": job,
                "machines_needed": 2,
                "slots_needed": 2,
                "start_reason": "launch",
                "code_version": "none",
                "opened_at": at(seconds),
                **changes,
            }
        )

    def open(self, job: str = "train", **changes: Any) -> m.OpenedRun:
        """Open a run."""
        return self.ledger.open_run(self.request(job, **changes))

    def close(
        self, run_id: str, outcome: RunOutcome = RunOutcome.FAILED, *, release: bool = False,
        seconds: float = 50,
    ) -> None:  # fmt: skip
        """Close a run."""
        self.ledger.close_run(
            m.CloseRun(run_id=run_id, outcome=outcome, closed_at=at(seconds), release=release)
        )

    def end(self, job: str = "train", phase: JobPhase = JobPhase.SUCCEEDED) -> None:
        """Close a job."""
        self.ledger.close_job(
            m.CloseJob(job_id=job, phase=phase, reason="done", closed_at=at(900), ettr=0.9)
        )

    def evict(self, *machines: str, **changes: Any) -> m.EvictedMachines:
        """Evict machines."""
        return self.ledger.evict(eviction(*machines, **changes))

    def state(self, machine_id: str) -> str:
        """The derived state of a machine."""
        return next(row.state for row in self.ledger.machines() if row.machine_id == machine_id)

    def holders(self) -> dict[str, str]:
        """Who has what."""
        return {row.machine_id: row.job_id for row in self.ledger.machines() if row.job_id}


def eviction(*machines: str, **changes: Any) -> m.EvictMachines:
    """A request to evict."""
    return m.EvictMachines(
        **{
            "incident_id": "train-1",
            "job_id": "train",
            "generation": 1,
            "step": 1,
            "machines": machines,
            "reason": "machine lost",
            "decided_at": at(40),
            **changes,
        }
    )


def names(opened: m.OpenedRun) -> list[str]:
    """Machines of a run by group rank."""
    return [ref.machine_id for ref in sorted(opened.machines, key=lambda ref: ref.group_rank)]


def finding(**changes: Any) -> Finding:
    """A finding."""
    return Finding(
        **{
            "symptom": Symptom.HANG,
            "side": Side.INFRASTRUCTURE,
            "cause": Cause.INFRASTRUCTURE,
            "confidence": Confidence.HIGH,
            "rule": "rank_stalled",
            "reason": "rank 1 stands still",
            "suspects": ("m1",),
            "step": 2**40,
            **changes,
        }
    )


def decision(incident: str = "train-1", round_number: int = 1, **changes: Any) -> m.DecisionRecord:
    """A decision."""
    return m.DecisionRecord(
        **{
            "decision_id": f"{incident}-r{round_number}",
            "incident_id": incident,
            "round_number": round_number,
            "finding": finding(),
            "state_before": LadderState(),
            "state_after": LadderState(no_progress_in_row=1, last_step=7),
            "decision": Decision(
                rung=Rung.EVICT, action=Action.EVICT_MACHINE, row="suspects", reason="m1 hangs",
                cause=Cause.INFRASTRUCTURE, evict=("m1",), budget_left=3,
            ),
            "policy_hash": "cafe",
            "decided_at": at(31),
            **changes,
        }
    )  # fmt: skip


def report(machine_id: str = "m1", *, ranks: int = 1, **changes: Any) -> MachineReport:
    """A machine's report."""
    rank = {"machine_id": machine_id, "state": RankState.EXITED, **changes}
    return MachineReport(
        machine_id=machine_id,
        reachable=True,
        ranks=tuple(RankReport(rank=number, **rank) for number in range(ranks)),
    )


def incident(**changes: Any) -> m.RecordIncident:
    """The record of an incident's round."""
    return m.RecordIncident(
        **{
            "incident_id": "train-1",
            "job_id": "train",
            "run_id": "train.1",
            "number": 1,
            "round_number": 1,
            "state": IncidentState.OPEN,
            "symptom": Symptom.HANG,
            "opened_at": at(30),
            "detected_at": at(30),
            "stopped_at": at(30.5),
            "summary": "rank 1 stands still",
            "observations": (
                m.ObservationRecord(
                    kind=EventKind.RANK_STALLED, verdict=Verdict.FAULTY, machine_id="m1", rank=1,
                    age_s=0.25, reason="no step for 60 s", data={"step": 2**40},
                ),
            ),
            "reports": (report(),),
            **changes,
        }
    )  # fmt: skip
