"""What probes saw of the machines of a failed run, and how a rank's end follows from it.

A fault that is sure and calls for its machine's eviction dooms the machine, unless several machines
show the same one at once and it is of a kind that they share (a storage server, a switch): then it
is outside of all of them. Anything less evicts nobody; it only explains a rank that failed nearby
in time, on the same machine.

Not here: whose finding it becomes (``attribution``), seeing (``everstep.machine.probes``).
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from everstep.decide.faults import FaultKind, signal_of
from everstep.decide.observation import Observation
from everstep.decide.reports import MachineReport, RankReport, Seen, Trigger
from everstep.decide.words import Action, Cause, Side, Symptom, Verdict

NEARBY_S = 120.0
"""A cause and its effect on one machine are seen within so long of each other."""
KILLED_WITHIN_S = 30.0
"""A kill for memory and its line in the kernel log are closer: one to two looks of a probe."""

SHARED = {
    Symptom.FILESYSTEM_IO: (Side.EXTERNAL, Action.WAIT_EXTERNAL),
    Symptom.NETWORK_HOST: (Side.INFRASTRUCTURE, Action.RETRY_IN_PLACE),
    Symptom.NETWORK_NCCL: (Side.INFRASTRUCTURE, Action.RETRY_IN_PLACE),
    Symptom.MFU_DECLINE: (Side.INFRASTRUCTURE, Action.WARN_ONLY),
}
"""What several machines have at once because of something that they share: side and action."""
_GPU = frozenset(
    {
        Symptom.CUDA_ERROR,
        Symptom.GPU_MEMORY_ECC,
        Symptom.GPU_UNAVAILABLE,
        Symptom.NVLINK_PCIE,
    }
)
_NETWORK = frozenset({Symptom.NETWORK_HOST, Symptom.NETWORK_NCCL})
_STORAGE = frozenset({Symptom.FILESYSTEM_IO, Symptom.CHECKPOINT_ERROR, Symptom.DATA_ERROR})
_GPU_TARGET = re.compile(r"\bgpu[ -]?(\d{1,3})$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFault:
    """A faulty observation of one machine of the run."""

    machine_id: str
    observation: Observation
    seen_ago_s: float
    """Seconds before the report, by the machine's own clock, at which it was last new."""
    present: bool
    """It still was so, or it is what made the run stop."""

    def near(self, rank: RankReport) -> bool:
        """True when it was seen about when the rank ended (or while the rank was stuck)."""
        limit_s = KILLED_WITHIN_S if self.observation.symptom is Symptom.CPU_OOM else NEARBY_S
        return abs(self.seen_ago_s - (rank.exited_ago_s or 0.0)) <= limit_s


@dataclass(frozen=True, slots=True)
class Explanation:
    """One row: which ends of a rank follow from which fault of its machine."""

    name: str
    fits: Callable[[RankReport, FaultKind, MachineFault], bool]
    says: str


def faults_of(
    reports: Sequence[MachineReport], triggers: Sequence[Trigger]
) -> tuple[MachineFault, ...]:
    """All faulty observations, each once: those of reports count, triggers fill in the rest."""
    found: dict[tuple[str, str, str, str], MachineFault] = {}
    standing = [t for t in triggers if t.observation and not t.cleared]
    stopped_for = {_key(t.machine_id, t.observation) for t in standing if t.observation}
    for report in reports:
        for seen in report.observations:
            if seen.observation.verdict is Verdict.FAULTY:
                key = _key(report.machine_id, seen.observation)
                found[key] = MachineFault(
                    machine_id=report.machine_id,
                    observation=seen.observation,
                    seen_ago_s=_last_new(seen),
                    present=seen.cleared_ago_s is None or key in stopped_for,
                )
    for trigger in standing:
        seen_by = trigger.observation
        if trigger.machine_id and seen_by and seen_by.verdict is Verdict.FAULTY:
            fault = MachineFault(
                machine_id=trigger.machine_id, observation=seen_by, seen_ago_s=0.0, present=True
            )
            found.setdefault(_key(trigger.machine_id, seen_by), fault)
    return tuple(found[key] for key in sorted(found))


def _key(machine_id: str | None, observation: Observation) -> tuple[str, str, str, str]:
    return (machine_id or "", observation.probe, observation.target, observation.rule)


def _last_new(seen: Seen) -> float:
    return seen.age_s if seen.renewed_ago_s is None else seen.renewed_ago_s


def only_slowed(seen: Iterable[tuple[str, Observation]]) -> str | None:
    """The one machine that is known to run slower than it could; None: no machine, or several."""
    slowed = {
        machine_id
        for machine_id, observation in seen
        if observation.verdict is Verdict.FAULTY and observation.symptom is Symptom.MFU_DECLINE
    }
    return slowed.pop() if len(slowed) == 1 else None


