"""What was found in a kernel log, and the words for it.

Not here: which findings stand, and what they come to (``kernel``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from everstep.decide.kernel_match import Hit
from everstep.decide.kernel_rules import KernelClass, LineRule, NumberRule, Windows
from everstep.decide.observation import Observation, Value
from everstep.decide.words import Action, Confidence, Verdict

PROBE = "kernel_log"
EVIDENCE_LINES_MAX = 5
EVIDENCE_CHARS_MAX = 300
TIMES_MAX = 4_096
PROGRAMS_MAX = 64
KILLED_MAX = 64

RANK = {
    Action.WARN_ONLY: 0,
    Action.RETRY_IN_PLACE: 1,
    Action.ROLLBACK_CODE: 2,
    Action.FIX_CONFIG_GIVE_UP: 3,
    Action.WAIT_EXTERNAL: 4,
    Action.STOP_TIME_CHECK: 5,
    Action.OVER_EVICT_GROUP: 6,
    Action.EVICT_MACHINE: 7,
}
"""Which action a set of findings leads to: the one that leaves the least broken."""


@dataclass(frozen=True, slots=True)
class EvidenceLine:
    """A line that a person would look at."""

    number: int
    """Counted from 1."""
    text: str


@dataclass(slots=True, kw_only=True)
class Finding:
    """One row of the catalogue at one target."""

    hit: Hit
    """The one that made it most serious."""
    action: Action
    first_s: float
    last_s: float
    order: int
    last_action: Action = Action.WARN_ONLY
    count: int = 0
    cleared: bool = False
    stayed: bool = False
    repeated: bool = False
    """It came often enough to count, however well it ended each time."""
    due_s: float | None = None
    """When its action is decided: a word that would soften it may still come."""
    times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=TIMES_MAX))
    evidence: list[EvidenceLine] = field(default_factory=list)
    killed: dict[int, str] = field(default_factory=dict)
    """Processes that the kernel ended for want of memory, with their names."""

    def note(self, now_s: float, count: int, line: EvidenceLine) -> None:
        """It came once more."""
        self.times.append((now_s, count))
        self.count += count
        self.last_s = now_s
        if len(self.evidence) < EVIDENCE_LINES_MAX:
            self.evidence.append(line)

    def ended(self, hit: Hit) -> bool:
        """Whether it names a process that the kernel ended and that was not known yet."""
        if hit.rule.kind is not KernelClass.OUT_OF_MEMORY or hit.pid is None:
            return False
        new = hit.pid not in self.killed and len(self.killed) < KILLED_MAX
        if new:
            self.killed[hit.pid] = hit.program
        return new

    def observation(self, action: Action) -> Observation:
        """The finding as a probe tells it."""
        hit = self.hit
        values: dict[str, Value] = {**hit.values, "count": self.count}
        if self.evidence:
            values["line"] = self.evidence[0].text
        if self.killed:
            pid, program = next(reversed(self.killed.items()))
            pids = ", ".join(map(str, self.killed))
            values |= {"pid": pid, "program": program, "pids": pids}
        sure = action is Action.EVICT_MACHINE or hit.rule.kind is KernelClass.OUT_OF_MEMORY
        return Observation(
            probe=PROBE,
            verdict=Verdict.FAULTY,
            reason=reason(hit, self.count),
            target=hit.target,
            rule=hit.name,
            symptom=hit.rule.symptom,
            action=action,
            confidence=Confidence.HIGH if sure else Confidence.LOW,
            values=values,
        )


@dataclass(frozen=True, slots=True)
class _Program:
    pid: int
    name: str
    at_s: float


class Programs:
    """Which programs failed on which GPU: one program's errors are its own, several's are not."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._seen: dict[str, list[_Program]] = {}

    def say(self, hit: Hit, now_s: float, *, timed: bool) -> Action:
        """What the programs that failed on the hit's GPU say about it, with this one.

        Args:
            hit: an Xid that is a program's fault first.
            now_s: when it came.
            timed: whether the log has times, so that distances mean something.
        """
        if hit.pid is not None:
            seen = [
                program
                for program in self._seen.get(hit.gpu, ())
                if now_s - program.at_s <= self._windows.programs_s
            ]
            # Programs that fail in the same moment share a fate (MPS), so they count as one.
            apart = not timed or all(now_s - p.at_s > self._windows.burst_s for p in seen)
            if apart and all(program.pid != hit.pid for program in seen):
                seen.append(_Program(hit.pid, hit.program, now_s))
            self._seen[hit.gpu] = seen[-PROGRAMS_MAX:]
        here = self._seen.get(hit.gpu, [])
        elsewhere = max((len(p) for gpu, p in self._seen.items() if gpu != hit.gpu), default=0)
        # A program that is wrong is wrong on every GPU it runs on.
        if len(here) < 2 * (elsewhere + 1):
            return Action.WARN_ONLY
        # A job with a bug that is restarted again and again is one program, however many processes
        # it was: that is worth a check of the GPU, not its eviction.
        sure = len({program.name for program in here if program.name}) > 1
        return Action.EVICT_MACHINE if sure else Action.STOP_TIME_CHECK

    def forget(self, gpu: str) -> None:
        """The GPU was reset, and is well."""
        self._seen.pop(gpu, None)


def is_softened(rule: NumberRule | LineRule) -> bool:
    """Whether the action hangs on the other Xids of the GPU."""
    return isinstance(rule, NumberRule) and rule.softened_by is not None


def worse(first: Action, second: Action) -> Action:
    """The one that leaves less broken."""
    return first if RANK[first] >= RANK[second] else second


def reason(hit: Hit, count: int) -> str:
    """One sentence for a person; who shows it says of which target."""
    what = hit.rule.meaning
    if isinstance(hit.rule, NumberRule):
        word, _, number = hit.name.partition("_")
        what = f"{'SXid' if word == 'sxid' else 'Xid'} {number}: {what}"
        if hit.rule.documented:
            what += f" (documented: {hit.rule.documented})"
    return f"{what}, {count} times" if count > 1 else what
