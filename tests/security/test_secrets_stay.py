"""Tokens do not reach ranks, logs, process lists or what the agent keeps on disk."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.secrets import SECRETS_DIR_VARIABLE
from tests.agents import AgentProcess, make_plan, processes_of, running_agent, until, wait_for
from tests.security.conftest import head, raw

CANARY = "canary-of-the-agents-environment"
SNOOP = """
import os, sys
print(sorted(os.environ))
for path in sys.argv[1:]:
    try:
        print("READ", open(path).read())
    except OSError as error:
        print("DENIED", path, error.strerror)
print("done", flush=True)
import time; time.sleep(600)
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    environment = {
        SECRETS_DIR_VARIABLE: str(tmp_path / "secrets"),
        "EVERSTEP_WEBHOOK_URL": CANARY,
        "TEMPORAL_API_KEY": CANARY,
    }
    with running_agent(tmp_path, **environment) as running:
        yield running


async def snoop(agent: AgentProcess, *paths: str) -> str:
    """What a rank that looks for secrets has found."""
    # The interpreter of the machine, not ours: another user must be able to reach it.
    plan = make_plan("/usr/bin/env", "python3", "-c", SNOOP, *paths)
    async with agent.client() as client:
        await client.start_run(
            job_id="job", generation=1, command_id="c1", validity_s=30.0, run=plan
        )
        log = agent.state / "runs" / "job" / "1" / "rank-0.log"
        await until(lambda: log.read_bytes().endswith(b"done\n"), "the rank to look around")
        return await client.log_tail("job", 1, 0)


def tokens_of(agent: AgentProcess) -> list[bytes]:
    own = agent.secrets
    return [token.encode() for token in (own.enrol, own.controller, own.peer, own.metrics)]


async def test_ranks_shims_and_process_lists_show_no_token(agent: AgentProcess) -> None:
    found = await snoop(agent)
    assert SECRETS_DIR_VARIABLE not in found
    assert "EVERSTEP_RUN_ID" in found  # it did look at its environment
    ours = processes_of(agent.state)
    assert len(ours) >= 2
    for pid in (*ours, agent.process.pid):
        for name in ("cmdline", "environ"):
            content = (Path("/proc") / str(pid) / name).read_bytes()
            assert not [token for token in tokens_of(agent) if token in content]
            assert pid == agent.process.pid or CANARY.encode() not in content


async def test_nothing_that_the_agent_keeps_holds_a_token(agent: AgentProcess) -> None:
    await snoop(agent)
    # Requests that might be written down whole: right, wrong, broken.
    address = ("127.0.0.1", agent.port)
    for token in tokens_of(agent):
        for path in ("/v1/machine", f"/v1/{token.decode()}", "/metrics", "/v1/events?after=x"):
            raw(address, head("GET", path, token.decode()), limit_s=10)
        raw(
            address,
            b"GET /v1/machine HTTP/1.1\r\nauthorization: Bearer " + token + b"\r\nbad\r\n\r\n",
        )
    assert agent.end() == 0
    looked_at = 0
    for kept in agent.state.rglob("*"):
        if kept.is_file():
            looked_at += 1
            content = kept.read_bytes()
            assert not [token for token in tokens_of(agent) if token in content], kept
    assert looked_at > 5
    assert not [token for token in tokens_of(agent) if token.decode() in agent.log]


def test_what_the_agent_keeps_for_itself_is_closed(agent: AgentProcess) -> None:
    assert stat.S_IMODE(agent.secrets.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((agent.state / "agent").stat().st_mode) == 0o700


def test_metrics_show_no_token(agent: AgentProcess) -> None:
    status, content = raw(("127.0.0.1", agent.port), head("GET", "/metrics", agent.secrets.metrics))
    assert status == 200
    assert b"everstep_agent_live_ranks 0.0" in content
    assert not [token for token in tokens_of(agent) if token in content]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: ranks are to run as another user")
async def test_ranks_of_another_user_cannot_read_the_tokens() -> None:
    """Without root the ranks are the agent's own user, and only the environment is cleaned."""
    try:
        pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("needs the account nobody")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        opened = [
            folder,
            *(p for p in folder.parents if p.owner() == "root" and p.stat().st_mode & 0o001 == 0),
        ]
        for parent in opened:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
        with running_agent(folder, "--rank-user", "nobody") as agent:
            own = agent.state / "agent"
            found = await snoop(
                agent,
                str(agent.secrets.directory / "controller.token"),
                str(own / "commands.sqlite"),
                str(own / "events.ring"),
                f"/proc/{agent.process.pid}/environ",
                str(agent.state / "runs" / "job" / "1" / "plan.json"),
            )
            assert found.count("DENIED") == 5
            assert "\nREAD " not in found
            assert agent.secrets.controller not in found
        wait_for(lambda: not processes_of(folder), "the ranks to be gone")
