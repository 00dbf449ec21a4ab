"""Xids as NVML and DCGM give them: a bare number, judged by the kernel log's catalogue.

Not here: the lines of the kernel's log, which say more (``kernel_log``).
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.decide.kernel_rules import KernelRules
from everstep.decide.words import Action, Confidence
from everstep.machine.probes.gpu_rules import GpuRule

JudgeXid = Callable[[int], GpuRule | None]
"""What an Xid means by itself; None: nothing for the machine (an application's own, say)."""


def by_catalogue(rules: KernelRules) -> JudgeXid:
    """What an Xid means by its row in the catalogue, where NVML gives only its number.

    The kernel log has the rest of the line: rows that need it (which program, which severity, which
    recovery) are left to the kernel log's own probe, or are judged with care here.
    """

    def judge(number: int) -> GpuRule | None:
        row = rules.xids.get(number, rules.unknown_xid)
        if row.teardown or row.several_programs or row.recovery:
            return None
        severity_matters = row.fatal is not None and row.nonfatal is not None
        action = Action.STOP_TIME_CHECK if severity_matters else row.action
        sure = number in rules.xids and not severity_matters
        return GpuRule(
            row.symptom, action, Confidence.HIGH if sure else Confidence.LOW, row.meaning
        )

    return judge
