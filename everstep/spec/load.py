"""Job specs and policies from files: found, read within bounds, merged, and blamed by line.

A policy file may be partial: it is laid over the packaged default key by key.

Not here: where files are looked up (``places``), the shape of what is loaded (``job``, ``policy``)
and the text of errors (``errors``).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from everstep.spec.errors import Locate, Problem, SpecError, problems_of, show
from everstep.spec.job import JobSpec
from everstep.spec.overlay import merge, overlay_locs, policy_hash, snapshot, with_overrides
from everstep.spec.places import (
    CONFIG_ENV,
    SYSTEM_CONFIG,
    checkout_config,
    find_config,
    packaged_config,
)
from everstep.spec.policy import Policy, PolicySnapshot
from everstep.spec.yaml_text import TEXT_BYTES_MAX, locator, plain_data

POLICY_FILE = "policy.yaml"


@dataclass(frozen=True, slots=True)
class LoadedPolicy:
    """A whole policy, and where it came from."""

    policy: Policy
    hash: str
    """First 16 hex digits of the SHA-256 of the canonical JSON."""
    text: str
    """The file as the operator wrote it, comments and all."""
    source: str
    """Where it came from, for people: a path, and ``(default)`` for the installation's own."""


def load_job_spec(path: Path) -> JobSpec:
    """Read and check a job spec (YAML or JSON).

    Raises:
        SpecError: with every problem that was found, one line each.
    """
    text = read_text(path)
    return job_spec_from_text(text, str(path), base=path.resolve().parent)


def job_spec_from_text(text: str, source: str, *, base: Path | None = None) -> JobSpec:
    """Check a job spec that is already in memory.

    Args:
        text: YAML or JSON.
        source: names it in errors.
        base: the folder that directories written as ``./x`` or ``../x`` are relative to.
    """
    data = _mapping(text, source, "a job spec needs at least `name` and `command`")
    if base is not None:
        data = _beside(data, base)
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        located = problems_of(error, model=JobSpec, source=source, locate=locator(text))
        raise SpecError(located) from None


def _beside(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Directories that begin with a dot, made absolute: they are relative to the spec's file."""

    def placed(value: Any) -> Any:
        explicit = isinstance(value, str) and (
            value in (".", "..") or value.startswith(("./", "../"))
        )
        return str((base / value).resolve()) if explicit else value

    out = dict(data)
    for key in ("code", "working_dir"):
        if key in out:
            out[key] = placed(out[key])
    checkpoint = out.get("checkpoint")
    if isinstance(checkpoint, Mapping) and "dir" in checkpoint:
        out["checkpoint"] = {**checkpoint, "dir": placed(checkpoint["dir"])}
    return out


def load_policy(path: Path | None, *, environ: Mapping[str, str] = os.environ) -> LoadedPolicy:
    """Read and check a policy file, or the one that the order of lookup finds.

    Raises:
        SpecError: with every problem that was found, one line each.
    """
    found = find_config(POLICY_FILE, flag=path, environ=environ)
    text = read_text(found)
    packaged = packaged_config() / POLICY_FILE
    if found.resolve() == packaged.resolve():
        return policy_from_text(text, f"{found} (default)", base={}, name=str(found))
    base = _mapping(read_text(packaged), str(packaged), "", remember=True)
    return policy_from_text(text, str(found), base=base)


def policy_from_text(
    text: str, source: str, *, base: Mapping[str, Any] | None = None, name: str | None = None
) -> LoadedPolicy:
    """Check a policy that is already in memory, laid over ``base`` (None: the packaged default).

    Args:
        text: YAML or JSON, whole or partial.
        source: where it came from, kept with the policy.
        base: a whole policy as plain data; ``{}`` when the text must be whole itself.
        name: the file's name in errors, when it is not ``source``.

    Raises:
        SpecError: with every problem that was found, one line each.
    """
    shown = name or source
    data = _mapping(text, shown, "keys like `detection:` and `ladder:` are needed", remember=True)
    if base is None:
        packaged = packaged_config() / POLICY_FILE
        base = _mapping(read_text(packaged), str(packaged), "", remember=True)
    locate = locator(text)
    wrong = [
        replace(problem, source=shown, line=locate(loc)) for problem, loc in overlay_locs(data)
    ]
    if wrong:
        raise SpecError(sorted(wrong, key=lambda p: p.line or 0))
    try:
        policy = Policy.model_validate(merge(base, data))
    except ValidationError as error:
        raise SpecError(problems_of(error, model=Policy, source=shown, locate=locate)) from None
    return LoadedPolicy(policy, policy_hash(policy), text, source)


def snapshot_for_job(loaded: LoadedPolicy, overrides: Mapping[str, Any]) -> PolicySnapshot:
    """The policy as one job sees it, with the job's ``policy`` block laid over it.

    Raises:
        SpecError: the job's overrides are not accepted.
    """
    return snapshot(loaded.policy, loaded.source, overrides)


def read_text(path: Path) -> str:
    """The text of a file a person named, within bounds.

    Raises:
        SpecError: it cannot be read, is too large, or is not text.
    """
    shown = str(path)
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            _refuse(shown, "a directory", "a YAML or JSON file is needed")
        if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind)):
            _refuse(shown, "a device or socket", "a YAML or JSON file is needed")
        with path.open("rb") as file:
            raw = file.read(TEXT_BYTES_MAX + 1)
    except FileNotFoundError:
        _refuse(shown, "no such file", "the path of a YAML or JSON file is needed")
    except PermissionError:
        _refuse(shown, "a file that may not be read", "give this user read permission")
    except (OSError, ValueError) as error:
        _refuse(shown, "a file that cannot be read", getattr(error, "strerror", None) or str(error))
    if len(raw) > TEXT_BYTES_MAX:
        _refuse(shown, "a file that is too large", f"at most {TEXT_BYTES_MAX // 1024} KiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse(shown, "bytes that are not UTF-8 text", "a YAML or JSON file is needed")


def _mapping(text: str, source: str, hint: str, *, remember: bool = False) -> dict[str, Any]:
    data = plain_data(text, source, remember=remember)
    if data is None:
        _refuse(source, "an empty file", hint)
    if not isinstance(data, dict):
        _refuse(source, show(data), f"a mapping is needed: {hint}", line=1)
    return data


def _refuse(source: str, got: str, accepted: str, *, line: int | None = None) -> NoReturn:
    raise SpecError([Problem("", got, accepted, source, line)]) from None


__all__ = [
    "CONFIG_ENV",
    "SYSTEM_CONFIG",
    "LoadedPolicy",
    "Locate",
    "SpecError",
    "checkout_config",
    "find_config",
    "job_spec_from_text",
    "load_job_spec",
    "load_policy",
    "packaged_config",
    "policy_from_text",
    "read_text",
    "snapshot_for_job",
    "with_overrides",
]
