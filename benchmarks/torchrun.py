"""torchrun under observation: the peer of ``bench_recovery``, with nothing of Everstep in it.

``Torchrun`` is one launcher for all ranks, ``Fleet`` one for each of two machines and a spare. Not
here: what is done to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from benchmarks.common import CHECKOUT

EXAMPLES = CHECKOUT / "examples"
ORDERS_ENV = "JOB_FAULTS"
MAX_RESTARTS = 20
_ENV = {
    "OMP_NUM_THREADS": "1",
    "LOGLEVEL": "INFO",
    # Else torch 2.13 keeps one store over all attempts, and gloo meets dead ranks' addresses.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_FAILED = re.compile(r"^E(\d\d)(\d\d) (\d\d:\d\d:\d\d\.\d{6}) .*failed \(exitcode", re.MULTILINE)
_ASKED = b"Rendezvous'ing worker group"
_ATTEMPT = re.compile(r"attempt_(\d+)")


class Launcher:
    """One torchrun process."""

    def __init__(self, folder: Path, *flags: str, script: tuple[str, ...], orders: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.said = folder / "launcher.log"
        self.logs_of_ranks = folder / "ranks"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("EVERSTEP_", "TORCH"))}
        with self.said.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", *flags),
                    *("--max-restarts", str(MAX_RESTARTS)),
                    *("--redirects", "3", "--log-dir", str(self.logs_of_ranks)),
                    str(EXAMPLES / "plain_torchrun_script" / "train.py"),
                    *script,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=clean | _ENV | {ORDERS_ENV: str(orders)},
                cwd=folder,
                start_new_session=True,
            )

    def logs(self) -> dict[Path, int]:
        """What its ranks print, with the number of the attempt, from 1."""
        found: dict[Path, int] = {}
        for path in self.logs_of_ranks.glob("*/attempt_*/*/stdout.log"):
            attempt = _ATTEMPT.search(str(path))
            if attempt:
                found[path] = int(attempt[1]) + 1
        return found

    def failed_at(self, after: float) -> float:
        """When it noticed a failed rank, by its own log (it writes local time without a year)."""
        text = self.said.read_text(encoding="utf-8", errors="replace")
        year = datetime.now().astimezone().year
        times = [
            datetime.strptime(f"{year}{month}{day} {clock}", "%Y%m%d %H:%M:%S.%f")
            .astimezone()
            .timestamp()
            for month, day, clock in _FAILED.findall(text)
        ]
        return min(at for at in times if at >= after)

    def kill(self) -> None:
        """End it and everything under it at once, as a machine does that loses power."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            # Stopped first: it must not start anything between the listing and the end.
            parent.suspend()
            family = [parent, *parent.children(recursive=True)]
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
        self.process.wait()


class Torchrun:
    """A job with one launcher."""

    def __init__(self, folder: Path, ranks: int, steps: int, save_every: int) -> None:
        self.orders = folder / "orders"
        self._launcher = Launcher(
            folder,
            *("--standalone", "--nproc-per-node", str(ranks)),
            script=_script(folder, steps, save_every),
            orders=self.orders,
        )
        self.logs = self._launcher.logs
        self.failed_at = self._launcher.failed_at

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self._launcher.kill)


class Fleet:
    """A job with a launcher on each of two machines, and a third that waits to take a place.

    The rendezvous lives in the first launcher; the second machine is the one to lose.
    """

    def __init__(self, folder: Path, ranks_per_machine: int, steps: int, save_every: int) -> None:
        self._folder = folder
        self._script = _script(folder, steps, save_every)
        self._flags = (
            *("--nnodes", "2", "--nproc-per-node", str(ranks_per_machine)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{_free_port()}"),
            *("--rdzv-id", "bench"),
        )
        self._launchers = [self._launcher("machine-1"), self._launcher("machine-2")]

    def _launcher(self, name: str) -> Launcher:
        folder = self._folder / name
        return Launcher(folder, *self._flags, script=self._script, orders=self._folder / "orders")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for launcher in self._launchers:
            await asyncio.to_thread(launcher.kill)

    def logs(self) -> dict[Path, int]:
        """What the ranks of all machines print."""
        return {path: n for launcher in self._launchers for path, n in launcher.logs().items()}

    def start_spare(self) -> None:
        """Start the third launcher."""
        self._launchers.append(self._launcher("machine-3"))

    async def spare_waits(self, limit_s: float = 60.0) -> None:
        """Wait until the spare launcher has asked to join.

        Raises:
            TimeoutError: it has not within the limit.
        """
        async with asyncio.timeout(limit_s):
            while _ASKED not in self._launchers[2].said.read_bytes():  # noqa: ASYNC110 - another process's file
                await asyncio.sleep(0.1)
        # It says so right before it asks; what the rendezvous then knows cannot be seen from here.
        await asyncio.sleep(2.0)

    def power_off(self) -> None:
        """Lose the second machine: its launcher and all of its ranks at once."""
        self._launchers[1].kill()


def _script(folder: Path, steps: int, save_every: int) -> tuple[str, ...]:
    """The training script's own arguments."""
    return (
        *("--steps", str(steps), "--save-every", str(save_every)),
        *("--checkpoint-dir", str(folder / "checkpoints")),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
