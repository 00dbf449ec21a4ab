"""From a probe to the ledger: seen, told, judged, evicted once, explained; and what is not."""

from __future__ import annotations

import asyncio

import pytest

from everstep.decide.words import Action, Confidence, IncidentState, Rung, Side, Symptom, Verdict
from everstep.story import Story, tell
from tests.e2e.table1.conftest import Fleet
from tests.support import judge
from tests.support.counting import Counter
from tests.support.world import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]


async def test_a_sick_machine_is_evicted_once_and_the_job_ends_as_if_nothing_had_been(
    fleet: Fleet,
) -> None:
    world = fleet.world
    counter = Counter("sick", world.folder, steps=150)
    async with world.job(counter) as job:
        used = set((await job.at_step(5)).answered)
        sick = max(used)
        check = fleet.check_says(
            sick,
            "cooling",
            verdict="faulty",
            reason="the pump of this rack stands still",
            symptom="gpu_unavailable",
            action="evict_machine",
            rule="pump",
            values={"flow_l_per_s": 0.0},
        )
        incidents = await job.succeeded()
        check.unlink()
        assert len(incidents) == 1, judge.story(incidents)
        (decision,) = incidents[0].decisions
        finding = decision.finding
        assert (finding.symptom, finding.side) == (Symptom.GPU_UNAVAILABLE, Side.INFRASTRUCTURE)
        assert (finding.suspects, finding.rule) == ((sick,), "machine_pump")
        assert finding.confidence is Confidence.HIGH
        assert decision.decision.action is Action.EVICT_MACHINE
        assert (decision.decision.rung, decision.decision.evict) == (Rung.EVICT, (sick,))
        assert [(a.kind, a.target) for a in incidents[0].actions] == [("evict", sick)]
        # What was seen is evidence: as the event told it, and in the machine's own report.
        told = [o for o in incidents[0].observations if o.kind == "probe"]
        assert [(o.machine_id, o.verdict) for o in told] == [(sick, Verdict.FAULTY)]
        assert told[0].data["rule"] == "pump"
        reports = {r["machine_id"]: r for r in incidents[0].rounds[0].reports}
        assert reports[sick]["observations"][0]["observation"]["rule"] == "pump"
        text = tell(Story(incident=incidents[0], runs=tuple(await job.runs())))
        assert "the pump of this rack stands still" in text
        assert judge.blocked(world.ledger_url) == [sick]
        await fleet.release_all(job.stage.ledger)


async def test_a_warning_goes_on_record_and_training_does_not_stop(fleet: Fleet) -> None:
    world = fleet.world
    counter = Counter("warned", world.folder, steps=400)
    async with world.job(counter) as job:
        used = sorted((await job.at_step(5)).answered)
        check = fleet.check_says(used[0], "fan", verdict="faulty", reason="fan 2 is slow")

        async def recorded() -> bool:
            return bool(await job.incidents())

        await until("the warning in the ledger", recorded)
        check.unlink()
        (incident,) = await job.succeeded()
        assert (incident.state, incident.decisions) == (IncidentState.STABLE, ())
        (seen,) = incident.observations
        assert (seen.kind, seen.machine_id) == ("probe", used[0])
        assert "fan 2 is slow" in incident.summary
        assert len(await job.runs()) == 1
        assert await asyncio.to_thread(judge.blocked, world.ledger_url) == []
