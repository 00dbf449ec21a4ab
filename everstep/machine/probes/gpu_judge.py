"""What the readings of a GPU mean: from values and what they were before to observations.

Pure in the caller's time, apart from the memory of each GPU: counters count from where they stood
when they were first seen, rates are measured between two looks, what must be seen twice is counted.
Not here: the driver and its process (``gpu_link``), and what each rule is worth (``gpu_rules``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from everstep.decide.observation import Observation, Value
from everstep.decide.words import Verdict
from everstep.machine.probes.gpu_rules import GPU_RULES, GpuRule
from everstep.spec.policy import ProbesPolicy

PROBE = "gpu"

Readings = Mapping[str, Any]

# Bits of the clocks' event reasons (nvml.h): lowered by hardware, for heat, by the power brake.
HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, POWER_BRAKE = 0x8, 0x20, 0x40, 0x80
# Recovery actions that concern peers and not the GPU itself.
RECOVERY_PEERS = frozenset({3, 5})
RECOVERY_NAMES: Final = {
    1: "reset the GPU",
    2: "reboot the machine",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS, FABRIC_COMPLETED = 1, 2, 3
FABRIC_LOOKS_MIN = 6
"""A fabric takes up to a minute to come up after a reboot."""

GONE_WORDS: Final = {
    "gpu_is_lost": "gpu_lost",
    "gpu_not_found": "gpu_lost",
    "reset_required": "gpu_reset_required",
}


NO_HANDLE: Final = frozenset({"unknown", "not_found", "invalid_argument"})
"""Errors of the handle of a GPU that the driver has counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One sign, before it is judged."""

    rule: str
    text: str
    values: Mapping[str, Value] = field(default_factory=dict)
    looks_min: int = 1
    """It counts when so many looks in a row have found it."""
    held: bool = False
    """It counts for the policy's hold time: it was an event, and the next look will not see it."""
    judged: GpuRule | None = None
    """The judgement, where it is not the rule's own row."""


@dataclass(slots=True)
class _Memory:
    """What was seen of one GPU."""

    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    links_up: set[int] = field(default_factory=set)
    streaks: dict[str, int] = field(default_factory=dict)
    held: dict[str, tuple[float, Finding]] = field(default_factory=dict)


