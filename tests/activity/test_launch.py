"""Starting and ending ranks on a shard: refusals, silence, retries."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.contracts import PERMANENT_FAILURE, TEMPORARY_FAILURE
from activities.failpoints import set_hook
from activities.launch import Launch
from everstep.decide.words import JobPhase, LogClass
from everstep.ledger import LedgerConflict, LedgerError, LedgerUnavailable
from everstep.machine.client import AgentRefused, AgentUnreachable
from everstep.spec import messages as m
from everstep.spec.agent_api import ErrorCode
from everstep.spec.job import JobSpec
from tests.activity.fakes import (
    GENERATION,
    JOB,
    RUN,
    FakeAgent,
    FakeAgents,
    FakeLocations,
    FixedPolicy,
    exited,
    policy,
    refs,
    report,
    until,
)

SPEC: dict[str, Any] = {
    "name": JOB,
    "command": ["python", "train.py"],
    "machines": 2,
    "ranks_per_machine": 2,
    "env": {"A": "1"},
}


class FailingLedger(FakeLocations):
    """A ledger whose every write fails as told."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def _fail(self, *_: object, **__: object) -> Any:
        raise self.error

    register_job = open_run = close_run = close_job = _fail


def launch(*agents: FakeAgent, ledger: Any = None) -> Launch:
    return Launch(ledger or FailingLedger(LedgerError("x")), FakeAgents(*agents), FixedPolicy())


def start(*machine_ids: str, spec: dict[str, Any] | None = None, **fields: Any) -> m.StartRanks:
    defaults: dict[str, Any] = {
        "command_id": "run/1",
        "job_id": JOB,
        "run_id": RUN,
        "generation": GENERATION,
        "machines": refs(*machine_ids),
        "machines_total": 2,
        "spec": JobSpec.model_validate(spec or SPEC),
        "code_version": "none",
        "code_path": None,
        "master_addr": "10.0.0.1",
        "master_port": 999,
        "start_reason": "launch",
        "restore": None,
        "checkpoint_dir": "/checkpoints/job",
        "policy": policy(),
    }
    return m.StartRanks(**(defaults | fields))


def stop(*machine_ids: str, planned: bool = False, **overrides: Any) -> m.StopRanks:
    return m.StopRanks(
        command_id="run/2",
        job_id=JOB,
        generation=GENERATION,
        machines=refs(*machine_ids),
        reason="the run has failed",
        planned=planned,
        policy=policy(**overrides),
    )


async def test_start_tells_refusal_from_silence() -> None:
    fine = FakeAgent("m1")
    refusing = FakeAgent("m2", started=AgentRefused(ErrorCode.EVICTED, "this machine is evicted"))
    silent = FakeAgent("m3", down=True)
    result = await ActivityEnvironment().run(
        launch(fine, refusing, silent).start_ranks, start("m1", "m2", "m3")
    )
    assert result.started == ("m1",)
    assert result.refused == {"m2": "evicted: this machine is evicted"}
    assert set(result.unreachable) == {"m3"}
    assert silent.asked["start_run"] == 3
    assert refusing.asked["start_run"] == 1


@pytest.mark.parametrize("code", [ErrorCode.BUSY, ErrorCode.WRONG_BOOT, ErrorCode.EXPIRED])
async def test_start_asks_again_where_the_agent_only_cannot_now(code: ErrorCode) -> None:
    agent = FakeAgent("m1", started=AgentRefused(code, "later"))
    task = asyncio.create_task(ActivityEnvironment().run(launch(agent).start_ranks, start("m1")))
    await until(lambda: agent.asked["start_run"] > 0)
    agent.started = None
    result = await task
    assert result.started == ("m1",)
    assert (result.refused, result.unreachable) == ({}, {})
    assert len({command["command_id"] for command in agent.commands}) == 1


