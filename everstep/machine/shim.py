"""The shim: one tiny process per run and machine that is the parent of the run's ranks.

Ranks must outlive the agent, and somebody must be their parent to learn their exit codes: that is
all the shim is for. It starts each rank in a session of its own, adopts what ranks leave behind
(it is a child subreaper), writes down exit code, signal and time of each rank, and ends when no
descendant is left. It decides nothing, reads no network and never ends a rank.

It is started by file name under ``python -I -S``, so it imports the standard library and nothing
of Everstep. Its records go into files that the agent filled to their full size beforehand: a disk
that becomes full later cannot stop them.

Not here: what the records mean (``everstep.machine.run``), the ranks' environment
(``everstep.machine.ranks``), and ending ranks (``everstep.machine.teardown``).
"""

# pathlib and contextlib would double the start time of every run.
# ruff: noqa: PTH112, PTH123, SIM105

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

LAUNCH_FILE = "launch.json"
SHIM_FILE = "shim.json"
RANKS_FILE = "ranks.jsonl"
EXITS_FILE = "exits.jsonl"

EXIT_CANNOT_START = 127
EXIT_NOT_PERMITTED = 126

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_STANDARD_ERROR = 2


class Records:
    """JSON lines written into a file that already has its full size (newlines to begin with)."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._offset = 0

    def append(self, record: dict[str, Any]) -> None:
        """Write one record; a failing disk must not end the shim, so errors are dropped."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            self._offset += os.pwrite(self._fd, line, self._offset)
        except OSError:
            pass  # nobody to tell: the agent sees the exit through its pidfd and reports "unknown"

    def sync(self) -> None:
        """Bring the records to the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError:
            pass  # as above


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: with the pid it names it for ever."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def boot_id() -> str:
    """Id of this boot of the kernel; pids and start times mean nothing beyond it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _become_subreaper() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(_PR_SET_NAME, b"everstep-shim", 0, 0, 0)


def _become_rank(
    rank: dict[str, Any], common_env: dict[str, str], user: dict[str, Any] | None
) -> None:
    """In the child: session, output, signals, user, directory, program. Returns only by raising."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    try:
        output = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        output = os.open(os.devnull, os.O_WRONLY)  # training goes on without a log
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, max(nothing, output) + 1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)  # Python ignores SIGPIPE, we ignore three more
        except OSError:
            continue  # reserved by the C library
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if user is not None:
        os.initgroups(user["name"], user["gid"])
        os.setgid(user["gid"])
        os.setuid(user["uid"])
    os.chdir(rank["cwd"])
    argv = rank["argv"]
    os.execvpe(argv[0], argv, {**common_env, **rank["env"]})  # noqa: S606 - a list, never a shell


def _start_rank(
    rank: dict[str, Any], common_env: dict[str, str], user: dict[str, Any] | None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = EXIT_CANNOT_START
    try:
        _become_rank(rank, common_env, user)
    except BaseException as error:  # noqa: BLE001 - the child must never run the parent's code
        if isinstance(error, PermissionError):
            status = EXIT_NOT_PERMITTED
        line = f"everstep: cannot start {rank['argv'][0]!r} in {rank['cwd']}: {error}\n"
        try:
            os.write(_STANDARD_ERROR, line.encode(errors="replace"))
        except OSError:
            pass  # the exit status still says it
    finally:
        os._exit(status)


def _exit_record(info: Any, rank: int, now_ns: int) -> dict[str, Any]:
    by_signal = info.si_code != os.CLD_EXITED
    return {
        "rank": rank,
        "pid": info.si_pid,
        "code": None if by_signal else info.si_status,
        "signal": info.si_status if by_signal else None,
        "at_ns": now_ns,
    }


def _record_exits(ranks: dict[int, int], exits: Records) -> None:
    """Wait for children until none is left, ranks and adopted orphans alike."""
    while True:
        try:
            info = os.waitid(os.P_ALL, 0, os.WEXITED)
            while info is not None:
                now_ns = time.monotonic_ns()
                rank = ranks.pop(info.si_pid, None)
                if rank is not None:
                    exits.append(_exit_record(info, rank, now_ns))
                info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            exits.sync()
            return
        exits.sync()


def _run(run_dir: str, answer: int) -> None:
    """Be the shim: start the ranks, tell the starter, stay until all descendants have ended."""
    os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for others; only SIGKILL ends a shim early
    _become_subreaper()
    os.chdir(run_dir)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)  # the starter reads its pipe to the end: let go of it
    with open(LAUNCH_FILE, encoding="utf-8") as file:
        launch = json.load(file)
    shim = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": boot_id()}
    Records(SHIM_FILE).append(shim)
    exits = Records(EXITS_FILE)
    starts = Records(RANKS_FILE)
    ranks: dict[int, int] = {}
    started = []
    for rank in launch["ranks"]:
        now_ns = time.monotonic_ns()
        pid = _start_rank(rank, launch["env"], launch["user"])
        ranks[pid] = rank["rank"]
        record = {
            "rank": rank["rank"],
            "pid": pid,
            "start_ticks": start_ticks(pid),
            "started_ns": now_ns,
        }
        starts.append(record)
        started.append(record)
    os.write(answer, json.dumps({"shim": shim, "ranks": started}).encode())
    os.close(answer)
    _record_exits(ranks, exits)


def main(argv: list[str]) -> NoReturn:
    """Fork the shim proper, pass its answer on to standard output, and end.

    The starter's child ends at once, so the shim belongs to init and not to the agent.
    """
    if len(argv) != 2 or not os.path.isdir(argv[1]):
        sys.stderr.write("everstep shim: takes one argument, the folder of a run\n")
        sys.exit(2)
    reader, writer = os.pipe()
    if os.fork() == 0:
        status = 1
        try:
            os.close(reader)
            _run(argv[1], writer)
            status = 0
        except BaseException as error:  # noqa: BLE001 - the last place that can say why
            line = f"everstep shim: {type(error).__name__}: {error}"
            try:
                os.write(writer, json.dumps({"error": line[:500]}).encode())
            except OSError:
                pass  # the starter is gone, or already has its answer
        finally:
            os._exit(status)
    os.close(writer)
    parts = []
    while part := os.read(reader, 65536):
        parts.append(part)
    os.write(1, b"".join(parts) or b'{"error":"everstep shim: ended without an answer"}')
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv)
