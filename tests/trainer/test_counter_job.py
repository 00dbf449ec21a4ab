"""The job of the crash sweeps: deterministic, quick to start, and as fragile as a real one."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

import psutil
import pytest

from tests.trainer.kit import EXAMPLES, load_module, run_python
from tests.trainer.launching import Launched, free_port, start_fresh

faults = load_module(EXAMPLES / "faults.py")
STEPS = 12
QUICK = ("--steps", str(STEPS), "--step-ms", "1")


def launched(root: Path, *arguments: str, world_size: int = 3) -> Launched:
    return Launched(
        root, start_fresh, "counter_job/train.py", *QUICK, *arguments, world_size=world_size
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = launched(tmp_path_factory.mktemp("uninterrupted"))
    assert job.run() == [0, 0, 0], job.tail()
    assert job.log(1).read_text().splitlines()[1].startswith("step 0 loss 0.")
    return job.digest()


def test_its_result_depends_on_seed_steps_and_ranks_only(
    tmp_path: Path, uninterrupted: str
) -> None:
    again = launched(tmp_path / "again")
    again.run()
    assert again.digest() == uninterrupted
    for name, more, ranks in (("seed", ("--seed", "2"), 3), ("wider", (), 4)):
        other = launched(tmp_path / name, *more, world_size=ranks)
        other.run()
        assert other.digest() != uninterrupted


@pytest.mark.parametrize(
    ("kind", "rank", "expected"),
    [
        ("sigkill", 2, -signal.SIGKILL),
        ("sigkill", 0, -signal.SIGKILL),
        ("sigsegv", 1, -signal.SIGSEGV),
        ("exception", 1, 1),
        ("exit0", 2, 0),
        ("exit7", 0, 7),
    ],
)
def test_broken_anywhere_it_ends_with_the_same_hash(
    tmp_path: Path, uninterrupted: str, kind: str, rank: int, expected: int
) -> None:
    job = launched(tmp_path)
    faults.order(job.faults, kind, rank=rank, step=5)
    statuses = job.run()
    assert statuses[rank] == expected
    witnesses = [r for r in range(3) if r != rank]
    for witness in witnesses:
        assert statuses[witness] == 1
        last = job.log(witness).read_text().splitlines()[-1]
        assert last.startswith(
            ("RuntimeError: Connection closed by peer [", "RuntimeError: Read error [")
        ), last
    assert not job.out.exists()
    assert job.run_to_the_end() == 2
    assert job.digest() == uninterrupted
    assert faults.fired(job.faults) == {f"{kind}.rank{rank}.step5": 1}
    results = job.computed()
    assert set(results) == {(r, step) for r in range(3) for step in range(STEPS)}
    assert {len(different) for different in results.values()} == {1}
    # The step before the fault was saved by all, so no step that was done is done again.
    assert "from step 5," in job.log(1).read_text()


def test_a_rank_that_stands_still_makes_the_others_time_out(tmp_path: Path) -> None:
    job = launched(tmp_path, "--timeout-s", "1")
    faults.order(job.faults, "sigstop", rank=1, step=3)

    def both_gave_up() -> bool:
        logs = [job.log(rank) for rank in (0, 2)]
        return all(log.exists() and "RuntimeError" in log.read_text() for log in logs)

    def kill_the_frozen_one() -> None:
        # As an agent would, when the others are gone.
        while not stopped.wait(0.05):
            for process in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.status() == psutil.STATUS_STOPPED and both_gave_up():
                        process.kill()

    stopped = threading.Event()
    agent = threading.Thread(target=kill_the_frozen_one)
    agent.start()
    try:
        assert job.run() == [1, -signal.SIGKILL, 1]
    finally:
        stopped.set()
        agent.join()
    text = job.log(0).read_text()
    assert "RuntimeError: Timed out waiting 1000ms for recv operation to complete" in text
    assert faults.fired(job.faults) == {"sigstop.rank1.step3": 1}


def test_a_nan_is_reported_and_never_saved(tmp_path: Path) -> None:
    job = launched(tmp_path)
    faults.order(job.faults, "nan", rank=1, step=4)
    assert job.run() == [0, 0, 0]
    assert job.job.progress(1)["nonfinite_step"] == 4
    assert job.job.progress(0)["nonfinite_step"] == -1
    lines = [line for line in job.log(1).read_text().splitlines() if "not saved" in line]
    assert len(lines) == 1
    assert "step-000000000004.g000001/COMPLETE.json" not in job.job.files()


def test_a_fault_for_ever_fires_in_every_run(tmp_path: Path) -> None:
    job = launched(tmp_path)
    faults.order(job.faults, "exception", rank=0, step=3, always=True)
    for _ in range(3):
        assert job.run()[0] == 1
    assert faults.fired(job.faults) == {"always.exception.rank0.step3": 3}


def test_it_imports_nothing_that_takes_long() -> None:
    done = run_python(
        "-X", "importtime", str(EXAMPLES / "counter_job" / "train.py"), "--steps", "1", env={}
    )
    assert done.returncode == 0, done.stderr
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()
    }
    assert {"everstep_trainer", "faults", "socket"} <= imported
    assert not imported & {"torch", "numpy", "asyncio", "multiprocessing", "inspect", "ctypes"}


def test_rank_0_does_not_let_strangers_in(tmp_path: Path) -> None:
    """A rank of an older run that comes back to the same port is turned away."""
    port = free_port()
    module = load_module(EXAMPLES / "counter_job" / "train.py")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in address.items():
            patch.setenv(name, value)
        gathered: dict[int, list[bytes]] = {}
        failures: list[str] = []

        def member(rank: int) -> None:
            ring = module.Ring(rank, 2, 5.0)
            gathered[rank] = ring.all_gather(bytes([rank]) * 32)
            ring.close()

        hub = threading.Thread(target=member, args=(0,))
        hub.start()
        stranger = module._join(("127.0.0.1", port), module._HELLO.pack(b"other run", 1), 5.0, 5.0)
        try:
            module._receive(stranger, 1)
        except RuntimeError as error:
            failures.append(str(error))
        stranger.close()
        member(1)
        hub.join()
    assert len(failures) == 1
    assert gathered[0] == gathered[1] == [b"\0" * 32, b"\1" * 32]
