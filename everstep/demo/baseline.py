"""The job that nobody touches: the same training under plain torchrun, beside the broken one.

It runs with the lowest priority, so that it takes what the broken job leaves of the processors.
Nothing of Everstep is in it: neither agent nor environment.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from everstep.demo.jobs import baseline_command, torch_env
from everstep.errors import EverstepError

NICENESS = 19


class Baseline:
    """A running baseline."""

    def __init__(self, folder: Path, *, code: Path, steps: int) -> None:
        """Nothing is started yet."""
        self._out = folder / "baseline.sha256"
        self._log = folder / "baseline.log"
        self._code = code
        self._steps = steps
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Begin to train."""
        cleaned = {k: v for k, v in os.environ.items() if not k.startswith("EVERSTEP_")}
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *baseline_command(code=self._code, steps=self._steps, out=self._out),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # The folder is a code version of the other job: nothing may be added to it.
                env={**cleaned, **torch_env(self._log.parent), "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=self._log.parent,
                start_new_session=True,
            )
        os.setpriority(os.PRIO_PGRP, self._process.pid, NICENESS)

    async def sha256(self) -> str:
        """Wait for its end; answers the hash of its weights.

        Raises:
            EverstepError: it failed.
        """
        if self._process is None:
            raise RuntimeError("start() comes first")
        code = await self._process.wait()
        if code != 0 or not self._out.is_file():
            raise EverstepError(f"the untouched job ended with {code}; its log is {self._log}")
        return self._out.read_text(encoding="ascii").strip()

    def running(self) -> bool:
        """Whether it still trains."""
        return self._process is not None and self._process.returncode is None

    async def stop(self) -> None:
        """End it with everything that it started."""
        if self._process is None or self._process.returncode is not None:
            return
        # torchrun ends its ranks, which have sessions of their own, when it is told to.
        for number, limit_s in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
            self._process.send_signal(number)
            try:
                async with asyncio.timeout(limit_s):
                    await self._process.wait()
                return
            except TimeoutError:
                continue
