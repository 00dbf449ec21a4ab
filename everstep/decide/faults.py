"""Ways in which a rank fails by itself, as a table: whose fault each is and what it is charged to.

The rows are also ranked by how much they say about one machine: when two ranks fail by themselves
at once, the more machine-specific fault is the finding and the other one is named beside it.

Not here: ranks that only suffered from others (witnesses), ranks that we stopped, machines; see
``everstep.decide.attribution``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from everstep.decide.diagnosis.types import Role, TailFinding
from everstep.decide.logs import headline
from everstep.decide.reports import RankReport
from everstep.decide.words import Action, Cause, Confidence, LogClass, RankState, Side, Symptom

_SAY_LITTLE = frozenset({LogClass.SILENT, LogClass.OTHER})
WITNESS_CLASSES = frozenset({LogClass.PEER_LOST, LogClass.COLLECTIVE_TIMEOUT})

_FROM_OUTSIDE = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
_SHELL_SIGNAL_BASE = 128
_CANNOT_START = frozenset({126, 127})
_HEADLINE_CHARS_MAX = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One row of the table."""

    name: str
    """Also the name of the rule in a finding."""
    when: Callable[[RankReport], bool]
    weight: int
    """The more it says about one machine, the higher."""
    symptom: Symptom
    side: Side
    cause: Cause
    confidence: Confidence = Confidence.HIGH
    says: str
    """What a person reads after "rank 3 on m-1"."""
    action: Action | None = None
    """What it calls for, where the catalogue of signatures says so."""
    machine_specific: bool = False
    """The fault is in the machine that the rank ran on."""


def signal_of(rank: RankReport) -> int | None:
    """The signal that ended the rank; a shell between us and it reports it as 128 + number."""
    if rank.signal is not None:
        return rank.signal
    code = rank.exit_code
    if code is None or code <= _SHELL_SIGNAL_BASE:
        return None
    try:
        return signal.Signals(code - _SHELL_SIGNAL_BASE).value
    except ValueError:
        return None


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended_badly(rank: RankReport) -> bool:
    """True when the rank ended by itself and not with success."""
    if rank.stopped_by_us or rank.state is not RankState.EXITED:
        return False
    return rank.signal is not None or rank.exit_code not in (0, None)


def is_witness(rank: RankReport) -> bool:
    """True when the rank failed because of its peers, by its own account."""
    if not ended_badly(rank):
        return False
    found = rank.log_finding
    by_catalogue = found is not None and found.role is Role.WITNESS
    return rank.log_class in WITNESS_CLASSES or (rank.log_class in _SAY_LITTLE and by_catalogue)


def _logged(*classes: LogClass) -> Callable[[RankReport], bool]:
    return lambda rank: rank.log_class in classes


def _on_gpu(rank: RankReport) -> bool:
    return any(word in line for line in rank.log_lines for word in ("CUDA", "HIP", "cuda."))


def crashed(rank: RankReport) -> bool:
    """True when a signal ended the rank that a program does not send to itself on purpose."""
    number = signal_of(rank)
    return number is not None and number not in _FROM_OUTSIDE and number != signal.SIGABRT


