"""The stacks of a run that this agent has: all that ``capture`` needs is known of it.

Not here: when they are taken (before a teardown, or on demand), and what becomes of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.decide.stack_report import StackReport
from everstep.machine.stacks.capture import CaptureLimits, StackTarget, capture

if TYPE_CHECKING:
    from everstep.machine.run import Run  # which takes stacks itself


def stack_target(run: Run) -> StackTarget:
    """The processes of a run, and where its ranks answer."""
    plan = run.record.plan
    starts = run.processes.starts if run.same_boot else {}
    seen = [run.monitor.progress(rank) for rank in run.record.ranks]
    return StackTarget(
        machine_id=run.record.machine_id,
        scope=run.scope,
        ranks={start.pid: rank for rank, start in starts.items()},
        training_pids=tuple(p.pid for p in seen if p is not None and p.pid),
        stack_files={rank: run.folder.stack(rank) for rank in run.record.ranks},
        axes=plan.axes or (("dp", plan.machines * plan.ranks_per_machine),),
        ranks_per_machine=plan.ranks_per_machine,
    )


async def capture_run(run: Run, limits: CaptureLimits | None = None) -> StackReport:
    """The stacks of every process of a run, grouped; none when nothing of it is left."""
    return await capture(stack_target(run), limits)
