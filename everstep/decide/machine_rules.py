"""Rules of attribution that start from what probes saw of the machines.

They come before everything that is inferred from ranks: a device that is gone explains the ranks
that complain, and not the other way round. Not here: the order of all rules (``attribution``), and
when a fault dooms its machine (``machine_faults``).
"""

from __future__ import annotations

from everstep.decide.evidence import Evidence, named_machines, named_ranks
from everstep.decide.faults import describe
from everstep.decide.machine_faults import (
    SHARED,
    MachineFault,
    doomed,
    explain,
    only_slowed,
    shared_outages,
    side_of,
)
from everstep.decide.reports import Finding
from everstep.decide.words import Action, Cause, Confidence, Side, Symptom

RULED_OUT_MAX = 12
_AT_ONCE_OF_A_HANG = frozenset(
    {
        Symptom.NETWORK_HOST,
        Symptom.NETWORK_NCCL,
        Symptom.FILESYSTEM_IO,
        Symptom.GPU_UNAVAILABLE,
        Symptom.NVLINK_PCIE,
        Symptom.HANG,
        Symptom.KERNEL_PANIC,
    }
)
"""What a fault of one machine may be when the whole job stands still or loses it."""
_OF_STORAGE = frozenset(
    {Symptom.FILESYSTEM_IO, Symptom.CHECKPOINT_ERROR, Symptom.DATA_ERROR, Symptom.UNKNOWN}
)
_OF_NETWORK = frozenset({Symptom.NETWORK_HOST, Symptom.NETWORK_NCCL, Symptom.UNKNOWN})


def doomed_of(evidence: Evidence) -> tuple[MachineFault, ...]:
    """Faults that call for the eviction of their machines, given which ranks failed."""
    stalled = {r.machine_id for r in evidence.ranks if r.rank in evidence.stalled}
    failed_on = {rank.machine_id for rank, _ in evidence.own} | stalled
    return doomed(evidence.faults, failed_on)


def shared_outage(evidence: Evidence) -> Finding | None:
    """Several machines have the same trouble with something outside of them."""
    shared = shared_outages(evidence.faults)
    if not shared or doomed_of(evidence) or evidence.nonfinite_seen:
        return None
    symptom = min(shared)
    fitting = _OF_STORAGE if symptom is Symptom.FILESYSTEM_IO else _OF_NETWORK
    if any(kind.symptom not in fitting for _, kind in evidence.own):
        return None
    side, action = SHARED[symptom]
    cause = Cause.UNCLEAR if side is Side.EXTERNAL else Cause.INFRASTRUCTURE
    machines = shared[symptom]
    shown = _first(evidence, machines[0], symptom)
    return Finding(
        symptom=symptom,
        side=side,
        cause=cause,
        confidence=Confidence.HIGH,
        rule="",
        reason=f"{named_machines(machines)} see it at once, so none of them is its cause: {shown}",
        culprit_ranks=tuple(rank.rank for rank, _ in evidence.own),
        action=action,
    )


def _first(evidence: Evidence, machine_id: str, symptom: Symptom) -> str:
    return next(
        fault.observation.reason
        for fault in evidence.faults
        if fault.machine_id == machine_id and fault.observation.symptom is symptom
    )


def machine_fault(evidence: Evidence) -> Finding | None:
    """A probe is sure that a machine has to go."""
    found = doomed_of(evidence)
    machines = tuple(sorted({fault.machine_id for fault in found}))
    if not found or set(evidence.lost) - set(machines):
        return None
    shown = found[0]
    more = f" (and {len(found) - 1} more faults)" if len(found) > 1 else ""
    failed = evidence.ranks_on(machines)
    return Finding(
        symptom=shown.observation.symptom or Symptom.UNKNOWN,
        side=Side.INFRASTRUCTURE,
        cause=Cause.INFRASTRUCTURE,
        confidence=Confidence.HIGH,
        rule=f"machine_{shown.observation.rule or shown.observation.probe}",
        reason=f"{named_machines(machines)}: {shown.observation.reason}{more}",
        culprit_ranks=tuple(rank.rank for rank in failed),
        suspects=(*machines, *evidence.dirty),
        action=Action.EVICT_MACHINE,
    )


