"""What can go wrong for a person who uses Everstep, as a small tree of errors.

    EverstepError
    ├── UsageProblem          the call itself makes no sense                     exit code 2
    ├── ConfigurationProblem  a file, an environment variable, a port, a disk    exit code 3
    ├── NotFound              no such job, incident, run or rank                 exit code 4
    │   ├── JobNotFound
    │   └── IncidentNotFound
    ├── Unreachable           somebody does not answer (unknown, not broken)     exit code 5
    │   ├── ServerUnreachable
    │   └── ControllerUnreachable
    └── Refused               understood, and the answer is no                   exit code 1
        ├── SameNameOtherSpec
        └── JobFailed

Every message is one line that a person can act on. Not here: faults of training (they are
incidents, not exceptions) and failures between our own processes (``activities.contracts``).
"""

from __future__ import annotations


class EverstepError(Exception):
    """Base of all; ``str(error)`` is one line for a person."""

    exit_code = 1


class UsageProblem(EverstepError):
    """The call itself makes no sense."""

    exit_code = 2


class ConfigurationProblem(EverstepError):
    """Something around us is not as it has to be: a file, a variable, a port, a disk."""

    exit_code = 3


class NotFound(EverstepError):
    """What was asked for does not exist."""

    exit_code = 4


class JobNotFound(NotFound):
    """No job of this name."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}: `everstep jobs` lists those there are")
        self.job_id = job_id


class IncidentNotFound(NotFound):
    """No incident of this id."""

    def __init__(self, incident_id: str) -> None:
        super().__init__(
            f"there is no incident {incident_id!r}: `everstep incidents` lists those there are"
        )
        self.incident_id = incident_id


class Unreachable(EverstepError):
    """Somebody does not answer; that says nothing about whether training goes on (it does)."""

    exit_code = 5


class ServerUnreachable(Unreachable):
    """The Temporal server does not answer."""


class ControllerUnreachable(Unreachable):
    """The Temporal server answers, but no controller works for it at the moment."""


class Refused(EverstepError):
    """Understood, and the answer is no."""

    exit_code = 1


class SameNameOtherSpec(Refused):
    """A job of this name is there already, and it is a different one."""


class JobFailed(Refused):
    """The job's workflow ended without a result: its input was refused, or it was terminated."""
