"""A small disk of its own for the demo's checkpoints, so that it can be filled without harm.

Needs the right to mount; without it the fault is skipped, and the report says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

SIZE_MIB = 160


class SmallDisk:
    """A tmpfs of a few megabytes."""

    def __init__(self, path: Path) -> None:
        """Nothing is mounted yet."""
        self.path = path
        self.why_not = ""
        self._mounted = False

    def mount(self) -> bool:
        """Mount it; False, with ``why_not``, where this user may not or there is no ``mount``."""
        program = shutil.which("mount")
        if os.geteuid() != 0:
            self.why_not = "only root can mount the small disk that it fills"
        elif program is None:
            self.why_not = "there is no mount program"
        else:
            self.path.mkdir(mode=0o700, parents=True)
            options = f"size={SIZE_MIB}m,mode=700"
            done = subprocess.run(
                [program, "-t", "tmpfs", "-o", options, "everstep-demo", str(self.path)],
                capture_output=True,
                text=True,
                check=False,
            )
            self._mounted = done.returncode == 0
            self.why_not = "" if self._mounted else " ".join(done.stderr.split())[:200]
        return self._mounted

    def unmount(self) -> None:
        """Give it back."""
        program = shutil.which("umount")
        if self._mounted and program is not None:
            # Lazily: a process that is still ending may have its directory there.
            subprocess.run([program, "-l", str(self.path)], capture_output=True, check=False)
            self._mounted = False
        with contextlib.suppress(OSError):
            self.path.rmdir()
