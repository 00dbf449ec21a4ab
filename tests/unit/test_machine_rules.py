"""Attribution from what probes saw: the machine that has to go, what is shared, what explains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from everstep.decide.attribution import Finding, MachineReport, RankReport, Trigger, attribute
from everstep.decide.ladder import LadderLimits, LadderState, decide
from everstep.decide.observation import Observation
from everstep.decide.reports import Seen
from everstep.decide.words import (
    Action,
    Cause,
    Confidence,
    LogClass,
    RankState,
    Rung,
    Side,
    Symptom,
    Verdict,
)

KILL, TERM = 9, 15
LIMITS = LadderLimits(
    budget_window_s=86400,
    infrastructure_restarts_max=20,
    user_code_restarts_max=3,
    unclear_restarts_max=5,
    no_progress_restarts_max=3,
    evictions_per_window_max=10,
    user_code_gives_up=True,
)


def fault(symptom: Symptom, action: Action = Action.EVICT_MACHINE, **more: Any) -> Observation:
    fields: dict[str, Any] = {
        "probe": "test",
        "verdict": Verdict.FAULTY,
        "reason": f"{symptom} was seen",
        "rule": symptom.value,
        "symptom": symptom,
        "action": action,
    }
    return Observation(**(fields | more))


GPU = fault(Symptom.GPU_UNAVAILABLE, target="gpu 1")
OOM = fault(Symptom.CPU_OOM, Action.FIX_CONFIG_GIVE_UP)


def rank(number: int, **more: Any) -> RankReport:
    """A rank of two per machine, ended by us unless told otherwise."""
    values: dict[str, Any] = {
        "rank": number,
        "machine_id": f"m{number // 2 + 1}",
        "state": RankState.EXITED,
        "step": 7,
        "exited_ago_s": 1.0,
    }
    if not {"exit_code", "signal"} & more.keys():
        values |= {"signal": TERM, "stopped_by_us": True}
    return RankReport(**(values | more))


def witness(number: int) -> RankReport:
    return rank(number, exit_code=1, log_class=LogClass.PEER_LOST)


def machines(
    *ranks: RankReport, seen: dict[str, list[Seen]] | None = None, **more: Any
) -> list[MachineReport]:
    ids = sorted({r.machine_id for r in ranks} | {"m1", "m2"} | set(seen or {}))
    return [
        MachineReport(
            machine_id=i,
            reachable=True,
            ranks=tuple(r for r in ranks if r.machine_id == i),
            observations=tuple((seen or {}).get(i, [])),
            **more.get(i, {}),
        )
        for i in ids
    ]


ALL = (rank(0), rank(1), rank(2), rank(3))


def now(observation: Observation, **more: Any) -> Seen:
    return Seen(observation=observation, **({"age_s": 3.0} | more))


def rung(finding: Finding) -> tuple[Rung, tuple[str, ...]]:
    decision, _ = decide(
        finding, LadderState(), limits=LIMITS, now_s=0.0, run_machines=["m1", "m2"]
    )
    return decision.rung, decision.evict


def test_a_machine_that_has_to_go_is_the_finding_and_is_evicted() -> None:
    found = attribute(machines(*ALL, seen={"m2": [now(GPU)]}))
    assert (found.symptom, found.side) == (Symptom.GPU_UNAVAILABLE, Side.INFRASTRUCTURE)
    assert (found.confidence, found.cause) == (Confidence.HIGH, Cause.INFRASTRUCTURE)
    assert (found.suspects, found.rule) == (("m2",), "machine_gpu_unavailable")
    assert found.action is Action.EVICT_MACHINE
    assert rung(found) == (Rung.EVICT, ("m2",))


def test_it_comes_before_what_ranks_say_and_names_them_beside() -> None:
    raised = rank(3, exit_code=1, log_class=LogClass.PYTHON_EXCEPTION, log_lines=("TypeError: x",))
    reports = machines(witness(0), witness(1), rank(2), raised, seen={"m2": [now(GPU)]})
    found = attribute(reports)
    assert (found.symptom, found.suspects) == (Symptom.GPU_UNAVAILABLE, ("m2",))
    assert found.culprit_ranks == (3,)
    assert found.witnesses == (0, 1)
    assert any("witnesses only" in line for line in found.ruled_out)
    assert any("ran until we ended" in line for line in found.ruled_out)


def test_what_stopped_the_run_counts_although_the_machine_says_no_more() -> None:
    reports = machines(*ALL[:2])
    reports[1] = MachineReport(machine_id="m2", reachable=False)
    told = Trigger(kind="probe", machine_id="m2", rank=None, reason="x", observation=GPU)
    assert attribute(reports, triggers=[told]).suspects == ("m2",)


def test_a_lost_machine_and_a_sick_one_both_go() -> None:
    reports = machines(*ALL, seen={"m2": [now(GPU)]})
    reports[0] = MachineReport(machine_id="m1", reachable=False, lost=True)
    found = attribute(reports)
    assert (found.rule, found.suspects) == ("machine_lost", ("m1", "m2"))
    same = machines(*ALL)
    same[1] = MachineReport(machine_id="m2", reachable=False, lost=True, observations=(now(GPU),))
    assert attribute(same).symptom is Symptom.GPU_UNAVAILABLE


@pytest.mark.parametrize(
    "seen",
    [
        now(replace(GPU, confidence=Confidence.LOW)),
        now(replace(GPU, action=Action.STOP_TIME_CHECK)),
        now(replace(GPU, action=Action.WARN_ONLY)),
        now(replace(GPU, verdict=Verdict.UNKNOWN, symptom=None, action=None)),
        now(GPU, cleared_ago_s=1.0),
    ],
)
def test_less_than_sure_and_present_evicts_nobody(seen: Seen) -> None:
    for ranks in (ALL, (witness(0), rank(1, signal=KILL), rank(2), rank(3))):
        found = attribute(machines(*ranks, seen={"m2": [seen]}))
        assert found.suspects == ()
        assert rung(found)[1] == ()


def test_a_fault_that_has_gone_again_counts_where_its_machine_failed() -> None:
    died = rank(3, signal=11)
    gone = now(replace(GPU, target="gpu 1"), cleared_ago_s=1.0)
    assert attribute(machines(*ALL[:3], died, seen={"m2": [gone]})).suspects == ("m2",)
    assert attribute(machines(*ALL[:3], died, seen={"m1": [gone]})).suspects == ()


@pytest.mark.parametrize(
    ("symptom", "action", "side"),
    [
        (Symptom.FILESYSTEM_IO, Action.WAIT_EXTERNAL, Side.EXTERNAL),
        (Symptom.FILESYSTEM_IO, Action.EVICT_MACHINE, Side.EXTERNAL),
        (Symptom.NETWORK_HOST, Action.EVICT_MACHINE, Side.INFRASTRUCTURE),
    ],
)
def test_what_several_machines_share_evicts_none_of_them(
    symptom: Symptom, action: Action, side: Side
) -> None:
    seen = {i: [now(fault(symptom, action))] for i in ("m1", "m2")}
    found = attribute(machines(*ALL, seen=seen))
    assert (found.rule, found.symptom, found.side) == ("shared_outage", symptom, side)
    assert found.suspects == ()
    assert rung(found) == (Rung.REATTEMPT, ())


def test_two_sick_devices_are_two_sick_machines() -> None:
    found = attribute(machines(*ALL, seen={"m1": [now(GPU)], "m2": [now(GPU)]}))
    assert found.suspects == ("m1", "m2")


def test_a_shared_outage_does_not_excuse_an_error_of_the_owner() -> None:
    seen = {i: [now(fault(Symptom.FILESYSTEM_IO, Action.WAIT_EXTERNAL))] for i in ("m1", "m2")}
    raised = rank(3, exit_code=1, log_class=LogClass.PYTHON_EXCEPTION, log_lines=("TypeError: x",))
    assert attribute(machines(*ALL[:3], raised, seen=seen)).symptom is Symptom.USER_CODE


def test_killed_for_memory_needs_the_kernels_word_nearby() -> None:
    ranks = (witness(0), witness(1), rank(2), rank(3, signal=KILL))
    found = attribute(machines(*ranks, seen={"m2": [now(OOM)]}))
    assert (found.symptom, found.rule) == (Symptom.CPU_OOM, "oom_killed")
    assert (found.side, found.cause) == (Side.USER_CODE, Cause.USER_CODE)
    assert (found.first_failed_rank, found.suspects) == (3, ())
    for seen in ({}, {"m1": [now(OOM)]}, {"m2": [now(OOM, age_s=500.0)]}):
        assert attribute(machines(*ranks, seen=seen)).rule == "crashed"
    again = now(OOM, age_s=500.0, renewed_ago_s=2.0)
    assert attribute(machines(*ranks, seen={"m2": [again]})).rule == "oom_killed"


def test_a_crash_on_a_gpu_that_is_not_well_is_not_the_owners() -> None:
    check = replace(GPU, action=Action.STOP_TIME_CHECK, confidence=Confidence.LOW)
    died = rank(3, signal=6)
    found = attribute(machines(*ALL[:3], died, seen={"m2": [now(check)]}))
    assert (found.rule, found.symptom) == ("gpu_of_rank", Symptom.GPU_UNAVAILABLE)
    assert (found.side, found.confidence) == (Side.INFRASTRUCTURE, Confidence.LOW)
    assert rung(found) == (Rung.REATTEMPT, ())
    other = replace(check, target="gpu 0")
    assert attribute(machines(*ALL[:3], died, seen={"m2": [now(other)]})).rule == "aborted"
    warned = replace(check, action=Action.WARN_ONLY)
    assert attribute(machines(*ALL[:3], died, seen={"m2": [now(warned)]})).rule == "aborted"


def test_lost_peers_beside_one_link_that_flaps_is_the_network() -> None:
    link = fault(Symptom.NETWORK_HOST, Action.WARN_ONLY, confidence=Confidence.LOW)
    ranks = (witness(0), witness(1), witness(2), witness(3))
    found = attribute(machines(*ranks, seen={"m2": [now(link)]}))
    assert (found.rule, found.symptom) == ("stands_beside_fault", Symptom.NETWORK_HOST)
    assert (found.side, found.suspects) == (Side.INFRASTRUCTURE, ())
    both = {"m1": [now(link)], "m2": [now(link)]}
    assert attribute(machines(*ranks, seen=both)).rule == "only_witnesses"


def test_slow_steps_and_one_hot_machine() -> None:
    hot = now(fault(Symptom.MFU_DECLINE, Action.WARN_ONLY))
    slow = Trigger(kind="step_time_decline", machine_id="m1", rank=None, reason="1.4 times")
    found = attribute(machines(*ALL, seen={"m2": [hot]}), triggers=[slow])
    assert (found.symptom, found.suspects) == (Symptom.MFU_DECLINE, ("m2",))
    assert rung(found) == (Rung.EVICT, ("m2",))
    both = attribute(machines(*ALL, seen={"m1": [hot], "m2": [hot]}), triggers=[slow])
    assert both.suspects == ()
    assert attribute(machines(*ALL, seen={"m2": [hot]})).suspects == ()


def test_what_went_before_the_run_stopped_neither_hides_nor_excuses_a_machine() -> None:
    """A watch tells what it has kept beside, too: it is not what made the run stop."""
    over = {"age_s": 560.0, "cleared_ago_s": 500.0}

    def before(machine_id: str, observation: Observation) -> Trigger:
        return Trigger(
            kind="probe",
            machine_id=machine_id,
            rank=None,
            reason="",
            observation=observation,
            cleared=True,
        )

    hot = fault(Symptom.MFU_DECLINE, Action.WARN_ONLY, reason="it is hot now")
    cool = replace(hot, reason="it was hot")
    slow = Trigger(kind="step_time_decline", machine_id="m1", rank=None, reason="1.4 times")
    seen = {"m1": [now(cool, **over)], "m2": [now(hot)]}
    found = attribute(machines(*ALL, seen=seen), triggers=[slow, before("m1", cool)])
    assert (found.rule, found.suspects) == ("slow_machine", ("m2",))
    assert "m2 is slowed down: it is hot now" in found.reason

    away = fault(Symptom.FILESYSTEM_IO, Action.WAIT_EXTERNAL)
    died = (rank(0, exit_code=1), *ALL[1:])
    seen = {"m1": [now(away, **over)], "m2": [now(away, **over)]}
    told = [before("m1", away), before("m2", away)]
    assert attribute(machines(*died, seen=seen), triggers=told).rule == "exit_code"
    assert attribute(machines(*died), triggers=told).rule == "exit_code"


def test_nan_on_a_machine_with_bad_memory_evicts_it_and_still_goes_back() -> None:
    ecc = now(fault(Symptom.GPU_MEMORY_ECC))
    found = attribute(machines(*ALL[:3], rank(3, nonfinite_step=5), seen={"m2": [ecc]}))
    assert (found.symptom, found.suspects) == (Symptom.GPU_MEMORY_ECC, ("m2",))
    assert found.nonfinite_step == 5


def test_what_was_looked_at_is_said() -> None:
    died = rank(3, signal=KILL)
    disk = now(fault(Symptom.DISK_FULL, Action.WARN_ONLY, target="/scratch"))
    reports = machines(
        *ALL[:3], died, seen={"m2": [disk]}, m2={"healthy_probes": ("gpu", "kernel_log")}
    )
    said = "\n".join(attribute(reports).ruled_out)
    assert "m2: probes that found nothing wrong: gpu, kernel_log" in said
    assert "m2 /scratch: disk_full was seen (warn_only, high confidence): evicts nobody" in said


def test_a_plan_is_no_fault() -> None:
    reports = machines(*ALL, seen={"m2": [now(GPU)]}, m1={"planned_stop": "maintenance"})
    assert attribute(reports).rule == "planned_stop"


def test_a_spike_of_the_loss_alone_accuses_nobody() -> None:
    spike = Trigger(kind="loss_spike", machine_id="m1", rank=0, reason="loss 6 times its median")
    found = attribute(machines(*ALL), triggers=[spike])
    assert (found.symptom, found.side, found.suspects) == (Symptom.LOSS_SPIKE, Side.UNCLEAR, ())
