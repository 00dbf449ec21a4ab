"""What step lines say by their figures: losses, gradient norms and step times that go wrong.

Only asked when no line names a failure, and only about lines that stand together.

Not here: the same rules while a job runs, over its own history (the agents' job rules).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from everstep.decide.diagnosis.hits import Item
from everstep.decide.diagnosis.types import Role, Signature, Weight
from everstep.decide.words import Action, Confidence, Side, Symptom

JUMP = {"loss": 4.0, "grad_norm": 10.0}
"""So many times the highest of the values before it is a jump."""
DECLINE = 1.05
"""Later steps take so many times as long as earlier ones: a decline worth a look."""
LASTING = 1.3
"""Every step of the end takes so many times as long as the early ones: the decline lasts."""
BEAT = 3.0
"""Slow steps that take so many times as long as the ones between them are a beat."""
VALUES_MIN = 4

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf)\b)"
_LOSS = re.compile(
    r"(?<!val )(?<!aux )(?<!val_)\b(?:lm[ _]|train[ _]|total[ _])?loss['\"]?\s*[:=]\s*" + _NUMBER,
    re.IGNORECASE,
)
_GRAD = re.compile(r"\bgrad(?:ient)?[ _]?norm['\"]?\s*[:=]\s*" + _NUMBER, re.IGNORECASE)
_TIMES = (
    re.compile(r"elapsed time per iteration \(ms\):\s*" + _NUMBER, re.IGNORECASE),
    re.compile(
        r"(?<![\d.])(\d+\.?\d*)\s?(?:s|sec|seconds)/(?:step|it(?:er)?|batch)\b", re.IGNORECASE
    ),
    re.compile(
        r"\b(?:time/step|time per step|step[_ ]time|iter[_ ]time|train_step_timing in s"
        r"|batch[_ ]time|sec(?:onds)?[_/ ](?:per[_ ])?(?:step|iter))['\"]?\s*[:=]\s*" + _NUMBER,
        re.IGNORECASE,
    ),
)
_RATE = re.compile(
    r"(?<![\d.])(\d+\.?\d*)\s?(?:samples|tokens|examples|images|sequences|steps|it|iter)/s(?:ec)?\b"
    r"|\b(?:throughput|tps|tokens[_ ]per[_ ]sec\w*|samples[_ ]per[_ ]sec\w*|tflops\w*"
    r"|speed)\b[^\d\n]{0,20}(\d+\.?\d*)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Trend:
    """What the figures say."""

    signature: Signature
    items: tuple[Item, ...]


def trend_of(items: Sequence[Item]) -> Trend | None:
    """The first of: not finite, a jump, a beat, a decline; None when the figures are well."""
    losses, norms = _values(items, (_LOSS,)), _values(items, (_GRAD,))
    for values, name in ((losses, "loss"), (norms, "grad_norm")):
        found = _not_finite(values, name)
        if found is not None:
            return found
    for values, name in ((losses, "loss"), (norms, "grad_norm")):
        found = _jump(values, name)
        if found is not None:
            return found
    return _pace(_values(items, _TIMES) or _rates(items))


def _values(items: Sequence[Item], patterns: Sequence[re.Pattern[str]]) -> list[tuple[float, Item]]:
    out: list[tuple[float, Item]] = []
    for item in items:
        for pattern in patterns:
            found = pattern.search(item.text)
            if found is not None:
                out.append((float(found[1]), item))
                break
    return out


def _rates(items: Sequence[Item]) -> list[tuple[float, Item]]:
    """Work per second, turned round so that more means slower, as for times."""
    out: list[tuple[float, Item]] = []
    for item in items:
        found = _RATE.search(item.text)
        value = float(found[1] or found[2]) if found is not None else 0.0
        if value > 0:
            out.append((1.0 / value, item))
    return out


def _not_finite(values: Sequence[tuple[float, Item]], name: str) -> Trend | None:
    bad = [item for value, item in values if not math.isfinite(value)]
    if not bad:
        return None
    lasting = not math.isfinite(values[-1][0])
    row = _row(
        f"{name}_not_finite",
        Symptom.NAN_VALUE,
        Side.USER_CODE if len(bad) > 1 else Side.UNCLEAR,
        Action.ROLLBACK_CODE if lasting else Action.WARN_ONLY,
        f"{name} is not finite"
        + (" and stays so: go back to a checkpoint before it" if lasting else ", and was so once"),
    )
    return Trend(row, tuple(bad[:3]))


def _jump(values: Sequence[tuple[float, Item]], name: str) -> Trend | None:
    """A value far over the ones before it; whether it came back says how much it matters."""
    for index in range(1, len(values)):
        before = [value for value, _ in values[max(0, index - 50) : index]]
        base = max(*before, 1e-3)
        value, item = values[index]
        if value < JUMP[name] * base or (name == "grad_norm" and len(before) < 2):
            continue
        after = [v for v, _ in values[index + 1 : index + 6]]
        back = bool(after) and median(after) < JUMP[name] * base
        row = _row(
            f"{name}_jump",
            Symptom.LOSS_SPIKE,
            Side.UNCLEAR if back or name == "grad_norm" else Side.USER_CODE,
            Action.WARN_ONLY if back else Action.ROLLBACK_CODE,
            f"{name} went from {base:.4g} to {value:.4g}"
            + (" and came back" if back else " and did not come back"),
        )
        return Trend(row, (values[index - 1][1], item))
    return None


def _pace(values: Sequence[tuple[float, Item]]) -> Trend | None:
    times = [(value, item) for value, item in values if math.isfinite(value) and value > 0]
    if len(times) < VALUES_MIN:
        return None
    numbers = [value for value, _ in times]
    shown = tuple(item for _, item in times[:2] + times[-2:])
    if _beats(numbers):
        row = _row(
            "step_time_beat",
            Symptom.MFU_DECLINE,
            Side.USER_CODE,
            Action.WARN_ONLY,
            "slow steps come in a fixed beat: the input pipeline or a periodic job, not a device",
        )
        return Trend(row, shown)
    early, late = _early_and_late(numbers)
    if late < DECLINE * early:
        return None
    row = _row(
        "step_time_decline",
        Symptom.MFU_DECLINE,
        Side.UNCLEAR,
        Action.STOP_TIME_CHECK if late >= 1.5 * early else Action.WARN_ONLY,
        f"a step takes {late / early:.2f} times as long as it did at first",
    )
    return Trend(row, shown)


def _early_and_late(numbers: Sequence[float]) -> tuple[float, float]:
    """Usual times of the first half and of the rest, or of an end that is slow throughout."""
    half = len(numbers) // 2
    early, late = median(numbers[:half]), median(numbers[half:])
    end = numbers[-max(VALUES_MIN, len(numbers) // 8) :]
    if len(numbers) >= 2 * len(end) and min(end) >= LASTING * early:
        late = max(late, median(end))
    return early, late


def _beats(numbers: Sequence[float]) -> bool:
    """Slow steps at equal distances, with quick ones between them."""
    quick = min(numbers)
    slow = [index for index, value in enumerate(numbers) if index and value >= BEAT * quick]
    if len(slow) < 2 or len(slow) > len(numbers) * 0.7:
        return False
    gaps = {b - a for a, b in pairwise(slow)}
    return len(gaps) == 1 and 1 not in gaps


def _row(name: str, symptom: Symptom, side: Side, action: Action, why: str) -> Signature:
    return Signature(
        name=name,
        pattern="",
        symptom=symptom,
        side=side,
        action=action,
        role=Role.NOTE,
        weight=Weight.WEAK,
        confidence=Confidence.LOW,
        why=why,
    )
