"""A folder with the trainer library and nothing else, for the ranks' path.

In an installation the library lies in ``site-packages`` beside everything the agent needs, and none
of that may reach a training image; the folder may also be closed to the ranks' account. So the
agent keeps a copy of its own, one per content; live runs go on using theirs after an upgrade.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

_NAME = "everstep_trainer"
_COPIES_MAX = 5


def trainer_folder(state_dir: Path) -> Path | None:
    """The folder to put on the ranks' path; None when the library is not installed here.

    Raises:
        OSError: the copy cannot be made.
    """
    spec = importlib.util.find_spec(_NAME)
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).resolve().parent
    files = sorted(p for p in source.iterdir() if p.suffix in {".py", ".typed"})
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    copies = state_dir / "trainer"
    target = copies / digest.hexdigest()[:16]
    if not target.is_dir():
        copies.mkdir(exist_ok=True)
        copies.chmod(0o755)
        _copy(files, target)
        _forget_old(copies)
    return target


def _copy(files: list[Path], target: Path) -> None:
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        (fresh / _NAME).mkdir(parents=True)
        for folder in (fresh, fresh / _NAME):
            folder.chmod(0o755)
        for file in files:
            copy = fresh / _NAME / file.name
            shutil.copyfile(file, copy)
            copy.chmod(0o644)
        with contextlib.suppress(FileExistsError):
            fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _forget_old(copies: Path) -> None:
    by_age = sorted(copies.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for old in by_age[_COPIES_MAX:]:
        shutil.rmtree(old, ignore_errors=True)