async def test_start_gives_each_machine_its_own_plan() -> None:
    agents = [FakeAgent("m1"), FakeAgent("m2")]
    await ActivityEnvironment().run(launch(*agents).start_ranks, start("m1", "m2"))
    plans = [agent.commands[0]["run"] for agent in agents]
    assert [plan.group_rank for plan in plans] == [0, 1]
    assert plans[0].env == {"A": "1"}
    assert plans[0].command == ("python", "train.py")
    assert plans[0].policy.settle_window_s == pytest.approx(0.3)
    assert [a.commands[0]["command_id"] for a in agents] == ["run/1/m1", "run/1/m2"]


async def test_start_runs_each_machines_own_copy_of_the_code() -> None:
    agents = [FakeAgent("m1"), FakeAgent("m2")]
    request = start(
        "m1", "m2", spec={**SPEC, "code": "/src"}, code_version="dir-1", code_path="/x/dir-1"
    )
    await ActivityEnvironment().run(launch(*agents).start_ranks, request)
    paths = [agent.commands[-1]["run"].code_path for agent in agents]
    assert paths == ["/state-of-m1/dir-1", "/state-of-m2/dir-1"]


async def test_stop_answers_for_every_machine_and_soon() -> None:
    fine = FakeAgent("m1", stopped=report("m1", exited(0, 1)))
    down, frozen = FakeAgent("m2", down=True), FakeAgent("m3", frozen=True)
    async with asyncio.timeout(6):  # three seconds, and what a loaded machine adds
        result = await ActivityEnvironment().run(
            launch(fine, down, frozen).stop_ranks, stop("m1", "m2", "m3")
        )
    assert [(r.machine_id, r.reachable, r.lost) for r in result.reports] == [
        ("m1", True, False),
        ("m2", False, False),
        ("m3", False, False),
    ]
    assert down.asked["info"] == frozen.asked["info"] == 2
    assert down.asked["stop_run"] == 0


@pytest.mark.parametrize("planned, grace", [(True, 30.0), (False, 1.0)])
async def test_stop_gives_the_grace_that_fits(planned: bool, grace: float) -> None:
    agent = FakeAgent("m1", stopped=report("m1"))
    await ActivityEnvironment().run(launch(agent).stop_ranks, stop("m1", planned=planned))
    assert agent.commands[0]["grace_s"] == grace
    assert agent.commands[0]["command_id"] == "run/2/m1"


@pytest.mark.parametrize(
    "refusal, reachable, vanished",
    [
        (AgentRefused(ErrorCode.NOT_FOUND, "no such run"), True, True),
        (AgentRefused(ErrorCode.OLDER_GENERATION, "newer was seen"), True, False),
        (AgentRefused(ErrorCode.BUSY, "starting"), False, False),
        (AgentUnreachable("reset in the middle"), False, False),
        (RuntimeError("nonsense"), False, False),
    ],
)
async def test_stop_says_what_a_refusal_means(
    refusal: Exception, reachable: bool, vanished: bool
) -> None:
    agent = FakeAgent("m1", stopped=refusal)
    result = await ActivityEnvironment().run(launch(agent).stop_ranks, stop("m1"))
    (only,) = result.reports
    assert (only.reachable, only.processes_vanished) == (reachable, vanished)
    assert only.note
    assert not only.lost


async def test_a_machine_that_could_not_end_the_run_is_not_clean() -> None:
    agent = FakeAgent("m1", stopped=AgentRefused(ErrorCode.FAILED, "Input/output error"))
    result = await ActivityEnvironment().run(launch(agent).stop_ranks, stop("m1"))
    (only,) = result.reports
    assert (only.reachable, only.teardown_clean) == (True, False)
    assert "Input/output error" in only.note


async def test_stop_of_a_machine_the_ledger_does_not_know() -> None:
    ledger = FailingLedger(LedgerError("x"))
    ledger.unknown.add("m1")
    result = await ActivityEnvironment().run(
        launch(FakeAgent("m1"), ledger=ledger).stop_ranks, stop("m1")
    )
    assert not result.reports[0].reachable
    assert "registered" in result.reports[0].note


async def test_shards_heartbeat_while_machines_are_slow() -> None:
    env, beats = ActivityEnvironment(), []
    env.on_heartbeat = lambda *_: beats.append(1)
    await env.run(launch(FakeAgent("m1", frozen=True)).stop_ranks, stop("m1"))
    assert len(beats) >= 3


