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

from everstep.errors import ConfigurationProblem
from everstep.spec.job import JobSpec

_SUMMARY_MAX = 200
"""Bytes that Temporal takes as a static summary."""


def to_spec(spec: JobSpec | Mapping[str, Any] | str | Path) -> JobSpec:
    """Validate whatever was given.

    Raises:
        ConfigurationProblem: it is not a valid spec; the message names file, key and value.
    """
    from everstep.spec import load

    if isinstance(spec, JobSpec):
        return spec
    try:
        if isinstance(spec, Mapping):
            return load.job_spec_from_data(dict(spec), source="job spec")
        return load.load_job_spec(Path(spec))
    except load.SpecError as error:
        raise ConfigurationProblem(str(error)) from None


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
