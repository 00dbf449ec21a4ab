"""The agent's end of the GPU helper process: start it, ask it with a deadline, give it up.

Nothing here waits for the driver. A helper that hangs in the kernel cannot be killed; it is left,
counted, and collected when it has ended after all.

Not here: when to start or give up (``gpu``), and what answers mean (``gpu_judge``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, cast

from everstep.machine.proc import read_process

LINE_BYTES_MAX = 64 * 1024
HELPER_MODULE = "everstep.machine.probes.gpu_helper"
XIDS_MAX = 1000
KILL_WAIT_S = 0.2
GRACE_S = 0.3
"""After a deadline: if this process itself was stopped for a while, the answer lies in the pipe."""

PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
"""Of the environment: the agent's own has secrets that the helper does not need."""


@dataclass(frozen=True, slots=True)
class Xid:
    """One Xid event."""

    number: int
    index: int | None
    """The GPU's index in this helper; None when the driver named none that is known."""


@dataclass(slots=True)
class Answers:
    """What came back of one look."""

    taken: bool = False
    """Whether the helper itself has answered at all."""
    by_index: dict[int, Mapping[str, Any]] = field(default_factory=dict)


class HelperLink:
    """One helper process. ``ask`` is for one thread; the rest for any."""

    def __init__(
        self,
        *,
        call_deadline_s: float,
        pulse_s: float,
        environ: Mapping[str, str],
        on_news: Callable[[], None],
    ) -> None:
        """Start the process.

        Args:
            call_deadline_s: after so many seconds in one driver call a device is stuck.
            pulse_s: pause between the cheap calls to each device.
            environ: what ``PASSED_ON`` is taken from.
            on_news: called, in a thread of this object's, when a look would find something new.

        Raises:
            OSError: no process could be started.
        """
        self.ready: int | None = None
        """GPUs that the driver counts; None until it has said so."""
        self.driver = ""
        self.failed: tuple[str, str] | None = None
        """Error word and text, when the driver refused."""
        self.without_events = ""
        """Why no Xid events come, when none do."""
        self.xids: deque[Xid] = deque(maxlen=XIDS_MAX)
        self.closed = False
        self.born_s = time.monotonic()
        self._on_news = on_news
        self._look = 0
        self._answers = Answers()
        self._change = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-m", HELPER_MODULE, str(call_deadline_s), str(pulse_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: environ[name] for name in PASSED_ON if name in environ},
            cwd="/",
            bufsize=0,
            start_new_session=True,  # a terminal's Ctrl-C is for the agent
        )
        self._input = cast("IO[bytes]", self._process.stdin)
        self._output = cast("IO[bytes]", self._process.stdout)
        os.set_blocking(self._input.fileno(), False)
        threading.Thread(target=self._read, name="probe-gpu-reader", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def sleeps_in_kernel(self) -> bool:
        """Whether it is in a kernel call that no signal ends."""
        seen = read_process(self.pid)
        return seen is not None and seen.state == "D"

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the driver has said how many GPUs there are; False when it has not."""
        with self._change:
            self._change.wait_for(
                lambda: self.ready is not None or self.failed is not None or self.closed, timeout_s
            )
            return self.ready is not None and not self.closed

    def ask(self, deadline_s: float, silent_s: float) -> Answers:
        """Let every GPU be looked at.

        Args:
            deadline_s: GPUs that have not answered then are missing from the answers.
            silent_s: when the helper itself has said nothing for so long, no more is waited for.
        """
        with self._change:
            self._look += 1
            self._answers = Answers()
            if not self._write({"look": self._look}):
                return self._answers
            began = time.monotonic()
            self._change.wait_for(lambda: self._answers.taken or self.closed, silent_s)
            self._wait(lambda: self._answers.taken or self.closed, GRACE_S)
            if self._answers.taken:
                left_s = began + deadline_s - time.monotonic()
                self._change.wait_for(lambda: self._complete() or self.closed, max(0.0, left_s))
                self._wait(lambda: self._complete() or self.closed, GRACE_S)
            return self._answers

    def kill(self) -> bool:
        """End it; False when it is still there: then keep this object and ``gone`` it later."""
        self._process.kill()
        try:
            self._process.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            return False
        return self.gone()

    def gone(self) -> bool:
        """Whether the process has ended; collects it, never waits."""
        if self._process.poll() is None:
            return False
        self._input.close()
        return True

    def _complete(self) -> bool:
        return len(self._answers.by_index) >= (self.ready or 0)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        if not done():
            self._change.wait_for(done, timeout_s)

    def _write(self, line: Mapping[str, Any]) -> bool:
        try:
            return bool(self._input.write(json.dumps(line).encode() + b"\n"))
        except (OSError, ValueError):  # it has ended, or has not read for very long
            return False

    def _read(self) -> None:
        """In a thread: take lines until the process closes its end or says what is no line."""
        with self._output as pipe:
            rest = b""
            while data := pipe.read(LINE_BYTES_MAX):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > LINE_BYTES_MAX or not all(self._take(line) for line in lines):
                    break
        with self._change:
            self.closed = True
            self._change.notify_all()
        self._on_news()

    def _take(self, text: bytes) -> bool:
        try:
            line = json.loads(text)
        except ValueError:
            return False
        if not isinstance(line, dict):
            return False
        with self._change:
            news = self._note(line)
            self._change.notify_all()
        if news:
            self._on_news()
        return True

    def _note(self, line: Mapping[str, Any]) -> bool:
        """Take what a line says; True when somebody should look now."""
        if "news" in line:
            return True
        if "xid" in line:
            self.xids.append(Xid(line["xid"], line.get("index")))
            return True
        if "ready" in line:
            self.ready, self.driver = line["ready"], line.get("driver", "")
        elif "failed" in line:
            self.failed = (line["failed"], line.get("text", ""))
        elif "without_events" in line:
            self.without_events = line["without_events"]
        elif "taken" in line:
            self._answers.taken = self._answers.taken or line["taken"] == self._look
        elif line.get("look") == self._look and isinstance(line.get("index"), int):
            self._answers.by_index[line["index"]] = line
        return False
