"""What Temporal's refusals mean to a person: mostly "not now", which is not "no"."""

from __future__ import annotations

import pytest
from temporalio.service import RPCError, RPCStatusCode

from everstep import rpc_errors
from everstep.errors import ControllerUnreachable, JobNotFound, Refused, ServerUnreachable


@pytest.mark.parametrize(
    "message,status,kind",
    [
        ("workflow not found", RPCStatusCode.NOT_FOUND, JobNotFound),
        ("deadline exceeded", RPCStatusCode.DEADLINE_EXCEEDED, ControllerUnreachable),
        ("no poller seen lately", RPCStatusCode.FAILED_PRECONDITION, ControllerUnreachable),
        (
            # Seen when a controller was frozen in the middle of a workflow task.
            "Unable to query workflow due to Workflow Task in failed state.",
            RPCStatusCode.FAILED_PRECONDITION,
            ControllerUnreachable,
        ),
        ("connection refused", RPCStatusCode.UNAVAILABLE, ServerUnreachable),
        ("not allowed", RPCStatusCode.PERMISSION_DENIED, Refused),
    ],
)
def test_errors_are_what_they_mean(
    message: str, status: RPCStatusCode, kind: type[Exception]
) -> None:
    translated = rpc_errors.translate(RPCError(message, status, b""), "job")
    assert type(translated) is kind
    assert "\n" not in str(translated)
