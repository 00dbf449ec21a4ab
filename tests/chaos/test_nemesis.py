"""Everything at once, at random, by a seed; the history is judged when it is quiet again.

The seed is printed; ``EVERSTEP_SEED`` plays the same blows again. ``EVERSTEP_NEMESIS_S`` makes the
rage longer.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import pytest

from everstep.decide.words import JobPhase
from tests.chaos.nemesis import Nemesis
from tests.support import judge
from tests.support.counting import Counter, final_sha256
from tests.support.world import running, until

RAGE_S = float(os.environ.get("EVERSTEP_NEMESIS_S", "20"))
STEP_MS = 50

pytestmark = [pytest.mark.slow, pytest.mark.timeout(RAGE_S + 500)]

POLICY = {
    "detection": {
        "hang_min": "5s",
        # Nobody loses a machine for good here: all that is killed comes back.
        "machine_lost_after": "60s",
    },
    "ladder": {
        "stable_after": "2s",
        "infrastructure_restarts_max": 500,
        "user_code_restarts_max": 500,
        "unclear_restarts_max": 500,
        "no_progress_restarts_max": 500,
    },
}


async def test_whatever_happens_the_job_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    seed = int(os.environ.get("EVERSTEP_SEED", secrets.randbelow(10**6)))
    print(f"EVERSTEP_SEED={seed}")  # noqa: T201 - shown when the test fails
    counter = Counter(
        "nemesis", tmp_path, steps=int(RAGE_S * 1000 / STEP_MS), step_ms=STEP_MS, policy=POLICY
    )
    async with running(tmp_path, machines=3, controllers=2) as world, world.job(counter) as job:
        await job.at_step(5)
        nemesis = Nemesis(world, job, seed)
        await nemesis.rage(RAGE_S)
        print(f"blows: {dict(nemesis.blows)}")  # noqa: T201 - shown when the test fails
        assert set(nemesis.blows) == nemesis.kinds, "a kind of blow never hit anything"
        # Quiet. What a person is asked, because two blows looked like more than a budget allows,
        # is answered here.

        async def ended() -> bool:
            status = await job.stage.status()
            if status is not None and status.phase is JobPhase.WAITING_FOR_PERSON:
                raise AssertionError(f"a person is asked: {status.reason}")
            return status is not None and status.phase is JobPhase.SUCCEEDED

        await until("the job's end", ended, limit_s=300)
        failed = failed_tasks(await job.client.history(counter.name))
        print(f"failed workflow tasks: {failed}")  # noqa: T201 - shown when the test fails
        assert not any("NON_DETERMINISTIC" in task for task in failed), failed
        incidents = await job.succeeded()
        assert incidents, "ranks were killed, and nobody noticed"
        assert judge.blocked(world.ledger_url) == []
        assert counter.sha256() == final_sha256(counter.steps)


def failed_tasks(history: str) -> list[str]:
    """Why workflow tasks failed: a thawed controller may say so, but never because of our code."""
    events = json.loads(history)["events"]
    found = [event.get("workflowTaskFailedEventAttributes") for event in events]
    return [
        f"{one.get('cause')}: {one.get('failure', {}).get('message', '')}" for one in found if one
    ]
