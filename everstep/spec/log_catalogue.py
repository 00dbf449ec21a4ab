"""The catalogue of log signatures: read, checked, and laid over by the site's own rows.

The file is ``log_signatures.yaml`` of the usual places for configuration; beside any of these a
``log_signatures.site.yaml`` may stand, whose rows come first, and whose rows replace rows of the
same name. Everything wrong is one line with file, line, key and what would be accepted.

Not here: what is done with signatures (``everstep.decide.diagnosis``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.literals import required_literals
from everstep.decide.diagnosis.types import Role, Signature, Weight
from everstep.decide.words import Action, Confidence, Side, Symptom
from everstep.spec.base import IS_REGEX, StrictModel
from everstep.spec.errors import KeyedValueError, Problem, SpecError, problems_of, quote
from everstep.spec.load import read_text
from everstep.spec.log_places import SIGNATURES_FILE, SITE_FILE, signature_files
from everstep.spec.yaml_text import locator, plain_data

PATTERN_CHARS_MAX = 4_000
ROWS_MAX = 2_000

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=PATTERN_CHARS_MAX), IS_REGEX]
RowName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,62}$")]


class SignatureRow(StrictModel):
    """One row, as an operator writes it. ``docs/diagnose.md`` explains the keys."""

    pattern: Pattern
    unless: Annotated[str, IS_REGEX] = ""
    symptom: Symptom
    side: Side
    action: Action
    role: Role = Role.ROOT
    weight: Weight = Weight.NORMAL
    confidence: Confidence = Confidence.HIGH
    machine: bool = False
    why: Annotated[str, StringConstraints(min_length=1, max_length=300)]
    source: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    examples: Annotated[tuple[str, ...], Field(min_length=1, max_length=50)]

    @field_validator("pattern")
    @classmethod
    def _searchable(cls, value: str) -> str:
        try:
            required_literals(value)
        except RecursionError:
            raise ValueError("a pattern with fewer groups inside of groups is needed") from None
        return value

    @model_validator(mode="after")
    def _matches_its_examples(self) -> SignatureRow:
        wrong = [
            Problem(f"examples[{index}]", quote(example), "a line that the pattern matches")
            for index, example in enumerate(self.examples)
            if not self.matches(example)
        ]
        if self.machine and self.side is not Side.INFRASTRUCTURE:
            accepted = "infrastructure, since `machine: true` says that the fault is the machine's"
            wrong.append(Problem("side", self.side.value, accepted))
        if wrong:
            raise KeyedValueError(*wrong)
        return self

    def matches(self, line: str) -> bool:
        """True when the row takes the line for evidence."""
        if re.search(self.pattern, line, re.IGNORECASE) is None:
            return False
        return not self.unless or re.search(self.unless, line, re.IGNORECASE) is None

    def signature(self, name: str) -> Signature:
        """The row as decisions use it."""
        return Signature(
            name=name,
            pattern=self.pattern,
            unless=self.unless,
            symptom=self.symptom,
            side=self.side,
            action=self.action,
            role=self.role,
            weight=self.weight,
            confidence=self.confidence,
            machine_specific=self.machine,
            why=self.why,
        )


class SignatureFile(StrictModel):
    """A whole file of log signatures."""

    version: Literal[1]
    signatures: Annotated[dict[RowName, SignatureRow], Field(max_length=ROWS_MAX)]


def signatures_from_text(text: str, source: str) -> dict[str, SignatureRow]:
    """Check a file of signatures that is already in memory.

    Raises:
        SpecError: with every problem that was found, one line each.
    """
    data = plain_data(text, source, remember=True)
    if not isinstance(data, Mapping):
        accepted = "a mapping with `version: 1` and `signatures:` is needed"
        raise SpecError([Problem("", "no mapping", accepted, source, 1)])
    try:
        return dict(SignatureFile.model_validate(data).signatures)
    except ValidationError as error:
        found = problems_of(error, model=SignatureFile, source=source, locate=locator(text))
        raise SpecError(found) from None


def load_signatures(
    flag: Path | None = None, *, environ: Mapping[str, str] = os.environ
) -> Catalogue:
    """The catalogue by the order of lookup, with the site's rows over it.

    Raises:
        SpecError: with every problem that was found, one line each.
    """
    main, site = signature_files(flag, environ=environ)
    rows = signatures_from_text(read_text(main), str(main))
    if site is not None:
        own = signatures_from_text(read_text(site), str(site))
        rows = {**own, **{name: row for name, row in rows.items() if name not in own}}
    return Catalogue([row.signature(name) for name, row in rows.items()])


def is_signature_file(data: Any) -> bool:
    """True for data that is meant to be a file of signatures."""
    return isinstance(data, Mapping) and "signatures" in data


__all__ = [
    "SIGNATURES_FILE",
    "SITE_FILE",
    "SignatureFile",
    "SignatureRow",
    "is_signature_file",
    "load_signatures",
    "signature_files",
    "signatures_from_text",
]
