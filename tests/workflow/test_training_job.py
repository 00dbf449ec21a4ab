"""The job's state machine, one behaviour a test, against a scripted fleet in virtual time."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from temporalio.client import WorkflowFailureError, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError, CancelledError

from everstep.decide.words import JobPhase, LogClass, Rung, RunPhase, Symptom, Verdict
from everstep.spec import messages as m
from everstep.spec.agent_api import EventKind
from tests.workflow.conftest import Bench
from tests.workflow.world import EPOCH, Say, Script, exited, rank_exit

pytestmark = pytest.mark.asyncio(loop_scope="session")

FIRST = Say("first_step", step=1)
DONE = Say("succeeded", step=100)


def trouble(*observations: m.ObservationRecord, step: int = 40) -> Say:
    """A watch that reports trouble."""
    return Say("trouble", step=step, observations=observations)


async def cause_of(handle: Any) -> ApplicationError:
    """Why a workflow failed."""
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, ApplicationError)
    return caught.value.cause


async def test_clean_job(bench: Bench) -> None:
    bench.world.scripts[1] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.phase, result.runs, result.incidents) == (JobPhase.SUCCEEDED, 1, 0)
    assert bench.world.closed_jobs[0].phase is JobPhase.SUCCEEDED
    assert [p.phase for p in bench.world.phases][:3] == [
        RunPhase.OPENED,
        RunPhase.START_COMMANDED,
        RunPhase.STARTED,
    ]
    assert bench.world.unused() == []


async def test_rank_killed_restarts_in_place_from_the_checkpoint(bench: Bench) -> None:
    world = bench.world
    world.checkpoints[1] = 40
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(2))], ranks={2: exited(2, signal=9, step=43)}
    )
    world.scripts[2] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (2, 1)
    first, second = world.started
    assert [r.machine_id for r in second.machines] == [r.machine_id for r in first.machines]
    assert second.restore is not None
    assert second.restore.step == 40
    assert second.master_port != first.master_port
    assert world.evictions == []
    record = world.incidents[f"{bench.name}-1-r1"]
    assert record.decision is not None
    assert record.decision.decision.rung is Rung.REATTEMPT
    assert record.decision.finding.first_failed_rank == 2
    assert record.evidence == ("looked closer",)
    assert world.unused() == []


async def test_machine_lost_is_evicted_and_a_standby_takes_its_place(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(0))],
        ranks={
            0: exited(
                0, exit_code=1, log_class=LogClass.PEER_LOST, line="Connection closed by peer"
            ),
            1: exited(
                1, exit_code=1, log_class=LogClass.PEER_LOST, line="Connection closed by peer"
            ),
        },
        unreachable=frozenset({"m2"}),
        lost=frozenset({"m2"}),
    )
    world.scripts[2] = Script([FIRST, DONE])
    await (await bench.start()).result()
    assert [e.machines for e in world.evictions] == [("m2",)]
    assert [r.machine_id for r in world.started[1].machines] == ["m1", "m3"]
    assert world.incidents[f"{bench.name}-1-r1"].symptom is Symptom.KERNEL_PANIC


async def test_machine_that_answers_again_is_not_evicted(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(0))],
        ranks={0: exited(0, signal=9)},
        unreachable=frozenset({"m2"}),
    )
    world.scripts[2] = Script([FIRST, DONE])
    await (await bench.start()).result()
    assert world.evictions == []
    assert [r.machine_id for r in world.started[1].machines] == ["m1", "m2"]


async def test_users_error_that_stays_ends_the_job_and_blames_no_machine(bench: Bench) -> None:
    world = bench.world
    for generation in range(1, 12):
        world.scripts[generation] = Script(
            [FIRST, trouble(rank_exit(1))],
            ranks={
                1: exited(
                    1,
                    exit_code=1,
                    log_class=LogClass.PYTHON_EXCEPTION,
                    line="TypeError: bad operand",
                    step=5,
                )
            },
        )
    error = await cause_of(await bench.start())
    assert "TypeError" in error.message or "user" in error.message
    assert world.evictions == []
    assert 2 <= len(world.started) <= 4
    assert world.closed_jobs[0].phase is JobPhase.FAILED
    assert [n.severity for n in world.notes] == ["needs_person"]


async def test_spent_budget_waits_for_a_person_and_resume_goes_on(bench: Bench) -> None:
    world = bench.world
    for generation in range(1, 40):
        world.scripts[generation] = Script(
            [FIRST, trouble(rank_exit(1), step=7)], ranks={1: exited(1, signal=9, step=7)}
        )
    handle = await bench.start()
    status = await bench.until_phase(handle, JobPhase.WAITING_FOR_PERSON)
    spent = len(world.started)
    assert spent < 40
    assert status.open_incident is not None
    # The round that tells people runs beside the job.
    await bench.until(lambda: [n.severity for n in world.notes] == ["needs_person"])
    world.scripts[world.generation + 1] = Script([FIRST, DONE])
    answer = await handle.execute_update(
        "resume", m.ResumeRequest(note="cable replaced", by="an sre"), result_type=m.UpdateAnswer
    )
    assert answer.accepted
    result = await handle.result()
    assert result.phase is JobPhase.SUCCEEDED
    assert len(world.started) == spent + 1


async def test_failing_again_at_once_is_the_next_round_of_the_same_incident(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(1))], ranks={1: exited(1, signal=9, step=9)}
    )
    world.scripts[2] = Script([trouble(rank_exit(1))], ranks={1: exited(1, signal=9)})
    world.scripts[3] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (3, 1)
    assert set(world.incidents) == {f"{bench.name}-1-r1", f"{bench.name}-1-r2"}


async def test_incident_closes_when_stable(bench: Bench, default_policy: Any) -> None:
    world = bench.world
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(1))], ranks={1: exited(1, signal=9, step=9)}
    )
    ticks = [Say("tick", step=20 + i) for i in range(8)]
    world.scripts[2] = Script([FIRST, *ticks, Say("hold")])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches > 0)
    status = await bench.status(handle)
    # Virtual time stands still while a watch is held: the incident is open until a later tick.
    assert status.open_incident == f"{bench.name}-1"
    await handle.execute_update("cancel", m.CancelRequest(), result_type=m.UpdateAnswer)
    assert (await handle.result()).phase is JobPhase.CANCELLED
    assert [c.incident_id for c in world.closed_incidents] == [f"{bench.name}-1"]


async def test_low_confidence_waits_for_the_closer_look(bench: Bench) -> None:
    world = bench.world
    world.gates["diagnose_run"] = asyncio.Event()
    lost_peer = {
        rank: exited(
            rank, exit_code=1, log_class=LogClass.PEER_LOST, line="Connection reset by peer"
        )
        for rank in range(4)
    }
    world.scripts[1] = Script([FIRST, trouble(rank_exit(0))], ranks=lost_peer)
    world.scripts[2] = Script([FIRST, DONE])
    handle = await bench.start()
    await bench.until(lambda: world.counts["diagnose_run"] > 0)
    assert len(world.started) == 1
    world.gates["diagnose_run"].set()
    await handle.result()
    assert len(world.started) == 2
    assert world.evictions == []


@pytest.mark.parametrize("reported", [33, None], ids=["by-ranks", "by-the-watch-alone"])
async def test_nan_restarts_from_a_checkpoint_before_it(bench: Bench, reported: int | None) -> None:
    """Later steps may be finite again and saved: they come after the spoilt one all the same."""
    world = bench.world
    world.scripts[1] = Script([FIRST, trouble(rank_exit(2))], ranks={2: exited(2, signal=9)})
    world.checkpoints = {1: 30, 2: 36}
    nonfinite = m.ObservationRecord(
        kind=EventKind.NONFINITE,
        verdict=Verdict.FAULTY,
        rank=0,
        reason="loss is nan at step 33",
        data={"step": 33},
    )
    world.scripts[2] = Script(
        [FIRST, trouble(nonfinite, step=37)],
        ranks={
            rank: exited(rank, signal=15, stopped_by_us=True, step=37, nonfinite_step=reported)
            for rank in range(4)
        },
    )
    world.scripts[3] = Script([FIRST, trouble(rank_exit(2))], ranks={2: exited(2, signal=9)})
    world.scripts[4] = Script([FIRST, DONE])
    await (await bench.start()).result()
    assert world.incidents[f"{bench.name}-1-r2"].symptom is Symptom.NAN_VALUE
    assert [choice.before_step for choice in world.choices] == [None, None, 33, None]
    assert [run.restore and run.restore.step for run in world.started] == [None, 30, 30, 30]
    assert world.unused() == []


async def test_a_start_that_fails_does_not_forget_the_spoilt_step(bench: Bench) -> None:
    world = bench.world
    world.checkpoints = {1: 36}
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(0), step=37)],
        ranks={0: exited(0, signal=9, step=37, nonfinite_step=33)},
    )
    world.scripts[3] = Script([FIRST, DONE])
    world.no_port.add(2)
    await (await bench.start()).result()
    assert world.no_port == set()
    assert [choice.before_step for choice in world.choices] == [None, 33, 33]
    assert [run.restore for run in world.started] == [None, None]


async def test_trouble_after_which_all_ranks_turn_out_to_have_finished_is_none(
    bench: Bench,
) -> None:
    world = bench.world
    away = m.ObservationRecord(
        kind=EventKind.EARLY_EXIT, verdict=Verdict.FAULTY, machine_id="m1", reason="m2 goes on"
    )
    world.scripts[1] = Script(
        [FIRST, trouble(away, step=100)],
        ranks={rank: exited(rank, exit_code=0, step=100) for rank in range(4)},
        unreachable=frozenset({"m2"}),
    )
    result = await (await bench.start()).result()
    assert (result.phase, result.runs, result.incidents) == (JobPhase.SUCCEEDED, 1, 0)
    assert world.counts["close_run:succeeded"] == 1
    assert world.counts["confirm_machines"] == 1


async def test_refused_start_is_recovered_like_any_trouble(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([], refused={"m2": "busy: run other/1 is live"})
    world.scripts[2] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (2, 1)
    assert world.evictions == []


async def test_planned_stop_spends_no_budget(bench: Bench) -> None:
    world = bench.world
    planned = m.ObservationRecord(
        kind=EventKind.PLANNED_STOP, verdict=Verdict.HEALTHY, machine_id="m1", reason="agent stops"
    )
    for generation in range(1, 25):
        world.scripts[generation] = Script([FIRST, trouble(planned, step=generation)])
    world.scripts[25] = Script([FIRST, DONE])

    from everstep.decide.attribution import MachineReport

    original = world._report

    def report(ref: m.MachineRef, script: Script) -> MachineReport:
        plain = original(ref, script)
        return MachineReport(
            machine_id=plain.machine_id,
            reachable=True,
            planned_stop="the agent was asked to stop",
            ranks=plain.ranks,
        )

    world._report = report  # type: ignore[method-assign]
    result = await (await bench.start()).result()
    assert result.phase is JobPhase.SUCCEEDED
    # More than any budget of the policy allows for failures.
    assert result.runs == 25


async def test_waits_for_machines_and_starts_when_they_come(bench: Bench) -> None:
    world = bench.world
    world.idle = ["m1"]
    world.scripts[1] = Script([FIRST, DONE])
    handle = await bench.start()
    status = await bench.until_phase(handle, JobPhase.WAITING_FOR_MACHINES)
    assert "1 of 2 machines" in status.reason
    world.idle += ["m9"]
    result = await handle.result()
    assert result.runs == 1
    assert world.counts["open_run"] >= 2
    assert world.notes == []


async def test_people_are_told_once_that_a_job_waits_long_for_machines(bench: Bench) -> None:
    world = bench.world
    world.idle = ["m1"]
    world.scripts[1] = Script([FIRST, DONE])
    handle = await bench.start()
    await bench.until_phase(handle, JobPhase.WAITING_FOR_MACHINES)
    # The waits between the looks are virtual time.
    await bench.until(lambda: world.notes != [], limit=1600)
    polls = world.counts["open_run"]
    await bench.until(lambda: world.counts["open_run"] >= polls + 5, limit=1600)
    assert ["1 of 2 machines" in n.text for n in world.notes] == [True]
    world.idle += ["m9"]
    assert (await handle.result()).runs == 1


async def test_cancel_while_waiting_for_machines(bench: Bench) -> None:
    bench.world.idle = []
    handle = await bench.start()
    await bench.until_phase(handle, JobPhase.WAITING_FOR_MACHINES)
    await handle.execute_update(
        "cancel", m.CancelRequest(reason="not needed"), result_type=m.UpdateAnswer
    )
    result = await handle.result()
    assert result.phase is JobPhase.CANCELLED
    assert "not needed" in result.reason
    assert bench.world.started == []


async def test_pause_keeps_machines_and_resume_goes_on(bench: Bench) -> None:
    world = bench.world
    world.checkpoints[1] = 12
    world.scripts[1] = Script([FIRST, Say("hold", step=12)])
    world.scripts[2] = Script([FIRST, DONE])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    await handle.execute_update(
        "pause", m.PauseRequest(reason="maintenance"), result_type=m.UpdateAnswer
    )
    status = await bench.until_phase(handle, JobPhase.PAUSED)
    assert "maintenance" in status.reason
    assert world.stopped[-1].planned
    assert not world.running
    assert world.leased == ["m1", "m2"]
    with pytest.raises(WorkflowUpdateFailedError):
        await handle.execute_update("pause", m.PauseRequest(), result_type=m.UpdateAnswer)
    await handle.execute_update("resume", m.ResumeRequest(), result_type=m.UpdateAnswer)
    result = await handle.result()
    assert (result.runs, result.incidents) == (2, 0)
    assert world.started[1].start_reason == "resume"


async def test_cancel_stops_ranks_and_gives_machines_back(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([FIRST, Say("hold", step=3)])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    await handle.execute_update("cancel", m.CancelRequest(), result_type=m.UpdateAnswer)
    assert (await handle.result()).phase is JobPhase.CANCELLED
    assert not world.running
    assert world.leased == []


async def test_temporal_cancellation_cleans_up_too(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([FIRST, Say("hold", step=3)])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, CancelledError)
    assert not world.running
    assert world.closed_jobs[0].phase is JobPhase.CANCELLED


async def test_resume_of_a_running_job_is_refused(bench: Bench) -> None:
    bench.world.scripts[1] = Script([FIRST, Say("hold", step=3)])
    handle = await bench.start()
    await bench.until(lambda: bench.world.held_watches == 1)
    with pytest.raises(WorkflowUpdateFailedError) as caught:
        await handle.execute_update("resume", m.ResumeRequest(), result_type=m.UpdateAnswer)
    assert "nothing to resume" in str(caught.value.cause)
    await handle.execute_update("cancel", m.CancelRequest(), result_type=m.UpdateAnswer)
    await handle.result()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"machines": 0}, "machines"),
        ({"comand": ["x"]}, "comand"),
        ({"layout": {"tp": 3}}, "layout"),
        ({"command": []}, "command"),
    ],
)
async def test_bad_spec_fails_the_start_at_once(
    bench: Bench, changes: dict[str, Any], said: str
) -> None:
    error = await cause_of(await bench.start(bench.spec(**changes)))
    assert error.type == "InvalidJobSpec"
    assert said in error.message
    assert bench.world.counts["register_job"] == 0


async def test_input_that_is_no_mapping_fails_at_once(bench: Bench) -> None:
    handle = await bench.client.start_workflow(
        m.TRAINING_JOB, "train.py", id=f"job-{bench.name}", task_queue=m.TASK_QUEUE
    )
    assert (await cause_of(handle)).type == "InvalidJobSpec"


async def test_wrong_workflow_id_is_refused(bench: Bench) -> None:
    handle = await bench.client.start_workflow(
        m.TRAINING_JOB, bench.spec(), id=f"other-{bench.name}", task_queue=m.TASK_QUEUE
    )
    error = await cause_of(handle)
    assert f"job-{bench.name}" in error.message


async def test_name_that_was_used_is_refused_by_the_ledger(bench: Bench) -> None:
    bench.world.problem = "job x has ended already"
    error = await cause_of(await bench.start())
    assert "ended already" in error.message
    assert bench.world.started == []


async def test_live_run_in_the_ledger_is_adopted(bench: Bench) -> None:
    world = bench.world
    world.generation = 5
    world.leased = ["m1", "m2"]
    world.live_run = m.LiveRun(
        run_id="job/5",
        generation=5,
        machines=tuple(
            m.MachineRef(machine_id=f"m{i + 1}", address="127.0.0.1", group_rank=i)
            for i in range(2)
        ),
        code_version="none",
        code_path=None,
        restore=None,
        first_step_at=None,
        opened_at=EPOCH,
    )
    world.scripts[5] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert result.phase is JobPhase.SUCCEEDED
    assert world.started == []
    assert world.counts["open_run"] == 0


async def test_continue_as_new_while_running_loses_nothing(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([FIRST, Say("hold", step=30), Say("tick", step=60), DONE])
    handle = await bench.start()
    first_run = handle.result_run_id
    await bench.until(lambda: world.held_watches == 1)
    await handle.signal("roll", m.RollRequest(reason="upgrade"))
    result = await handle.result()
    assert result.phase is JobPhase.SUCCEEDED
    assert len(world.started) == 1
    assert world.unused() == []
    description = await bench.client.get_workflow_handle(f"job-{bench.name}").describe()
    assert description.run_id != first_run


async def test_continue_as_new_in_an_incident_happens_at_the_next_safe_point(bench: Bench) -> None:
    world = bench.world
    world.checkpoints[1] = 30
    loop = asyncio.get_running_loop()
    job = bench.client.get_workflow_handle(f"job-{bench.name}")

    def roll_now(_: m.StopRanks) -> None:
        task = loop.create_task(job.signal("roll", m.RollRequest()))
        rolls.append(task)

    rolls: list[asyncio.Task[None]] = []
    world.on_stop = roll_now
    world.scripts[1] = Script(
        [FIRST, Say("tick", step=10), trouble(rank_exit(0))],
        ranks={2: exited(2, signal=9, step=33)},
        unreachable=frozenset({"m2"}),
        lost=frozenset({"m2"}),
    )
    world.scripts[2] = Script([FIRST, DONE])
    handle = await bench.start()
    result = await handle.result()
    assert len(rolls) == 1
    assert result.phase is JobPhase.SUCCEEDED
    assert (result.runs, result.incidents) == (2, 1)
    assert len(world.evictions) == 1
    assert [r.machine_id for r in world.started[1].machines] == ["m1", "m3"]
    description = await bench.client.get_workflow_handle(f"job-{bench.name}").describe()
    assert description.run_id != handle.first_execution_run_id


async def test_blind_job_tells_a_person_and_touches_nothing(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([FIRST, Say("blind"), Say("tick", step=50), DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (1, 0)
    assert [n.severity for n in world.notes] == ["warning"]
    assert world.stopped == []


async def test_failed_save_is_recorded_and_training_goes_on(bench: Bench) -> None:
    world = bench.world
    failed = m.ObservationRecord(
        kind=EventKind.SAVE_FAILED,
        verdict=Verdict.FAULTY,
        machine_id="m1",
        rank=0,
        reason="cannot save step 10: No space left on device",
    )
    world.scripts[1] = Script(
        [
            FIRST,
            Say("tick", step=10, observations=(failed,)),
            Say("tick", step=11, observations=(failed,)),
            DONE,
        ]
    )
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (1, 1)
    record = world.incidents[f"{bench.name}-1-r1"]
    assert record.symptom is Symptom.DISK_FULL
    assert world.stopped == []


async def test_page_and_search_attributes_tell_the_story(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script([FIRST, Say("hold", step=12)])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    from temporalio.api.sdk.v1 import WorkflowMetadata

    metadata = await handle.query("__temporal_workflow_metadata", result_type=WorkflowMetadata)
    page = metadata.current_details
    assert bench.name in page
    assert "running" in page
    assert "m1, m2" in page
    description = await handle.describe()
    values = {k.name: v for k, v in ((p.key, p.value) for p in description.typed_search_attributes)}
    assert values["EverstepState"] == "running"
    await handle.execute_update("cancel", m.CancelRequest(), result_type=m.UpdateAnswer)
    await handle.result()


async def test_a_look_before_the_first_step_does_not_make_an_incident_stable(bench: Bench) -> None:
    """Restarting is slow, looks are frequent: failing again then is still the same incident."""
    world = bench.world
    world.policy = world.policy.model_copy(
        update={
            "policy": world.policy.policy.model_copy(
                update={
                    "ladder": world.policy.policy.ladder.model_copy(
                        update={"stable_after": timedelta(0)}
                    )
                }
            )
        }
    )
    again = trouble(rank_exit(1), step=9)
    ended = {1: exited(1, signal=9, step=9)}
    world.scripts[1] = Script([FIRST, again], ranks=ended)
    world.scripts[2] = Script([Say("tick"), Say("tick"), again], ranks=ended)
    world.scripts[3] = Script([FIRST, DONE])
    result = await (await bench.start()).result()
    assert (result.runs, result.incidents) == (3, 1)


async def test_starting_from_scratch_loses_every_step(bench: Bench) -> None:
    world = bench.world
    world.scripts[1] = Script(
        [FIRST, trouble(rank_exit(1), step=9)], ranks={1: exited(1, signal=9, step=9)}
    )
    world.scripts[2] = Script([FIRST, Say("hold", step=3)])
    handle = await bench.start()
    await bench.until(lambda: world.held_watches == 1)
    # Steps 0 to 9 were done.
    assert (await bench.status(handle)).incidents[0].steps_lost == 10
    await handle.execute_update("cancel", m.CancelRequest(), result_type=m.UpdateAnswer)
    await handle.result()
