"""Fences and slot files: what they keep over a restart, damage, and a disk without room."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from everstep.machine.fences import Fence, Fences
from everstep.machine.slots import SlotFile, SlotShape

SMALL = SlotShape(kind=b"everstep-fences", slots=4, slot_bytes=256)


def test_fences_survive_a_restart(tmp_path: Path) -> None:
    fences = Fences(tmp_path / "fences", SMALL)
    assert fences.saw("job", 3)
    assert fences.allow_from("job", 5)
    fences.close()

    again = Fences(tmp_path / "fences", SMALL)

    assert again.fence("job") == Fence(highest_seen=3, lowest_allowed=5)
    assert again.older("job", 4) == 5
    assert again.older("job", 5) is None
    assert again.older("other", 1) is None


def test_the_last_run_may_still_be_stopped_after_the_job_was_fenced(tmp_path: Path) -> None:
    fences = Fences(tmp_path / "fences", SMALL)
    fences.saw("job", 3)
    fences.allow_from("job", 4)

    assert fences.older("job", 3) == 4
    assert fences.older("job", 3, stopping=True) is None
    assert fences.older("job", 2, stopping=True) == 3


@given(st.lists(st.tuples(st.sampled_from(["saw", "allow"]), st.integers(1, 50)), max_size=30))
def test_fences_only_rise(tmp_path_factory: object, steps: list[tuple[str, int]]) -> None:
    folder = tmp_path_factory.mktemp("fences")  # type: ignore[attr-defined]
    fences = Fences(folder / "fences", SMALL)
    seen = allowed = 0
    for what, generation in steps:
        if what == "saw":
            fences.saw("job", generation)
            seen = max(seen, generation)
        else:
            fences.allow_from("job", generation)
            allowed = max(allowed, generation)
        assert fences.fence("job") == Fence(seen, allowed)
    fences.close()
    assert Fences(folder / "fences", SMALL).fence("job") == Fence(seen, allowed)
    (folder / "fences").unlink()


def test_a_full_file_drops_the_job_not_heard_of_longest(tmp_path: Path) -> None:
    fences = Fences(tmp_path / "fences", SMALL)
    for number in range(1, 5):
        fences.saw(f"job-{number}", number)
    fences.saw("job-1", 10)
    fences.saw("job-5", 5)
    fences.close()

    again = Fences(tmp_path / "fences", SMALL)

    assert again.fence("job-2") == Fence()
    assert again.fence("job-1") == Fence(highest_seen=10)
    assert again.fence("job-5") == Fence(highest_seen=5)


def test_a_damaged_fence_file_loses_only_what_was_damaged(tmp_path: Path) -> None:
    path = tmp_path / "fences"
    fences = Fences(path, SMALL)
    fences.saw("job-a", 4)
    fences.saw("job-b", 6)
    fences.close()
    with path.open("r+b") as file:
        file.seek(4096 + 12)
        file.write(b"\xff\xff")

    again = Fences(path, SMALL)

    assert again.fence("job-a") == Fence()
    assert again.fence("job-b") == Fence(highest_seen=6)


def test_no_room_at_the_start_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk; it needs a process of its own."""
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from pathlib import Path\n"
        "from everstep.machine.ring import EventRing\n"
        "from everstep.spec.agent_api import EventKind\n"
        "ring = EventRing(Path(sys.argv[1]))\n"
        "ring.emit(EventKind.AGENT_STARTED)\n"
        "print(ring.problem, len(ring.read(0).events), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "ring")],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)),
    )

    assert done.stdout.splitlines()[-1].endswith("File too large 1")


def test_a_write_that_fails_is_told_and_a_later_one_heals(tmp_path: Path) -> None:
    shape = SlotShape(kind=b"k", slots=2, slot_bytes=64)
    file = SlotFile(tmp_path / "f", shape, keep_over_reboot=True)
    descriptor = file._descriptor
    file._descriptor = 10_000_000

    assert not file.write(0, b"lost", sync=False)
    problems = [file.problem]

    file._descriptor = descriptor
    assert file.write(0, b"kept", sync=True)
    problems.append(file.problem)
    assert problems == [f"{tmp_path / 'f'}: Bad file descriptor", None]
    assert not file.write(1, b"x" * 100, sync=False)
    file.close()
    assert list(SlotFile(tmp_path / "f", shape, keep_over_reboot=True).entries()) == [(0, b"kept")]
