"""What a training script talks to: one ``Session`` per process.

Not here: how a state becomes bytes (``_codec``, ``_parts``), and which files make a checkpoint
(``_store``).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep_trainer import _codec, _store
from everstep_trainer._environment import Environment, read_environment
from everstep_trainer._errors import SaveFailed, StaleGeneration
from everstep_trainer._progress import BLOCK_BYTES, ProgressBlock, map_block
from everstep_trainer._stacks import answer_by_signal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class SaveResult(NamedTuple):
    """What became of a save. It is true when this rank's part is safe."""

    ok: bool
    """This rank's part is on disk (or there is nothing to do, without Everstep)."""
    step: int
    complete: bool = False
    """Every rank's part was there too when this one was done, so the checkpoint counts."""
    path: str | None = None
    """The checkpoint's folder."""
    bytes: int = 0
    """Size of this rank's part."""
    seconds: float = 0.0
    error: str | None = None
    """Why not, in one line."""

    def __bool__(self) -> bool:
        return self.ok


class Session:
    """This process's connection to Everstep; without Everstep every method is a cheap no-op."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Use ``attach()``, which makes one session per process.

        Raises:
            BadEnvironment: Everstep's variables do not make sense.
        """
        self._environment: Environment = read_environment(environ)
        self._pid = os.getpid()
        self._sections: list[tuple[str, int, float]] = []
        self._warned: set[str] = set()
        self._block = self._open_block()
        self._report = self._block.report
        if self.active and not _is_helper_process():
            answer_by_signal(environ)
        self._store: _store.Store | None = None
        if self._environment.checkpoint_dir or self._environment.restore:
            self._store = _store.Store(self._environment)

    # ---- what this run is -------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True when Everstep started this process."""
        return self._environment.job_id is not None

    @property
    def job_id(self) -> str | None:
        """The job, or None without Everstep."""
        return self._environment.job_id

    @property
    def run_id(self) -> str | None:
        """This run of the job, or None without Everstep."""
        return self._environment.run_id

    @property
    def generation(self) -> int:
        """Number of this run: 1, 2, 3...; 0 without Everstep."""
        return self._environment.generation

    @property
    def start_reason(self) -> str | None:
        """Why this run started ("launch", "reattempt", "evict", "resume"...)."""
        return self._environment.start_reason

    @property
    def code_version(self) -> str | None:
        """The code version that this run runs."""
        return self._environment.code_version

    @property
    def restore_step(self) -> int | None:
        """Step of the checkpoint this run starts from; None when it starts from scratch."""
        return self._environment.restore.step if self._environment.restore else None

    @property
    def rank(self) -> int:
        """Global rank of this process (``RANK``; 0 when it is not set)."""
        return self._environment.rank

    @property
    def world_size(self) -> int:
        """Number of ranks (``WORLD_SIZE``; 1 when it is not set)."""
        return self._environment.world_size

    # ---- progress ---------------------------------------------------------------------------

    def step(self, step: int, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Report that step ``step`` is complete. Costs about a microsecond.

        Give plain floats: a tensor works too, but reading it from a GPU waits for the GPU.
        """
        self._report(step, loss, grad_norm)

    @contextlib.contextmanager
    def section(self, name: str, limit_s: float | None = None) -> Iterator[None]:
        """Declare that what follows is no training step, so its own limit holds, not the step's.

        Args:
            name: for people ("eval", "compile"...).
            limit_s: seconds after which it counts as hung; None: the policy's ``section_max``.
        """
        self._sections.append((name, time.monotonic_ns(), limit_s or 0.0))
        self._write_sections()
        try:
            yield
        finally:
            self._sections.pop()
            self._write_sections()

    # ---- checkpoints ------------------------------------------------------------------------

    def save(self, step: int, state: Any, *, must_succeed: bool = False) -> SaveResult:
        """Write this rank's part of the checkpoint after ``step``; returns when it is on disk.

        Call it on every rank with the same ``step``, after ``session.step(step, ...)``. The
        checkpoint counts once every rank's part is there; no rank waits for another. A step whose
        reported loss or gradient norm is not finite is not saved. When it cannot be written (disk
        full, quota, I/O error), older checkpoints stay as they are, one line says so, and training
        goes on.

        Args:
            step: the last completed step.
            state: any nest of dict, list, tuple, torch tensors, numpy arrays, numbers, str, bytes,
                bool and None. What this rank needs of it is this rank's choice.
            must_succeed: raise SaveFailed instead of going on.

        Raises:
            StaleGeneration: a newer run of the job exists; this one has to end.
            UnsupportedState: the state holds something that cannot be stored.
            SaveFailed: only with ``must_succeed``.
        """
        if not 0 <= step <= _store.STEP_MAX:
            raise ValueError(f"step must be between 0 and {_store.STEP_MAX}, not {step}")
        if not self.active:
            return SaveResult(ok=True, step=step)
        began = time.monotonic()
        with self.section("save"):
            result = self._save(step, state)
        result = result._replace(seconds=time.monotonic() - began)
        if must_succeed and not result.ok:
            raise SaveFailed(f"save of step {step} failed: {result.error}")
        return result

    def load(self, *, rank: int | None = None) -> tuple[int, Any] | None:
        """The step and state this run starts from, or None: it starts from scratch.

        Everything is verified before anything is returned. Which checkpoint it is was decided by
        the controller, so that all ranks start from the same one.

        Args:
            rank: whose part to read; None: this rank's own. State that is the same on all ranks
                may so be saved by one of them and loaded by all.

        Raises:
            CheckpointUnreadable: it is damaged or foreign (WorldSizeChanged: of another number of
                ranks).
            StaleGeneration: a newer run of the job exists; this one has to end.
        """
        restore = self._environment.restore
        if restore is None or self._store is None:
            return None
        with self.section("load"):
            state = self._store.load(self.rank if rank is None else rank)
        return restore.step, state

    # ---- called by the interpreter ----------------------------------------------------------

    def finish(self) -> None:
        """Called at the end of the interpreter: note that it came by itself."""
        if os.getpid() != self._pid or hasattr(sys, "last_type"):
            return  # a forked child, or an exception has ended the script
        if self._store is not None:
            with contextlib.suppress(OSError, ValueError, StaleGeneration):
                newest = self._store.complete_pending()
                if newest >= 0:
                    self._block.write_committed(newest)
        self._block.write_finished()

    def leave_to_parent(self) -> None:
        """Called in a forked child (a data loader's worker, say): only the parent reports."""
        self._block.detach()

    # ---- inside -----------------------------------------------------------------------------

    def _save(self, step: int, state: Any) -> SaveResult:
        store = self._store
        if store is None or not self._environment.checkpoint_dir:
            self._warn("EVERSTEP_CHECKPOINT_DIR is not set: nothing is saved")
            return SaveResult(ok=False, step=step, error="EVERSTEP_CHECKPOINT_DIR is not set")
        if step in self._block.nonfinite_steps or not self._block.last_is_finite:
            error = "its reported loss or gradient norm is not finite"
            self._warn(f"step {step} is not saved: {error}", once_per="nonfinite")
            return SaveResult(ok=False, step=step, error=error)
        encoded = _codec.encode(state)
        path = str(store.folder(step))
        try:
            newest = store.complete_pending()
            size = store.write(step, encoded)
            complete = store.complete(step)
        except (OSError, ValueError) as error:
            return self._failed(step, _describe(error))
        newest = max(newest, step if complete else -1)
        if newest >= 0:
            self._block.write_committed(newest)
        self._warned -= {"save", "nonfinite"}  # the next failure is news again
        if self.rank == 0:
            self._prune(store)
        return SaveResult(ok=True, step=step, complete=complete, path=path, bytes=size)

    def _failed(self, step: int, error: str) -> SaveResult:
        self._block.write_failed_save(step, error)
        self._warn(
            f"save of step {step} failed: {error}; older checkpoints are intact, training goes on",
            once_per="save",
        )
        return SaveResult(ok=False, step=step, error=error)

    def _prune(self, store: _store.Store) -> None:
        try:
            store.prune()
        except (OSError, ValueError) as error:
            self._warn(f"old checkpoints were not removed: {_describe(error)}", once_per="prune")

    def _open_block(self) -> ProgressBlock:
        path = self._environment.progress_file
        if path is not None and not _is_helper_process():
            try:
                return ProgressBlock(map_block(path), self._environment.generation)
            except (OSError, ValueError) as error:
                # Training matters more than watching it.
                self._warn(f"progress is not reported: {_describe(error)}")
        return ProgressBlock(bytearray(BLOCK_BYTES), self._environment.generation)

    def _write_sections(self) -> None:
        if self._sections:
            name, entered_ns, limit_s = self._sections[-1]
        else:
            name, entered_ns, limit_s = "", time.monotonic_ns(), 0.0
        self._block.write_section(len(self._sections), entered_ns, limit_s, name)

    def _warn(self, message: str, once_per: str | None = None) -> None:
        key = once_per or message
        if key not in self._warned:
            self._warned.add(key)
            sys.stderr.write(f"everstep_trainer: rank {self.rank}: {message}\n")
            sys.stderr.flush()


def _is_helper_process() -> bool:
    """True in a process that a rank has made with ``multiprocessing``, by whatever method.

    A data loader's worker that is spawned imports the script anew, and so may attach. While it does
    so ``parent_process()`` is still None, but the name is there.
    """
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.current_process().name != "MainProcess"


def _describe(error: Exception) -> str:
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    name = errno.errorcode.get(error.errno, str(error.errno))
    place = f" while writing {error.filename}" if error.filename else ""
    return f"{error.strerror} ({name}){place}"


_session: Session | None = None


def attach() -> Session:
    """The session of this process; the first call reads the environment and makes it.

    Raises:
        BadEnvironment: Everstep's variables do not make sense.
    """
    global _session  # noqa: PLW0603 - one rank is one process: that is what the state is about
    if _session is None:
        session = Session(os.environ)
        if session.active:
            atexit.register(session.finish)
            os.register_at_fork(after_in_child=session.leave_to_parent)
        _session = session
    return _session


def save(step: int, state: Any) -> SaveResult:
    """``attach().save(step, state)``."""
    return attach().save(step, state)


def load() -> tuple[int, Any] | None:
    """``attach().load()``."""
    return attach().load()
