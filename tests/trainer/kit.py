"""What the tests of the trainer library share: environments of ranks, and an eye on the results."""

from __future__ import annotations

import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from everstep_trainer import Session

CHECKOUT = Path(__file__).resolve().parents[2]
TRAINER = CHECKOUT / "trainer"
EXAMPLES = CHECKOUT / "examples"
PROGRAMS = Path(__file__).parent / "programs"


class Job:
    """One job's directories, and the environment of each of its ranks."""

    def __init__(self, root: Path, *, world_size: int = 1, keep: int = 3) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.world_size = world_size
        self.keep = keep
        root.mkdir(parents=True, exist_ok=True)

    def environ(
        self, rank: int = 0, *, generation: int = 1, restore: str | None = None, **more: str
    ) -> dict[str, str]:
        """The variables that an agent sets, as far as this library reads them."""
        environ = {
            "EVERSTEP_JOB_ID": "tests",
            "EVERSTEP_RUN_ID": f"tests-{generation}",
            "EVERSTEP_GENERATION": str(generation),
            "EVERSTEP_START_REASON": "launch" if generation == 1 else "reattempt",
            "EVERSTEP_CODE_VERSION": "v1",
            "EVERSTEP_CHECKPOINT_DIR": str(self.checkpoints),
            "EVERSTEP_CHECKPOINT_KEEP": str(self.keep),
            "EVERSTEP_PROGRESS_FILE": str(self.progress_path(rank, generation)),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
        }
        if restore is not None:
            step, _, written_by = restore.removeprefix("step-").partition(".g")
            environ |= {
                "EVERSTEP_RESTORE_PATH": str(self.checkpoints / restore),
                "EVERSTEP_RESTORE_STEP": str(int(step)),
                "EVERSTEP_RESTORE_GENERATION": str(int(written_by)),
            }
        return environ | more

    def session(self, rank: int = 0, **how: Any) -> Session:
        """A rank of the job, within this process."""
        return Session(self.environ(rank, **how))

    def sessions(self, **how: Any) -> list[Session]:
        """All ranks of the job, within this process."""
        return [self.session(rank, **how) for rank in range(self.world_size)]

    def progress_path(self, rank: int, generation: int) -> Path:
        """Where that rank reports."""
        return self.root / f"progress-{generation}-{rank}.bin"

    def progress(self, rank: int = 0, generation: int = 1) -> dict[str, Any]:
        """What that rank has reported."""
        return read_progress(self.progress_path(rank, generation))

    def folders(self) -> list[str]:
        """Names of the checkpoint folders."""
        if not self.checkpoints.is_dir():
            return []
        return sorted(path.name for path in self.checkpoints.glob("step-*"))

    def files(self) -> list[str]:
        """Everything below the checkpoint directory."""
        return sorted(
            str(path.relative_to(self.checkpoints))
            for path in self.checkpoints.rglob("*")
            if path.is_file()
        )


def read_progress(path: Path) -> dict[str, Any]:
    """A progress file, read by the offsets of the agreed layout and by nothing of ours."""
    raw = path.read_bytes()

    def at(offset: int, kind: str) -> Any:
        return struct.unpack_from("<" + kind, raw, offset)[0]

    return {
        "size": len(raw),
        "magic": raw[:8],
        "seq": at(8, "Q"),
        "pid": at(16, "I"),
        "generation": at(20, "I"),
        "step": at(24, "q"),
        "loss": at(32, "d"),
        "grad_norm": at(40, "d"),
        "flags": at(48, "Q"),
        "monotonic_ns": at(56, "Q"),
        "nonfinite_step": at(64, "q"),
        "steps": at(72, "Q"),
        "section_depth": at(80, "Q"),
        "section_ns": at(88, "Q"),
        "section_limit_s": at(96, "d"),
        "section": at(104, "64s").split(b"\0")[0].decode(),
        "committed": at(168, "q"),
        "failed": at(176, "q"),
        "error": at(184, "256s").split(b"\0")[0].decode(),
    }


def run_python(
    *arguments: str, env: Mapping[str, str], timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run Python with the trainer library on its path and nothing else of this environment."""
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR", "HOME") if name in os.environ}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": str(TRAINER), "PYTHONDONTWRITEBYTECODE": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def same(left: Any, right: Any) -> bool:
    """Equal in kind, structure and every bit; NaNs with the same bits are equal."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, dict):
        pairs: Sequence[tuple[Any, Any]] = list(zip(left.items(), right.items(), strict=False))
        return len(left) == len(right) and all(
            same(k1, k2) and same(v1, v2) for (k1, v1), (k2, v2) in pairs
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "dtype") and hasattr(left, "shape"):
        return (
            left.dtype == right.dtype
            and tuple(left.shape) == tuple(right.shape)
            and bits(left) == bits(right)
        )
    return bool(left == right)


def bits(array: Any) -> bytes:
    """Bytes of a numpy or torch value, independently of how the library takes them."""
    if hasattr(array, "tobytes"):
        return bytes(array.tobytes())
    import torch

    flat = array.detach().cpu().contiguous().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).contiguous().reshape(-1)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return bytes(flat.view(integers[flat.element_size()]).numpy().tobytes())


def load_module(path: Path) -> Any:
    """A program of ours as a module."""
    spec = importlib.util.spec_from_file_location(f"program_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
