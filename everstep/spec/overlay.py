"""Partial policies: a file or a job's ``policy`` block, laid over a whole one key by key.

A file may hold every key; a job's block only those that are not marked as the fleet's own.
No I/O: workflows and activities use it on what they were given. Files are ``everstep.spec.load``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from everstep.spec.errors import Loc, Problem, SpecError, dotted, problems_of, show, suggest
from everstep.spec.policy import FleetOnly, Policy, PolicySnapshot

HASH_DIGITS = 16


def canonical_json(policy: Policy) -> str:
    """The same text for the same policy, wherever and whenever it is made."""
    return json.dumps(policy.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def policy_hash(policy: Policy) -> str:
    """First digits of the SHA-256 of the canonical JSON: the policy's version for decisions."""
    return hashlib.sha256(canonical_json(policy).encode()).hexdigest()[:HASH_DIGITS]


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """``over`` laid over ``base``: sections key by key, everything else replaced whole."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def overlay_problems(over: Mapping[str, Any]) -> tuple[Problem, ...]:
    """What is wrong with a job's overrides, each key judged by itself."""
    return tuple(problem for problem, _ in _section_problems(Policy, over, (), of_job=True))


def with_overrides(policy: Policy, over: Mapping[str, Any]) -> Policy:
    """``policy`` with a job's overrides laid over it.

    Raises:
        SpecError: a key of ``over`` is not known, its value not accepted, or it is the fleet's.
    """
    found = overlay_problems(over)
    if found:
        raise SpecError(found)
    if not over:
        return policy
    try:
        return Policy.model_validate(merge(policy.model_dump(mode="json"), over))
    except ValidationError as error:  # a rule between two keys
        raise SpecError(problems_of(error, model=Policy)) from None


def snapshot(policy: Policy, source: str, overrides: Mapping[str, Any]) -> PolicySnapshot:
    """The policy as one job sees it.

    Raises:
        SpecError: the job's overrides are not accepted.
    """
    try:
        merged = with_overrides(policy, overrides)
    except SpecError as error:
        raise SpecError(
            replace(p, key=f"policy.{p.key}" if p.key else "policy") for p in error.problems
        ) from None
    where = f"{source} with the job's overrides" if overrides else source
    return PolicySnapshot(policy=merged, hash=policy_hash(merged), source=where)


def overlay_locs(over: Mapping[str, Any]) -> tuple[tuple[Problem, Loc], ...]:
    """What is wrong with a fleet's partial policy, with the path of each for finding its line."""
    return tuple(_section_problems(Policy, over, (), of_job=False))


def _section_problems(
    model: type[BaseModel], over: Mapping[str, Any], loc: Loc, *, of_job: bool
) -> list[tuple[Problem, Loc]]:
    found: list[tuple[Problem, Loc]] = []
    fields = model.model_fields
    open_keys = [key for key in fields if not (of_job and _fleet_only(fields[key]))]
    for key, value in over.items():
        here = (*loc, key)
        field = fields.get(key)
        if field is None:
            accepted = suggest(str(key), open_keys)
            found.append((Problem(dotted(here), "a key that is not known", accepted), here))
            continue
        mark = _fleet_only(field) if of_job else None
        if mark is not None:
            accepted = (
                f"{key} is the fleet's ({mark.why}): set it in config/policy.yaml; "
                f"a job may override {', '.join(sorted(open_keys))}"
            )
            found += _refused(_section(field), value, here, accepted)
            continue
        section = _section(field)
        if section is not None:
            if isinstance(value, Mapping):
                found += _section_problems(section, value, here, of_job=of_job)
            else:
                problem = Problem(
                    dotted(here), show(value, loc=here), "a section with keys is needed"
                )
                found.append((problem, here))
            continue
        found += [(p, here) for p in _value_problems(field.rebuild_annotation(), value, here)]
    return found


def _refused(
    section: type[BaseModel] | None, value: Any, loc: Loc, accepted: str
) -> list[tuple[Problem, Loc]]:
    """A problem for each key that a job sets there; none for a section that it leaves empty."""
    if section is None or not isinstance(value, Mapping):
        return [(Problem(dotted(loc), show(value, loc=loc), accepted), loc)]
    found: list[tuple[Problem, Loc]] = []
    for key, inner in value.items():
        here = (*loc, key)
        # The value of a key that is not known may be a secret.
        known = key in section.model_fields
        got = show(inner, loc=here) if known else "a key that is not known"
        found.append((Problem(dotted(here), got, accepted), here))
    return found


def _fleet_only(field: FieldInfo) -> FleetOnly | None:
    return next((mark for mark in field.metadata if isinstance(mark, FleetOnly)), None)


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _value_problems(annotation: Any, value: Any, loc: Loc) -> list[Problem]:
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        return list(problems_of(error, within=loc)[:1])
    return []
