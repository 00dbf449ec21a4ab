"""MFU decline: one rank takes longer for every step, so all of them do.

The rank is really slow, and its steps, their stacks and what follows are real. That a machine's
clocks are lowered is told by a check of the site, since no GPU is here. Windows are seconds in the
place of minutes, and three times as slow counts in the place of a fifth: the machine is busy.
"""

from __future__ import annotations

import pytest

from everstep.decide.words import Action, IncidentState, Rung, Side, Symptom
from everstep.story import Story, tell
from tests.e2e.table1.conftest import Fleet
from tests.support import judge
from tests.support.counting import Counter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="package"),
]
SLOW_RANK = 2
QUICK_LOOKS = {
    "detection": {
        "step_time_window": "4s",
        "step_time_factor": 3,
        "slow_round_interval": "500ms",
    }
}


def slowed(fleet: Fleet, name: str, steps: int) -> Counter:
    """A job that is slow from the time on at which its best pace is known."""
    counter = Counter(name, fleet.world.folder, steps=steps, policy=QUICK_LOOKS)
    counter.order("slow25", rank=SLOW_RANK, step=350)
    return counter


async def test_who_makes_all_steps_slow_is_found_by_stacks_and_goes_on_record(fleet: Fleet) -> None:
    async with fleet.world.job(slowed(fleet, "slow", 430)) as job:
        await job.at_step(5)
        machines = (await job.client.status(job.name)).machines
        incidents = await job.succeeded()
        (incident,) = incidents
        assert (incident.symptom, incident.state) == (Symptom.MFU_DECLINE, IncidentState.STABLE)
        assert incident.decisions == ()
        assert len(await job.runs()) == 1
        first, second = (
            [o for o in incident.observations if o.round_number == number] for number in (1, 2)
        )
        assert {o.kind for o in first} == {"step_time_decline"}
        assert first[0].data["ratio"] >= 3
        assert [(o.rank, o.machine_id) for o in second] == [(SLOW_RANK, machines[1])]
        assert f"rounds: machine {machines[1]}; training goes on" in incident.summary
        assert f"rank {SLOW_RANK} behind" in incident.summary
        text = tell(Story(incident=incident, runs=tuple(await job.runs())))
        assert "before_step (faults.py)" in text, text


async def test_slow_steps_and_one_machine_that_is_slowed_down_evict_it(fleet: Fleet) -> None:
    counter = slowed(fleet, "hot", 500)
    async with fleet.world.job(counter) as job:
        await job.at_step(5)
        machine = (await job.client.status(job.name)).machines[1]  # of ranks 2 and 3
        check = fleet.check_says(
            machine,
            "heat",
            verdict="faulty",
            reason="GPU 0 is slowed down by heat",
            symptom="mfu_decline",
            action="warn_only",
            rule="heat",
        )
        incidents = await job.succeeded()
        check.unlink()
        decided = [i for i in incidents if i.decisions]
        assert len(decided) == 1, judge.story(incidents)
        (decision,) = decided[0].decisions
        finding = decision.finding
        assert (finding.rule, finding.suspects) == ("slow_machine", (machine,))
        assert (finding.symptom, finding.side) == (Symptom.MFU_DECLINE, Side.INFRASTRUCTURE)
        assert decision.decision.action is Action.EVICT_MACHINE
        assert (decision.decision.rung, decision.decision.evict) == (Rung.EVICT, (machine,))
        assert judge.blocked(fleet.world.ledger_url) == [machine]
        assert len(await job.runs()) == 2
        # What the probe told at first was a warning, and stopped nothing.
        assert [(i.symptom, i.state) for i in incidents if i is not decided[0]] == [
            (Symptom.MFU_DECLINE, IncidentState.STABLE)
        ]
        await fleet.release_all(job.stage.ledger)
