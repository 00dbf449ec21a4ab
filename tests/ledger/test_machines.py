"""Registration, fences, evictions that happen once, and release."""

from __future__ import annotations

import pytest

from everstep.ledger import LedgerConflict, MachineState
from tests.ledger.support import Fleet, at, names


def test_registering_again_updates_the_machine_and_keeps_when_it_came(fleet: Fleet) -> None:
    fleet.machine("m1", labels={"rack": "r1"})
    fleet.machine("m1", seconds=5, url="https://elsewhere:1", slots=4, labels={"rack": "r2"})

    (row,) = fleet.ledger.machines()

    assert (row.url, row.slots, row.labels) == ("https://elsewhere:1", 4, {"rack": "r2"})
    assert (row.first_seen_at, row.last_seen_at) == (at(0), at(5))
    assert (row.state, row.job_id) == (MachineState.IDLE, None)
    assert fleet.ledger.machine_locations(["m1", "m9"]) == {"m1": "https://elsewhere:1"}


def test_the_newest_boot_wins_and_the_one_before_is_refused_while_it_lives(fleet: Fleet) -> None:
    fleet.machine("m1", boot="old")
    assert fleet.machine("m1", boot="new", seconds=1, url="http://new:1").accepted

    refused = fleet.machine("m1", boot="old", seconds=2)

    assert not refused.accepted
    assert "machine id m1 is used by another agent (http://new:1)" in refused.message
    assert fleet.machine("m1", boot="new", seconds=3).accepted
    assert fleet.machine("m1", boot="old", seconds=64).accepted, "the newer one is gone"


def test_a_machine_in_the_open_run_may_run_that_generation(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()

    assert fleet.machine("m1", jobs={"train": 1}).fences == {"train": 1}


def test_a_machine_that_was_replaced_is_fenced_off_the_run_that_goes_on(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3")
    fleet.job()
    fleet.open()
    fleet.evict("m1")
    fleet.open(keep=("m1", "m2"), avoid=("m1",))

    standing = fleet.machine("m1", jobs={"train": 1})

    assert standing.evicted
    assert standing.fences == {"train": 3}, "neither run 1 nor run 2 may run here"
    assert fleet.machine("m3", jobs={"train": 2}).fences == {"train": 2}


@pytest.mark.parametrize("how", ["run closed", "job ended", "evicted"])
def test_ranks_that_come_back_after_their_run_are_fenced(fleet: Fleet, how: str) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    opened = fleet.open()
    if how == "run closed":
        fleet.close(opened.run_id)
    elif how == "job ended":
        fleet.end()
    else:
        fleet.evict("m1")

    assert fleet.machine("m1", jobs={"train": 1}).fences == {"train": 2}


def test_ranks_of_a_job_that_this_ledger_does_not_know_are_left_alone(fleet: Fleet) -> None:
    fleet.job()

    assert fleet.machine("m1", jobs={"unknown": 7, "train": 3}).fences == {}


def test_an_eviction_ends_the_lease_and_blocks_the_machine(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()

    evicted = fleet.evict("m2", "m1", "m2")

    assert evicted.evicted == ("m1", "m2")
    assert evicted.already == {}
    assert fleet.holders() == {}
    row = fleet.ledger.machines()[0]
    assert (row.state, row.blocked_reason) == (MachineState.EVICTED, "machine lost")
    assert (row.blocked_by, row.blocked_at) == ("train-1", at(40))
    assert fleet.open().shortfall == 2


def test_repeating_an_eviction_after_the_release_does_nothing(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    first = fleet.evict("m1")
    assert fleet.ledger.release("m1", reason="repaired", by="ann", now=at(60))

    assert fleet.evict("m1") == first
    assert fleet.state("m1") == "idle"
    assert not fleet.ledger.release("m1", reason="again", by="ann", now=at(61))


def test_a_machine_that_another_incident_evicted_is_reported_not_blocked_twice(
    fleet: Fleet,
) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.evict("m1")

    second = fleet.evict("m1", "m2", incident_id="train-2")

    assert second.evicted == ("m2",)
    assert second.already == {"m1": "evicted before by incident train-1: machine lost"}
    assert fleet.evict("m1", "m2", incident_id="train-2") == second


def test_another_step_of_the_same_incident_does_not_block_twice(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.evict("m1")

    assert fleet.evict("m1", step=2).already.keys() == {"m1"}


@pytest.mark.parametrize(
    ("situation", "reason"),
    [
        ("newer run", "run 2 was opened after this was decided"),
        ("job ended", "job train has ended"),
        ("another job has it", "leased to job other since 2030-01-01T12:00:01"),
        ("unknown machine", "is not a registered machine"),
    ],
)
def test_an_eviction_looks_at_the_present_state_first(
    fleet: Fleet, situation: str, reason: str
) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.job("other")
    first = fleet.open()
    machine = "m1"
    if situation == "newer run":
        fleet.open(keep=("m1", "m2"))
    elif situation == "job ended":
        fleet.end()
    elif situation == "another job has it":
        fleet.close(first.run_id, release=True)
        fleet.open("other", machines_needed=1)
    else:
        machine = "m9"

    stale = fleet.evict(machine)

    assert stale.evicted == ()
    assert stale.already[machine].startswith(reason)
    assert fleet.evict(machine) == stale
    assert "evicted" not in {fleet.state("m1"), fleet.state("m2")}


def test_an_eviction_for_an_unknown_job_is_refused(fleet: Fleet) -> None:
    fleet.machines("m1")

    with pytest.raises(LedgerConflict, match="job train: not in this ledger"):
        fleet.evict("m1")


@pytest.mark.parametrize("clock_off_s", [-3600, 0, 3600])
def test_a_released_machine_is_leased_once_its_agent_has_heard_of_it(
    fleet: Fleet, clock_off_s: float
) -> None:
    """Until then the agent refuses to start ranks; and who releases has a clock of its own."""
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.evict("m1")
    assert fleet.machine("m1", seconds=50).evicted
    fleet.ledger.release("m1", reason="repaired", by="ann", now=at(60 + clock_off_s))
    fleet.machine("m2", seconds=61)

    assert fleet.open(keep=("m1", "m2"), seconds=61).shortfall == 1
    assert fleet.open(machines_needed=1, seconds=61, avoid=("m2",)).shortfall == 1
    assert fleet.state("m1") == "idle"

    assert not fleet.machine("m1", seconds=62).evicted
    assert names(fleet.open(keep=("m1", "m2"), seconds=63)) == ["m1", "m2"]


def test_a_machine_that_never_heard_of_its_eviction_is_leased_right_after_its_release(
    fleet: Fleet,
) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.evict("m1")
    fleet.ledger.release("m1", reason="a mistake", by="ann", now=at(60))

    assert names(fleet.open(keep=("m1", "m2"))) == ["m1", "m2"]


def test_a_released_machine_can_be_leased_and_evicted_again(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    fleet.evict("m1")
    fleet.ledger.release("m1", reason="repaired", by="ann", now=at(60))

    assert fleet.open(keep=("m1", "m2")).shortfall == 0
    assert fleet.evict("m1", generation=2, incident_id="train-2").evicted == ("m1",)
