"""The judges must be able to find somebody guilty: each rule is broken once."""

from __future__ import annotations

import json
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from everstep.decide.words import IncidentState, RunOutcome, Symptom
from everstep.ledger import IncidentDetail, RunRow
from everstep.spec.agent_api import RestorePointPlan
from tests.support import judge
from tests.support.counting import Counter, states

START = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def run(generation: int, begin: float, end: float | None, restored: int | None = None) -> RunRow:
    point = None
    if restored is not None:
        point = RestorePointPlan(step=restored, generation=generation - 1, path="p")
    return RunRow(
        run_id=f"j.{generation}",
        job_id="j",
        generation=generation,
        start_reason="launch",
        code_version="none",
        incident_id=None,
        opened_at=at(begin),
        closed_at=None if end is None else at(end),
        outcome=None if end is None else RunOutcome.FAILED,
        restore_chosen=True,
        restore=point,
    )


GOOD = [run(1, 0, 1), run(2, 1, 2, restored=4), run(3, 3, 4, restored=4)]


def test_good_runs_are_good() -> None:
    assert list(judge._runs(GOOD)) == []


@pytest.mark.parametrize(
    "runs,said",
    [
        ([run(1, 0, 1), run(3, 2, 3)], "generations"),
        ([run(1, 0, None)], "still open"),
        ([run(1, 0, 5), run(2, 4, 6)], "open at once"),
        ([run(1, 0, 1), run(2, 1, 2, restored=9), run(3, 2, 3, restored=4)], "went back"),
    ],
)
def test_bad_runs_are_found(runs: list[RunRow], said: str) -> None:
    assert said in " ".join(judge._runs(runs))


def incident(**changes: Any) -> IncidentDetail:
    fields = {
        "incident_id": "j-1",
        "job_id": "j",
        "number": 1,
        "state": IncidentState.STABLE,
        "symptom": Symptom.UNKNOWN,
        "summary": "",
        "opened_at": at(0),
        "closed_at": at(1),
    }
    return IncidentDetail.model_validate(fields | changes)


def action(target: str = "m1") -> dict[str, Any]:
    return {
        "incident_id": "j-1",
        "step": 1,
        "target": target,
        "generation": 1,
        "kind": "evict",
        "job_id": "j",
        "result": {},
        "at": at(1),
    }


@pytest.mark.parametrize(
    "incidents,said",
    [
        ([incident(number=2)], "numbered"),
        ([incident(closed_at=None)], "j-1 is"),
        ([incident(state=IncidentState.OPEN)], "open"),
    ],
)
def test_bad_incidents_are_found(incidents: list[IncidentDetail], said: str) -> None:
    assert list(judge._incidents([incident()])) == []
    assert said in " ".join(judge._incidents(incidents))


def test_an_eviction_nobody_decided_and_its_victim_at_work_are_found() -> None:
    evicted = incident(actions=(action(),))
    ref = {"machine_id": "m1", "address": "a", "group_rank": 0}
    later = run(2, 2, 3).model_copy(update={"machines": ()})
    used = RunRow.model_validate(later.model_dump() | {"machines": (ref,)})
    assert "decided []" in " ".join(judge._evictions([later], [evicted]))
    assert "m1 was evicted and is in run 2" in list(judge._evictions([used], [evicted]))


@pytest.mark.parametrize(
    "leases,blocks,said",
    [
        ([("m1", 0, 5, "a"), ("m1", 5, 9, "b"), ("m2", 1, None, "c")], [("m1", 9, None)], ""),
        ([("m1", 0, 5, "a"), ("m1", 4, 9, "b")], [], "at once"),
        ([("m1", 0, None, "a"), ("m1", 4, 9, "b")], [], "at once"),
        ([("m1", 5, 9, "a")], [("m1", 4, 6)], "while it was blocked"),
        ([("m1", 3, None, "a")], [("m1", 4, None)], "blocked and leased"),
    ],
)
def test_machines_in_two_hands_are_found(
    tmp_path: Path, leases: list[Any], blocks: list[Any], said: str
) -> None:
    path = tmp_path / "l.db"
    connection = sqlite3.connect(path)
    connection.execute("create table leases (machine_id, leased_at, ended_at, run_id)")
    connection.execute("create table blocks (machine_id, blocked_at, released_at)")
    connection.executemany("insert into leases values (?, ?, ?, ?)", leases)
    connection.executemany("insert into blocks values (?, ?, ?)", blocks)
    connection.commit()
    connection.close()
    found = " ".join(judge.machines(f"sqlite:///{path}"))
    assert (said in found) if said else (not found)


def write(counter: Counter, *lines: tuple[int, int, str]) -> None:
    path = counter.step_log / "rank-1.jsonl"
    rows = [{"generation": g, "step": s, "state": state} for g, s, state in lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "ascii")


def test_wrong_steps_are_found(tmp_path: Path) -> None:
    counter = Counter("j", tmp_path, steps=9)
    right = [row[1] for row in states(9)]
    good = [(1, s, right[s]) for s in range(6)] + [(2, s, right[s]) for s in range(5, 9)]
    write(counter, *good)
    assert counter.problems(GOOD[:2]) == []
    assert counter.reached() == 8
    for bad, said in (
        ([*good[:3], *good[4:]], "step 4 instead of 3"),
        ([*good[:6], (2, 4, right[4])], "step 4 instead of 5"),
        ([*good[:2], (1, 2, right[3])], "another state"),
        ([(7, 0, right[0])], "run 7 is not in the ledger"),
    ):
        write(counter, *bad)
        assert said in " ".join(counter.problems(GOOD[:2]))
