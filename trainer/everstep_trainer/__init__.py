"""Everstep inside the training process: progress, declared sections and checkpoints.

::

    import everstep_trainer

    session = everstep_trainer.attach()
    restored = session.load()
    ...
    session.step(step, loss=loss)
    session.save(step, state)

This package enters other people's images: it needs nothing but the standard library, runs on
Python 3.9 and later, imports torch and numpy only when they are already there, and does nothing
at all when the process was not started by Everstep. ``docs/trainer.md`` is the manual.

Not here: anything that talks to a network, and anything that decides (both are the agent's and
the controller's business).
"""

from __future__ import annotations

from everstep_trainer._errors import (
    BadEnvironment,
    CheckpointUnreadable,
    SaveFailed,
    StaleGeneration,
    TrainerError,
    UnsupportedState,
    WorldSizeChanged,
)
from everstep_trainer._session import SaveResult, Session, attach, load, save

__all__ = [
    "BadEnvironment",
    "CheckpointUnreadable",
    "SaveFailed",
    "SaveResult",
    "Session",
    "StaleGeneration",
    "TrainerError",
    "UnsupportedState",
    "WorldSizeChanged",
    "attach",
    "load",
    "save",
]

# Tracebacks end with the class's name: let it be the one that users import.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
