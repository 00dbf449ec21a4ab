"""What every probe is, for those that run one.

Not here: any probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from everstep.decide.observation import Observation


class Probe(Protocol):
    """One real-time check. Kept for the agent's life: it may remember what it saw last."""

    @property
    def name(self) -> str:
        """The ``probe`` of its observations; unique among the probes of a machine."""
        ...

    @property
    def interval(self) -> str:
        """Which of the policy's intervals it keeps: ``gpu``, ``host`` or ``network``."""
        ...

    def look(self, now_s: float) -> Sequence[Observation]:
        """Look once; blocking, in a thread of the caller's.

        Args:
            now_s: seconds of a monotonic clock, for rates and for windows ("twice in five
                minutes").

        Returns one observation for each target, healthy ones too. A target that cannot be looked at
        is *unknown* with the reason; what does not exist on this machine yields nothing. Raises
        nothing for what a machine may do to it.
        """
        ...

    def close(self) -> None:
        """Let go of what it holds (files, a helper process)."""
        ...
