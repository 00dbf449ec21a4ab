"""Probes and job signals in the life of a job: an eviction for a sure fault, else a record."""

from __future__ import annotations

import asyncio

import pytest

from everstep.decide.observation import Observation
from everstep.decide.words import IncidentState, JobPhase, Symptom, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind
from everstep.spec.probe_events import event_data
from tests.support.observations import BLIND, HOT, WARNING, XID
from tests.workflow.conftest import Bench, ask, ended
from tests.workflow.scenarios import DONE, FIRST, SLOW, behind
from tests.workflow.world import Say, Script

pytestmark = pytest.mark.asyncio(loop_scope="session")


def seen(observation: Observation, machine_id: str = "m2") -> m.ObservationRecord:
    """What a watch says about a probe."""
    return m.ObservationRecord(
        kind=EventKind.PROBE,
        verdict=observation.verdict,
        machine_id=machine_id,
        age_s=1.5,
        reason=observation.reason,
        data=event_data(observation),
    )


async def test_a_sure_fault_evicts_its_machine_once_and_stops_nothing_else(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([FIRST, Say("trouble", step=9, observations=(seen(XID),))])
    world.scripts[2] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (2, 1)
    assert [e.machines for e in world.evictions] == [("m2",)]
    assert [r.machine_id for r in world.started[1].machines] == ["m1", "m3"]
    record = world.incidents[f"{bench.name}-1-r1"]
    assert record.symptom is Symptom.GPU_UNAVAILABLE
    assert [o.data["rule"] for o in record.observations] == ["xid_79"]


async def test_a_warning_is_recorded_once_for_each_symptom_and_nothing_stops(bench: Bench) -> None:
    world = bench.world
    spike = m.ObservationRecord(
        kind=EventKind.LOSS_SPIKE, verdict=Verdict.FAULTY, machine_id="m1", rank=0, reason="6 times"
    )
    told = (seen(WARNING), seen(WARNING, "m1"), seen(HOT), spike)
    world.scripts[1] = Script(
        [
            FIRST,
            Say("tick", step=10, observations=told),
            Say("tick", step=11, observations=told),
            DONE,
        ]
    )
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (1, 3)
    assert world.stopped == []
    records = {r.symptom: r for r in world.incidents.values()}
    assert set(records) == {Symptom.NVLINK_PCIE, Symptom.MFU_DECLINE, Symptom.LOSS_SPIKE}
    assert {r.state for r in records.values()} == {IncidentState.STABLE}
    assert [o.machine_id for o in records[Symptom.NVLINK_PCIE].observations] == ["m2", "m1"]


async def test_unknown_and_evidence_beside_a_failure_are_no_incidents(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script(
        [
            FIRST,
            Say("tick", step=10, observations=(seen(BLIND),)),
            Say("trouble", step=12, observations=(seen(XID, "m1"), seen(WARNING))),
        ]
    )
    world.scripts[2] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (2, 1)
    assert [e.machines for e in world.evictions] == [("m1",)]


TRAINS_ON = Say("hold", step=12)


async def test_slow_steps_start_a_look_that_names_a_machine_and_stops_nothing(bench: Bench) -> None:
    world = bench.world
    world.slow = behind(1)
    told = [Say("tick", step=step, observations=(SLOW,)) for step in (10, 11)]
    world.scripts[1] = Script([FIRST, *told, TRAINS_ON])
    handle = await bench.start()
    await bench.until(lambda: bool(world.notes) and f"{bench.name}-1-r2" in world.incidents)
    (listed,) = (await bench.status(handle)).incidents
    assert world.stopped == []
    await ask(handle, "cancel", m.CancelRequest())
    result = await ended(handle)
    assert (result.runs, result.incidents) == (1, 1)
    assert world.evictions == []
    assert world.counts["find_slow_ranks"] == 1
    first, second = (world.incidents[f"{bench.name}-1-r{n}"] for n in (1, 2))
    assert first.summary == "m1: 1.4 times; training goes on"
    assert (
        second.summary
        == "m1: 1.4 times; rank 3 behind in 5 of 5 rounds: machine m2; training goes on"
    )
    assert (listed.rounds, listed.reason) == (2, second.summary)
    assert {r.symptom for r in (first, second)} == {Symptom.MFU_DECLINE}
    assert [(o.rank, o.machine_id) for o in second.observations] == [(3, "m2")]
    assert second.evidence[0] == "rank 3 behind in 5 of 5 rounds: machine m2"
    assert "rank 3: at last in compute" in second.evidence
    assert [(n.severity, "rank 3 behind" in n.text) for n in world.notes] == [("warning", True)]


async def test_a_look_that_names_no_machine_is_on_record_and_tells_nobody(bench: Bench) -> None:
    world = bench.world
    world.slow = behind()
    world.scripts[1] = Script([FIRST, Say("tick", step=10, observations=(SLOW,)), TRAINS_ON])
    handle = await bench.start()
    await bench.until(lambda: f"{bench.name}-1-r2" in world.incidents)
    await ask(handle, "cancel", m.CancelRequest())
    await ended(handle)
    assert world.notes == []


async def test_a_look_ends_with_its_run_and_holds_up_neither_recovery_nor_end(bench: Bench) -> None:
    world = bench.world
    world.gates["find_slow_ranks"] = asyncio.Event()  # never set
    world.scripts[1] = Script(
        [
            FIRST,
            Say("tick", step=10, observations=(SLOW,)),
            Say("trouble", step=12, observations=(seen(XID, "m2"),)),
        ]
    )
    world.scripts[2] = Script([FIRST, Say("tick", step=20, observations=(SLOW,)), TRAINS_ON])
    handle = await bench.start()
    await bench.until(lambda: world.counts["find_slow_ranks"] >= 1 and world.held_watches == 1)
    assert [e.machines for e in world.evictions] == [("m2",)]
    await handle.signal("roll", m.RollRequest())
    await ask(handle, "cancel", m.CancelRequest())
    result = await ended(handle)
    assert (result.phase, result.runs) == (JobPhase.CANCELLED, 2)
    numbers = [key.removeprefix(bench.name) for key in world.incidents]
    assert not [number for number in numbers if number.endswith("r2")]


@pytest.mark.parametrize("asked", ["roll", "pause"])
async def test_a_look_that_finds_nothing_leaves_one_round(bench: Bench, asked: str) -> None:
    """Also where the job continues as new, or pauses, while the look goes on."""
    world = bench.world
    gate = world.gates["find_slow_ranks"] = asyncio.Event()
    world.scripts[1] = Script([FIRST, Say("tick", step=10, observations=(SLOW,)), TRAINS_ON, DONE])
    world.scripts[2] = Script([FIRST, DONE])
    handle = await bench.start()
    await bench.until(lambda: world.counts["find_slow_ranks"] == 1 and world.held_watches == 1)
    if asked == "pause":
        world.scripts[1].watches.clear()
        await ask(handle, "pause", m.PauseRequest())
        await bench.until_phase(handle, JobPhase.PAUSED)
        await ask(handle, "resume", m.ResumeRequest())
    else:
        await handle.signal("roll", m.RollRequest())
        gate.set()
    result = await ended(handle)
    assert (result.phase, result.incidents) == (JobPhase.SUCCEEDED, 1)
    assert list(world.incidents) == [f"{bench.name}-1-r1"]


async def test_a_look_that_fails_changes_nothing(bench: Bench) -> None:
    world = bench.world
    world.failing["find_slow_ranks"] = "the ledger is wrong"
    world.scripts[1] = Script([FIRST, Say("tick", step=10, observations=(SLOW,)), DONE])
    result = await (await bench.start()).result()
    assert (result.phase, result.incidents) == (JobPhase.SUCCEEDED, 1)
