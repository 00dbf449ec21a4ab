"""The kernel catalogue from files: ``config/xid.yaml``, and a site's own rows laid over it.

Three layers, each over the one before, key by key: the packaged file; the ``xid.yaml`` that the
order of lookup finds, which may be partial; and an ``xid.site.yaml`` found in the same way. A file
that is named takes the place of the last two. Every problem names its file, line, key and value.

Not here: the shape of a row (``kernel_rows``), the compiled form
(``everstep.decide.kernel_rules``) and how lines are judged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from everstep.decide.kernel_rules import (
    KernelClass,
    KernelRules,
    LineRule,
    NumberRule,
    RecoveryRule,
    Repeat,
    Stay,
    Windows,
)
from everstep.decide.words import Action
from everstep.spec.errors import Loc, Problem, SpecError, dotted, problems_of, quote, show, suggest
from everstep.spec.kernel_rows import KernelCatalogue, LineRow, SxidGroup, SxidRow, XidRow
from everstep.spec.load import find_config, packaged_config, read_text
from everstep.spec.overlay import merge
from everstep.spec.yaml_text import locator, plain_data

CATALOGUE_FILE = "xid.yaml"
SITE_FILE = "xid.site.yaml"


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    text: str
    data: Mapping[str, Any]


def load_kernel_catalogue(
    path: Path | None = None, *, environ: Mapping[str, str] = os.environ
) -> KernelRules:
    """Read, check and compile the catalogue.

    Args:
        path: a file laid over the packaged catalogue; None: what the order of lookup finds.
        environ: for ``EVERSTEP_CONFIG``.

    Raises:
        SpecError: with every problem that was found, one line each.
    """
    layers = [_layer(place) for place in _places(path, environ)]
    merged: dict[str, Any] = {}
    for layer in layers:
        merged = merge(merged, layer.data)
    try:
        catalogue = KernelCatalogue.model_validate(merged)
    except ValidationError as error:
        raise SpecError(_blamed_validation(error, layers)) from None
    problems = [(problem, loc) for loc, problem in _cross_problems(catalogue)]
    if problems:
        raise SpecError(_blame(problem, loc, layers) for problem, loc in problems)
    return compile_catalogue(catalogue, " + ".join(layer.name for layer in layers))


def catalogue_files(
    path: Path | None = None, *, environ: Mapping[str, str] = os.environ
) -> list[Path]:
    """The files that make up the catalogue, lowest layer first."""
    return _places(path, environ)


def _places(path: Path | None, environ: Mapping[str, str]) -> list[Path]:
    packaged = packaged_config() / CATALOGUE_FILE
    if path is not None:
        above = [path]
    else:
        above = [find_config(name, environ=environ) for name in (CATALOGUE_FILE, SITE_FILE)]
        above = [place for place in above if place.is_file()]
    return [packaged, *(place for place in above if place.resolve() != packaged.resolve())]


def _layer(place: Path) -> _Layer:
    text = read_text(place)
    data = plain_data(text, str(place), remember=True)
    if not isinstance(data, dict):
        accepted = "a mapping is needed: keys like `xids:` and `kernel_lines:`"
        raise SpecError([Problem("", show(data), accepted, str(place), 1)])
    return _Layer(str(place), text, data)


# --- Whose line it is


def _blamed_validation(error: ValidationError, layers: Sequence[_Layer]) -> list[Problem]:
    seen: list[Loc] = []

    def remember(loc: Loc) -> int:
        seen.append(loc)
        return len(seen) - 1

    found = problems_of(error, model=KernelCatalogue, locate=remember)
    blamed = [
        _blame(problem, seen[problem.line] if problem.line is not None else (), layers)
        for problem in found
    ]
    return sorted(blamed, key=lambda p: (p.source or "", p.line or 0))


def _blame(problem: Problem, loc: Loc, layers: Sequence[_Layer]) -> Problem:
    """The problem with the file and line of the topmost layer that says most of its path."""
    layer = max(reversed(layers), key=lambda candidate: _depth(candidate.data, loc))
    return replace(problem, source=layer.name, line=locator(layer.text)(loc))


def _depth(data: Any, loc: Loc) -> int:
    depth = 0
    for part in loc:
        row = isinstance(data, Mapping) and part in data
        item = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if not (row or item):
            break
        data = data[part]
        depth += 1
    return depth


# --- Rules between rows


def _cross_problems(catalogue: KernelCatalogue) -> Iterator[tuple[Loc, Problem]]:
    names = {f"xid_{number}" for number in catalogue.xids} | set(catalogue.kernel_lines)
    for missing in sorted(set(KernelClass) - set(catalogue.kinds)):
        yield ("kinds",), Problem(f"kinds.{missing}", "nothing", "each kind needs a row")
    numbered: list[tuple[Loc, XidRow | SxidGroup]] = [
        (("unknown_xid",), catalogue.unknown_xid),
        (("unknown_sxid",), catalogue.unknown_sxid),
        *((("xids", number), row) for number, row in catalogue.xids.items()),
        *((("sxid_groups", name), group) for name, group in catalogue.sxid_groups.items()),
    ]
    for loc, row in numbered:
        yield from _documented_problems(catalogue, loc, row)
        yield from _name_problems(names, (*loc, "explained_by"), row.explained_by)
    for name, line in catalogue.kernel_lines.items():
        loc = ("kernel_lines", name)
        yield from _name_problems(names, (*loc, "explained_by"), line.explained_by)
        yield from _name_problems(set(catalogue.kernel_lines), (*loc, "clears"), line.clears)
        yield from _name_problems(names, (*loc, "follows"), line.follows)
    yield from _group_problems(catalogue)


def _documented_problems(
    catalogue: KernelCatalogue, loc: Loc, row: XidRow | SxidGroup
) -> Iterator[tuple[Loc, Problem]]:
    if row.documented and row.documented not in catalogue.documented:
        here = (*loc, "documented")
        accepted = suggest(row.documented, catalogue.documented)
        yield here, Problem(dotted(here), quote(row.documented), accepted)
    elif row.action is None and not row.documented:
        here = (*loc, "action")
        accepted = "an action is needed where nothing is documented: " + ", ".join(Action)
        yield here, Problem(dotted(here), "nothing", accepted)


def _name_problems(
    known: set[str], loc: Loc, names: Sequence[str]
) -> Iterator[tuple[Loc, Problem]]:
    for name in names:
        if name not in known:
            accepted = f"the name of a row is needed: {suggest(name, known)}"
            yield loc, Problem(dotted(loc), quote(name), accepted)


def _group_problems(catalogue: KernelCatalogue) -> Iterator[tuple[Loc, Problem]]:
    group_of: dict[str, str] = {}
    for name, group in catalogue.sxid_groups.items():
        for number in group.rows:
            if number in group_of:
                key = f"sxid_groups.{name}.rows.{number}"
                accepted = f"it stands in {group_of[number]} already: give each number once"
                loc = ("sxid_groups", name, "rows", number)
                yield loc, Problem(key, f"SXid {number}", accepted)
            group_of.setdefault(number, name)
    for number, row in catalogue.sxids.items():
        if number not in group_of and (
            row.meaning is None or row.kind is None or row.action is None
        ):
            accepted = "a number of no group needs at least meaning, kind and action"
            yield ("sxids", number), Problem(f"sxids.{number}", f"SXid {number}", accepted)


# --- Compiled form


def compile_catalogue(catalogue: KernelCatalogue, source: str) -> KernelRules:
    """The catalogue as the judge uses it; it has been checked."""
    xids = {
        int(number): _xid(catalogue, int(number), row) for number, row in catalogue.xids.items()
    }
    lines = [_line(catalogue, name, row) for name, row in catalogue.kernel_lines.items()]
    windows = catalogue.windows
    return KernelRules(
        xids=xids,
        sxids=_sxids(catalogue),
        unknown_xid=_xid(catalogue, 0, catalogue.unknown_xid),
        unknown_sxid=_xid(catalogue, 0, catalogue.unknown_sxid),
        lines=tuple(sorted(lines, key=lambda line: not line.benign)),
        recovery={
            name.lower(): RecoveryRule(name=name, action=row.action, clears=row.clears)
            for name, row in catalogue.recovery_actions.items()
        },
        windows=Windows(
            burst_s=windows.burst.total_seconds(),
            programs_s=windows.programs.total_seconds(),
            consequences_s=windows.consequences.total_seconds(),
            settle_s=windows.settle.total_seconds(),
            teardown_s=windows.teardown.total_seconds(),
        ),
        source=source,
        by_name={line.name: line for line in lines},
    )


def _xid(catalogue: KernelCatalogue, number: int, row: XidRow) -> NumberRule:
    kind = catalogue.kinds[row.kind]
    action = row.action or catalogue.documented[row.documented].action
    return NumberRule(
        number=number,
        meaning=row.meaning,
        kind=row.kind,
        documented=row.documented,
        action=action,
        symptom=row.symptom or kind.symptom,
        side=row.side or kind.side,
        source=row.source or catalogue.source,
        teardown=row.teardown,
        several_programs=row.several_programs,
        recovery=row.recovery,
        fatal=row.fatal,
        nonfatal=row.nonfatal,
        softened_by=row.softened.by if row.softened else None,
        softened_action=row.softened.action if row.softened else None,
        explained_by=row.explained_by,
    )


def _sxids(catalogue: KernelCatalogue) -> dict[int, NumberRule]:
    out: dict[int, NumberRule] = {}
    for group in catalogue.sxid_groups.values():
        shared = group.model_dump(exclude={"rows"})
        for number, meaning in group.rows.items():
            own = catalogue.sxids.get(number, SxidRow()).model_dump(exclude_none=True)
            row = XidRow.model_validate({**shared, "meaning": meaning, **own})
            out[int(number)] = _xid(catalogue, int(number), row)
    for number, single in catalogue.sxids.items():
        if int(number) not in out:
            row = XidRow.model_validate(single.model_dump(exclude_none=True))
            out[int(number)] = _xid(catalogue, int(number), row)
    return out


def _line(catalogue: KernelCatalogue, name: str, row: LineRow) -> LineRule:
    kind = catalogue.kinds[row.kind]
    repeat, stay, within = row.repeat, row.stay, row.explained_within
    within_s = (within or catalogue.windows.consequences).total_seconds()
    return LineRule(
        name=name,
        pattern=re.compile(row.pattern, re.IGNORECASE),
        begins=re.compile(row.begins, re.IGNORECASE) if row.begins else None,
        meaning=row.meaning,
        kind=row.kind,
        action=row.action,
        symptom=row.symptom or kind.symptom,
        side=row.side or kind.side,
        source=row.source or catalogue.source,
        examples=(row.example,) if isinstance(row.example, str) else row.example,
        benign=row.benign,
        target=row.target,
        teardown=row.teardown,
        repeat=Repeat(
            count=repeat.count, within_s=repeat.within.total_seconds(), action=repeat.action
        )
        if repeat
        else None,
        stay=Stay(for_s=stay.after.total_seconds(), action=stay.action) if stay else None,
        boot_grace_s=row.boot_grace.total_seconds() if row.boot_grace else 0.0,
        clears=row.clears,
        explained_by=row.explained_by,
        explained_within_s=within_s,
        follows=row.follows,
    )
