"""From what a user hands over (a path, a mapping, a model) to a validated job spec, and its texts.

Not here: the rules of a spec (``everstep.spec.job``) and reading YAML (``everstep.spec.load``).
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from everstep.errors import ConfigurationProblem
from everstep.spec.errors import SpecError, problems_of
from everstep.spec.job import JobSpec

_SUMMARY_MAX = 200
"""Bytes that Temporal takes as a static summary."""


def to_spec(spec: JobSpec | Mapping[str, Any] | str | Path) -> JobSpec:
    """Validate whatever was given, its ``policy`` block included.

    Raises:
        ConfigurationProblem: it is not a valid spec; a line for each problem, with file and key.
    """
    from everstep.spec import load

    try:
        job = _as_spec(spec)
        if job.policy:
            load.snapshot_for_job(load.load_policy(None), job.policy)
    except load.SpecError as error:
        raise ConfigurationProblem(str(error)) from None
    return job


def _as_spec(spec: JobSpec | Mapping[str, Any] | str | Path) -> JobSpec:
    from everstep.spec.load import load_job_spec

    if isinstance(spec, JobSpec):
        return spec
    if not isinstance(spec, Mapping):
        return load_job_spec(Path(spec))
    try:
        return JobSpec.model_validate(dict(spec))
    except ValidationError as error:
        raise SpecError(problems_of(error, model=JobSpec, source="job spec")) from None


def spec_hash(spec: JobSpec) -> str:
    """SHA-256 of the spec's canonical JSON: equal specs, equal hashes."""
    text = json.dumps(spec.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def spec_summary(spec: JobSpec) -> str:
    """The job in one line of the Temporal UI."""
    text = f"{spec.name}: {spec.machines} machines x {spec.ranks_per_machine} ranks: "
    room = _SUMMARY_MAX - len(text.encode())
    command = shlex.join(spec.command).encode()
    cut = command if len(command) <= room else command[: room - 3]
    return text + cut.decode(errors="ignore") + ("…" if cut is not command else "")


def spec_details(spec: JobSpec) -> str:
    """The job for the Temporal UI's details, in Markdown. Values of ``env`` stay out of it."""
    command = shlex.join(spec.command)
    rows = [
        ("machines", f"{spec.machines} x {spec.ranks_per_machine} ranks"),
        ("layout", ", ".join(f"{k}={v}" for k, v in spec.layout.sizes(spec.world_size).items())),
        ("code", spec.code or "on the machines already"),
        ("checkpoints", spec.checkpoint.dir or "the controllers' checkpoint root"),
        ("environment", ", ".join(sorted(spec.env)) or "-"),
        *sorted(spec.labels.items()),
    ]
    table = "\n".join(f"| {key} | {str(value).replace('|', '/')} |" for key, value in rows)
    return f"```\n{command[:2000]}\n```\n\n| | |\n| --- | --- |\n{table}\n"
