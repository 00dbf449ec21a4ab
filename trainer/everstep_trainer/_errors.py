"""Everything this package raises on purpose; each is one line for the person who reads the log.

::

    TrainerError
      BadEnvironment        Everstep's environment variables do not make sense
      StaleGeneration       a newer run of the job exists: this one may no longer commit
      CheckpointUnreadable  the checkpoint to resume from is damaged, foreign or incomplete
        WorldSizeChanged    it was written by another number of ranks
      SaveFailed            a save failed and the caller had asked for an exception
      UnsupportedState      the state holds something that cannot be saved (also a TypeError)
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of all errors of this package."""


class BadEnvironment(TrainerError):
    """An ``EVERSTEP_*`` variable is missing or has a value that makes no sense."""


class StaleGeneration(TrainerError):
    """A newer run of the job exists, so this run's work must not count any more."""


class CheckpointUnreadable(TrainerError):
    """The checkpoint this run was told to start from cannot be used."""


class WorldSizeChanged(CheckpointUnreadable):
    """The checkpoint was written by another number of ranks than this run has."""


class SaveFailed(TrainerError):
    """A save failed, and the caller had asked for an exception instead of a result."""


class UnsupportedState(TrainerError, TypeError):
    """The state holds an object that cannot be stored without pickle."""