FAULTS: tuple[FaultKind, ...] = (
    FaultKind(
        name="fenced_off",
        when=_logged(LogClass.CHECKPOINT_REFUSED),
        weight=0,
        symptom=Symptom.CHECKPOINT_ERROR,
        side=Side.INFRASTRUCTURE,
        cause=Cause.INFRASTRUCTURE,
        says="was refused a commit because a newer run exists: it had been fenced off",
    ),
    FaultKind(
        name="gpu_out_of_memory",
        when=lambda rank: rank.log_class is LogClass.OUT_OF_MEMORY and _on_gpu(rank),
        weight=8,
        symptom=Symptom.GPU_OOM,
        side=Side.USER_CODE,
        cause=Cause.USER_CODE,
        says="ran out of GPU memory",
    ),
    FaultKind(
        name="out_of_memory",
        when=_logged(LogClass.OUT_OF_MEMORY),
        weight=8,
        symptom=Symptom.CPU_OOM,
        side=Side.USER_CODE,
        cause=Cause.USER_CODE,
        says="ran out of memory",
    ),
    FaultKind(
        # Charged to "unclear": a full disk is emptied by people, so the job ends up waiting for
        # one instead of ending.
        name="disk_full",
        when=_logged(LogClass.DISK_FULL),
        weight=6,
        symptom=Symptom.DISK_FULL,
        side=Side.USER_CODE,
        cause=Cause.UNCLEAR,
        says="found the disk full",
    ),
    FaultKind(
        name="port_taken",
        when=_logged(LogClass.PORT_TAKEN),
        weight=5,
        symptom=Symptom.NETWORK_HOST,
        side=Side.INFRASTRUCTURE,
        cause=Cause.INFRASTRUCTURE,
        says="found the port of the rendezvous taken; the next run gets a fresh one",
    ),
    FaultKind(
        name="crashed",
        when=crashed,
        weight=7,
        symptom=Symptom.UNKNOWN,
        side=Side.UNCLEAR,
        cause=Cause.UNCLEAR,
        says="was ended by {signal}",
    ),
    FaultKind(
        name="stopped_from_outside",
        when=lambda rank: signal_of(rank) in _FROM_OUTSIDE,
        weight=1,
        symptom=Symptom.UNKNOWN,
        side=Side.UNCLEAR,
        cause=Cause.UNCLEAR,
        confidence=Confidence.LOW,
        says="was told to stop ({signal}) by somebody else",
    ),
    FaultKind(
        name="aborted",
        when=lambda rank: signal_of(rank) == signal.SIGABRT,
        weight=2,
        symptom=Symptom.UNKNOWN,
        side=Side.UNCLEAR,
        cause=Cause.UNCLEAR,
        says="aborted itself ({signal})",
    ),
    FaultKind(
        name="checkpoint_unreadable",
        when=_logged(LogClass.CHECKPOINT_UNREADABLE),
        weight=4,
        symptom=Symptom.CHECKPOINT_ERROR,
        side=Side.UNCLEAR,
        cause=Cause.UNCLEAR,
        says="could not read its checkpoint",
    ),
    FaultKind(
        name="program_not_loaded",
        when=lambda rank: rank.log_class is LogClass.IMPORT_FAILED,
        weight=4,
        symptom=Symptom.ENVIRONMENT_MISMATCH,
        side=Side.USER_CODE,
        cause=Cause.USER_CODE,
        says="could not load its program or a module",
    ),
    FaultKind(
        name="python_exception",
        when=_logged(LogClass.PYTHON_EXCEPTION),
        weight=3,
        symptom=Symptom.USER_CODE,
        side=Side.USER_CODE,
        cause=Cause.USER_CODE,
        says="raised an exception",
    ),
    FaultKind(
        name="cannot_start",
        when=lambda rank: rank.exit_code in _CANNOT_START,
        weight=4,
        symptom=Symptom.CONFIG_ERROR,
        side=Side.USER_CODE,
        cause=Cause.USER_CODE,
        says="could not start its command (exit code {code})",
    ),
    FaultKind(
        name="exit_code",
        when=lambda _rank: True,
        weight=2,
        symptom=Symptom.UNKNOWN,
        side=Side.UNCLEAR,
        cause=Cause.UNCLEAR,
        confidence=Confidence.LOW,
        says="ended with exit code {code}",
    ),
)
"""The first row that fits is the kind of a rank's fault."""


def fault_of(rank: RankReport) -> FaultKind | None:
    """How the rank failed by itself; None when it did not, or was a witness or stopped by us."""
    if not ended_badly(rank) or is_witness(rank):
        return None
    return kind_of_end(rank)


def kind_of_end(rank: RankReport) -> FaultKind:
    """The row that fits a rank, whatever its role in the failure."""
    found = rank.log_finding
    if found is not None and _says_more(found, rank.log_class):
        return _kind_by_catalogue(
            found.rule,
            found.symptom,
            found.side,
            found.action,
            found.confidence,
            found.machine_specific,
            found.why,
        )
    return next(kind for kind in FAULTS if kind.when(rank))


def _says_more(found: TailFinding, log_class: LogClass) -> bool:
    """True when the catalogue knows a cause, and the runtime's own lines name none."""
    if found.role is not Role.ROOT or found.symptom is Symptom.UNKNOWN:
        return False
    if log_class is LogClass.PYTHON_EXCEPTION:
        return found.symptom is not Symptom.USER_CODE
    return log_class in _SAY_LITTLE


_CAUSES = {
    Side.INFRASTRUCTURE: Cause.INFRASTRUCTURE,
    Side.USER_CODE: Cause.USER_CODE,
    Side.EXTERNAL: Cause.UNCLEAR,
    Side.UNCLEAR: Cause.UNCLEAR,
}


@lru_cache(maxsize=512)
def _kind_by_catalogue(
    rule: str,
    symptom: Symptom,
    side: Side,
    action: Action,
    confidence: Confidence,
    machine_specific: bool,
    why: str,
) -> FaultKind:
    """One and the same row for all ranks with one finding."""
    return FaultKind(
        name=rule,
        when=lambda _rank: True,
        weight=9 if machine_specific else 5,
        symptom=symptom,
        side=side,
        cause=_CAUSES[side],
        confidence=confidence,
        says=(why or f"failed by {rule}").replace("{", "(").replace("}", ")"),
        action=action,
        machine_specific=machine_specific,
    )


def describe(rank: RankReport, kind: FaultKind) -> str:
    """The fault in words, with the line of the log that says most."""
    number = signal_of(rank)
    name = signal_name(number) if number is not None else "no signal"
    text = kind.says.format(signal=name, code=rank.exit_code)
    spoken = headline(rank.log_lines) if kind.cause is not Cause.UNCLEAR or number is None else ""
    return f"{text}: {spoken[:_HEADLINE_CHARS_MAX]}" if spoken else text
