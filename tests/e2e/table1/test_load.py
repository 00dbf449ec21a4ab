"""CPU overload: processes that keep the host busy, seen by the load probe, on record as a warning.

The thresholds are far below the default, so that a few seconds of a small machine are enough.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.decide.words import IncidentState, Symptom
from tests.support.counting import Counter
from tests.support.world import running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio]

FLEET = """
machines: {register_interval: 500ms}
detection: {heartbeat_interval: 500ms}
probes: {host_interval: 200ms, cpu_load_max: 0.01, cpu_pressure_share_max: 0.001}
"""


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many processes that do nothing but compute."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


async def test_an_overloaded_host_goes_on_record_and_nothing_stops(tmp_path: Path) -> None:
    policy = tmp_path / "fleet.yaml"
    policy.write_text(FLEET, encoding="utf-8")
    counter = Counter("busy", tmp_path, steps=800)
    async with (
        running(tmp_path, machines=2, policy=policy, probes="load") as world,
        world.job(counter) as job,
    ):
        await job.at_step(5)

        async def recorded() -> bool:
            return bool(await job.incidents())

        with busy(3):
            await until("the warning in the ledger", recorded)
        incidents = await job.succeeded()
        assert {(i.symptom, i.state) for i in incidents} == {
            (Symptom.MFU_DECLINE, IncidentState.STABLE)
        }
        seen = [o for i in incidents for o in i.observations]
        assert {o.data["rule"] for o in seen} <= {"cpu_overload", "cpu_steal"}
        assert "cpu_overload" in {o.data["rule"] for o in seen}
        assert all(i.decisions == () for i in incidents)
        assert len(await job.runs()) == 1