class GpuJudge:
    """Judges the GPUs of one machine; remembers them by their label (``gpu 3``)."""

    def __init__(
        self,
        policy: ProbesPolicy,
        expected_pids: Callable[[], Collection[int] | None] = lambda: None,
    ) -> None:
        """Begin without memory.

        Args:
            policy: the thresholds.
            expected_pids: processes that may hold GPUs now; None: it is not known, nothing is said.
        """
        self._policy = policy
        self._expected_pids = expected_pids
        self._memories: dict[str, _Memory] = {}

    def judge(
        self,
        label: str,
        readings: Readings,
        errors: Mapping[str, str],
        now_s: float,
        name: str = "",
    ) -> list[Observation]:
        """Judge one GPU's answer.

        Args:
            label: the GPU, the same for its whole life.
            readings: values of ``gpu_calls.ITEMS``; what is missing could not be read.
            errors: by item, the error words of those that failed.
            now_s: monotonic seconds.
            name: the card's, for people.
        """
        memory = self._memories.setdefault(label, _Memory())
        gone = next((e for e in errors.values() if e in GONE_WORDS), None)
        if gone is not None:
            finding = Finding(GONE_WORDS[gone], f"the driver says: {gone.replace('_', ' ')}")
            return [observe(label, finding)]
        if errors.get("handle") in NO_HANDLE:
            return [observe(label, Finding("gpu_lost", "the driver has no handle for it any more"))]
        found = [
            finding
            for check in (_errors, self._heat, self._memory_errors, self._pcie, self._nvlink)
            for finding in check(memory, readings, errors, now_s)
        ]
        found += self._recovery(readings)
        found += self._processes(readings)
        counted = self._counted(memory, found, now_s)
        if counted:
            return [observe(label, finding) for finding in counted]
        if errors:
            item, word = next(iter(errors.items()))
            text = f"{label}: {item} could not be read: {word.replace('_', ' ')}"
            return [Observation(probe=PROBE, target=label, verdict=Verdict.UNKNOWN, reason=text)]
        return [_healthy(label, name, readings)]

    def hold(self, label: str, finding: Finding, now_s: float) -> None:
        """Let a sign that came by itself (an Xid) count for the hold time."""
        memory = self._memories.setdefault(label, _Memory())
        memory.held[finding.rule] = (now_s + self._policy.gpu_event_hold.total_seconds(), finding)

    def compare(
        self, readings: Mapping[str, Readings], names: Mapping[str, str]
    ) -> dict[str, Finding]:
        """By label: GPUs with fewer NVLinks up than the best of the same model."""
        up = {label: str(r["links"]).count("1") for label, r in readings.items() if "links" in r}
        best: dict[str, int] = {}
        for label, count in up.items():
            best[names.get(label, "")] = max(count, best.get(names.get(label, ""), 0))
        return {
            label: Finding(
                "nvlink_fewer",
                f"{count} NVLinks are up, {best[names.get(label, '')]} on a GPU beside it",
                {"links_up": count},
            )
            for label, count in up.items()
            if count < best[names.get(label, "")]
        }

    def _counted(self, memory: _Memory, found: Sequence[Finding], now_s: float) -> list[Finding]:
        """Those that have been seen often enough, and those still held from before."""
        rules = {finding.rule for finding in found}
        memory.streaks = {rule: memory.streaks.get(rule, 0) + 1 for rule in rules}
        counted = {f.rule: f for f in found if memory.streaks[f.rule] >= f.looks_min}
        hold_s = self._policy.gpu_event_hold.total_seconds()
        for finding in counted.values():
            if finding.held:
                memory.held[finding.rule] = (now_s + hold_s, finding)
        memory.held = {rule: held for rule, held in memory.held.items() if held[0] > now_s}
        for rule, (_, finding) in memory.held.items():
            counted.setdefault(rule, finding)
        return list(counted.values())

    def _heat(
        self, _: _Memory, readings: Readings, _errors: Mapping[str, str], _now_s: float
    ) -> Iterator[Finding]:
        reasons = readings.get("slowdown_reasons", 0)
        lasting = self._policy.gpu_slow_looks_min
        temperature = readings.get("temperature_c")
        values: dict[str, Value] = {"temperature_c": temperature, "slowdown_reasons": reasons}
        if reasons & POWER_BRAKE:
            text = "clocks are lowered by the power brake"
            yield Finding("power_slowdown", text, values)
            yield Finding(
                "power_slowdown_lasting", f"{text}, {lasting} looks in a row", values, lasting
            )
        lowered = reasons & (SW_THERMAL | HW_THERMAL)
        if reasons & HW_SLOWDOWN and not reasons & POWER_BRAKE:
            lowered |= HW_SLOWDOWN
        hot = self._hot(readings) if lowered else ""
        if hot:
            text = f"clocks are lowered for heat: {hot}"
            yield Finding("thermal_slowdown", text, values)
            text = f"{text}, {lasting} looks in a row"
            yield Finding("thermal_slowdown_lasting", text, values, lasting)

    def _hot(self, readings: Readings) -> str:
        margin_c = self._policy.gpu_hot_margin_c
        limit_c = readings.get("slowdown_c")
        hot_c = limit_c - margin_c if limit_c else self._policy.gpu_hot_c
        temperature = readings.get("temperature_c")
        if temperature is not None and temperature >= hot_c:
            return f"{temperature} °C, hot from {hot_c} °C"
        memory, memory_max = readings.get("memory_temperature_c"), readings.get("memory_max_c")
        if memory and memory_max and memory >= memory_max - margin_c:
            return f"memory {memory} °C, hot from {memory_max - margin_c} °C"
        return ""

    def _memory_errors(
        self, memory: _Memory, readings: Readings, _errors: Mapping[str, str], _now_s: float
    ) -> Iterator[Finding]:
        for key, life in (
            ("ecc_volatile", "since its last reset"),
            ("ecc_aggregate", "in its life"),
        ):
            if key not in readings:
                continue
            count = readings[key]
            before = memory.last.get(key, (count, 0.0))[0]
            memory.last[key] = (count, _now_s)
            memory.first.setdefault(key, count)
            if count > before:
                text = f"{count - before} new uncorrectable memory errors, {count} {life}"
                yield Finding("ecc_uncorrectable", text, {key: count}, held=True)
        volatile = readings.get("ecc_volatile", 0)
        if volatile and volatile == memory.first.get("ecc_volatile"):
            text = (
                f"{volatile} uncorrectable memory errors since its last reset, none while we looked"
            )
            yield Finding("ecc_before", text, {"ecc_volatile": volatile})
        aggregate = readings.get("ecc_aggregate", 0)
        if aggregate > self._policy.ecc_aggregate_max:
            text = f"{aggregate} uncorrectable memory errors in its life"
            yield Finding("ecc_aggregate", text, {"ecc_aggregate": aggregate})
        for key, rule, text in (
            (
                "sram_threshold_exceeded",
                "sram_threshold",
                "SRAM errors are over NVIDIA's threshold",
            ),
            ("remap_failed", "row_remap_failed", "a memory row could not be remapped"),
            ("remap_pending", "row_remap_pending", "a remapped row waits for a reset"),
            ("pages_pending", "retired_pages_pending", "a retired page waits for a reset"),
        ):
            if readings.get(key):
                rows = readings.get("rows_remapped")
                yield Finding(rule, text, {} if rows is None else {"rows_remapped": rows})

    def _pcie(
        self, memory: _Memory, readings: Readings, _errors: Mapping[str, str], now_s: float
    ) -> Iterator[Finding]:
        busy = readings.get("busy_percent")
        if busy is not None and busy >= self._policy.gpu_busy_percent_min:
            for key, what in (("pcie_width", "lanes x"), ("pcie_generation", "generation ")):
                now, most = readings.get(key), readings.get(f"{key}_max")
                if now and most and now < most:
                    text = f"busy ({busy} %), but its PCIe link has {what}{now} of {most}"
                    yield Finding(key, text, {key: now, f"{key}_max": most}, looks_min=2)
        rate = _per_minute(memory, readings, "pcie_replays", now_s)
        if rate > self._policy.pcie_replays_per_minute_max:
            text = f"{rate:.0f} PCIe replays in a minute"
            yield Finding("pcie_replays", text, {"pcie_replays_per_minute": round(rate)}, held=True)

    def _nvlink(
        self, memory: _Memory, readings: Readings, _errors: Mapping[str, str], now_s: float
    ) -> Iterator[Finding]:
        links = str(readings.get("links", ""))
        down = sorted(link for link in memory.links_up if links and links[link : link + 1] != "1")
        memory.links_up |= {link for link, state in enumerate(links) if state == "1"}
        if down:
            names = ", ".join(map(str, down))
            yield Finding(
                "nvlink_down", f"NVLink {names} was up and is down", {"links_down": names}
            )
        rate = _per_minute(memory, readings, "nvlink_errors", now_s)
        if rate > self._policy.nvlink_errors_per_minute_max:
            text = f"{rate:.0f} NVLink errors in a minute"
            yield Finding(
                "nvlink_errors", text, {"nvlink_errors_per_minute": round(rate)}, held=True
            )
        state, status = readings.get("fabric_state"), readings.get("fabric_status", 0)
        if state in (FABRIC_NOT_STARTED, FABRIC_IN_PROGRESS):
            text = "it stays outside of its NVLink fabric: is the fabric manager running?"
            yield Finding("fabric_not_ready", text, {"fabric_state": state}, FABRIC_LOOKS_MIN)
        elif state == FABRIC_COMPLETED and status:
            text = f"it could not join its NVLink fabric (status {status})"
            yield Finding("fabric_failed", text, {"fabric_status": status})
        elif state == FABRIC_COMPLETED and readings.get("fabric_health", 0) & 0x3 == 1:
            yield Finding("fabric_degraded", "its NVLink fabric has less bandwidth than it should")

    def _recovery(self, readings: Readings) -> Iterator[Finding]:
        action = readings.get("recovery_action", 0)
        if action:
            rule = "recovery_drain" if action in RECOVERY_PEERS else "recovery_reset"
            name = RECOVERY_NAMES.get(action, f"take action {action}")
            yield Finding(rule, f"the driver asks to {name}", {"recovery_action": action})

    def _processes(self, readings: Readings) -> Iterator[Finding]:
        expected = self._expected_pids()
        if expected is None:
            return
        strangers = sorted(set(readings.get("pids", ())) - set(expected))
        if strangers:
            pids = ", ".join(map(str, strangers[:8]))
            text = f"held by {len(strangers)} processes of no run: {pids}"
            yield Finding("process_left", text, {"pids": pids}, looks_min=2)


