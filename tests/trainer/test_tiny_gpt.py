"""The demo job, for real: four ranks of PyTorch over gloo, broken and resumed bit for bit."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.trainer.kit import EXAMPLES, load_module
from tests.trainer.launching import ForkServer, Launched, free_port, start_fresh

faults = load_module(EXAMPLES / "faults.py")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 14
SMALL = ("--tiny", "--steps", str(STEPS), "--save-every", "3", "--collective-timeout-s", "60")
SCRIPT = "tiny_gpt/train.py"


@pytest.fixture(scope="module")
def uninterrupted(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> str:
    job = Launched(tmp_path_factory.mktemp("uninterrupted"), fork_server, SCRIPT, *SMALL)
    assert job.run() == [0, 0, 0, 0], job.tail()
    assert len(job.digest()) == 64
    digests = {job.log(rank).read_text().split("sha256 ")[1].strip() for rank in range(4)}
    assert digests == {job.digest()}, "the ranks have drifted apart"
    return job.digest()


def check_interrupted(job: Launched, uninterrupted: str, fired: dict[str, int]) -> None:
    """It has ended where an uninterrupted run ends, and computed no step in two ways."""
    assert job.digest() == uninterrupted
    assert faults.fired(job.faults) == fired
    results = job.computed()
    assert set(results) == {(rank, step) for rank in range(4) for step in range(STEPS)}
    assert {len(different) for different in results.values()} == {1}


@pytest.mark.parametrize(("kind", "rank", "step"), [("sigkill", 2, 7), ("exception", 0, 1)])
def test_broken_once_it_ends_bit_for_bit_where_it_would_have(
    fork_server: ForkServer, tmp_path: Path, uninterrupted: str, kind: str, rank: int, step: int
) -> None:
    job = Launched(tmp_path, fork_server, SCRIPT, *SMALL)
    faults.order(job.faults, kind, rank=rank, step=step)
    statuses = job.run()
    expected = -signal.SIGKILL if kind == "sigkill" else 1
    assert statuses[rank] == expected, job.tail()
    assert all(status != 0 for status in statuses)
    assert job.run_to_the_end() == 2
    resumed = step // 3 * 3 - 1
    log = job.log(1).read_text()
    assert (f"resumed after step {resumed}, because of reattempt" in log) is (resumed >= 0)
    check_interrupted(job, uninterrupted, {f"{kind}.rank{rank}.step{step}": 1})


def test_broken_again_and_again_it_still_ends_there(
    fork_server: ForkServer, tmp_path: Path, uninterrupted: str
) -> None:
    """Different faults, two of them in the same run, and one right after the resumption."""
    job = Launched(tmp_path, fork_server, SCRIPT, *SMALL, keep=1)
    orders = [("sigkill", 1, 4), ("exit0", 2, 4), ("sigkill", 3, 5), ("sigsegv", 0, 11)]
    for kind, rank, step in orders:
        faults.order(job.faults, kind, rank=rank, step=step)
    runs = job.run_to_the_end()
    assert 3 <= runs <= 5
    check_interrupted(
        job, uninterrupted, {f"{kind}.rank{rank}.step{step}": 1 for kind, rank, step in orders}
    )


def test_without_settling_ddp_the_bits_change(fork_server: ForkServer, tmp_path: Path) -> None:
    """If this fails, torch has changed and `settle_ddp` may not be needed: then measure again."""
    whole = Launched(tmp_path / "whole", fork_server, SCRIPT, *SMALL, "--no-settle")
    assert whole.run() == [0, 0, 0, 0], whole.tail()
    broken = Launched(tmp_path / "broken", fork_server, SCRIPT, *SMALL, "--no-settle")
    faults.order(broken.faults, "sigkill", rank=2, step=7)
    assert broken.run_to_the_end() == 2
    assert broken.digest() != whole.digest()


def test_a_nan_spoils_all_ranks_and_reaches_no_checkpoint(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    job = Launched(tmp_path, fork_server, SCRIPT, *SMALL)
    faults.order(job.faults, "nan", rank=1, step=7)
    job.run()
    assert {job.job.progress(rank)["nonfinite_step"] for rank in range(4)} == {7}
    assert job.newest() == "step-000000000005.g000001"
    assert faults.fired(job.faults) == {"nan.rank1.step7": 1}


def test_fresh_interpreters_compute_the_same_bits_as_forked_ones(
    tmp_path: Path, uninterrupted: str
) -> None:
    job = Launched(tmp_path, start_fresh, SCRIPT, *SMALL)
    assert job.run() == [0, 0, 0, 0], job.tail()
    assert job.digest() == uninterrupted
    text = job.log(0).read_text()
    assert text.startswith("step 0 loss ")
    assert "arning" not in text


def test_the_plain_script_resumes_from_its_own_checkpoints(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Nothing but torchrun's variables reaches it, and a fresh port each time."""
    script = EXAMPLES / "plain_torchrun_script" / "train.py"
    orders = tmp_path / "faults"
    faults.order(orders, "exception", rank=1, step=7)
    out, logs = tmp_path / "out.sha256", [tmp_path / "0.log", tmp_path / "1.log"]

    def run(name: str) -> list[int]:
        arguments = ["--tiny", "--steps", "10", "--checkpoint-dir", str(tmp_path / name)]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environs = [{"RANK": str(rank), "WORLD_SIZE": "2", **meeting} for rank in (0, 1)]
        for environ, log in zip(environs, logs, strict=True):
            log.unlink(missing_ok=True)
            if name == "broken":
                environ["JOB_FAULTS"] = str(orders)
            environ["TORCHELASTIC_ERROR_FILE"] = f"{log}.error.json"
        ranks = list(zip(environs, logs, strict=True))
        return fork_server(script, [*arguments, "--out", str(out)], ranks)

    assert run("broken") == [1, 1]
    assert "fault ordered" in (tmp_path / "1.log.error.json").read_text()
    assert run("broken") == [0, 0]
    assert "resumed after step 4\n" in logs[0].read_text()
    resumed = out.read_text()
    assert run("whole") == [0, 0]
    assert "resumed" not in logs[0].read_text()
    assert out.read_text() == resumed
    assert faults.fired(orders) == {"exception.rank1.step7": 1}
