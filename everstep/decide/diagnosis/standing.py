"""How much a line may claim: a fault, a remark by the way, or nothing because it only quotes.

Healthy machines print the names of faults too: counters that are zero, checks that passed, banners
with advice, samples of the training data. And what a program logs as information or as a warning
has not ended it.

Not here: what a line means (``catalogue``).
"""

from __future__ import annotations

import re
from enum import StrEnum

from everstep.decide.diagnosis.types import Role, Signature
from everstep.decide.words import Symptom

_NONE = (
    r"(?:0+(?:\.0+)?|0x0+|no|none|nil|null|n/?a|ok|okay|pass(?:ed)?|false|disabled|healthy"
    r"|inactive|not active)"
)
_LABEL = (
    r"(?:(?:\W|_)*\b(?:errors?|counts?|counters?|totals?|events?|failures?|faults?|kills?|volatile"
    r"|aggregate|occurred|detected|state|status|pages?|rows?|pending|found|seen|dbe|sbe)\b){0,4}"
)
_VALUE_AFTER = re.compile(
    r"^s?[\"')\]]*"
    + _LABEL
    + r"[\"')\]]*\s*(?:[:=|]|\.{2,}|->|=>)\s*[\"'\[(]*"
    + _NONE
    # what follows must end the value: "No space left" is none
    + r"(?=[\"'\])}]*\s*(?:$|[,;|/}]|->|=>|\s{2}|\())",
    re.IGNORECASE,
)
_NONE_BEFORE = re.compile(
    r"(?:^|[^\w-])(?:no|zero|without(?: any)?)\s+(?:(?:critical|fatal|new|known|recent)\s+)?$",
    re.IGNORECASE,
)
_ZERO_BEFORE = re.compile(r"(?:^|[:;,|(]\s*)0\s+$")
_MANY_AFTER = re.compile(
    r"^(?:\s+\w+)?\s*(?:errors|events|faults|failures|kills|pages|rows)\b|^s\b"
)
_PASSED = re.compile(r"(?:->|=>|[:=|\[]|\.{3,})\s*(?:PASS(?:ED)?|OK(?:AY)?)\s*[\]|.]*\s*$")

_QUOTED = re.compile(
    r"^(?:.{0,80}?(?:[\])|>]|\s-)\s*)?[\"']?(?:sample|prompt|user|human|assistant|question|answer"
    r"|completion|response|instruction|example|generated(?: text)?|decoded|prediction)s?"
    r"(?:\s?[#\[]?\d+\]?)?[\"']?\s?[:=>]\s"
    r"|(?:^|[\s\"'>|])(?:User|Human|Assistant|Question|Answer|Prompt|Completion):\s",
    re.IGNORECASE,
)
_TALK_BEFORE = re.compile(
    r"\b(?:my|your|I'm|I am|if you (?:see|get)|what (?:is|does|to do)|how (?:do|can|to)|why (?:is"
    r"|does|did|has)|explain)\b",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"\b(?:docker|podman|singularity|apptainer) run\s+-|\s--ulimit[ =]|^\s*usage:\s"
    r"|\brecommends? (?:the use of|setting|using)\b",
    re.IGNORECASE,
)
_LEVEL = re.compile(
    r"\bNCCL (?:INFO|TRACE)\b"
    r"|^\[?[WI](?:\d{4})? ?(?=[\d\s])[^\]]{0,60}\S+\.(?:cpp|cc|cu|h|py|hpp):\d+\]"
    r"|^[-\d:. ]{8,32}: [WI] \S+"
    r"|^(?:[^\"'{]{0,100}?[\s\[(|:,/-])?(?:INFO|DEBUG|WARN|WARNING|NOTICE|NOTE)\b(?=[\]\s|):,-]|$)"
    r"|^(?:.{0,160}: )?(?:Warning|warning|\w+Warning): "
    r"|[\"'](?:level|levelname|severity|lvl)[\"']\s*:\s*[\"'](?i:info|warn|warning|debug)[\"']"
)
_ERROR_LEVEL = re.compile(
    r"\bNCCL (?:WARN|ERROR)\b|\b(?:ERROR|CRITICAL|FATAL)\b|^INFO: (?:task|rcu)|\bNVRM\b|SXid"
    r"|\bkernel:|^(?:slurmstepd|srun|slurmctld|sbatch|salloc)\b"
)
_SHELL = re.compile(
    r"^(?:(?:-?(?:ba|z|da|k|c)?sh|/?\S+\.(?:sh|bash|slurm|sbatch))(?:: line \d+)?: "
    r"|(?:ulimit|mkdir|rm|cp|mv|ln|cat|ls|chmod|chown|touch|sysctl|export|cd|source): )"
)
_GOES_ON = re.compile(
    r"\b(?:skip(?:ping|ped)?|ignor(?:ing|ed)|continuing|going on|carrying on|non-fatal|caught"
    r"|fall(?:ing|s)? back)\b",
    re.IGNORECASE,
)
_TROUBLE = re.compile(
    r"\b(?:fail(?:ed|ure|s)?|errors?|exceptions?|could not|couldn't|cannot|unable|crashed)\b",
    re.IGNORECASE,
)
_INFORMS = re.compile(r"\b(?:INFO|DEBUG)\b|^\[?I\d{4}")


class Standing(StrEnum):
    """How much a line may claim."""

    FULL = "full"
    MILD = "mild"
    """Information, a warning, a shell that goes on: any real end of a process explains more."""
    NOTHING = "nothing"
    """It quotes or advises."""


def says_none(line: str, start: int, end: int) -> bool:
    """True when the line says that what stands from start to end is not there."""
    before, after = line[:start], line[end:]
    return (
        _VALUE_AFTER.match(after) is not None
        or _NONE_BEFORE.search(before) is not None
        or (_ZERO_BEFORE.search(before) is not None and _MANY_AFTER.match(after) is not None)
        or _PASSED.search(after) is not None
    )


def standing_of(line: str, signature: Signature) -> Standing:
    """How much a line may claim that a signature matches."""
    if signature.role not in (Role.ROOT, Role.WITNESS):
        return Standing.FULL
    if _ADVICE.search(line) is not None or _QUOTED.search(line) is not None:
        return Standing.NOTHING
    if signature.machine_specific and _TALK_BEFORE.search(line) is not None:
        return Standing.NOTHING
    if signature.symptom in (Symptom.PREEMPTION, Symptom.KERNEL_PANIC):
        return Standing.FULL  # schedulers and their handlers announce these at any level
    return Standing.MILD if remark(line) else Standing.FULL


def remark(line: str) -> bool:
    """True for a line below the level of an error: its writer went on."""
    if _SHELL.match(line) is not None:
        return True
    return _LEVEL.search(line) is not None and _ERROR_LEVEL.search(line) is None


def introduces_caught(line: str) -> bool:
    """True for a line that is written right before the traceback of an exception it survived.

    It has to tell of trouble: any line may stand before the traceback that ends a process.
    """
    if _TROUBLE.search(line) is None or _INFORMS.search(line) is not None:
        return False
    return remark(line) or _GOES_ON.search(line) is not None
