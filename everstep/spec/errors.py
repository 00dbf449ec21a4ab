"""What is wrong with something a person wrote: one clear line for each problem.

Every problem reads ``FILE:LINE: KEY: got VALUE; WHAT WOULD BE ACCEPTED`` (without a file, as for
the input of a workflow, it starts at the key). Values are cut, and values that may hold secrets
(environment variables, unknown keys, names that look like credentials) are never shown.

Not here: reading files (``everstep.spec.load``). This module does no I/O, so workflows may use it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from everstep.spec.base import StrictModel

Loc = tuple[int | str, ...]
Locate = Callable[[Loc], int | None]
"""From a key path to its line in the file (1-based), or None when it is not known."""

SHOWN_CHARS_MAX = 60
SUGGESTION_CUTOFF = 0.6
KEYS_SHOWN_MAX = 14

_SECRET_NAME = re.compile(
    r"pass(word|wd|phrase)?$|secret|token|credential|api_?key|private_?key|access_?key|auth|webhook",
    re.IGNORECASE,
)
_HIDDEN = "a value that is not shown"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, with what would be right."""

    key: str
    """Dotted key path; empty for the document as a whole."""
    got: str
    accepted: str
    source: str | None = None
    line: int | None = None

    def render(self) -> str:
        """The problem as one line."""
        where = self.source or ""
        if where and self.line is not None:
            where = f"{where}:{self.line}"
        parts = [part for part in (where, self.key) if part]
        return _one_line(": ".join([*parts, f"got {self.got}; {self.accepted}"]))


class SpecError(Exception):
    """A spec or policy that cannot be used; ``str()`` is one line for each problem."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.lines))

    @property
    def lines(self) -> tuple[str, ...]:
        """One line for each problem."""
        return tuple(problem.render() for problem in self.problems)


class KeyedValueError(ValueError):
    """Raised in a validator that looks at several keys, to say which key is at fault."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("; ".join(problem.render() for problem in problems))


def show(value: Any, *, loc: Loc = ()) -> str:
    """A value as a person may see it in an error: short, and without secrets."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple, set)):
        return "an empty list" if not value else f"a list of {len(value)}"
    if _may_be_secret(loc):
        return _HIDDEN
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return quote(value)
    return cut(str(value))


def quote(text: str) -> str:
    """Text in quotes, cut, on one line, without control characters."""
    return repr(cut(text))


def cut(text: str, limit: int = SHOWN_CHARS_MAX) -> str:
    """At most ``limit`` characters of ``text``; a cut is visible."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def dotted(loc: Sequence[int | str]) -> str:
    """``("env", "A")`` as ``env.A`` and ``("command", 2)`` as ``command[2]``."""
    out = ""
    for part in loc:
        if isinstance(part, int):
            out += f"[{part}]"
        else:
            out += f".{_one_line(cut(part))}" if out else _one_line(cut(part))
    return out


def suggest(wrong: str, known: Iterable[str]) -> str:
    """``did you mean X? accepted here: ...`` for a misspelt name."""
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=SUGGESTION_CUTOFF)
    shown = ", ".join(names[:KEYS_SHOWN_MAX]) + (", ..." if len(names) > KEYS_SHOWN_MAX else "")
    listing = f"accepted here: {shown}" if names else "no keys are accepted here"
    return f"did you mean {close[0]}? {listing}" if close else listing


def problems_of(
    error: ValidationError,
    *,
    model: type[BaseModel] | None = None,
    source: str | None = None,
    locate: Locate | None = None,
    within: Loc = (),
) -> tuple[Problem, ...]:
    """The problems of a failed validation, in the order of the document.

    Args:
        error: what pydantic raised.
        model: the model that was validated, for the names of known keys; found by the error's
            title when it is one that people write.
        source: the file's name for people; None for input that is no file.
        locate: finds the line of a key.
        within: path of what was validated, when it is part of a larger document.
    """
    found: list[Problem] = []
    model = model or _model_named(error.title)
    for raw in error.errors(include_url=False):
        detail = {**raw, "loc": (*within, *raw["loc"])}
        for problem, loc in _problems_of_detail(detail, model):
            line = problem.line
            if line is None and locate is not None:
                line = locate(loc)
            found.append(replace(problem, source=problem.source or source, line=line))
    unique = list(dict.fromkeys(found))
    return tuple(sorted(unique, key=lambda p: (p.line is None, p.line or 0)))


