"""What probes have to know of the runs of this machine: folders, processes, groups, teardowns.

Asked for at each look, from the probe's thread, so nothing here may wait or raise. A control group
is remembered for a while after its process is gone: that it was killed there is what one wants to
see. Not here: the runs (``runs``), the probes (``probes``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from everstep.machine.probes.host_memory import cgroup_folders

GROUPS_KEPT_S = 60.0
GROUPS_MAX = 64
TEARDOWNS_KEPT_S = 60.0


class Uses(Protocol):
    """The part of ``everstep.machine.runs.RunManager`` that is needed."""

    def places(self) -> Sequence[Path]:
        """Folders of live runs."""

    def pids(self) -> Sequence[int]:
        """Processes of live ranks."""

    def teardowns(self) -> Sequence[tuple[float, float]]:
        """From when until when ranks were ended, monotonic seconds; infinity: it goes on."""


class RunPlaces:
    """Answers for probes."""

    def __init__(
        self,
        own: Iterable[Path] = (),
        *,
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own``: folders of the agent itself."""
        self.runs: Uses | None = None
        """Set once there are runs: probes are made before them."""
        self._own = tuple(own)
        self._proc, self._sys = proc, sys
        self._clock = clock
        self._groups: dict[Path, float] = {}

    def paths(self) -> Iterable[Path]:
        """Folders whose disks matter."""
        return dict.fromkeys((*self._own, *(self.runs.places() if self.runs else ())))

    def pids(self) -> Iterable[int]:
        """Processes of live ranks."""
        return self.runs.pids() if self.runs else ()

    def teardowns(self) -> Iterable[tuple[float, float]]:
        """From when until when ranks were ended by us: now, or until a minute ago."""
        since = self._clock() - TEARDOWNS_KEPT_S
        return [span for span in (self.runs.teardowns() if self.runs else ()) if span[1] >= since]

    def cgroups(self) -> Iterable[Path]:
        """Control groups in which ranks live, or lived until a minute ago."""
        now = self._clock()
        for pid in self.pids():
            for folder in cgroup_folders(self._proc, self._sys / "fs" / "cgroup", pid):
                self._groups[folder] = now
        self._groups = {
            folder: at for folder, at in self._groups.items() if now - at <= GROUPS_KEPT_S
        }
        return list(self._groups)[-GROUPS_MAX:]
