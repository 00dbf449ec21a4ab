"""Probes in the life of a job: one eviction for a sure fault, a record for a warning, no more."""

from __future__ import annotations

import pytest

from everstep.decide.observation import Observation
from everstep.decide.words import IncidentState, Symptom, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind
from everstep.spec.probe_events import event_data
from tests.support.observations import BLIND, HOT, WARNING, XID
from tests.workflow.conftest import Bench
from tests.workflow.scenarios import DONE, FIRST
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
