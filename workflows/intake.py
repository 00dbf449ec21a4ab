"""What a ``TrainingJob`` is started with: a job spec as plain JSON, or the state it carried over.

Any Temporal SDK in any language may start a job, so the input is checked here and a bad one fails
the start at once, with one line for each problem.
"""

from __future__ import annotations

from typing import Any

from temporalio import workflow

with workflow.unsafe.imports_passed_through():
    from pydantic import ValidationError
    from temporalio.exceptions import ApplicationError

    from activities import contracts
    from everstep.spec import messages as m
    from everstep.spec.errors import format_validation_error
    from everstep.spec.job import JobSpec
    from workflows.state import JobState

CONTINUED = "everstep_continued"
"""Key of the input under which continue-as-new passes the state on."""


def state_from(raw: Any) -> JobState:
    """The state to begin with: a new job's, or the one carried through continue-as-new.

    Raises:
        ApplicationError: the input is not a job spec; fails the start at once with the reason.
    """
    if isinstance(raw, dict) and CONTINUED in raw:
        return JobState.model_validate(raw[CONTINUED])
    try:
        spec = JobSpec.model_validate(raw)
    except ValidationError as error:
        problems = format_validation_error(error, source="job spec")
        raise ApplicationError(
            "; ".join(problems)[:1500], type=contracts.INVALID_JOB_SPEC, non_retryable=True
        ) from None
    expected = m.job_workflow_id(spec.name)
    if workflow.info().workflow_id != expected:
        raise ApplicationError(
            f"workflow id: got {workflow.info().workflow_id}; job {spec.name} must be started "
            f"with the workflow id {expected}, so that it cannot run twice",
            type=contracts.INVALID_JOB_SPEC,
            non_retryable=True,
        )
    return JobState(spec=spec, created_at=workflow.now())
