"""Name, types and call options of every activity. No implementation: all that workflows see.

A stub here and its implementation in this package have the same name and signature
(``tests/contract/test_contracts.py``). ``call(stub, argument, ...)`` schedules one with its options
and a one-line summary for the Temporal UI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

from everstep.spec import messages as m
from everstep.spec.base import Message
from everstep.spec.policy import PolicySnapshot

A = TypeVar("A", bound=Message)
R = TypeVar("R", bound=Message)

PERMANENT_FAILURE = "PermanentFailure"
TEMPORARY_FAILURE = "TemporaryFailure"
INVALID_JOB_SPEC = "InvalidJobSpec"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How an activity is scheduled. Reasons are in ``docs/temporal.md``."""

    start_to_close: timedelta
    heartbeat: timedelta | None = None
    attempts_max: int = 0
    """0: unlimited, it resumes from its last heartbeat."""
    queue: str = m.TASK_QUEUE
    wait_cancellation: bool = False


QUICK = CallOptions(start_to_close=timedelta(seconds=60), heartbeat=timedelta(seconds=2))
"""A ledger transaction or one command. ``workers.heartbeats`` heartbeats for it, so that a killed
controller is noticed at once and a ledger that is locked for a while is waited for."""
SHARD = CallOptions(start_to_close=timedelta(minutes=10), heartbeat=timedelta(seconds=2))
"""Commands to many machines: resumes, and a repeated command answers with its first result."""
LOOK = CallOptions(
    start_to_close=timedelta(hours=3), heartbeat=timedelta(seconds=2), attempts_max=3
)
"""Several rounds with the policy's time between them; evidence, so it may also fail."""
COPY = CallOptions(start_to_close=timedelta(hours=1), heartbeat=timedelta(seconds=5))
"""Moves data."""
WATCH = CallOptions(
    start_to_close=timedelta(days=7),
    heartbeat=timedelta(seconds=2),
    queue=m.WATCH_QUEUE,
    wait_cancellation=True,
)

OPTIONS: dict[str, CallOptions] = {}


def _stub(
    options: CallOptions,
) -> Callable[[Callable[[A], Awaitable[R]]], Callable[[A], Awaitable[R]]]:
    def register(function: Callable[[A], Awaitable[R]]) -> Callable[[A], Awaitable[R]]:
        OPTIONS[function.__name__] = options
        return activity.defn(name=function.__name__)(function)

    return register


# detection.py


@_stub(WATCH)
async def watch_run(request: m.WatchRun) -> m.WatchResult:
    """Follow one shard until all ranks succeeded, trouble, or the asked-for milestone."""
    raise NotImplementedError


@_stub(SHARD)
async def confirm_machines(request: m.ConfirmMachines) -> m.ConfirmedMachines:
    """Wait for unreachable machines until they answer or count as lost."""
    raise NotImplementedError


# diagnosis.py


@_stub(SHARD)
async def diagnose_run(request: m.DiagnoseRun) -> m.DiagnosedRun:
    """Attribute a failed run from exits, signals and whole log tails."""
    raise NotImplementedError


@_stub(LOOK)
async def find_slow_ranks(request: m.FindSlowRanks) -> m.FoundSlowRanks:
    """Look at all ranks' stacks in several rounds: who is behind in most of them."""
    raise NotImplementedError


# isolation.py


@_stub(QUICK)
async def evict_machines(request: m.EvictMachines) -> m.EvictedMachines:
    """Take machines out of use and block them, exactly once each."""
    raise NotImplementedError


# hot_update.py


@_stub(COPY)
async def materialise_code(request: m.MaterialiseCodeInput) -> m.MaterialisedCodeResult:
    """Bring a code version to machines, verified by hash."""
    raise NotImplementedError


# checkpoint_restore.py


@_stub(COPY)
async def choose_restore_point(request: m.ChooseRestorePoint) -> m.RestorePoint:
    """Fence older generations off and choose the newest complete checkpoint on the lineage."""
    raise NotImplementedError


# launch.py


@_stub(QUICK)
async def register_job(request: m.RegisterJob) -> m.RegisteredJob:
    """Enter the job into the ledger, or find its live run there."""
    raise NotImplementedError


@_stub(QUICK)
async def open_run(request: m.OpenRun) -> m.OpenedRun:
    """Claim machines and open the next run in one transaction, idempotent by request key."""
    raise NotImplementedError


@_stub(QUICK)
async def prepare_run(request: m.PrepareRunInput) -> m.PreparedRunResult:
    """Reserve a fresh rendezvous port on the run's first machine."""
    raise NotImplementedError


@_stub(SHARD)
async def start_ranks(request: m.StartRanks) -> m.StartedRanks:
    """Start the ranks of one shard."""
    raise NotImplementedError


@_stub(SHARD)
async def stop_ranks(request: m.StopRanks) -> m.StoppedRanks:
    """Capture evidence and end the ranks of one shard, verified."""
    raise NotImplementedError


@_stub(QUICK)
async def close_run(request: m.CloseRun) -> m.Done:
    """Mark a run closed."""
    raise NotImplementedError


@_stub(QUICK)
async def close_job(request: m.CloseJob) -> m.Done:
    """Mark a job ended and give its machines back."""
    raise NotImplementedError


# ledger.py


@_stub(QUICK)
async def record_progress(request: m.RecordProgress) -> m.Done:
    """Store boundaries of runs and the job's phase."""
    raise NotImplementedError


@_stub(QUICK)
async def record_incident(request: m.RecordIncident) -> m.Done:
    """Store an incident's round with evidence and decision."""
    raise NotImplementedError


@_stub(QUICK)
async def close_incident(request: m.CloseIncident) -> m.Done:
    """Mark an incident over."""
    raise NotImplementedError


@_stub(QUICK)
async def read_policy(request: m.ReadPolicy) -> PolicySnapshot:
    """The policy as it is now, with the job's overrides."""
    raise NotImplementedError


# notification.py


@_stub(CallOptions(start_to_close=timedelta(seconds=30), attempts_max=10))
async def notify(request: m.Notify) -> m.Done:
    """Tell people; repeats by key are harmless."""
    raise NotImplementedError


def schedule(
    stub: Callable[[A], Awaitable[R]],
    argument: A,
    *,
    summary: str,
    heartbeat: timedelta | None = None,
) -> workflow.ActivityHandle[Any]:
    """Schedule an activity with its contract's options.

    Args:
        stub: which one.
        argument: its one message.
        summary: its line in the Temporal UI.
        heartbeat: the policy's own limit, in place of the contract's.
    """
    options = OPTIONS[stub.__name__]
    return workflow.start_activity(
        stub,
        argument,
        task_queue=options.queue,
        start_to_close_timeout=options.start_to_close,
        heartbeat_timeout=heartbeat or options.heartbeat,
        retry_policy=RetryPolicy(
            initial_interval=timedelta(milliseconds=200),
            backoff_coefficient=2.0,
            maximum_interval=timedelta(seconds=5),
            maximum_attempts=options.attempts_max,
            non_retryable_error_types=[PERMANENT_FAILURE],
        ),
        cancellation_type=(
            workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED
            if options.wait_cancellation
            else workflow.ActivityCancellationType.TRY_CANCEL
        ),
        summary=summary[:200],
    )


async def call(stub: Callable[[A], Awaitable[R]], argument: A, *, summary: str) -> R:
    """Schedule an activity and wait for its result."""
    result: R = await schedule(stub, argument, summary=summary)
    return result
