"""Steps, loss and speed from the lines that training frameworks print, for unmodified scripts.

One parser per rank's log; lines go in, in order, and what they tell comes out. The forms are those
of Megatron-LM (and its kin), torchtitan, DeepSpeed, Hugging Face Trainer, Lightning, NeMo, progress
bars with a loss, and plain ``step 12 loss 3.4`` lines; a job may name a pattern of its own instead.

A bare progress bar tells nothing: the tokenizer has one too. It counts once the Trainer's loss
lines appear beside it, and then only bars with the same total do.

Not here: reading files (``framework_log_reader``), and judging numbers (``monitor``).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal

LINE_CHARACTERS_MAX = 2000
"""What is looked at of a line: the longest real ones (Megatron's with many losses) have 700."""
STEP_MAX = 2**53

Phase = Literal["eval", "save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogStep:
    """A line that says how far training is."""

    step: int | None
    """None: a Trainer that prints losses, but no progress bar."""
    loss: float | None = None
    grad_norm: float | None = None
    step_time_s: float | None = None
    """Where the line itself says it."""
    speed_kind: str | None = None
    """``mfu``, ``tflops`` or ``tps``: the best one on the line."""
    speed: float | None = None
    skipped: bool = False
    """The loss scaler skipped the update: a gradient that is not finite is then in order."""


@dataclass(frozen=True, slots=True)
class LogPhase:
    """A line that says that something else than training goes on."""

    phase: Phase


_NUMBER = r"[-+]?(?:\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+|nan|inf(?:inity)?)"
_FLAGS = re.IGNORECASE

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_MEGATRON = re.compile(r"\biteration\s+(\d+)\s*/\s*\d+\s*\|")
_NEMO = re.compile(r"\bTraining epoch (\d+), iteration (\d+)/(\d+) \|")
_TITAN = re.compile(rf"\bsteps?:\s*(\d+)(?:\s*/\s*\d+)?\s+loss:\s*({_NUMBER})", _FLAGS)
_DEEPSPEED = re.compile(r"\bstep=(\d+), skipped=\d+, lr=\[")
_TRAINER = re.compile(rf"\{{'loss': '?({_NUMBER})'?[,}}]", _FLAGS)
_TRAINER_NORM = re.compile(rf"'grad_norm': '?({_NUMBER})'?[,}}]", _FLAGS)
_TRAINER_EVAL = re.compile(r"\{'eval_\w+': ")
_BAR = re.compile(r"^([^|]{0,200}?)\s*\d{1,3}%\|[^|]{0,300}\|\s*(\d+)/(\d+) \[([^\]]{0,800})")
_ENDLESS_BAR = re.compile(r"^([^|]{0,200}?)\s*\b(\d+)it \[([^\]]{0,800})")
_EPOCH = re.compile(r"\bEpoch (\d+)(?:/-?\d+)?\s*:?$")
_TRAINING_BAR = re.compile(r"^$|\b(?:train(?:ing)?|steps?|iter(?:ation)?s?)\b", _FLAGS)
_POSTFIX_LOSS = re.compile(
    rf"(?:^|[ ,])(?:reduced_train_loss|train_loss|train_loss_step|train/loss|loss)=({_NUMBER})",
    _FLAGS,
)
_POSTFIX_NORM = re.compile(rf"\b(?:grad_norm|gradient_norm|gnorm)=({_NUMBER})", _FLAGS)
_GLOBAL_STEP = re.compile(r"\bglobal_step=(\d+)")
_STEP = re.compile(
    r"\b(?:global[ _]?step|step|iter|iteration)\b[\s:=#\[(]{1,10}(\d+)(?![\d.]*%)(?:\s*/\s*(\d+))?",
    _FLAGS,
)
_IN_EPOCH = re.compile(r"\bepochs?\b[\s:=#\[(]{1,10}\d", _FLAGS)
_LOSS = re.compile(rf"\b(?:train(?:ing)?[ _/]?)?loss\b[\s:=]{{1,10}}({_NUMBER})(?![\w/])", _FLAGS)
_NORM = re.compile(rf"\b(?:grad(?:ient)?[ _]?norm|gnorm)\b[\s:=]{{1,10}}({_NUMBER})", _FLAGS)
_SPEEDS = (
    ("mfu", re.compile(rf"\bmfu\b[\s:=]{{1,10}}({_NUMBER})", _FLAGS)),
    ("tflops", re.compile(rf"\btflops\b[\s:=]{{1,10}}({_NUMBER})", _FLAGS)),
    ("tps", re.compile(rf"\b(?:tps|tokens/s(?:ec)?)\b[\s:=]{{1,10}}({_NUMBER})", _FLAGS)),
)
_SECONDS = re.compile(rf"\biter(?:ation)? time \(s\):\s*({_NUMBER})", _FLAGS)
_HELD_OUT = re.compile(
    r"\b(?:val(?:id(?:ation)?)?|validate|eval(?:uation)?|test|best|lowest|min(?:imum)?|target)\b",
    _FLAGS,
)
"""Another loss than that of the step; the best one so far begins with infinity."""
_EVALUATES = re.compile(
    r"\b(?:running (?:evaluation|validation|prediction)|evaluat(?:ing|e) (?:on|iter|model)"
    r"|starting (?:evaluation|validation)|validation loss at iteration"
    r"|validation epoch|validation: iteration)\b|\bvalidate step:",
    _FLAGS,
)
_SAVES = re.compile(r"\bsav(?:ing|ed)\b.{0,40}\b(?:checkpoint|ckpt|model checkpoint)\b", _FLAGS)
_EVAL_BAR = re.compile(r"\b(?:validat\w*|sanity check\w*|test\w*|evaluat\w*|predict\w*)\b", _FLAGS)


def may_tell(line: bytes) -> bool:
    """Whether a line is worth decoding: this is all that most lines cost."""
    return (
        b"step" in line
        or b"iter" in line
        or b"oss" in line
        or b"Step" in line
        or b"Iter" in line
        or b"it/s" in line
        or b"s/it" in line
        or b"heckpoint" in line
        or b"valuat" in line
        or b"alidat" in line
    )


def number(text: str | None) -> float | None:
    """A number as logs print it (``10,050``, ``1.1E+01``, ``nan``); None when it is none."""
    if text is None:
        return None
    try:
        return float(text.replace(",", "").strip().split("/")[0])
    except ValueError:
        return None


def _index(text: str) -> int | None:
    if len(text) > 24:
        return None
    value = int(text.replace(",", ""))
    return value if value < STEP_MAX else None


def _found(pattern: re.Pattern[str], line: str) -> float | None:
    match = pattern.search(line)
    return number(match[1]) if match is not None else None


def _is_speed(value: float | None) -> bool:
    """Whether it can be compared; small models have printed speeds of 0.0."""
    return value is not None and math.isfinite(value) and value > 0


def _speed(line: str) -> tuple[str | None, float | None]:
    for kind, pattern in _SPEEDS:
        value = _found(pattern, line)
        if _is_speed(value):
            return kind, value
    return None, None


def _fields(line: str) -> dict[str, str]:
    """``key: value`` pairs between bars."""
    pairs = (part.partition(": ") for part in line.split("|"))
    return {key.strip(): value.strip() for key, _, value in pairs if value}


def _field(fields: dict[str, str], *keys: str) -> float | None:
    return next((number(fields[key]) for key in keys if key in fields), None)


def _of_fields(step: int | None, line: str) -> LogStep:
    fields = _fields(line)
    loss = _field(fields, "lm loss", "lm_loss", "reduced_train_loss", "loss")
    if loss is None:
        others = [k for k in fields if k.endswith("loss") and not _HELD_OUT.search(k)]
        loss = _field(fields, *others)
    if _field(fields, "number of nan iterations"):
        loss = math.nan  # it leaves them out of the loss that it prints
    milliseconds = _field(fields, "elapsed time per iteration (ms)")
    seconds = _field(fields, "train_step_timing in s")
    speed = _field(fields, "throughput per GPU (TFLOP/s/GPU)")
    return LogStep(
        step=step,
        loss=loss,
        grad_norm=_field(fields, "grad norm", "grad_norm"),
        step_time_s=milliseconds / 1000 if milliseconds is not None else seconds,
        speed_kind="tflops" if _is_speed(speed) else None,
        speed=speed if _is_speed(speed) else None,
        skipped=bool(_field(fields, "number of skipped iterations")),
    )


class LineParser:
    """The forms, and what has to be remembered from line to line."""

    def __init__(self, pattern: re.Pattern[str] | None = None) -> None:
        self._pattern = pattern
        self._form: str | None = None
        """The form that has told a loss: others that the same job prints are left out then."""
        self._bar: tuple[int, int] | None = None
        self._trainer_total: int | None = None
        self._finite_bar = False
        self._counted: tuple[int, int] = (0, 0)
        """Steps of the bars before this one, and where this one is."""

    def feed(self, line: str) -> LogStep | LogPhase | None:
        """What one line tells; lines are cut to ``LINE_CHARACTERS_MAX``.

        Never raises, whatever the line is.
        """
        line = line[:LINE_CHARACTERS_MAX]
        if self._pattern is not None:
            return self._own(line)
        if "\x1b" in line:
            line = ESCAPE.sub("", line)
        found = self._bar_line(line) if "%|" in line or "it [" in line else None
        if found is None:
            found = self._text_line(line)
        return found

    def _own(self, line: str) -> LogStep | LogPhase | None:
        match = self._pattern.search(line) if self._pattern is not None else None
        if match is None:
            return _phase(line)
        groups = match.groupdict()
        step = number(groups["step"])
        if step is None or not 0 <= step < STEP_MAX:
            return None
        return LogStep(
            step=int(step),
            loss=number(groups.get("loss")),
            grad_norm=number(groups.get("grad_norm")),
        )

    def _take(self, form: str, step: LogStep) -> LogStep | None:
        if self._form is None and step.loss is not None:
            self._form = form
        return step if self._form in (None, form) else None

    # --- lines ---------------------------------------------------------------------------------

    def _text_line(self, line: str) -> LogStep | LogPhase | None:
        if (match := _MEGATRON.search(line)) is not None:
            return self._take("megatron", _of_fields(_index(match[1]), line))
        if (match := _NEMO.search(line)) is not None:
            return self._take("nemo", _of_fields(_nemo_step(match, line), line))
        if _EVALUATES.search(line) is not None:
            return LogPhase("eval")
        if (match := _TRAINER.search(line)) is not None:
            return self._trainer(match, line)
        return self._plain_line(line) or _phase(line)

    def _plain_line(self, line: str) -> LogStep | None:
        if (match := _TITAN.search(line)) is not None:
            return self._take("titan", self._plain(match[1], match[2], line))
        if (match := _DEEPSPEED.search(line)) is not None:
            return self._take("deepspeed", LogStep(step=_index(match[1])))
        step, loss = _STEP.search(line), _LOSS.search(line)
        if step is None or loss is None or _HELD_OUT.search(line) is not None:
            return None
        found = self._plain(step[1], loss[1], line)
        if step[2] is not None and found.step is not None and _IN_EPOCH.search(line) is not None:
            found = replace(found, step=self._counted_step(found.step, _index(step[2]) or 0))
        return self._take("plain", found)

    def _plain(self, step: str, loss: str, line: str) -> LogStep:
        kind, speed = _speed(line)
        return LogStep(
            step=_index(step),
            loss=number(loss),
            grad_norm=_found(_NORM, line),
            step_time_s=_found(_SECONDS, line),
            speed_kind=kind,
            speed=speed,
        )

    def _trainer(self, match: re.Match[str], line: str) -> LogStep | None:
        if self._bar is not None and self._trainer_total is None:
            self._trainer_total = self._bar[1]
        counts = self._bar is not None and self._bar[1] == self._trainer_total
        return self._take(
            "trainer",
            LogStep(
                step=self._bar[0] if counts and self._bar is not None else None,
                loss=number(match[1]),
                grad_norm=_found(_TRAINER_NORM, line),
            ),
        )

    # --- bars ----------------------------------------------------------------------------------

    def _bar_line(self, line: str) -> LogStep | LogPhase | None:
        match = _BAR.search(line)
        if match is None:
            endless = _ENDLESS_BAR.search(line)
            if endless is None:
                return None
            name, count, total, postfix = endless[1], _index(endless[2]), 0, endless[3]
        else:
            name, count, postfix = match[1], _index(match[2]), match[4]
            total = _index(match[3]) or 0
        if count is None:
            return None
        name = name.strip().rstrip(":").strip()
        if _EVAL_BAR.search(name) is not None:
            return LogPhase("eval")
        loss = _found(_POSTFIX_LOSS, postfix)
        if (epoch := _EPOCH.search(name)) is not None:
            step = self._epoch_step(int(epoch[1][:9]), count, total, postfix)
            return self._bar_step("epochs", count, step, loss, postfix)
        if loss is not None and _TRAINING_BAR.search(name) is not None:
            return self._bar_step("bar", count, self._counted_step(count, total), loss, postfix)
        if not name and total:
            return self._bare_bar(count, total)
        return None

    def _bar_step(
        self, form: str, count: int, step: int, loss: float | None, postfix: str
    ) -> LogStep | None:
        if count == 0 or step >= STEP_MAX:
            return None
        # A bar shows "nan" where it has no loss to show (manual optimisation, first batches).
        self._finite_bar |= loss is not None and math.isfinite(loss)
        loss = loss if self._finite_bar else None
        norm = _found(_POSTFIX_NORM, postfix)
        return self._take(form, LogStep(step=step, loss=loss, grad_norm=norm))

    def _epoch_step(self, epoch: int, count: int, total: int, postfix: str) -> int:
        if (match := _GLOBAL_STEP.search(postfix)) is not None and len(match[1]) < 17:
            return int(match[1])
        return epoch * total + count if total else self._counted_step(count, total)

    def _counted_step(self, count: int, total: int) -> int:
        before, last = self._counted
        if count < last:  # the next epoch's bar
            before += total or last
        self._counted = (before, count)
        return before + count

    def _bare_bar(self, count: int, total: int) -> LogStep | LogPhase | None:
        if self._trainer_total is None or total == self._trainer_total:
            self._bar = (count, total)
        if self._form != "trainer" or self._trainer_total is None:
            return None
        if total != self._trainer_total:
            return LogPhase("eval")
        return LogStep(step=count)


def _nemo_step(match: re.Match[str], line: str) -> int | None:
    step = _field(_fields(line), "global_step")
    if step is not None and 0 <= step < STEP_MAX:
        return int(step)
    epoch, iteration, last = (_index(text) or 0 for text in match.groups())
    return epoch * (last + 1) + iteration


def _phase(line: str) -> LogPhase | None:
    if _SAVES.search(line) is not None:
        return LogPhase("save")
    evaluates = _EVALUATES.search(line) or _TRAINER_EVAL.search(line)
    return LogPhase("eval") if evaluates is not None else None