def shared_outages(faults: Iterable[MachineFault]) -> dict[Symptom, tuple[str, ...]]:
    """Symptoms of a shared kind that two machines or more have at once, and which machines."""
    machines: dict[Symptom, set[str]] = defaultdict(set)
    for fault in faults:
        symptom = fault.observation.symptom
        if symptom in SHARED and fault.present and _serious(fault):
            machines[symptom].add(fault.machine_id)
    return {symptom: tuple(sorted(ids)) for symptom, ids in machines.items() if len(ids) > 1}


def _serious(fault: MachineFault) -> bool:
    return fault.observation.action in {Action.EVICT_MACHINE, Action.WAIT_EXTERNAL}


def doomed(
    faults: Sequence[MachineFault], failed_on: Iterable[str] = ()
) -> tuple[MachineFault, ...]:
    """Faults that call for the eviction of one machine alone.

    One that has gone again counts only where a rank of its machine failed (``failed_on``).
    """
    shared, failed = shared_outages(faults), set(failed_on)
    return tuple(
        fault
        for fault in faults
        if fault.observation.calls_for_eviction
        and (fault.present or fault.machine_id in failed)
        and not (
            fault.observation.symptom is not None
            and fault.machine_id in shared.get(fault.observation.symptom, ())
        )
    )


def side_of(observation: Observation) -> tuple[Side, Cause]:
    """Whose fault it is, and what it is charged to."""
    if observation.symptom is Symptom.DISK_FULL:
        return Side.USER_CODE, Cause.UNCLEAR  # emptied by people: the job ends up waiting for one
    if observation.symptom is Symptom.CPU_OOM:
        return Side.USER_CODE, Cause.USER_CODE
    if observation.action is Action.WAIT_EXTERNAL:
        return Side.EXTERNAL, Cause.UNCLEAR
    if observation.symptom is Symptom.CONFIG_ERROR:
        return Side.USER_CODE, Cause.UNCLEAR
    return Side.INFRASTRUCTURE, Cause.INFRASTRUCTURE


def explain(
    own: Sequence[tuple[RankReport, FaultKind]],
    faults: Sequence[MachineFault],
    local_ranks: Callable[[RankReport], int],
) -> tuple[Explanation, MachineFault, tuple[RankReport, ...]] | None:
    """The first row by which a rank's own end follows from a fault of its machine.

    Args:
        own: ranks that failed by themselves, and how.
        faults: of all machines.
        local_ranks: a rank's index on its machine, which is that of its GPU by default.
    """
    for row in EXPLANATIONS:
        for fault in sorted(faults, key=_surest_first):
            ranks = tuple(
                rank
                for rank, kind in own
                if rank.machine_id == fault.machine_id
                and fault.near(rank)
                and not _of_another_gpu(fault, local_ranks(rank))
                and row.fits(rank, kind, fault)
            )
            if ranks:
                return row, fault, ranks
    return None


def _surest_first(fault: MachineFault) -> tuple[bool, bool, float]:
    return (not fault.observation.calls_for_eviction, not fault.present, fault.seen_ago_s)


def _of_another_gpu(fault: MachineFault, local_rank: int) -> bool:
    found = _GPU_TARGET.search(fault.observation.target)
    return found is not None and int(found.group(1)) != local_rank


def _nothing_known(kind: FaultKind) -> bool:
    return kind.symptom is Symptom.UNKNOWN


EXPLANATIONS: tuple[Explanation, ...] = (
    Explanation(
        "oom_killed",
        lambda rank, _kind, fault: (
            signal_of(rank) == signal.SIGKILL and fault.observation.symptom is Symptom.CPU_OOM
        ),
        "was killed by the kernel for memory",
    ),
    Explanation(
        "gpu_of_rank",
        lambda _rank, kind, fault: (
            fault.observation.symptom in _GPU
            and fault.observation.action in {Action.EVICT_MACHINE, Action.STOP_TIME_CHECK}
            and (kind.symptom in _GPU or _nothing_known(kind))
        ),
        "failed on a GPU that is not well",
    ),
    Explanation(
        "storage_of_machine",
        lambda _rank, kind, fault: (
            fault.observation.symptom is Symptom.FILESYSTEM_IO
            and (kind.symptom in _STORAGE or _nothing_known(kind))
        ),
        "failed beside storage that is not well",
    ),
    Explanation(
        "disk_of_machine",
        lambda _rank, kind, fault: (
            fault.observation.symptom is Symptom.DISK_FULL
            and fault.observation.action is not Action.WARN_ONLY
            and (kind.symptom in _STORAGE or _nothing_known(kind))
        ),
        "failed beside a full disk",
    ),
    Explanation(
        "network_of_machine",
        lambda _rank, kind, fault: (
            fault.observation.symptom in _NETWORK
            and (kind.symptom in _NETWORK or _nothing_known(kind))
        ),
        "failed beside a network that is not well",
    ),
    Explanation(
        "machine_not_well",
        lambda _rank, kind, fault: (
            _nothing_known(kind)
            and fault.observation.symptom not in {None, Symptom.UNKNOWN, Symptom.CPU_OOM}
            and fault.observation.action in {Action.EVICT_MACHINE, Action.STOP_TIME_CHECK}
        ),
        "failed on a machine that is not well",
    ),
)
"""In order; within a row the surest fault first."""
