"""GPU classes of Table 1 through the real pynvml, over a stand-in library of each machine's own."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from everstep.decide.words import Action, Rung, Side, Symptom
from everstep.ledger import Ledger
from tests.e2e.table1.conftest import Fleet, told
from tests.support.nvml import StandIn, build
from tests.support.world import running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

MACHINES = 5
FLEET = """
machines: {register_interval: 500ms}
detection: {heartbeat_interval: 500ms}
probes:
  gpu_interval: 500ms
  gpu_pulse_interval: 300ms
  gpu_call_deadline: 2s
  dcgm_url: ''
"""
SICK = {
    "lost": ({"error": 15}, {Symptom.GPU_UNAVAILABLE}),
    "hung": ({"hang": 1}, {Symptom.GPU_UNAVAILABLE}),
    "memory": ({"ecc_volatile": 3}, {Symptom.GPU_MEMORY_ECC}),
}


@dataclass
class Gpus(Fleet):
    """Machines with two GPUs each; those that were evicted stay out."""

    libraries: Mapping[str, StandIn]

    async def release_all(self, ledger: Ledger) -> None:
        """A GPU that was lost does not come back."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gpus(tmp_path_factory: Any) -> AsyncIterator[Gpus]:
    """Two machines for a job, and one standby for each test."""
    folder = tmp_path_factory.mktemp("g")
    policy = folder / "fleet.yaml"
    policy.write_text(FLEET, encoding="utf-8")
    libraries = {f"machine-{n}": build(folder / f"nvml-{n}") for n in range(1, MACHINES + 1)}
    for library in libraries.values():
        library.set(count=2)
    path = os.environ.get("LD_LIBRARY_PATH", "")
    env = {
        name: {"LD_LIBRARY_PATH": f"{library.folder}:{path}"} for name, library in libraries.items()
    }
    async with running(
        folder, machines=MACHINES, policy=policy, probes="gpu", part_env=env
    ) as world:
        yield Gpus(world, {}, libraries)


@pytest.mark.parametrize("name", SICK)
async def test_a_gpu_that_is_not_well_takes_its_machine_out(gpus: Gpus, name: str) -> None:
    says, symptoms = SICK[name]
    async with told(gpus, f"gpu-{name}") as job:
        _, sick = await job.running()
        await gpus.looked(sick)
        gpus.libraries[sick].set(1, **says)
        incident = await job.incident()
        (decision,) = incident.decisions
        finding = decision.finding
        assert finding.symptom in symptoms, finding
        assert (finding.side, finding.suspects) == (Side.INFRASTRUCTURE, (sick,))
        assert decision.decision.action is Action.EVICT_MACHINE
        assert (decision.decision.rung, decision.decision.evict) == (Rung.EVICT, (sick,))
        first = incident.observations[0]
        assert (first.kind, first.machine_id, first.data["probe"]) == ("probe", sick, "gpu")
        assert sick not in await job.running(generation=2)
