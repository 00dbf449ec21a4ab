"""Temporal's errors in the words of ``everstep.errors``.

The SDK raises a dozen types for what a person sees as four things: no such job, the server is away,
no controller works, the job said no. Not here: deciding what to do about any of them.
"""

from __future__ import annotations

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
_AWAY = frozenset({RPCStatusCode.UNAVAILABLE, RPCStatusCode.ABORTED, RPCStatusCode.UNKNOWN})
_LATE = frozenset({RPCStatusCode.DEADLINE_EXCEEDED, RPCStatusCode.CANCELLED})
_LINE_MAX = 300


def short(error: BaseException | str) -> str:
    """An error's text as one bounded line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LINE_MAX else text[: _LINE_MAX - 1] + "…"


def translate(error: BaseException, job_id: str) -> EverstepError:
    """The error a person should see. Unknown ones are bugs: they are raised again as they are."""
    if isinstance(error, EverstepError):
        return error
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