async def test_prepare_is_a_value_whatever_happens() -> None:
    request = m.PrepareRunInput(
        command_id="c", job_id=JOB, generation=1, machine=refs("m1")[0], policy=policy()
    )
    env = ActivityEnvironment()
    prepared = await env.run(launch(FakeAgent("m1")).prepare_run, request)
    assert (prepared.master_addr, prepared.master_port) == ("127.0.0.1", 4242)
    for agent in (
        FakeAgent("m1", down=True),
        FakeAgent("m1", prepared=AgentRefused(ErrorCode.EVICTED, "evicted")),
        FakeAgent("m1", prepared=KeyError("nonsense")),
    ):
        result = await env.run(launch(agent).prepare_run, request)
        assert result.unreachable
        assert result.master_port == 0


@pytest.mark.parametrize(
    "error, kind, final",
    [
        (LedgerUnavailable("ledger: locked"), TEMPORARY_FAILURE, False),
        (LedgerConflict("job job: has ended"), PERMANENT_FAILURE, True),
        (LedgerError("ledger: damaged"), PERMANENT_FAILURE, True),
    ],
)
async def test_a_ledger_that_fails_is_one_of_two_failures(
    error: Exception, kind: str, final: bool
) -> None:
    now = datetime.now(UTC)
    activities = launch(ledger=FailingLedger(error))
    calls: list[tuple[Any, Any]] = [
        (
            activities.register_job,
            m.RegisterJob(
                job_id=JOB, workflow_id="w", temporal_run_id="r", spec=JobSpec.model_validate(SPEC)
            ),
        ),
        (
            activities.close_job,
            m.CloseJob(job_id=JOB, phase=JobPhase.FAILED, reason="x", closed_at=now),
        ),
    ]
    for activity, request in calls:
        with pytest.raises(ApplicationError) as raised:
            await ActivityEnvironment().run(activity, request)
        assert raised.value.type == kind
        assert raised.value.non_retryable is final
        assert str(raised.value.message) == str(error)


async def test_after_effect_is_reached_once_the_effect_is_there() -> None:
    seen: list[int] = []
    agent = FakeAgent("m1")
    set_hook(lambda: seen.append(agent.asked["start_run"]))
    try:
        await ActivityEnvironment().run(launch(agent).start_ranks, start("m1"))
    finally:
        set_hook(None)
    assert seen == [1]


async def test_evidence_of_a_large_shard_fits_into_one_answer() -> None:
    """Every rank says at length that its peers are gone: three megabytes in all."""
    names = [f"m{i}" for i in range(200)]
    lines = ("x" * 300,) * 5
    agents = [
        FakeAgent(
            name,
            stopped=report(
                name,
                *(
                    exited(8 * i + local, 1, name, log_class=LogClass.PEER_LOST, log_lines=lines)
                    for local in range(8)
                ),
            ),
        )
        for i, name in enumerate(names)
    ]
    result = await ActivityEnvironment().run(launch(*agents).stop_ranks, stop(*names))
    assert len(result.model_dump_json()) < 1.6e6
    assert [r.machine_id for r in result.reports] == names
    assert sum(len(r.ranks) for r in result.reports) == 1600


async def test_an_outage_of_the_ledger_is_not_one_of_the_machines() -> None:
    """They are asked once it answers again; until then nothing is said about them."""

    def hook() -> None:
        raise LedgerUnavailable("ledger: does not answer")

    ledger = FailingLedger(LedgerError("x"))
    ledger.hook = hook
    activities = launch(FakeAgent("m1"), ledger=ledger)
    prepare = m.PrepareRunInput(
        command_id="c", job_id=JOB, generation=1, machine=refs("m1")[0], policy=policy()
    )
    calls: list[tuple[Any, Any]] = [
        (activities.start_ranks, start("m1")),
        (activities.stop_ranks, stop("m1")),
        (activities.prepare_run, prepare),
    ]
    for function, request in calls:
        with pytest.raises(ApplicationError) as caught:
            await ActivityEnvironment().run(function, request)
        assert caught.value.type == TEMPORARY_FAILURE
