"""What may start, on which port, in which environment, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.decide.words import LogClass
from everstep.machine import shim
from everstep.machine.guard import Refusal
from everstep.machine.launch import StateUnusable
from everstep.machine.runs import RunManager
from everstep.spec.agent_api import ErrorCode, EventKind, RestorePointPlan
from tests.process.runs_world import Machine, is_alive, plan, rank_report, until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT PROVED HERE: needs root")

DUMP = """
import json
with open(f"env-{rank}.new", "w") as file:
    json.dump(dict(os.environ), file)
os.rename(f"env-{rank}.new", f"env-{rank}")
"""


def environment(machine: Machine, rank: int) -> dict[str, str]:
    env: dict[str, str] = json.loads((machine.folder() / "work" / f"env-{rank}").read_text())
    return env


def names(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# --- generations --------------------------------------------------------------------------------


async def refused(machine: Machine, generation: int) -> str:
    with pytest.raises(Refusal) as caught:
        await machine.start("print('must not run')", generation=generation)
    assert caught.value.code is ErrorCode.OLDER_GENERATION
    return caught.value.message


async def test_a_generation_that_was_stopped_before_it_came_never_starts(
    machine: Machine,
) -> None:
    report = await machine.stop(generation=3)
    assert report.ranks == ()
    assert report.teardown_clean
    assert report.reachable
    assert "stopped" in await refused(machine, 3)
    await refused(machine, 2)
    await machine.restart()
    await refused(machine, 3)
    with pytest.raises(Refusal):
        await machine.manager.prepare("job", 3)
    await machine.start("print('fine')", generation=4)
    ended = await machine.event(EventKind.RUN_ENDED)
    assert ended.generation == 4


async def test_a_newer_generation_ends_the_older_one_first(machine: Machine) -> None:
    old = await machine.start("mark('ready'); time.sleep(600)", generation=1)
    await machine.marked("ready")
    await machine.start("time.sleep(600)", generation=2)
    assert not is_alive(old[0])
    assert machine.manager.live_jobs() == {"job": 2}
    await refused(machine, 1)


async def test_an_older_generation_is_ended_on_demand(machine: Machine) -> None:
    old = await machine.start("mark('ready'); time.sleep(600)", generation=4)
    await machine.marked("ready", generation=4)
    await machine.manager.stop_older("job", 4)
    assert is_alive(old[0]), "the generation itself is not older"
    await machine.manager.stop_older("other-job", 9)
    assert is_alive(old[0])
    await machine.manager.stop_older("job", 5)
    assert not is_alive(old[0])
    await refused(machine, 4)


async def test_starting_the_same_run_twice_starts_it_once(machine: Machine) -> None:
    made = plan("mark(f'ran-{os.getpid()}'); time.sleep(600)", ranks=2)
    first, second = await asyncio.gather(*(machine.manager.start("job", 1, made) for _ in range(2)))
    assert first == second
    await until(lambda: len(list((machine.folder() / "work").glob("ran-*"))) == 2, "both run")
    await machine.event(EventKind.RUN_STARTED)
    with pytest.raises(Refusal):
        await machine.manager.start("job", 1, plan("", run_id="another"))


async def test_a_stop_in_the_middle_of_a_start_ends_what_was_started(machine: Machine) -> None:
    start = asyncio.create_task(machine.start("time.sleep(600)", ranks=2))
    await asyncio.sleep(0)
    await machine.stop()
    results = await asyncio.gather(start, return_exceptions=True)
    assert isinstance(results[0], (dict, Refusal))
    assert machine.manager.live_jobs() == {}


async def test_a_start_whose_caller_goes_away_is_finished(machine: Machine) -> None:
    start = asyncio.create_task(machine.start("time.sleep(600)"))
    await asyncio.sleep(0.001)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await until(lambda: machine.manager.live_jobs() == {"job": 1}, "the run is there")


async def test_only_the_newest_folders_are_kept_and_never_a_live_one(machine: Machine) -> None:
    for generation in (1, 2, 3, 4):
        await machine.start("pass", generation=generation, limits={"runs_kept_max": 2})
        await until(lambda: len(machine.of(EventKind.RUN_ENDED)) == generation, "it ends")  # noqa: B023 - awaited within its iteration
    kept = {p.name for p in (machine.state_dir / "runs" / "job").iterdir() if p.is_dir()}
    assert kept == {"3", "4"}
    assert machine.manager.state("job", 1) is None
    assert machine.manager.log_path("job", 1, 0) is None
    log = machine.manager.log_path("job", 4, 0)
    assert log is not None
    assert log.is_file()
    assert machine.manager.log_path("job", 4, 1) is None, "no such rank here"


# --- ports --------------------------------------------------------------------------------------


async def test_ports_are_fresh_and_free_also_for_the_next_agent(machine: Machine) -> None:
    ports = [await machine.manager.prepare("job", 1) for _ in range(100)]
    await machine.restart()
    ports += [await machine.manager.prepare("job", 1) for _ in range(100)]
    assert len(set(ports)) == 200
    with socket.create_server(("127.0.0.1", ports[-1])):
        pass


# --- what a rank sees ---------------------------------------------------------------------------


async def test_a_rank_sees_what_torchrun_would_set_and_what_everstep_adds(
    machine: Machine,
) -> None:
    await machine.start(
        DUMP,
        ranks=2,
        generation=1,
        machines=3,
        group_rank=2,
        run_id="job-run-7",
        start_reason="evict",
        env={"MINE": "yes", "PYTHONPATH": "/somewhere"},
        restore=RestorePointPlan(step=40, generation=2, path="/ckpt/step-40"),
        checkpoint_dir="/ckpt",
        checkpoint_keep=5,
    )
    await machine.event(EventKind.RUN_ENDED)
    env = environment(machine, 5)
    folder = machine.folder()
    expected = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29999",
        "RANK": "5",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "5",
        "ROLE_WORLD_SIZE": "6",
        "ROLE_NAME": "default",
        "NODE_RANK": "2",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "job-run-7",
        "TORCHELASTIC_ERROR_FILE": str(folder / "error" / "rank-5.json"),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "EVERSTEP_JOB_ID": "job",
        "EVERSTEP_RUN_ID": "job-run-7",
        "EVERSTEP_GENERATION": "1",
        "EVERSTEP_START_REASON": "evict",
        "EVERSTEP_CODE_VERSION": "v1",
        "EVERSTEP_RESTORE_STEP": "40",
        "EVERSTEP_RESTORE_GENERATION": "2",
        "EVERSTEP_RESTORE_PATH": "/ckpt/step-40",
        "EVERSTEP_CHECKPOINT_DIR": "/ckpt",
        "EVERSTEP_CHECKPOINT_KEEP": "5",
        "EVERSTEP_PROGRESS_FILE": str(folder / "progress" / "rank-5.bin"),
        "EVERSTEP_MACHINE_ID": "m1",
        "MINE": "yes",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    assert {name: env.get(name) for name in expected} == expected
    assert int(env["TORCHELASTIC_MAX_RESTARTS"]) > 0
    assert env["EVERSTEP_RUN_MARK"] == environment(machine, 4)["EVERSTEP_RUN_MARK"]
    first, second = env["PYTHONPATH"].split(os.pathsep)
    assert second == "/somewhere"
    assert names(first) == ["everstep_trainer"], "nothing else of ours on the ranks' path"


async def test_a_rank_sees_nothing_of_the_agents_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERSTEP_SECRETS_DIR", "/secret")
    monkeypatch.setenv("EVERSTEP_CONFIG", "/etc/x")
    monkeypatch.setenv("TEMPORAL_API_KEY", "sesame")
    monkeypatch.setenv("PYTHONPATH", "/agents/own")
    monkeypatch.setenv("SOMEBODY_ELSES", "stays")
    await machine.start(DUMP)
    await machine.event(EventKind.RUN_ENDED)
    env = environment(machine, 0)
    assert not {"EVERSTEP_SECRETS_DIR", "EVERSTEP_CONFIG", "TEMPORAL_API_KEY"} & set(env)
    assert "/agents/own" not in env["PYTHONPATH"]
    assert env["SOMEBODY_ELSES"] == "stays"
    assert not {k for k in env if k.startswith("EVERSTEP_RESTORE")}, "it starts from scratch"
    assert "EVERSTEP_CHECKPOINT_DIR" not in env


async def test_a_rank_runs_where_the_plan_says(machine: Machine, tmp_path: Path) -> None:
    code, working = tmp_path / "code", tmp_path / "working"
    code.mkdir()
    working.mkdir()
    await machine.start("mark('here')", code_path=str(code))
    await machine.event(EventKind.RUN_ENDED)
    assert (code / "here").exists()
    await machine.start("mark('here')", generation=2, code_path=str(code), working_dir=str(working))
    await until(lambda: machine.state(2).ended, "it ends")
    assert (working / "here").exists()


async def test_a_rank_starts_like_a_program_in_a_shell(machine: Machine) -> None:
    await machine.start(
        """
        assert os.getsid(0) == os.getpid() == os.getpgid(0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert sorted(os.listdir("/proc/self/fd")) == ["0", "1", "2", "3"]  # 3: the listing itself
        assert sys.stdin.read() == ""
        ignored = next(x for x in open("/proc/self/status") if x.startswith("SigIgn"))
        # Python itself ignores SIGPIPE and SIGXFSZ when it starts. Signals 32 and 33 are the C
        # library's own: nobody can set them back, and some programs' parents leave them ignored.
        assert int(ignored.split()[1], 16) & ~(1 << 12 | 1 << 24 | 1 << 31 | 1 << 32) == 0, ignored
        print("to stdout")
        print("to stderr", file=sys.stderr)
        """
    )
    await machine.event(EventKind.RUN_ENDED)
    log = machine.manager.log_path("job", 1, 0)
    assert log is not None
    assert machine.state().succeeded, log.read_text()
    assert log.read_text().splitlines() == ["to stdout", "to stderr"]


async def test_the_error_file_of_torch_is_read_when_the_log_says_nothing(
    machine: Machine,
) -> None:
    await machine.start(
        """
        import json
        stack = "Traceback (most recent call last):\\n  File x\\nValueError: from the error file"
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": {"message": "m", "extraInfo": {"py_callstack": stack}}}, file)
        os._exit(1)
        """
    )
    event = await machine.event(EventKind.RANK_EXITED)
    assert event.data["log_class"] == LogClass.PYTHON_EXCEPTION
    assert "from the error file" in " ".join(event.data["log_lines"])


@needs_root
@pytest.mark.root
async def test_ranks_run_as_another_user(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & stat.S_IXOTH == 0:
            folder.chmod(folder.stat().st_mode | stat.S_IXOTH)  # nobody has to get in
    machine = Machine(tmp_path / "state")
    machine.manager = machine.new_manager(rank_user="nobody")
    try:
        await machine.manager.adopt()
        script = (
            'id -u; id -G; echo "home $HOME"; touch "$TORCHELASTIC_ERROR_FILE" here; '
            f'printf x | dd of="$EVERSTEP_PROGRESS_FILE" conv=notrunc 2>/dev/null && echo wrote; '
            f"cat {machine.state_dir}/runs/job/1/plan.json || echo refused"
        )
        await machine.start("", command=("/bin/sh", "-c", script))
        await machine.event(EventKind.RUN_ENDED)
        nobody = pwd.getpwnam("nobody")
        log = (machine.folder() / "rank-0.log").read_text().splitlines()
        assert log[0] == str(nobody.pw_uid)
        assert log[1].split() == [str(nobody.pw_gid)]
        assert log[2] == f"home {nobody.pw_dir}"
        assert "wrote" in log
        assert log[-1] == "refused", "a plan may hold secrets of the job's owner"
        assert (machine.folder() / "work" / "here").stat().st_uid == nobody.pw_uid
    finally:
        await machine.end()


def test_unusable_state_and_users_are_one_clear_line(tmp_path: Path) -> None:
    def manager(path: Path, user: str | None = None) -> None:
        RunManager(state_dir=path, machine_id="m", emit=lambda *_, **__: None, rank_user=user)

    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StateUnusable, match=str(file)):
        manager(file)
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "runs").write_text("")
    with pytest.raises(StateUnusable, match="runs"):
        manager(tmp_path / "state")
    with pytest.raises(StateUnusable, match="no-such-user"):
        manager(tmp_path / "other", "no-such-user")


async def test_a_job_name_that_is_a_path_is_refused(machine: Machine) -> None:
    for name in ("../up", "a/b", "", ".", "x" * 100):
        with pytest.raises(Refusal):
            await machine.manager.start(name, 1, plan("mark('x')"))
        await machine.manager.stop(name, 1, reason="", grace_s=0, kill_wait_s=1, planned=False)
    assert names(machine.state_dir / "runs") == []
    assert not (machine.state_dir / "up").exists()


# --- a full disk --------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def fill(folder: Path) -> None:
    with (folder / "ballast").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError:
                return


@needs_root
@pytest.mark.root
async def test_a_full_disk_is_a_clear_refusal_and_leaves_nothing(small_disk: Path) -> None:
    machine = Machine(small_disk / "state")
    try:
        await machine.manager.adopt()
        fill(small_disk)
        with pytest.raises(Refusal, match="No space left on device") as caught:
            await machine.start("print('x')")
        assert caught.value.code is ErrorCode.FAILED
        assert "\n" not in caught.value.message
        assert machine.manager.live_jobs() == {}
        assert not machine.folder().exists()
        await machine.stop(generation=2)  # its memory may not be on disk: it still holds
        await refused(machine, 2)
        (small_disk / "ballast").unlink()
        await machine.start("print('x')", generation=3)
        assert (await machine.event(EventKind.RUN_ENDED)).data["succeeded"]
    finally:
        await machine.end()


@needs_root
@pytest.mark.root
async def test_a_disk_that_fills_up_stops_neither_ranks_nor_records(small_disk: Path) -> None:
    machine = Machine(small_disk / "state")
    try:
        await machine.manager.adopt()
        await machine.start(
            """
            import everstep_trainer
            session = everstep_trainer.attach()
            mark("ready")
            signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3 if rank else 600))
            for step in range(10**9):
                session.step(step)
                time.sleep(0.02)
            """,
            ranks=2,
            limits={"settle_window_s": 0.1},
        )
        await machine.marked("ready")
        fill(small_disk)
        await machine.event(EventKind.FIRST_STEP)
        await machine.restart()
        await machine.event(EventKind.RUN_ADOPTED)
        step = machine.manager.summaries()[0].step or 0
        await until(lambda: (machine.manager.summaries()[0].step or 0) > step, "training goes on")
        os.kill(machine.state().pids[1], 10)
        event = await machine.event(EventKind.RANK_EXITED, 1)
        assert event.data["exit_code"] == 3
        assert event.data["log_class"] == LogClass.DISK_FULL, "it could not write down more"
        await machine.event(EventKind.RUN_ENDED)
        await machine.restart()
        report = await machine.stop()
        assert [r.stopped_by_us for r in report.ranks] == [True, False]
        assert rank_report(report, 1).exit_code == 3
        assert report.teardown_clean
        assert len(machine.of(EventKind.RANK_EXITED)) == 1
    finally:
        await machine.end()


# --- the shim -----------------------------------------------------------------------------------


def test_the_shim_needs_nothing_but_the_standard_library() -> None:
    program = (
        "import sys, runpy; sys.argv = ['shim'];\n"
        f"try: runpy.run_path({shim.__file__!r}, run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 2\n"
        "outside = [m for m in sys.modules if m.partition('.')[0] in "
        "('everstep', 'pydantic', 'temporalio', 'asyncio', 'site')]\n"
        "assert not outside, outside"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_shim_from_the_package_is_light_too() -> None:
    program = (
        "import sys, everstep.machine.shim\n"
        "heavy = {'pydantic', 'temporalio', 'structlog', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr


def test_a_shim_without_a_run_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", shim.__file__, "/no/such/folder"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "folder of a run" in done.stderr
