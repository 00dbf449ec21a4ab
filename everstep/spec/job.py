"""The job spec: what a user writes to launch a job, and what ``TrainingJob`` takes as its input."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from everstep.spec.base import IS_REGEX, JobName, StrictModel
from everstep.spec.errors import KeyedValueError, Problem
from everstep.spec.overlay import overlay_problems
from everstep.spec.torchrun import unwrap_launcher

AXES = ("tp", "cp", "ep", "dp", "pp")
RESERVED_ENV_PREFIXES = ("EVERSTEP_", "TORCHELASTIC_")
RESERVED_ENV = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)


class Layout(StrictModel):
    """Sizes of the parallel axes and the order in which ranks are laid out.

    The product of the sizes is the world size. ``order`` lists the axes from the one whose
    neighbours have adjacent ranks to the one whose neighbours are farthest apart.
    An axis that is not given has size 1, except ``dp``, which takes what is left.
    """

    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor parallel."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Context parallel."""
    ep: Annotated[int, Field(ge=1)] = 1
    """Expert parallel."""
    dp: Annotated[int, Field(ge=1)] | None = None
    """Data parallel; not given: all ranks that the other axes leave."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Pipeline parallel."""
    order: tuple[str, ...] = AXES
    """Axes from the one whose neighbours have adjacent ranks to the farthest apart."""

    @field_validator("order")
    @classmethod
    def _order_is_permutation(cls, order: tuple[str, ...]) -> tuple[str, ...]:
        if sorted(order) != sorted(AXES):
            raise ValueError(f"order must name each of {', '.join(AXES)} exactly once")
        return order

    def sizes(self, world_size: int) -> dict[str, int]:
        """Size of every axis for ``world_size`` ranks.

        Raises:
            ValueError: the sizes do not multiply to ``world_size``.
        """
        others = self.tp * self.cp * self.ep * self.pp
        dp = self.dp if self.dp is not None else max(1, world_size // others)
        if others * dp != world_size:
            raise ValueError(
                f"tp*cp*ep*dp*pp = {self.tp}*{self.cp}*{self.ep}*{dp}*{self.pp} = {others * dp}, "
                f"but machines*ranks_per_machine = {world_size}"
            )
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": dp, "pp": self.pp}


class CheckpointSpec(StrictModel):
    """Where the trainer library saves to disk."""

    dir: str | None = None
    """Absolute directory that all machines of the job share. Default: the agents' shared
    checkpoint root (``--checkpoint-root``), with one folder per job."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 3
    """How many complete checkpoints to keep."""

    @field_validator("dir")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError("must be an absolute path that every machine of the job can reach")
        return value


class ProgressSpec(StrictModel):
    """How to read progress from the output of a script that does not use the trainer library."""

    pattern: Annotated[str, Field(max_length=500), IS_REGEX] | None = None
    """A regular expression for lines with a step, for scripts that print neither a known
    framework's lines nor `step N loss X`: `(?P<step>\\d+)`, and if you like `(?P<loss>...)` and
    `(?P<grad_norm>...)`. It is searched for in each line; then no other form is."""

    @field_validator("pattern")
    @classmethod
    def _names_a_step(cls, value: str | None) -> str | None:
        if value is None:
            return None
        groups = re.compile(value).groupindex
        if "step" not in groups:
            raise ValueError(r"must have a group named step: (?P<step>\d+)")
        unknown = sorted(groups.keys() - {"step", "loss", "grad_norm"})
        if unknown:
            raise ValueError(f"groups may be named step, loss and grad_norm, not {unknown[0]}")
        return value


class JobSpec(StrictModel):
    """One training job.

    ``command`` runs once per rank with torchrun's environment variables. A command that is itself
    ``torchrun ...`` or ``python -m torch.distributed.run ...`` is understood: see
    ``everstep.spec.torchrun``.
    """

    name: JobName
    """A DNS label of at most 62 characters; the job's id everywhere."""
    command: Annotated[tuple[str, ...], Field(min_length=1, max_length=1000)]
    """What every rank runs: a list of words, or one line that is split like a shell would."""
    machines: Annotated[int, Field(ge=1, le=100_000)] = 1
    """How many machines a run needs."""
    ranks_per_machine: Annotated[int, Field(ge=1, le=128)] = 1
    """Ranks on each machine, usually one for each GPU."""
    layout: Layout = Layout()
    """Sizes of the parallel axes and order of ranks."""
    env: Annotated[dict[str, str], Field(max_length=500)] = Field(default_factory=dict)
    """Environment variables of the ranks."""
    working_dir: str | None = None
    """Absolute directory to start ranks in. Default: the materialised code version, else the run's
    own folder."""
    code: str | None = None
    """Absolute directory whose files are the job's code version; copied to every machine and run
    from there. None: the command refers to files that are already on the machines."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Where the trainer library saves."""
    progress: ProgressSpec = ProgressSpec()
    """How to read progress from the output of a script that does not use the trainer library."""
    policy: dict[str, Any] = Field(default_factory=dict)
    """Overrides of the fleet's policy for this job, in the policy file's own shape."""
    labels: Annotated[dict[str, str], Field(max_length=50)] = Field(default_factory=dict)
    """Anything for people and other programs; Everstep only stores it."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.machines * self.ranks_per_machine

    @field_validator("command", mode="before")
    @classmethod
    def _split_command(cls, value: Any) -> Any:
        if isinstance(value, str):
            try:
                return tuple(shlex.split(value))
            except ValueError as error:
                raise ValueError(f"cannot be split like a shell would: {error}") from None
        return value

    @field_validator("working_dir", "code")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not PurePosixPath(value).is_absolute():
            raise ValueError("must be an absolute path")
        return value

    @field_validator("env")
    @classmethod
    def _env_names(cls, env: dict[str, str]) -> dict[str, str]:
        for key, value in env.items():
            if not key or "=" in key or "\0" in key or "\0" in value:
                raise ValueError(f"{key!r} is not a name an environment variable can have")
            if key in RESERVED_ENV or key.startswith(RESERVED_ENV_PREFIXES):
                raise ValueError(f"{key} is set by Everstep for every run and cannot be overridden")
        return env

    @field_validator("policy")
    @classmethod
    def _policy_keys(cls, policy: dict[str, Any]) -> dict[str, Any]:
        found = overlay_problems(policy)
        if found:
            raise KeyedValueError(*found)
        return policy

    @model_validator(mode="before")
    @classmethod
    def _understand_torchrun(cls, data: Any) -> Any:
        return unwrap_launcher(data)

    @model_validator(mode="after")
    def _layout_fits(self) -> Self:
        try:
            self.layout.sizes(self.world_size)
        except ValueError as error:
            raise KeyedValueError(Problem("layout", "sizes that do not fit", str(error))) from None
        return self