def format_validation_error(
    error: ValidationError,
    source: str | None = None,
    text: str | None = None,
    *,
    model: type[BaseModel] | None = None,
) -> tuple[str, ...]:
    """One line for each problem; with ``source`` and ``text`` it names file and line.

    Workflows call it without both: the key path is then all there is.
    """
    locate: Locate | None = None
    if text is not None:
        from everstep.spec.yaml_text import locator  # keeps the YAML library out of workflows

        locate = locator(text)
    found = problems_of(error, model=model, source=source, locate=locate)
    return tuple(problem.render() for problem in found)


def loc_of(key: str) -> Loc:
    """The path that ``dotted`` rendered, for keys without dots or brackets of their own."""
    parts: list[int | str] = []
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", key):
        parts.append(name or int(index))
    return tuple(parts)


def _problems_of_detail(
    detail: dict[str, Any], model: type[BaseModel] | None
) -> list[tuple[Problem, Loc]]:
    loc: Loc = tuple(part for part in detail["loc"] if part != "[key]")
    original = detail.get("ctx", {}).get("error")
    if isinstance(original, KeyedValueError):
        pairs = []
        for problem in original.problems:
            key = ".".join(part for part in (dotted(loc), problem.key) if part)
            pairs.append((replace(problem, key=key), (*loc, *loc_of(problem.key))))
        return pairs
    kind = detail["type"]
    if kind == "extra_forbidden":
        accepted = suggest(str(loc[-1]), _known_keys(model, loc[:-1]))
        return [(Problem(dotted(loc), "a key that is not known", accepted), loc)]
    if kind == "missing":
        return [(Problem(dotted(loc), "nothing", _required(loc, model)), loc[:-1])]
    got = show(detail.get("input"), loc=loc)
    return [(Problem(dotted(loc), got, _accepted(kind, detail, loc)), loc)]


_ACCEPTED: dict[str, str] = {
    "int_type": "a whole number is needed",
    "int_parsing": "a whole number is needed",
    "int_parsing_size": "a smaller whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "float_parsing": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool_type": "true or false is needed",
    "bool_parsing": "true or false is needed",
    "string_type": "text is needed (a number or true/false must stand in quotes)",
    "string_too_short": "at least {min_length} characters are needed",
    "string_too_long": "at most {max_length} characters are allowed",
    "too_short": "at least {min_length} is needed",
    "too_long": "at most {max_length} are allowed",
    "tuple_type": "a list is needed, like [python, train.py]",
    "list_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "model_attributes_type": "a mapping is needed",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be {ge} or more",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be {le} or less",
    "literal_error": "accepted: {expected}",
    "enum": "accepted: {expected}",
}
"""What would be accepted, for each kind of error of pydantic."""

_PATTERNS: dict[Loc, str] = {
    ("name",): "1 to 62 lower-case letters, digits and -, with a letter or digit at both ends",
    ("webhook_url_env",): "the name of an environment variable (never the URL itself), or ''",
}
"""What a pattern means, by the key it stands at."""


def _accepted(kind: str, detail: Mapping[str, Any], loc: Loc) -> str:
    context = {k: str(v) for k, v in detail.get("ctx", {}).items()}
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(loc[-1:], f"it must match {context.get('pattern', '')}")
    template = _ACCEPTED.get(kind)
    if template is not None:
        return template.format_map(context)
    message = str(detail.get("msg", "not accepted"))
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _required(loc: Loc, model: type[BaseModel] | None) -> str:
    parent = _model_at(model, loc[:-1])
    name = str(loc[-1]) if loc else ""
    field = parent.model_fields.get(name) if parent is not None else None
    kind = _nested_model(field.annotation) if field is not None else None
    return "this section is required" if kind is not None else "this key is required"


def _known_keys(model: type[BaseModel] | None, loc: Loc) -> tuple[str, ...]:
    found = _model_at(model, loc)
    return tuple(found.model_fields) if found is not None else ()


def _model_named(title: str) -> type[BaseModel] | None:
    return next((m for m in StrictModel.__subclasses__() if m.__name__ == title), None)


def _model_at(model: type[BaseModel] | None, loc: Loc) -> type[BaseModel] | None:
    current = model
    in_table = False
    for part in loc:
        if in_table:  # the name of a row
            in_table = False
            continue
        if current is None or not isinstance(part, str):
            return None
        field = current.model_fields.get(part)
        current = _nested_model(field.annotation) if field is not None else None
        in_table = field is not None and get_origin(field.annotation) is dict
    return current


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is not None:
        for argument in get_args(annotation):
            found = _nested_model(argument)
            if found is not None:
                return found
    return None


def _may_be_secret(loc: Loc) -> bool:
    names = [part for part in loc if isinstance(part, str)]
    return names[:1] == ["env"] or any(_SECRET_NAME.search(name) for name in names)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
