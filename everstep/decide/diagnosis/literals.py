"""Fixed texts without which a regular expression cannot match: what a fast scan looks for first.

``required_literals`` answers a set of texts of which every match holds at least one, so a scan for
these texts in raw bytes loses no match (a test holds it to that). Regular expressions are only
tried on the lines that it found.

Not here: the scan itself (``everstep.logfiles``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# The standard library's own reader of patterns: no stubs tell of it.
op: Any = import_module("re._constants")
parser: Any = import_module("re._parser")

LITERAL_CHARS_MIN = 4
LITERALS_MAX = 400
_COMMON = """
error errors err fail failed failure fatal warn warning info exception loss lr grad grads norm value
values output outputs input tensor weight weights param params found save write rank node step steps
iter iteration epoch time nan inf the not and none null true false model data batch train training
valid 500 502 503 504 down need bad wrong hang stuck health differ checkpoint gpu gpus nccl config
option setting timeout connect barrier flag missing devices 429 wait() store loader dbe eio efa fi_
"""
COMMON = frozenset(_COMMON.split())
"""Words that stand in many lines of a healthy log: looking for them would find every line."""
_EXACT_MAX = 40
_CLASS_MAX = 4


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known about the texts that a part of an expression can match."""

    exact: tuple[str, ...] | None
    """All texts it can match; None: too many or unbounded."""
    required: tuple[str, ...] | None
    """Texts of which every match holds one; None: nothing is known."""


_EMPTY = _Found(("",), None)
_ANYTHING = _Found(None, None)


def required_literals(pattern: str) -> tuple[str, ...]:
    """Lower-case texts of which every match of ``pattern`` holds at least one.

    Raises:
        ValueError: there is no such set of texts of at least ``LITERAL_CHARS_MIN`` characters.
        re.error: the pattern is no regular expression.
    """
    found = _best([_sequence(parser.parse(pattern))])
    if found is None or min(map(_worth, found)) < LITERAL_CHARS_MIN or len(found) > LITERALS_MAX:
        worst = min(found, key=_worth) if found else ""
        raise ValueError(
            f"a pattern needs fixed text of {LITERAL_CHARS_MIN} characters or more in each of its "
            "branches, and not only a word that ordinary lines are full of"
            + (f" (it has only {worst!r})" if worst else "")
        )
    return tuple(sorted(set(found)))


def _sequence(items: Iterable[Any]) -> _Found:
    """Parts one after the other: runs of known texts are joined, the best run is what counts."""
    candidates: list[_Found] = []
    run: tuple[str, ...] = ("",)
    whole = True
    for item in items:
        part = _part(item)
        joined = None if part.exact is None else _product(run, part.exact)
        if joined is not None:
            run = joined
            continue
        whole = False
        candidates.append(_Found(run, None))
        if part.exact is not None:
            run = part.exact
        else:
            candidates.append(part)
            run = ("",)
    if whole:
        return _Found(run, None)
    candidates.append(_Found(run, None))
    return _Found(None, _best(candidates))


def _part(item: tuple[Any, Any]) -> _Found:
    code, value = item
    if code is op.LITERAL:
        return _Found((chr(value).lower(),), None)
    if code is op.IN:
        return _class(value)
    if code is op.SUBPATTERN:
        return _sequence(value[-1])
    if code is op.ATOMIC_GROUP:
        return _sequence(value)
    if code is op.BRANCH:
        return _branch([_sequence(branch) for branch in value[1]])
    if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT):
        return _repeat(*value)
    if code in (op.AT, op.ASSERT, op.ASSERT_NOT):
        return _EMPTY
    return _ANYTHING


def _class(members: Sequence[tuple[Any, Any]]) -> _Found:
    if len(members) <= _CLASS_MAX and all(code is op.LITERAL for code, _ in members):
        return _Found(tuple({chr(value).lower(): None for _, value in members}), None)
    return _ANYTHING


def _branch(branches: Sequence[_Found]) -> _Found:
    if all(branch.exact is not None for branch in branches):
        texts = [text for branch in branches for text in branch.exact or ()]
        if len(texts) <= _EXACT_MAX:
            return _Found(tuple(dict.fromkeys(texts)), None)
    required = [_best([branch]) for branch in branches]
    if any(texts is None for texts in required):
        return _ANYTHING
    return _Found(None, tuple(text for texts in required for text in texts or ()))


def _repeat(least: int, most: Any, body: Any) -> _Found:
    part = _sequence(body)
    if (least, most) == (0, 1) and part.exact is not None:
        return _Found(("", *part.exact), None)
    if least == 0:
        return _ANYTHING
    if (least, most) == (1, 1):
        return part
    return _Found(None, _best([part]))


def _product(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...] | None:
    if len(left) * len(right) > _EXACT_MAX:
        return None
    return tuple(dict.fromkeys(a + b for a in left for b in right))


def _best(candidates: Iterable[_Found]) -> tuple[str, ...] | None:
    """The most selective set: long texts first, then few of them."""
    sets = [texts for c in candidates for texts in (c.exact, c.required) if texts and all(texts)]
    return max(sets, key=lambda texts: (min(*map(_worth, texts), 12), -len(texts)), default=None)


def _worth(text: str) -> int:
    """How selective a text is: its length, but next to nothing for a common word."""
    return 1 if text.strip() in COMMON else len(text)
