"""What a machine's kernel log says about the machine: judged as a set, not line by line.

One line is seldom the whole story: the same Xid comes in bursts, a program's error from many
programs is the GPU's, what follows a lost GPU is a consequence, and what was repaired is over.
The catalogue (``kernel_rules``) says what each line means; this module says what they mean
together, for a file (``judge``) and line by line as they come (``KernelJudge``).

Not here: reading the log (``everstep.machine.probes``) and taking lines apart (``kernel_text``,
``kernel_match``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from everstep.decide.kernel_findings import (
    EVIDENCE_CHARS_MAX,
    PROBE,
    RANK,
    TIMES_MAX,
    EvidenceLine,
    Finding,
    Programs,
    is_softened,
    reason,
    worse,
)
from everstep.decide.kernel_json import Reader
from everstep.decide.kernel_match import Hit, Matcher
from everstep.decide.kernel_rules import KernelRules, LineRule, NumberRule
from everstep.decide.kernel_text import KernelLine
from everstep.decide.kernel_times import Clock, LineTime
from everstep.decide.kernel_verdict import Coverage, KernelVerdict
from everstep.decide.observation import Observation
from everstep.decide.words import Action, Verdict

FINDINGS_MAX = 4_096
TEARDOWNS_MAX = 16
BOOT_MESSAGE = "Linux version "

__all__ = ["EvidenceLine", "KernelJudge", "KernelVerdict", "judge"]


def judge(
    lines: Iterable[str], rules: KernelRules, *, gpu_names: Mapping[str, str] | None = None
) -> KernelVerdict:
    """What a whole log says about its machine.

    Args:
        lines: in their order; with or without prefixes.
        rules: the catalogue.
        gpu_names: what the machine calls its GPUs, by PCI address.
    """
    judge_ = KernelJudge(rules, gpu_names=gpu_names)
    for line in lines:
        judge_.feed(line, 0.0)
    return judge_.verdict()


class KernelJudge:
    """Judges lines as they come; bounded memory, however long it runs."""

    def __init__(self, rules: KernelRules, *, gpu_names: Mapping[str, str] | None = None) -> None:
        """Nothing has been seen yet; arguments as of ``judge``."""
        self._rules = rules
        self._matcher = Matcher(rules, gpu_names or {})
        self._reader = Reader()
        self._time = LineTime()
        self._at_s: float | None = None
        self._lines = 0
        self._coverage = Coverage()
        self._booted_s: float | None = None
        """When the kernel's first message came, if it did."""
        self._findings: dict[tuple[str, str], Finding] = {}
        self._watched: set[tuple[str, str]] = set()
        """Findings that time alone may change."""
        self._programs = Programs(rules.windows)
        self._teardowns: dict[float, float] = {}
        """From when until when; the end may still be open."""

    def feed(self, line: str, at_s: float) -> list[Observation]:
        """Take one line.

        Args:
            line: as it was read.
            at_s: when it was read, in seconds of the reader's monotonic clock. The line's own time
                counts for the distance between lines, where it has one.

        Returns what is new: a finding, one that has become more serious, or one that is over.
        """
        self._lines += 1
        parsed = self._reader.read(line)
        if parsed is None:
            self._coverage.note(self._lines, line, None, found=False)
            return []
        if parsed.time.at_s is None:
            self._pass_time(at_s)
        self._at_s = at_s
        now_s = self._time.at(parsed.time)
        out = self._decide_due(now_s)
        if parsed.from_kernel and parsed.message.startswith(BOOT_MESSAGE):
            self._booted_s = now_s
        hit = self._matcher.match(parsed.message) if parsed.from_kernel else None
        self._coverage.note(self._lines, line, parsed, found=hit is not None)
        if hit is not None:
            out += self._take(hit, parsed, now_s, at_s)
        return out

    def tick(self, at_s: float) -> list[Observation]:
        """Time has passed: what was waiting for another line is decided."""
        self._pass_time(at_s)
        return self._decide_due(self._time.now_s)

    def name_gpus(self, gpu_names: Mapping[str, str]) -> Callable[[str], str]:
        """Call GPUs by other names (as of ``judge``) from now on, also in what was found before.

        Returns what turns a target of before into the same one's name of now.
        """
        now = self._matcher.name_gpus(gpu_names)
        for finding in self._findings.values():
            finding.hit = replace(finding.hit, target=now(finding.hit.target))
        self._findings = {(name, now(target)): f for (name, target), f in self._findings.items()}
        self._watched = {(name, now(target)) for name, target in self._watched}
        return now

    def teardown(self, from_s: float, until_s: float) -> None:
        """Processes are ended on purpose in this time (of the reader's clock).

        Args:
            from_s: what tells two teardowns apart; said again, its other end is another one.
            until_s: infinity while it goes on. The catalogue's margin is added.
        """
        self._teardowns[from_s] = until_s
        while len(self._teardowns) > TEARDOWNS_MAX:
            del self._teardowns[next(iter(self._teardowns))]

    def verdict(self) -> KernelVerdict:
        """What all lines so far say together."""
        for finding in self._findings.values():
            if is_softened(finding.hit.rule):
                finding.action = self._softened(finding)
            self._outlast(finding, self._time.now_s)
        standing = [
            finding
            for finding in self._findings.values()
            if not finding.cleared and not self._explained(finding, (t for t, _ in finding.times))
        ]
        standing.sort(key=lambda f: (-RANK[f.action], f.order))
        if not standing:
            seen = self._findings.values()
            lines = [line for finding in seen for line in finding.evidence]
            over = any(finding.cleared for finding in seen)
            return self._coverage.nothing(lines[-1] if lines else None, over=over)
        first = standing[0]
        told = tuple(f.observation(f.action) for f in standing)
        return KernelVerdict(
            action=first.action,
            symptom=first.hit.rule.symptom,
            side=first.hit.rule.side,
            confidence=told[0].confidence,
            rule=first.hit.name,
            target=first.hit.target,
            observations=told,
            evidence=tuple(first.evidence),
            why=told[0].reason,
        )

    # --- One hit

    def _take(self, hit: Hit, line: KernelLine, now_s: float, at_s: float) -> list[Observation]:
        rule = hit.rule
        if hit.expected and self._torn_down(at_s):
            return []
        if isinstance(rule, LineRule):
            if self._uptime_s(line, now_s) < rule.boot_grace_s:
                return []
            if rule.clears:
                return self._clear(hit, set(rule.clears))
            if rule.follows and not self._seen_since(rule.follows, now_s - rule.explained_within_s):
                return []
        if hit.recovery is not None and hit.recovery.clears:
            self._programs.forget(hit.gpu)
            return self._clear(hit, None)
        finding = self._finding(hit, now_s)
        merged = finding.count > 0 and now_s - finding.last_s <= self._rules.windows.burst_s
        evidence = EvidenceLine(self._lines, line.message[:EVIDENCE_CHARS_MAX])
        finding.note(now_s, hit.count, evidence)
        merged = not finding.ended(hit) and merged
        action = self._together(hit, finding, now_s)
        if is_softened(rule):
            if not merged:
                finding.due_s = now_s + self._rules.windows.settle_s
            return []
        return self._raise(finding, hit, action, merged=merged) + self._look_again(hit)

    def _raise(
        self, finding: Finding, hit: Hit, action: Action, *, merged: bool
    ) -> list[Observation]:
        """Note an action; an observation unless it says nothing new."""
        if RANK[action] > RANK[finding.action]:
            finding.action, finding.hit = action, hit
        more = RANK[action] > RANK[finding.last_action]
        if merged and not more:
            return []
        finding.last_action = action
        if self._explained(finding, (finding.last_s,)):
            return []
        return [finding.observation(action)]

    def _finding(self, hit: Hit, now_s: float) -> Finding:
        key = (hit.name, hit.target)
        finding = self._findings.get(key)
        if finding is not None and finding.cleared:
            # It is back: a new finding, which still knows how often it was there.
            times = finding.times
            del self._findings[key]
            finding = None
        else:
            times = deque(maxlen=TIMES_MAX)
        if finding is None:
            while len(self._findings) >= FINDINGS_MAX:
                del self._findings[next(iter(self._findings))]
            finding = self._findings[key] = Finding(
                hit=hit,
                action=Action.WARN_ONLY,
                first_s=now_s,
                last_s=now_s,
                order=self._lines,
                times=times,
            )
            rule = hit.rule
            if is_softened(rule) or (isinstance(rule, LineRule) and rule.stay is not None):
                self._watched.add(key)
        return finding

    def _together(self, hit: Hit, finding: Finding, now_s: float) -> Action:
        """The action of a hit, with what came before it."""
        action = hit.action
        rule = hit.rule
        if isinstance(rule, NumberRule):
            if rule.several_programs:
                action = worse(action, self._programs.say(hit, now_s, timed=self._time.timed))
            return action
        if rule.repeat is not None:
            recent = sum(n for at, n in finding.times if now_s - at <= rule.repeat.within_s)
            if recent >= rule.repeat.count:
                # Without times nobody can say that they lie close together.
                finding.repeated = True
                guess = rule.repeat.action is Action.EVICT_MACHINE and not self._time.timed
                action = worse(action, Action.STOP_TIME_CHECK if guess else rule.repeat.action)
        return action

    def _torn_down(self, at_s: float) -> bool:
        margin_s = self._rules.windows.teardown_s
        return any(a <= at_s <= b + margin_s for a, b in self._teardowns.items())

    # --- What other lines change

    def _uptime_s(self, line: KernelLine, now_s: float) -> float:
        """How long the machine had been up, as far as the log says; else for ever."""
        if line.time.clock is Clock.BOOT and line.time.at_s is not None:
            return line.time.at_s
        if self._booted_s is not None and self._time.timed:
            return now_s - self._booted_s
        return math.inf

    def _seen_since(self, names: tuple[str, ...], since_s: float) -> bool:
        return any(
            finding.hit.name in names and finding.last_s >= since_s
            for finding in self._findings.values()
        )

    def _explained(self, finding: Finding, times: Iterable[float]) -> bool:
        """Whether something else that was found makes it a consequence, each time it came."""
        rule = finding.hit.rule
        names = set(rule.explained_by)
        within_s = self._rules.windows.consequences_s
        if isinstance(rule, LineRule):
            within_s = rule.explained_within_s
        if not names:
            return False
        causes = [f for f in self._findings.values() if f.hit.name in names and not f.cleared]
        return bool(causes) and all(
            any(c.first_s - within_s <= at_s <= c.last_s + within_s for c in causes)
            for at_s in times
        )

    def _softened(self, finding: Finding) -> Action:
        """The action of a finding that hangs on the other Xids of its GPU."""
        rule = finding.hit.rule
        if not isinstance(rule, NumberRule) or rule.softened_action is None:
            return finding.hit.action
        others = {
            other.hit.xid
            for other in self._findings.values()
            if other.hit.gpu == finding.hit.gpu
            and not other.cleared
            and isinstance(other.hit.rule, NumberRule)
            and not other.hit.rule.teardown
            and not other.hit.rule.several_programs
            and not is_softened(other.hit.rule)
            and abs(other.last_s - finding.last_s) <= self._rules.windows.consequences_s
        }
        return rule.softened_action if others == {rule.softened_by} else finding.hit.action

    def _look_again(self, hit: Hit) -> list[Observation]:
        """Findings of the same GPU that were softened before this hit came."""
        out: list[Observation] = []
        if not hit.gpu:
            return out
        for key in self._watched:
            finding = self._findings.get(key)
            decided = finding is not None and finding.due_s is None and not finding.cleared
            if (
                finding is not None
                and decided
                and finding.hit.gpu == hit.gpu
                and is_softened(finding.hit.rule)
            ):
                out += self._raise(finding, finding.hit, self._softened(finding), merged=True)
        return out

    def _decide_due(self, now_s: float) -> list[Observation]:
        out: list[Observation] = []
        for key in list(self._watched):
            finding = self._findings.get(key)
            if finding is None or finding.cleared:
                self._watched.discard(key)
                continue
            if finding.due_s is not None and now_s >= finding.due_s:
                finding.due_s = None
                out += self._raise(finding, finding.hit, self._softened(finding), merged=False)
            out += self._outlast(finding, now_s)
        return out

    def _outlast(self, finding: Finding, now_s: float) -> list[Observation]:
        """What has lasted too long to pass by itself."""
        rule = finding.hit.rule
        stay = rule.stay if isinstance(rule, LineRule) else None
        if stay is None or finding.cleared or finding.stayed:
            return []
        if now_s - finding.last_s < stay.for_s:
            return []
        finding.stayed = True
        return self._raise(finding, finding.hit, stay.action, merged=True)

    def _clear(self, hit: Hit, names: set[str] | None) -> list[Observation]:
        """What is over now, for the target of the hit only; ``names`` None: all of it."""
        over = [
            finding
            for finding in self._findings.values()
            if finding.hit.target == hit.target
            and not finding.cleared
            and (names is None or (finding.hit.name in names and not finding.repeated))
        ]
        for finding in over:
            finding.cleared = True
        if not over:
            return []
        was = ", ".join(sorted({finding.hit.name for finding in over}))
        return [
            Observation(
                probe=PROBE,
                verdict=Verdict.HEALTHY,
                reason=f"{reason(hit, 1)}: over is {was}",
                target=hit.target,
                rule=hit.name,
                values={**hit.values, "cleared": was},
            )
        ]

    def _pass_time(self, at_s: float) -> None:
        if self._at_s is not None:
            self._time.advance(at_s - self._at_s)
        self._at_s = at_s
