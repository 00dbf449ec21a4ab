"""What Everstep tells a rank through its environment, read once and checked.

Not here: torchrun's variables other than ``RANK`` and ``WORLD_SIZE``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from everstep_trainer._errors import BadEnvironment

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER = re.compile(r"step-(\d{12})\.g(\d{6})")
GENERATION_MAX = 999_999
"""Folder names hold six digits."""


class RestorePoint(NamedTuple):
    """The checkpoint this run starts from."""

    step: int
    generation: int
    path: str


class Environment(NamedTuple):
    """The environment of one rank. ``job_id`` is None when Everstep did not start the process."""

    job_id: str | None
    run_id: str | None
    generation: int
    start_reason: str | None
    code_version: str | None
    restore: RestorePoint | None
    checkpoint_dir: str | None
    checkpoint_keep: int
    progress_file: str | None
    rank: int
    world_size: int


def read_environment(environ: Mapping[str, str]) -> Environment:
    """Read the variables.

    Raises:
        BadEnvironment: one of them is missing or makes no sense.
    """
    rank = _integer(environ, "RANK", 0, minimum=0)
    world_size = _integer(environ, "WORLD_SIZE", 1, minimum=1)
    job_id = environ.get("EVERSTEP_JOB_ID") or None
    if job_id is None:
        return Environment(
            None, None, 0, None, None, None, None, 1, None, rank, max(world_size, rank + 1)
        )
    if rank >= world_size:
        raise BadEnvironment(f"RANK={rank} must be less than WORLD_SIZE={world_size}")
    for name in ("EVERSTEP_RUN_ID", "EVERSTEP_GENERATION"):
        if not environ.get(name):
            raise BadEnvironment(f"EVERSTEP_JOB_ID is set but {name} is not: set all or none")
    return Environment(
        job_id=job_id,
        run_id=environ["EVERSTEP_RUN_ID"],
        generation=_integer(environ, "EVERSTEP_GENERATION", 0, minimum=1, maximum=GENERATION_MAX),
        start_reason=environ.get("EVERSTEP_START_REASON") or None,
        code_version=environ.get("EVERSTEP_CODE_VERSION") or None,
        restore=_restore_point(environ),
        checkpoint_dir=environ.get("EVERSTEP_CHECKPOINT_DIR") or None,
        checkpoint_keep=_integer(environ, "EVERSTEP_CHECKPOINT_KEEP", 3, minimum=1),
        progress_file=environ.get("EVERSTEP_PROGRESS_FILE") or None,
        rank=rank,
        world_size=world_size,
    )


def _restore_point(environ: Mapping[str, str]) -> RestorePoint | None:
    path = environ.get("EVERSTEP_RESTORE_PATH")
    if not path:
        return None
    # The folder's own name says what it holds; the variables must agree with it.
    named = _FOLDER.fullmatch(path.rstrip("/").rpartition("/")[2])
    if named is None:
        raise BadEnvironment(
            f"EVERSTEP_RESTORE_PATH={path} must end in step-<12 digits>.g<6 digits>"
        )
    step, generation = int(named[1]), int(named[2])
    for name, value in (
        ("EVERSTEP_RESTORE_STEP", step),
        ("EVERSTEP_RESTORE_GENERATION", generation),
    ):
        given = _integer(environ, name, value, minimum=0)
        if given != value:
            raise BadEnvironment(f"{name}={given} contradicts EVERSTEP_RESTORE_PATH={path}")
    return RestorePoint(step, generation, path)


def _integer(
    environ: Mapping[str, str], name: str, default: int, *, minimum: int, maximum: int = 2**63 - 1
) -> int:
    text = environ.get(name)
    if not text:
        return default
    # int() also takes " 1_0 ", "+1" and digits of other scripts.
    if not re.fullmatch(r"[0-9]{1,19}", text) or not minimum <= int(text) <= maximum:
        upper = "" if maximum == 2**63 - 1 else f" and at most {maximum}"
        raise BadEnvironment(
            f"{name}={text!r:.60} must be a whole number of at least {minimum}{upper}"
        )
    return int(text)
