"""The stacks of a run's processes on this machine, on demand and before the run is torn down.

``capture`` is the entry. It only looks: it never stops, ends or traces a process for longer than
one reading of its memory takes. Not here: what the stacks say (``everstep.decide.aggregation``).
"""

from everstep.machine.stacks.capture import CaptureLimits, StackTarget, capture
from everstep.machine.stacks.signalled import SIGNAL as STACK_SIGNAL

__all__ = ["STACK_SIGNAL", "CaptureLimits", "StackTarget", "capture"]
