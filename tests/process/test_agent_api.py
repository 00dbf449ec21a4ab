"""A real agent with real processes: commands, streams, restarts, registration, endings."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from everstep.decide.stack_report import ProcessRole, ranks_of
from everstep.machine.client import (
    AgentClient,
    AgentPool,
    AgentRefused,
    AgentUnreachable,
    ClientTimeouts,
    StreamLine,
)
from everstep.machine.code import hash_directory
from everstep.secrets import Secrets
from everstep.spec.agent_api import (
    ErrorCode,
    EventKind,
    EventLine,
    GapLine,
    HeartbeatLine,
    HelloLine,
)
from tests.agents import (
    AgentProcess,
    everstep_program,
    make_plan,
    processes_of,
    running_agent,
    until,
    wait_for,
)

VALID: dict[str, Any] = {"job_id": "job", "generation": 1, "validity_s": 30.0}


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with running_agent(tmp_path) as running:
        yield running


@asynccontextmanager
async def connected(agent: AgentProcess, **options: Any) -> AsyncIterator[AgentClient]:
    async with agent.client(**options) as client:
        yield client


async def lines_until(
    client: AgentClient, kind: EventKind, after: str | None = None
) -> tuple[list[StreamLine], str]:
    """Lines up to the first event of a kind, and the cursor behind it."""
    seen: list[StreamLine] = []
    ring = ""
    stream = client.stream(after)
    try:
        async with asyncio.timeout(30):
            async for line in stream:
                seen.append(line)
                if isinstance(line, (HelloLine, GapLine)):
                    ring = line.ring_id
                if isinstance(line, EventLine) and line.kind is kind:
                    return seen, f"{ring}:{line.seq}"
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    raise AssertionError("the stream ended")


async def test_a_run_from_start_to_stop(agent: AgentProcess) -> None:
    async with connected(agent, machine_id="m1") as client:
        info = await client.info()
        assert (info.machine_id, info.slots, info.runs) == ("m1", 4, ())
        prepared = await client.prepare_run(**VALID, command_id="c1")
        assert prepared.master_addr == "127.0.0.1"
        plan = make_plan("sh", "-c", "echo out; echo err >&2; exec sleep 600", ranks=2)
        started = await client.start_run(**VALID, command_id="c2", run=plan)
        assert set(started.pids) == {0, 1}
        assert await client.start_run(**VALID, command_id="c2", run=plan) == started
        state = await client.run_state("job", 1)
        assert (state.run_id, state.ended, state.pids) == ("job-r1", False, started.pids)

        stacks = await client.stacks("job", 1, looks=1)
        ranks = [group.spans for group in stacks.groups if group.role is ProcessRole.RANK]
        assert {rank for spans in ranks for rank in ranks_of(spans)} == {0, 1}
        with pytest.raises(AgentRefused) as caught:
            await client.stacks("job", 2)
        assert caught.value.code is ErrorCode.NOT_FOUND

        log = agent.state / "runs" / "job" / "1" / "rank-1.log"
        wait_for(lambda: b"err" in log.read_bytes(), "the rank to write")
        assert await client.log_tail("job", 1, 1) == "out\nerr\n"
        assert await client.log_part("job", 1, 1, offset=4, tail_bytes=2) == (4, 8, b"er")
        with pytest.raises(AgentRefused) as caught:
            await client.log_tail("job", 1, 2)
        assert caught.value.code is ErrorCode.NOT_FOUND

        stopped = await client.stop_run(
            **VALID, command_id="c3", reason="enough", grace_s=2.0, kill_wait_s=5.0
        )
        assert stopped.report.teardown_clean
        assert [rank.stopped_by_us for rank in stopped.report.ranks] == [True, True]
        assert processes_of(agent.state) == []
        with pytest.raises(AgentRefused) as caught:
            await client.start_run(**VALID, command_id="c4", run=make_plan(run_id="again"))
        assert caught.value.code in {ErrorCode.OLDER_GENERATION, ErrorCode.BUSY}


async def test_a_stream_resumes_across_a_kill_of_the_agent_and_the_run_is_adopted(
    tmp_path: Path,
) -> None:
    with running_agent(tmp_path) as first:
        async with connected(first) as client:
            await client.start_run(**VALID, command_id="c1", run=make_plan())
            seen, cursor = await lines_until(client, EventKind.RUN_STARTED)
            assert isinstance(seen[0], HelloLine)
            pids = (await client.run_state("job", 1)).pids
        first.process.kill()
        first.process.wait()
        (first.state / "agent" / "address.json").unlink()

        # Not through the context manager's end, which would end the ranks too.
        with running_agent(tmp_path) as second:
            assert psutil.pid_exists(pids[0])
            async with connected(second) as client:
                seen, _ = await lines_until(client, EventKind.AGENT_STARTED, after=cursor)
                assert not any(isinstance(line, GapLine) for line in seen)
                kinds = [line.kind for line in seen if isinstance(line, EventLine)]
                assert EventKind.RUN_ADOPTED in kinds
                assert EventKind.RUN_STARTED not in kinds
                assert (await client.run_state("job", 1)).pids == pids
                # A command whose answer was lost with the first agent.
                again = await client.start_run(**VALID, command_id="c1", run=make_plan())
                assert again.pids == pids


async def test_cursors_that_are_not_good_get_a_gap(agent: AgentProcess) -> None:
    async with connected(agent) as client:
        _, cursor = await lines_until(client, EventKind.AGENT_STARTED)
        ring = cursor.partition(":")[0]
        for bad in (f"{'0' * 16}:1", f"{ring}:999999"):
            seen, _ = await lines_until(client, EventKind.AGENT_STARTED, after=bad)
            assert isinstance(seen[1], GapLine)
        with pytest.raises(AgentRefused) as caught:
            await lines_until(client, EventKind.AGENT_STARTED, after="nonsense")
        assert caught.value.code is ErrorCode.BAD_REQUEST


async def test_a_damaged_ring_is_replaced_at_the_start(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        async with connected(agent) as client:
            _, cursor = await lines_until(client, EventKind.AGENT_STARTED)
        assert agent.end() == 0
    ring = tmp_path / "m1" / "agent" / "events.ring"
    os.truncate(ring, 1000)
    (tmp_path / "m1" / "agent" / "fences").write_bytes(b"garbage")
    (tmp_path / "m1" / "agent" / "commands.sqlite").write_bytes(b"garbage" * 100)
    with running_agent(tmp_path) as agent:
        async with connected(agent) as client:
            seen, fresh = await lines_until(client, EventKind.AGENT_STARTED, after=cursor)
        assert isinstance(seen[1], GapLine)
        assert fresh.partition(":")[0] != cursor.partition(":")[0]
        assert agent.log.count("event ring made anew") == 1
        assert "Traceback" not in agent.log


async def test_heartbeats_come_and_carry_the_runs(agent: AgentProcess) -> None:
    async with connected(agent) as client:
        await client.start_run(**VALID, command_id="c1", run=make_plan())
        async with asyncio.timeout(30):
            async for line in client.stream():
                if isinstance(line, HeartbeatLine):
                    assert [run.run_id for run in line.runs] == ["job-r1"]
                    return


async def test_sigterm_leaves_ranks_alone_and_a_flag_changes_that(tmp_path: Path) -> None:
    with running_agent(tmp_path) as agent:
        async with connected(agent) as client:
            await client.start_run(**VALID, command_id="c1", run=make_plan("sleep", "600"))
        assert agent.end(signal.SIGTERM) == 0
        assert processes_of(agent.state)
        with running_agent(tmp_path, "--stop-ranks-on-exit") as second:
            async with connected(second) as client:
                stream = asyncio.create_task(lines_until(client, EventKind.RUN_STOPPED))
                info = await client.info()
                assert [run.generation for run in info.runs] == [1]
                second.process.send_signal(signal.SIGTERM)
                seen, _ = await stream
            assert await asyncio.to_thread(second.process.wait, 60) == 0
            assert processes_of(agent.state) == []
    kinds = [line.kind for line in seen if isinstance(line, EventLine)]
    assert kinds.index(EventKind.PLANNED_STOP) < kinds.index(EventKind.RUN_STOPPED)


async def test_shutdown_stops_everything_answers_and_ends(agent: AgentProcess) -> None:
    async with connected(agent) as client:
        await client.start_run(**VALID, command_id="c1", run=make_plan())
        await client.start_run(
            **{**VALID, "job_id": "other", "generation": 3},
            command_id="c2",
            run=make_plan(run_id="other-r3"),
        )
        done = await client.shutdown(**VALID, command_id="c3", timeout_s=60)
        assert done.stopped == {"job": 1, "other": 3}
        assert processes_of(agent.state) == []
        assert await asyncio.to_thread(agent.process.wait, 30) == 0


async def test_code_is_brought_and_ranks_run_in_it(agent: AgentProcess, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.sh").write_text("echo from $PWD; sleep 600\n")
    version = hash_directory(source)
    async with connected(agent) as client:
        brought = await client.materialise_code(
            **VALID, command_id="c1", code_version=version, source=str(source)
        )
        assert hash_directory(brought.path) == version
        plan = make_plan("sh", "main.sh", code_version=version, code_path=brought.path)
        await client.start_run(**VALID, command_id="c2", run=plan)
        log = agent.state / "runs" / "job" / "1" / "rank-0.log"
        wait_for(lambda: b"from" in log.read_bytes(), "the rank to write")
        assert await client.log_tail("job", 1, 0) == f"from {brought.path}\n"


# --- registration


class Controllers:
    """A controller's endpoint that answers what the test says, and remembers."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.answer: dict[str, Any] = {
            "accepted": True,
            "register_interval_s": 0.1,
            "heartbeat_interval_s": 0.1,
        }
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.seen.append(json.loads(body))
                outer.tokens.append(self.headers["authorization"])
                content = json.dumps(outer.answer).encode()
                self.send_response(outer.status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def controllers() -> Iterator[Controllers]:
    fake = Controllers()
    yield fake
    fake.close()


async def test_registration_ends_fenced_ranks_and_knows_of_evictions(
    tmp_path: Path, controllers: Controllers
) -> None:
    # The first address is dead: the second one is asked.
    both = f"http://127.0.0.1:9,{controllers.url}"
    with running_agent(tmp_path, controller=both) as agent:
        async with connected(agent) as client:
            await client.start_run(**VALID, command_id="c1", run=make_plan())
            await until(
                lambda: controllers.seen and controllers.seen[-1]["jobs"] == {"job": 1},
                "the run to be registered",
            )
            said = controllers.seen[-1]
            assert (said["machine_id"], said["url"], said["slots"]) == ("m1", agent.url, 4)
            assert set(controllers.tokens) == {f"Bearer {agent.secrets.enrol}"}

            controllers.answer |= {"fences": {"job": 2}, "evicted": True}
            await until(lambda: not processes_of(agent.state), "the fenced ranks to be ended")
            for command_id, generation, code in (
                ("c2", 1, ErrorCode.OLDER_GENERATION),
                ("c3", 2, ErrorCode.EVICTED),
            ):
                with pytest.raises(AgentRefused) as caught:
                    await client.prepare_run(
                        **{**VALID, "generation": generation}, command_id=command_id
                    )
                assert caught.value.code is code
            controllers.answer |= {"evicted": False}
            count = len(controllers.seen)
            await until(lambda: len(controllers.seen) > count + 1, "another registration")
            await client.prepare_run(**{**VALID, "generation": 2}, command_id="c4")


async def test_a_machine_that_comes_back_ends_its_old_ranks(
    tmp_path: Path, controllers: Controllers
) -> None:
    with running_agent(tmp_path) as agent:
        async with connected(agent) as client:
            await client.start_run(**VALID, command_id="c1", run=make_plan())
        agent.kill()
        assert processes_of(agent.state)
        controllers.answer |= {"fences": {"job": 2}}
        with running_agent(tmp_path, controller=controllers.url) as second:
            assert controllers.seen == [] or controllers.seen[0]["jobs"] == {"job": 1}
            await until(lambda: not processes_of(second.state), "the old ranks to be ended")


async def test_controllers_that_refuse_or_talk_nonsense_change_nothing(
    tmp_path: Path, controllers: Controllers
) -> None:
    controllers.status = 500
    with running_agent(tmp_path, controller=controllers.url) as agent:
        await until(lambda: len(controllers.seen) >= 2, "two tries")
        controllers.status, controllers.answer = 200, {"accepted": "who knows"}
        count = len(controllers.seen)
        await until(lambda: len(controllers.seen) >= count + 2, "two more tries")
        async with connected(agent) as client:
            await client.start_run(**VALID, command_id="c1", run=make_plan())
        assert agent.secrets.enrol not in agent.log


# --- starting badly


def refusal(folder: Path, *flags: str, **overrides: str) -> tuple[int, str]:
    """Exit code and output of an agent that does not start."""
    arguments = {
        "--machine-id": "m1",
        "--state": str(folder / "m1"),
        "--secrets": str(folder / "secrets"),
        "--controller": "http://127.0.0.1:9",
        "--listen": "127.0.0.1:0",
    } | {f"--{key.replace('_', '-')}": value for key, value in overrides.items()}
    done = subprocess.run(
        [
            everstep_program(),
            "agent",
            *(part for pair in arguments.items() for part in pair),
            *flags,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).strip()


def test_a_second_agent_on_the_same_state_is_refused(agent: AgentProcess, tmp_path: Path) -> None:
    code, said = refusal(tmp_path)
    assert code == 3
    assert "another agent is using it" in said
    assert len(said.splitlines()) == 1


def test_a_port_that_is_taken_is_one_line(agent: AgentProcess, tmp_path: Path) -> None:
    code, said = refusal(tmp_path, state=str(tmp_path / "m2"), listen=f"127.0.0.1:{agent.port}")
    assert code == 3
    assert "Address already in use" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"listen": "0.0.0.0:0"}, "--tls-cert"),
        ({"listen": "nonsense"}, "must be HOST:PORT"),
        ({"listen": "127.0.0.1:99999"}, "must be HOST:PORT"),
        ({"listen": "192.0.2.1:0", "tls_cert": "/none", "tls_key": "/none"}, "certificate"),
        ({"tls_cert": "/none"}, "both or neither"),
        ({"machine_id": "../m"}, "--machine-id"),
        ({"controller": "localhost:7700"}, "must be http://"),
        ({"secrets": "/none"}, "no such directory"),
        ({"state": "/proc/none"}, "--state /proc/none"),
        ({"rank_user": "nobody-of-this-name"}, "no such user"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, changes: dict[str, str], expected: str) -> None:
    Secrets.create(tmp_path / "secrets")
    code, said = refusal(tmp_path, **changes)
    assert code == 3
    assert expected in said
    assert len(said.splitlines()) == 1
    assert "Traceback" not in said


