"""A stand-in for NVIDIA's library, built by the tests and loaded by the real ``pynvml``.

Not here: any patching of Python. What the library says is a file that a test rewrites.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"


class StandIn:
    """One library in a folder of its own, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._values: dict[str, str] = {}

    @property
    def environ(self) -> dict[str, str]:
        """Of a process that is to load it: before Python starts."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder)}

    def set(self, gpu: int | None = None, **values: str | int) -> None:
        """Say something from the next call on; of one GPU, or of the library.

        A function's name goes after two underscores: ``hang__nvmlDeviceGetUUID=1``.
        """
        prefix = "" if gpu is None else f"{gpu}."
        for key, value in values.items():
            self._values[prefix + key.replace("__", ".")] = str(value)
        self._write()

    def unset(self, gpu: int | None = None, *keys: str) -> None:
        """Take back what was said."""
        prefix = "" if gpu is None else f"{gpu}."
        for key in keys:
            del self._values[prefix + key.replace("__", ".")]
        self._write()

    def _write(self) -> None:
        text = "".join(f"{key}={value}\n" for key, value in self._values.items())
        new = self.folder / "nvml.control.new"
        new.write_text(text)
        new.replace(self.folder / "nvml.control")  # a reader sees all of it or none


def build(folder: Path, *flags: str) -> StandIn:
    """Compile the library into ``folder``; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc): the stand-in for NVIDIA's library cannot be built")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / LIBRARY
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", f"-Wl,-soname,{LIBRARY}", *flags]
    subprocess.run([compiler, *options, "-o", str(output), str(SOURCE), "-ldl"], check=True)
    return StandIn(folder)
