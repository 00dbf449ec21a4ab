"""Temporal's errors in the words of ``everstep.errors``.

The SDK raises a dozen types for what a person sees as four things: no such job, the server is away,
no controller works, the job said no. Not here: deciding what to do about any of them.
"""

from __future__ import annotations

import re

from temporalio.client import (
    WorkflowFailureError,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
from temporalio.exceptions import ApplicationError, CancelledError, TerminatedError
from temporalio.service import RPCError, RPCStatusCode

from everstep.errors import (
    ConfigurationProblem,
    ControllerUnreachable,
    EverstepError,
    JobFailed,
    JobNotFound,
    Refused,
    ServerUnreachable,
)

_NO_WORKER = "no controller answers for it at the moment (training goes on); look at `everstep up`"
_TASK_FAILED = (
    "its last workflow task failed and is tried again (training goes on); the job's history in the "
    "Temporal UI says why"
)
_AWAY = frozenset({RPCStatusCode.UNAVAILABLE, RPCStatusCode.ABORTED, RPCStatusCode.UNKNOWN})
_LATE = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
SDK_ERRORS = (
    RPCError,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
    WorkflowUpdateRPCTimeoutOrCancelledError,
)
"""What the SDK raises for a server or workflow that says no or nothing. Anything else is a bug."""
_CORE_MESSAGE = re.compile(r'message: "([^"]+)"')
_LINE_MAX = 300
INVALID_JOB_SPEC = "InvalidJobSpec"
"""Type of the failure of a workflow whose input was refused (``activities.contracts`` has it too,
which this side may not import)."""


def short(error: BaseException | str) -> str:
    """An error's text as one bounded line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE_MAX else text[: _LINE_MAX - 1] + "…"


def core_reason(error: BaseException) -> str:
    """The operating system's word in an error of the SDK's core, which wraps it several times."""
    found = _CORE_MESSAGE.search(str(error))
    return found.group(1) if found else short(error)


def translate(error: BaseException, job_id: str) -> EverstepError:
    """The error a person should see for one of ``SDK_ERRORS``; others are raised again."""
    if isinstance(error, WorkflowUpdateRPCTimeoutOrCancelledError):
        return ControllerUnreachable(f"{job_id}: {_NO_WORKER}")
    if isinstance(error, WorkflowUpdateFailedError):
        return Refused(f"{job_id}: {short(error.cause)}")
    if isinstance(error, WorkflowQueryFailedError | WorkflowQueryRejectedError):
        return Refused(f"{job_id}: {short(error)}")
    if isinstance(error, RPCError):
        return _from_rpc(error, job_id)
    raise error


def _from_rpc(error: RPCError, job_id: str) -> EverstepError:
    message = short(error.message)
    if error.status is RPCStatusCode.NOT_FOUND:
        return JobNotFound(job_id)
    if error.status in _LATE:
        return ControllerUnreachable(f"{job_id}: {_NO_WORKER}")
    if error.status is RPCStatusCode.FAILED_PRECONDITION and "poller" in message:
        return ControllerUnreachable(f"{job_id}: {_NO_WORKER}")
    if "Workflow Task in failed state" in message:
        # A controller that was frozen or starved in the middle of one; a bug of ours at worst.
        return ControllerUnreachable(f"{job_id}: {_TASK_FAILED}")
    if error.status in _AWAY:
        return ServerUnreachable(f"the Temporal server does not answer: {message}")
    if error.status is RPCStatusCode.INVALID_ARGUMENT and "earch attribute" in message:
        return ConfigurationProblem(
            f"the Temporal namespace lacks Everstep's search attributes ({message}); create "
            "EverstepState, EverstepSymptom and EverstepCodeVersion as Keyword"
        )
    return Refused(f"{job_id}: the Temporal server refused: {message}")


def continued_as_new(error: BaseException) -> bool:
    """Whether an update met a workflow that continued as new before it answered."""
    cause = error.cause if isinstance(error, WorkflowUpdateFailedError) else None
    return isinstance(cause, ApplicationError) and cause.type == "AcceptedUpdateCompletedWorkflow"


def input_was_refused(error: WorkflowFailureError) -> bool:
    """Whether a workflow failed because its input was not a valid job."""
    cause = error.cause
    return isinstance(cause, ApplicationError) and cause.type == INVALID_JOB_SPEC


def ended_without_result(error: WorkflowFailureError, job_id: str) -> EverstepError:
    """Why a job's workflow failed, was cancelled or was terminated."""
    cause = error.cause
    if isinstance(cause, TerminatedError):
        return JobFailed(
            f"{job_id}: its workflow was terminated ({short(cause)}); "
            f"`everstep adopt {job_id}` takes the job up again"
        )
    if isinstance(cause, CancelledError):
        return JobFailed(f"{job_id}: cancelled")
    return JobFailed(f"{job_id}: {short(cause)}")
