"""The demo's job specs: the examples, with a policy that notices within seconds.

Not here: what is done to them (``faults``, ``side_jobs``).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from everstep._bootstrap import app_root
from everstep.spec.job import JobSpec

MAIN = "demo"
USER_ERROR = "demo-user-error"
BAD_SPEC = "demo-bad-spec"
PLAIN = "demo-plain"

MACHINES = 2
RANKS_PER_MACHINE = 2
SAVE_EVERY = 5
ORDERS_ENV = "JOB_FAULTS"

POLICY: dict[str, Any] = {
    "detection": {
        "hang_min": "5s",
        "exit_skew_max": "3s",
        "machine_lost_after": "3s",
        "progress_report_interval": "5s",
        "first_step_max": "3m",
    },
    # A dozen faults in five minutes would spend the budgets of a day.
    "ladder": {
        "stable_after": "2s",
        "infrastructure_restarts_max": 50,
        "user_code_restarts_max": 50,
        "unclear_restarts_max": 50,
    },
    "teardown": {"stop_grace": "5s"},
}


def copy_examples(target: Path) -> Path:
    """The example jobs, in a folder that nobody edits while the demo runs."""
    source = app_root() / "examples"
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def torch_env(folder: Path) -> dict[str, str]:
    """One thread, since two compute other bits, and a temporary directory that goes with us."""
    scratch = folder / "tmp"
    scratch.mkdir(exist_ok=True)
    return {"OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)}


def main_job(
    *, code: Path, steps: int, step_ms: int, checkpoints: Path, orders: Path, out: Path
) -> JobSpec:
    """Four ranks of a small GPT on two machines."""
    return JobSpec.model_validate(
        {
            "name": MAIN,
            "command": [
                sys.executable,
                "tiny_gpt/train.py",
                *("--steps", str(steps)),
                *("--save-every", str(SAVE_EVERY)),
                *("--step-ms", str(step_ms)),
                *("--out", str(out)),
            ],
            "machines": MACHINES,
            "ranks_per_machine": RANKS_PER_MACHINE,
            "code": str(code),
            "checkpoint": {"dir": str(checkpoints), "keep": 2},
            "env": {ORDERS_ENV: str(orders), **torch_env(out.parent)},
            "policy": POLICY,
        }
    )


def baseline_command(*, code: Path, steps: int, out: Path) -> list[str]:
    """The same training under plain torchrun, at its own speed."""
    ranks = MACHINES * RANKS_PER_MACHINE
    return [
        sys.executable,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        str(code / "tiny_gpt" / "train.py"),
        *("--steps", str(steps)),
        *("--save-every", str(SAVE_EVERY)),
        *("--out", str(out)),
    ]


def user_error_job(*, code: Path, orders: Path) -> JobSpec:
    """A job whose code fails at the same step every time."""
    policy = {**POLICY, "ladder": {"stable_after": "2s", "user_code_restarts_max": 2}}
    return JobSpec.model_validate(
        {
            "name": USER_ERROR,
            "command": [sys.executable, "counter_job/train.py", "--steps", "200"],
            "machines": MACHINES,
            "ranks_per_machine": RANKS_PER_MACHINE,
            "code": str(code),
            "env": {ORDERS_ENV: str(orders)},
            "policy": policy,
        }
    )


def bad_spec() -> dict[str, Any]:
    """A job that asks for a layout its ranks do not fit, as another SDK might send it."""
    return {
        "name": BAD_SPEC,
        "command": [sys.executable, "train.py"],
        "machines": 2,
        "ranks_per_machine": 2,
        "layout": {"tp": 3},
    }


def plain_job(*, code: Path, steps: int, checkpoints: Path) -> JobSpec:
    """A script that knows nothing of Everstep, under the launcher it was written for."""
    return JobSpec.model_validate(
        {
            "name": PLAIN,
            "command": [
                sys.executable,
                *("-m", "torch.distributed.run", "--nproc-per-node", "2"),
                "plain_torchrun_script/train.py",
                *("--steps", str(steps)),
                *("--save-every", str(SAVE_EVERY)),
                *("--checkpoint-dir", str(checkpoints)),
            ],
            "machines": 1,
            "code": str(code),
            "env": torch_env(checkpoints.parent),
            "policy": POLICY,
        }
    )