def observe(label: str, finding: Finding) -> Observation:
    """The finding with what its rule is worth."""
    rule = finding.judged or GPU_RULES[finding.rule]
    return Observation(
        probe=PROBE,
        target=label,
        verdict=Verdict.FAULTY,
        rule=finding.rule,
        reason=f"{label}: {finding.text}" if label else finding.text,
        symptom=rule.symptom,
        action=rule.action,
        confidence=rule.confidence,
        values=dict(finding.values),
    )


def _errors(
    _: _Memory, _readings: Readings, errors: Mapping[str, str], _now_s: float
) -> Iterator[Finding]:
    for word in sorted(set(errors.values())):
        items = ", ".join(item for item, error in errors.items() if error == word)
        rule = "gpu_unknown_error" if word == "unknown" else "gpu_call_fails"
        yield Finding(rule, f"{items}: {word.replace('_', ' ')}", {"error": word}, looks_min=2)


def _per_minute(memory: _Memory, readings: Readings, key: str, now_s: float) -> float:
    """Rate of a counter since the last look; 0 at the first, and when it was set back."""
    if key not in readings:
        return 0.0
    count = readings[key]
    before, at_s = memory.last.get(key, (count, now_s))
    memory.last[key] = (count, now_s)
    if now_s <= at_s or count <= before:
        return 0.0
    # A single error a moment after the last look is no storm.
    return float((count - before) * 60 / max(now_s - at_s, 10.0))


def _healthy(label: str, name: str, readings: Readings) -> Observation:
    shown: dict[str, Value] = {
        key: readings[key]
        for key in (
            "temperature_c",
            "busy_percent",
            "power_w",
            "pcie_generation",
            "pcie_width",
            "mig",
        )
        if key in readings
    }
    for key in ("memory_used", "memory_total"):
        if f"{key}_bytes" in readings:
            shown[f"{key}_gib"] = round(readings[f"{key}_bytes"] / 2**30, 1)
    if "links" in readings:
        shown["links_up"] = str(readings["links"]).count("1")
    facts = [
        f"{readings[key]}{unit}"
        for key, unit in (("temperature_c", " °C"), ("busy_percent", " % busy"))
        if key in readings
    ]
    text = f"{label}: {', '.join([name or 'answers', *facts])}"
    return Observation(
        probe=PROBE, target=label, verdict=Verdict.HEALTHY, reason=text, values=shown
    )
