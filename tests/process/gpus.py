"""A machine with GPUs that are a stand-in library, and a policy quick enough for tests."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.decide.observation import Observation
from everstep.decide.words import Verdict
from everstep.machine.probes.gpu import GpuProbe
from everstep.spec.load import load_policy
from everstep.spec.overlay import merge
from everstep.spec.policy import ProbesPolicy
from tests.support.nvml import StandIn, build

WAIT_MAX_S = 20.0
QUICK: dict[str, Any] = {
    "gpu_interval": "1s",
    "gpu_call_deadline": "400ms",
    "gpu_pulse_interval": "100ms",
    "gpu_start_deadline": "4s",
    "gpu_retry_max": "8s",
    "look_deadline": "8s",
}


def quick_policy(**changes: Any) -> ProbesPolicy:
    """The default policy with short times."""
    default = load_policy(None, environ={}).policy.probes.model_dump(mode="json")
    return ProbesPolicy.model_validate(merge(default, {**QUICK, **changes}))


class Gpus:
    """Library, probe, and invented time for the looks."""

    def __init__(self, library: StandIn) -> None:
        self.library = library
        self.now_s = 1000.0
        self.probes: list[GpuProbe] = []
        self.helpers: list[psutil.Process] = []

    def probe(self, policy: ProbesPolicy | None = None, **options: Any) -> GpuProbe:
        """A probe of this library; closed at the end."""
        made = GpuProbe(policy or quick_policy(), environ=self.library.environ, **options)
        self.probes.append(made)
        return made

    def look(self, probe: GpuProbe, after_s: float = 10.0) -> list[Observation]:
        """Look once, so much later in invented time."""
        self.now_s += after_s
        seen = list(probe.look(self.now_s))
        if probe.helper_pid is not None and probe.helper_pid not in {p.pid for p in self.helpers}:
            self.helpers.append(psutil.Process(probe.helper_pid))
        return seen

    def until(
        self, probe: GpuProbe, done: Callable[[Sequence[Observation]], bool], after_s: float = 10.0
    ) -> list[Observation]:
        """Look until something is seen that another thread has to notice first."""
        deadline = time.monotonic() + WAIT_MAX_S
        while not done(seen := self.look(probe, after_s)):
            assert time.monotonic() < deadline, f"never seen; last: {seen}"
            time.sleep(0.02)
        return seen


def rules(seen: Sequence[Observation]) -> dict[str, list[str]]:
    """By target, the rules of its faults."""
    found: dict[str, list[str]] = {}
    for observation in seen:
        rule = [observation.rule] if observation.verdict is Verdict.FAULTY else []
        found.setdefault(observation.target, []).extend(rule)
    return found


@pytest.fixture(scope="session")
def nvml_built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built once."""
    return build(tmp_path_factory.mktemp("nvml")).folder


@pytest.fixture
def gpus(nvml_built: Path, tmp_path: Path) -> Iterator[Gpus]:
    """Two GPUs that are well, until the test says otherwise."""
    folder = tmp_path / "nvml"
    shutil.copytree(nvml_built, folder)
    made = Gpus(StandIn(folder))
    yield made
    for probe in made.probes:
        probe.close()
    gone, left = psutil.wait_procs(made.helpers, timeout=5)
    assert not left, f"helpers are left: {left}; gone: {gone}"