def slow_machine(evidence: Evidence) -> Finding | None:
    """Steps take longer than before, and one machine is known to be slowed down."""
    if not any(trigger.kind == "step_time_decline" for trigger in evidence.triggers):
        return None
    present = [(f.machine_id, f.observation) for f in evidence.faults if f.present]
    machine = only_slowed(present)
    if machine is None:
        return None
    shown = next(o for i, o in present if i == machine and o.symptom is Symptom.MFU_DECLINE)
    return Finding(
        symptom=Symptom.MFU_DECLINE,
        side=Side.INFRASTRUCTURE,
        cause=Cause.INFRASTRUCTURE,
        confidence=Confidence.HIGH,
        rule="",
        reason=f"steps take longer since {machine} is slowed down: {shown.reason}",
        suspects=(machine,),
        action=Action.EVICT_MACHINE,
    )


def explained_by_machine(evidence: Evidence) -> Finding | None:
    """A rank failed by itself, and a fault of its machine explains how."""
    if not evidence.own:
        return None
    places: dict[str, list[int]] = {}
    for rank in evidence.ranks:
        places.setdefault(rank.machine_id, []).append(rank.rank)
    found = explain(evidence.own, evidence.faults, lambda r: places[r.machine_id].index(r.rank))
    if found is None:
        return None
    row, fault, ranks = found
    side, cause = side_of(fault.observation)
    return Finding(
        symptom=fault.observation.symptom or Symptom.UNKNOWN,
        side=side,
        cause=cause,
        # That a rank was killed and that the kernel kills for memory, together, leave no doubt.
        confidence=Confidence.HIGH if row.name == "oom_killed" else fault.observation.confidence,
        rule=row.name,
        reason=f"{named_ranks(ranks)} on {fault.machine_id} {row.says}: {fault.observation.reason}",
        culprit_ranks=tuple(rank.rank for rank in ranks),
        action=_beyond_a_warning(fault),
    )


def _beyond_a_warning(fault: MachineFault) -> Action | None:
    """What it calls for; a warning is about the machine, and the run has failed."""
    action = fault.observation.action
    return None if action is Action.WARN_ONLY else action


def stands_beside_fault(evidence: Evidence) -> Finding | None:
    """Nobody failed by itself, all wait for somebody, and one machine is not well."""
    if evidence.own or not (evidence.hang_seen or evidence.witnesses):
        return None
    faults = [
        fault
        for fault in evidence.faults
        if fault.observation.symptom in _AT_ONCE_OF_A_HANG and fault.present
    ]
    machines = sorted({fault.machine_id for fault in faults})
    if len(machines) != 1:
        return None
    observation = faults[0].observation
    side, cause = side_of(observation)
    return Finding(
        symptom=observation.symptom or Symptom.HANG,
        side=side,
        cause=cause,
        confidence=Confidence.LOW,
        rule="",
        reason=f"no rank failed by itself, and {machines[0]} is not well: {observation.reason}",
        action=_beyond_a_warning(faults[0]),
    )


def loss_spike(evidence: Evidence) -> Finding | None:
    """Loss or gradients went far above their baseline, and nothing else is known."""
    spikes = [trigger for trigger in evidence.triggers if trigger.kind == "loss_spike"]
    if not spikes or evidence.own:
        return None
    return Finding(
        symptom=Symptom.LOSS_SPIKE,
        side=Side.UNCLEAR,
        cause=Cause.UNCLEAR,
        confidence=Confidence.LOW,
        rule="",
        reason=spikes[0].reason or "loss or gradients far above their baseline",
    )


def ruled_out(finding: Finding, evidence: Evidence) -> tuple[str, ...]:
    """What was looked at and is not the cause, for people."""
    lines = []
    witnesses = [r for r in evidence.witnesses if r.rank not in finding.culprit_ranks]
    if witnesses:
        lines.append(f"{named_ranks(witnesses)}: lost peers, witnesses only")
    stopped = [r for r in evidence.collateral if r.rank not in finding.culprit_ranks]
    if stopped:
        lines.append(f"{named_ranks(stopped)}: ran until we ended them")
    lines += [
        f"rank {rank.rank}: {describe(rank, kind)}, but the rule above says more"
        for rank, kind in evidence.own
        if rank.rank not in finding.culprit_ranks
    ]
    for fault in evidence.faults:
        if fault.machine_id not in finding.suspects:
            seen = fault.observation
            lines.append(
                f"{fault.machine_id} {seen.target}: {seen.reason} "
                f"({seen.action or 'no action'}, {seen.confidence} confidence): evicts nobody"
            )
    accused = {r.machine_id for r in evidence.ranks if r.rank in finding.culprit_ranks}
    for machine_id in sorted(accused | set(finding.suspects)):
        probes = evidence.healthy_probes.get(machine_id)
        if probes:
            lines.append(f"{machine_id}: probes that found nothing wrong: {', '.join(probes)}")
    return tuple(line[:300] for line in lines[:RULED_OUT_MAX])