# --- the client alone


async def test_who_does_not_answer_is_unreachable_and_not_refused(agent: AgentProcess) -> None:
    limits = ClientTimeouts(connect_s=0.5, answer_s=0.5, stream_silence_s=0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in ("http://127.0.0.1:9", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            async with AgentClient(url, "t", timeouts=limits) as client:
                with pytest.raises(AgentUnreachable):
                    await client.info()
                with pytest.raises(AgentUnreachable):
                    await anext(client.stream())
                with pytest.raises(AgentUnreachable):
                    await client.prepare_run(**VALID, command_id="c1")
    async with AgentClient(agent.url, "wrong-token") as client:
        with pytest.raises(AgentRefused) as caught:
            await client.info()
        assert caught.value.code is ErrorCode.UNAUTHORIZED
        with pytest.raises(AgentRefused):
            await anext(client.stream())


async def test_another_machine_at_the_address_is_unreachable(agent: AgentProcess) -> None:
    pool = AgentPool(agent.secrets.controller)
    right, wrong = pool.client(agent.url, "m1"), pool.client(agent.url, "m2")
    assert pool.client(agent.url, "m1") is right
    await right.prepare_run(**VALID, command_id="c1")
    with pytest.raises(AgentUnreachable, match="machine m1 answers there"):
        await wrong.prepare_run(**VALID, command_id="c2")
    with pytest.raises(AgentUnreachable, match="machine m1 answers there"):
        await anext(wrong.stream())
    await pool.aclose()


async def test_a_client_that_knew_the_agent_before_its_restart_finds_the_new_one(
    tmp_path: Path,
) -> None:
    with running_agent(tmp_path) as first:
        client = first.client()
        await client.info()
        port = first.port
        first.kill()
    with running_agent(tmp_path, "--listen", f"127.0.0.1:{port}") as second:
        assert second.port == port
        await client.prepare_run(**VALID, command_id="c1")
        await client.aclose()


async def test_a_command_that_was_held_up_too_long_is_not_carried_out(
    agent: AgentProcess,
) -> None:
    async with connected(agent) as client:
        await client.info()
        agent.process.send_signal(signal.SIGSTOP)
        command = asyncio.create_task(
            client.start_run(
                job_id="job", generation=1, command_id="c1", validity_s=0.2, run=make_plan()
            )
        )
        await asyncio.sleep(0.5)  # the thing itself: the command gets old on its way
        agent.process.send_signal(signal.SIGCONT)
        with pytest.raises(AgentRefused) as caught:
            await command
        assert caught.value.code is ErrorCode.EXPIRED
        assert processes_of(agent.state) == []
