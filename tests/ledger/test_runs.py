"""Opening, superseding, closing and adopting runs."""

from __future__ import annotations

import pytest

from everstep.decide.restore import CheckpointId, LineageEntry
from everstep.decide.words import JobPhase, RunOutcome, RunPhase
from everstep.ledger import LedgerConflict
from everstep.spec import messages as m
from tests.ledger.support import Fleet, at, names


def test_a_run_leases_idle_machines_in_sorted_order(fleet: Fleet) -> None:
    fleet.machines("m3", "m1", "m2")
    fleet.job()

    opened = fleet.open()

    assert (opened.run_id, opened.generation, opened.shortfall) == ("train.1", 1, 0)
    assert names(opened) == ["m1", "m2"]
    assert fleet.holders() == {"m1": "train", "m2": "train"}
    (run,) = fleet.ledger.runs("train")
    assert run.at(RunPhase.OPENED) == at(1)
    assert run.machines == opened.machines
    assert run.outcome is None


def test_the_same_request_gets_the_first_answer_even_after_the_run_was_closed(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3")
    fleet.job()
    request = fleet.request()
    first = fleet.ledger.open_run(request)
    fleet.close(first.run_id, release=True)

    assert fleet.ledger.open_run(request) == first
    assert len(fleet.ledger.runs("train")) == 1
    assert fleet.holders() == {}, "a repeat must not lease anything"


def test_a_shortfall_leases_and_opens_nothing_and_is_the_answer_to_a_repeat(fleet: Fleet) -> None:
    fleet.machines("m1")
    fleet.job()
    request = fleet.request(machines_needed=3)

    assert fleet.ledger.open_run(request) == m.OpenedRun(shortfall=2)
    assert fleet.holders() == {}
    assert fleet.ledger.runs("train") == []

    fleet.machines("m2", "m3")
    assert fleet.ledger.open_run(request) == m.OpenedRun(shortfall=2)
    assert fleet.open(machines_needed=3).generation == 1


def test_kept_machines_stay_in_their_places_and_a_blocked_one_is_replaced_there(
    fleet: Fleet,
) -> None:
    fleet.machines("m1", "m2", "m3", "m4")
    fleet.job()
    fleet.open(machines_needed=3)
    fleet.evict("m2")

    opened = fleet.open(
        machines_needed=3, keep=("m1", "m2", "m3"), avoid=("m2",), start_reason="evict"
    )

    assert names(opened) == ["m1", "m4", "m3"]
    assert opened.generation == 2
    assert fleet.state("m2") == "evicted"


def test_machines_that_are_not_kept_are_given_back(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()

    fleet.open(machines_needed=1, keep=("m2",))

    assert fleet.holders() == {"m2": "train"}


def test_a_machine_to_avoid_is_never_taken_not_even_when_it_is_kept(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3")
    fleet.job()
    fleet.open()

    assert names(fleet.open(keep=("m1", "m2"), avoid=("m1",))) == ["m3", "m2"]


def test_an_open_run_is_superseded_and_word_of_its_real_end_may_come_later(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    first = fleet.open()
    fleet.open(keep=("m1", "m2"), seconds=60)
    assert [run.outcome for run in fleet.ledger.runs("train")] == [RunOutcome.SUPERSEDED, None]

    fleet.close(first.run_id, RunOutcome.FAILED, release=True, seconds=55)
    fleet.close(first.run_id, RunOutcome.STOPPED, seconds=70)

    run = fleet.ledger.runs("train")[0]
    assert (run.outcome, run.closed_at) == (RunOutcome.FAILED, at(55))
    assert run.at(RunPhase.CLOSED) == at(55)
    assert fleet.holders() == {"m1": "train", "m2": "train"}, "they are the next run's now"


def test_a_shortfall_leaves_an_open_run_and_its_machines_alone(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()

    assert fleet.open(machines_needed=3).shortfall == 1
    assert fleet.holders() == {"m1": "train", "m2": "train"}
    assert fleet.ledger.runs("train")[0].closed_at is None


def test_a_job_that_waits_gives_back_what_it_does_not_keep(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.close(fleet.open().run_id)

    assert fleet.open(machines_needed=3, keep=("m1",)).shortfall == 1
    assert fleet.holders() == {"m1": "train"}


def test_machines_of_other_jobs_small_ones_and_silent_ones_are_not_taken(fleet: Fleet) -> None:
    fleet.machines("a1", "a2")
    fleet.machine("small", slots=1, seconds=100)
    fleet.machine("silent", seconds=60)
    fleet.machine("fresh", seconds=100)
    fleet.job("other")
    fleet.job()
    fleet.open("other")

    opened = fleet.open(machines_needed=2, seconds=101)

    assert opened.shortfall == 1, "only `fresh` is idle, big enough and seen lately"


def test_a_kept_machine_that_is_silent_is_unknown_not_gone(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()

    assert names(fleet.open(keep=("m1", "m2"), seconds=5000)) == ["m1", "m2"]


def test_a_kept_machine_that_another_job_has_by_now_is_replaced(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3", "m4")
    fleet.job("other")
    fleet.job()
    fleet.close(fleet.open().run_id, release=True)
    assert names(fleet.open("other", machines_needed=1)) == ["m1"]

    assert names(fleet.open(keep=("m1", "m2"))) == ["m3", "m2"]


def test_the_smallest_machine_that_is_big_enough_is_taken_first(fleet: Fleet) -> None:
    fleet.machine("a-big", slots=8)
    fleet.machine("b-small", slots=2)
    fleet.job()

    assert names(fleet.open(machines_needed=1)) == ["b-small"]


def test_a_request_older_than_the_last_answered_one_is_refused(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3")
    fleet.job()
    frozen = fleet.request()
    fleet.open()

    with pytest.raises(LedgerConflict, match="wf/1 is older than wf/2"):
        fleet.ledger.open_run(frozen)
    assert fleet.ledger.runs("train")[-1].closed_at is None


def test_a_request_of_a_workflow_that_was_replaced_is_refused(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    frozen = fleet.request()
    fleet.origin = "wf-anew"
    fleet.open()

    with pytest.raises(LedgerConflict, match="is older than wf-anew/3"):
        fleet.ledger.open_run(frozen)


def test_one_key_belongs_to_one_job(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.job("other")
    request = fleet.request()
    fleet.ledger.open_run(request)

    with pytest.raises(LedgerConflict, match="was answered for job train"):
        fleet.ledger.open_run(request.model_copy(update={"job_id": "other"}))


def test_runs_of_jobs_that_are_unknown_or_ended_are_refused(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    with pytest.raises(LedgerConflict, match="job train: not in this ledger"):
        fleet.open()
    fleet.job()
    fleet.end()

    with pytest.raises(LedgerConflict, match="ended as succeeded"):
        fleet.open()
    with pytest.raises(LedgerConflict, match="run nobody.1: not in this ledger"):
        fleet.close("nobody.1")


def test_a_key_of_another_form_is_refused(fleet: Fleet) -> None:
    fleet.job()

    with pytest.raises(LedgerConflict, match="is not <temporal run id>/<number>"):
        fleet.open(request_key="hello")


def test_the_first_restore_point_holds_and_makes_the_lineage(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    assert fleet.ledger.lineage("train") == (), "it has not chosen yet, so it has not trained"
    assert fleet.ledger.set_restore_point("train.1", None) is None
    fleet.open(keep=("m1", "m2"))
    point = CheckpointId(step=2**40, generation=1)
    first = fleet.ledger.set_restore_point("train.2", point, path="/c/step")

    again = fleet.ledger.set_restore_point("train.2", CheckpointId(step=9, generation=1), path="/x")

    assert first == again
    assert first is not None
    assert (first.step, first.generation, first.path) == (2**40, 1, "/c/step")
    assert fleet.ledger.set_restore_point("train.1", point, path="/late") is None
    assert fleet.ledger.lineage("train") == (
        LineageEntry(generation=1, restored=None, stepped=False),
        LineageEntry(generation=2, restored=point, stepped=False),
    )


def test_a_temporal_server_with_another_clock_does_not_hide_the_machines(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", seconds=10)
    fleet.job()

    ahead = fleet.request(seconds=3600)

    assert fleet.ledger.open_run(ahead, now=at(11)).shortfall == 0


def test_machines_that_went_away_are_not_leased_by_a_server_that_is_behind(fleet: Fleet) -> None:
    fleet.machines("m1", "m2", seconds=10)
    fleet.job()

    behind = fleet.request(seconds=11)

    assert fleet.ledger.open_run(behind, now=at(3600)).shortfall == 2


def test_the_lineage_says_which_runs_have_made_a_step(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    for generation in (1, 2):
        fleet.open(keep=("m1", "m2"))
        fleet.ledger.set_restore_point(f"train.{generation}", None)
    fleet.ledger.record_progress(
        m.RecordProgress(
            job_id="train",
            phase=JobPhase.RUNNING,
            phases=(m.RecordPhase(run_id="train.1", phase=RunPhase.FIRST_STEP, at=at(5)),),
        )
    )
    assert [entry.stepped for entry in fleet.ledger.lineage("train")] == [True, False]


def test_an_open_run_can_be_adopted_with_everything_it_needs(fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    assert fleet.ledger.live_run("train") is None
    opened = fleet.open()
    fleet.ledger.set_restore_point("train.1", CheckpointId(step=3, generation=1), path="/c/3")
    fleet.ledger.record_code_version("train", "sha-1", now=at(2), path="/code/sha-1")
    fleet.ledger.record_progress(
        m.RecordProgress(
            job_id="train",
            phase=JobPhase.RUNNING,
            code_version="sha-1",
            phases=(
                m.RecordPhase(run_id="train.1", phase=RunPhase.START_COMMANDED, at=at(3)),
                m.RecordPhase(run_id="train.1", phase=RunPhase.FIRST_STEP, at=at(5), step=4),
            ),
        )
    )

    live = fleet.job().live_run

    assert live == fleet.ledger.live_run("train")
    assert live is not None
    assert live.machines == opened.machines
    assert (live.code_version, live.code_path) == ("sha-1", "/code/sha-1")
    assert live.restore is not None
    assert live.restore.path == "/c/3"
    assert (live.opened_at, live.first_step_at) == (at(1), at(5))
    fleet.close("train.1")
    assert fleet.ledger.live_run("train") is None
