"""The ladder: one test for each row, and for every sequence that it ends within its budgets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from everstep.decide.attribution import Finding
from everstep.decide.ladder import (
    ROWS,
    Decision,
    LadderLimits,
    LadderState,
    decide,
    person_resumed,
)
from everstep.decide.words import Action, Cause, Confidence, Rung, Side, Symptom
from everstep.spec.limits import ladder_limits
from everstep.spec.load import load_policy

MACHINES = ("m-1", "m-2", "m-3")
LIMITS = LadderLimits(
    budget_window_s=1000,
    infrastructure_restarts_max=4,
    user_code_restarts_max=2,
    unclear_restarts_max=3,
    no_progress_restarts_max=2,
    evictions_per_window_max=3,
    user_code_gives_up=True,
    progress_without_steps_s=100,
)
TERMINAL = {Rung.ASK_PERSON, Rung.GIVE_UP}


def _finding(
    cause: Cause = Cause.UNCLEAR,
    *,
    step: int | None = 10,
    suspects: tuple[str, ...] = (),
    confidence: Confidence = Confidence.HIGH,
) -> Finding:
    return Finding(
        symptom=Symptom.UNKNOWN,
        side=Side.UNCLEAR,
        cause=cause,
        confidence=confidence,
        rule="test",
        reason="because",
        suspects=suspects,
        step=step,
    )


def _lost(*machines: str, step: int | None = 10) -> Finding:
    return _finding(Cause.INFRASTRUCTURE, suspects=machines, step=step)


def _decide(
    finding: Finding,
    state: LadderState | None = None,
    *,
    now_s: float = 0,
    limits: LadderLimits = LIMITS,
) -> tuple[Decision, LadderState]:
    return decide(
        finding, state or LadderState(), limits=limits, now_s=now_s, run_machines=MACHINES
    )


def _play(*findings: Finding, limits: LadderLimits = LIMITS) -> list[Decision]:
    state, out = LadderState(), []
    for position, finding in enumerate(findings):
        decision, state = _decide(finding, state, now_s=float(position), limits=limits)
        out.append(decision)
    return out


def test_a_planned_stop_resumes_and_spends_nothing() -> None:
    decision, state = _decide(_finding(Cause.PLANNED))

    assert (
        decision.rung,
        decision.action,
        decision.budget_left,
    ) == (Rung.RESUME, Action.WAIT_EXTERNAL, None)
    assert state.records == ()


def test_suspects_of_the_run_are_evicted() -> None:
    decision, state = _decide(_lost("m-3", "m-1", "m-9"))

    assert (decision.rung, decision.action) == (Rung.EVICT, Action.EVICT_MACHINE)
    assert decision.evict == ("m-1", "m-3")
    assert state.records[0].machines == ("m-1", "m-3")
    assert (decision.cause, decision.budget_left) == (Cause.INFRASTRUCTURE, 3)


def test_suspects_without_confidence_are_not_evicted() -> None:
    decision, _ = _decide(
        _finding(Cause.INFRASTRUCTURE, suspects=("m-1",), confidence=Confidence.LOW)
    )

    assert (decision.rung, decision.evict) == (Rung.REATTEMPT, ())


def test_suspects_outside_of_the_run_are_not_evicted() -> None:
    decision, _ = _decide(_lost("m-9"))

    assert (decision.rung, decision.evict) == (Rung.REATTEMPT, ())


def test_more_evictions_than_the_window_allows_ask_a_person() -> None:
    decisions = _play(_lost("m-1", "m-2"), _lost("m-3", "m-1", step=11), _lost("m-3", step=12))

    assert [d.row for d in decisions] == ["evict", "evict_guard", "evict"]
    assert "ask a person: 2 machines evicted already, 2 more would pass the limit of 3" in (
        decisions[1].reason
    )


def test_evictions_that_do_not_help_ask_a_person() -> None:
    decisions = _play(_lost("m-1"), _lost("m-2"), _lost("m-3"))

    assert [d.row for d in decisions] == ["evict", "evict", "evict_spent"]
    assert "2 restarts in a row made no progress past step 10" in decisions[2].reason


def test_a_machine_that_dies_after_vain_reattempts_is_still_evicted() -> None:
    decisions = _play(_finding(), _finding(), _lost("m-1"))

    assert [d.row for d in decisions] == ["reattempt", "reattempt", "evict"]


@pytest.mark.parametrize(
    "gives_up, row, rung",
    [(True, "user_code_give_up", Rung.GIVE_UP), (False, "user_code_ask", Rung.ASK_PERSON)],
)
def test_an_owners_error_ends_when_its_budget_is_spent(
    *, gives_up: bool, row: str, rung: Rung
) -> None:
    limits = replace(LIMITS, user_code_gives_up=gives_up)
    decisions = _play(
        *(_finding(Cause.USER_CODE, step=step) for step in (10, 20, 30)), limits=limits
    )

    assert ["user_code", "user_code", row] == [d.row for d in decisions]
    assert [d.budget_left for d in decisions] == [1, 0, None]
    assert (rung, Action.FIX_CONFIG_GIVE_UP) == (decisions[-1].rung, decisions[-1].action)
    assert "2 of 2 restarts for user_code used within" in decisions[-1].reason


def test_unclear_causes_are_reattempted_and_end_at_a_person() -> None:
    decisions = _play(*(_finding(step=step) for step in (10, 20, 30, 40)))

    assert [d.row for d in decisions] == ["reattempt"] * 3 + ["ask_person"]
    assert [d.budget_left for d in decisions] == [2, 1, 0, None]


def test_each_cause_has_a_budget_of_its_own() -> None:
    infrastructure = [_finding(Cause.INFRASTRUCTURE, step=step) for step in (10, 20, 30, 40)]
    decisions = _play(*infrastructure, _finding(Cause.USER_CODE, step=50))

    assert (decisions[-1].row, decisions[-1].budget_left) == ("user_code", 1)


def test_failing_at_the_same_step_spends_the_budget_at_once() -> None:
    decisions = _play(_finding(), _finding(step=9), _finding(step=10))

    assert [d.row for d in decisions] == ["reattempt", "reattempt", "ask_person"]


def test_getting_further_starts_the_count_of_vain_restarts_afresh() -> None:
    decisions = _play(_finding(), _finding(), _finding(step=11), _finding(step=11))

    assert "ask_person" not in [d.row for d in decisions[:3]]


def test_runs_without_a_first_step_make_no_progress() -> None:
    decisions = _play(*[_finding(step=None)] * 3)

    assert [d.row for d in decisions] == ["reattempt", "reattempt", "ask_person"]


def test_a_long_run_of_a_script_that_reports_no_steps_is_progress() -> None:
    state = LadderState()
    rows = []
    for now_s in (0.0, 200.0, 400.0):
        decision, state = _decide(_finding(step=None), state, now_s=now_s)
        rows.append(decision.row)

    assert rows == ["reattempt"] * 3
    assert state.no_progress_in_row == 0


def test_what_is_older_than_the_window_is_forgotten() -> None:
    state = LadderState()
    for now_s in (0.0, 1.0):
        _, state = _decide(_finding(), state, now_s=now_s)
    decision, state = _decide(_finding(), state, now_s=1002.0)

    assert (decision.row, len(state.records)) == ("reattempt", 1)


def test_a_planned_stop_neither_adds_to_vain_restarts_nor_hides_them() -> None:
    state = LadderState()
    rows = []
    for finding in (_finding(), _finding(Cause.PLANNED), _finding(), _finding()):
        decision, state = _decide(finding, state)
        rows.append(decision.row)

    assert rows == ["reattempt", "planned", "reattempt", "ask_person"]


def test_a_person_who_resumes_gives_all_budgets_back() -> None:
    _, state = _decide(_lost("m-1"))

    assert LadderState() == person_resumed(state)


def test_every_row_can_be_reached() -> None:
    low = replace(LIMITS, evictions_per_window_max=0)
    keep = replace(LIMITS, user_code_gives_up=False, user_code_restarts_max=0)
    none = replace(LIMITS, infrastructure_restarts_max=0, user_code_restarts_max=0)
    none = replace(none, unclear_restarts_max=0)
    seen = {
        _decide(finding, limits=limits)[0].row
        for finding in (
            _finding(Cause.PLANNED), _lost("m-1"), _finding(Cause.USER_CODE), _finding()
        )
        for limits in (LIMITS, low, keep, none)
    }  # fmt: skip

    assert {row.name for row in ROWS} == seen


FINDINGS = st.builds(
    _finding,
    st.sampled_from(Cause),
    step=st.one_of(st.none(), st.integers(0, 5)),
    suspects=st.lists(st.sampled_from([*MACHINES, "m-9"]), unique=True, max_size=3).map(tuple),
    confidence=st.sampled_from(Confidence),
)
LIMIT_SETS = st.builds(
    LadderLimits,
    budget_window_s=st.sampled_from([5.0, 50.0, 1000.0]),
    infrastructure_restarts_max=st.integers(0, 4),
    user_code_restarts_max=st.integers(0, 4),
    unclear_restarts_max=st.integers(0, 4),
    no_progress_restarts_max=st.integers(0, 4),
    evictions_per_window_max=st.integers(0, 4),
    user_code_gives_up=st.booleans(),
    progress_without_steps_s=st.sampled_from([2.0, 1e9]),
)


@given(st.lists(st.tuples(st.floats(0, 20), FINDINGS), max_size=40), LIMIT_SETS)
def test_caps_hold_in_every_window_and_the_state_stays_small(
    story: list[tuple[float, Finding]], limits: LadderLimits
) -> None:
    state, now_s = LadderState(), 0.0
    for pause_s, finding in story:
        now_s += pause_s
        before = state
        decision, state = _decide(finding, before, now_s=now_s, limits=limits)

        assert (decision, state) == _decide(finding, before, now_s=now_s, limits=limits)
        window = [r for r in state.records if r.at_s > now_s - limits.budget_window_s]
        assert list(state.records) == window
        for cause, cap in (
            (Cause.INFRASTRUCTURE, limits.infrastructure_restarts_max),
            (Cause.USER_CODE, limits.user_code_restarts_max),
            (Cause.UNCLEAR, limits.unclear_restarts_max),
            (Cause.PLANNED, 0),
        ):
            assert sum(r.cause is cause for r in window) <= cap
        evicted = [m for r in window if r.rung is Rung.EVICT for m in r.machines]
        assert len(evicted) <= limits.evictions_per_window_max
        assert set(decision.evict) <= set(MACHINES) & set(finding.suspects)
        assert (decision.rung is Rung.EVICT) == bool(decision.evict)
        if decision.evict:
            assert finding.confidence is Confidence.HIGH
            assert finding.cause is not Cause.PLANNED
        assert decision.budget_left is None or decision.budget_left >= 0
        assert len(decision.reason) < 600


@given(st.lists(FINDINGS, min_size=30, max_size=30), LIMIT_SETS)
def test_every_story_without_planned_stops_ends_within_the_budgets(
    story: list[Finding], limits: LadderLimits
) -> None:
    limits = replace(limits, budget_window_s=1000.0)
    faults = [f for f in story if f.cause is not Cause.PLANNED] or [_finding()] * 30
    faults = (faults * 30)[:30]
    state, restarts = LadderState(), 0
    for position, finding in enumerate(faults):
        decision, state = _decide(finding, state, now_s=float(position), limits=limits)
        if decision.rung in TERMINAL:
            break
        restarts += 1

    assert decision.rung in TERMINAL
    assert restarts <= (
        limits.infrastructure_restarts_max
        + limits.user_code_restarts_max
        + limits.unclear_restarts_max
    )


@given(st.lists(st.tuples(st.floats(0, 5), FINDINGS), max_size=12), LIMIT_SETS)
def test_the_state_survives_json(story: list[tuple[float, Finding]], limits: LadderLimits) -> None:
    states: TypeAdapter[LadderState] = TypeAdapter(LadderState)
    decisions: TypeAdapter[Decision] = TypeAdapter(Decision)
    direct, stored, now_s = LadderState(), LadderState(), 0.0
    for pause_s, finding in story:
        now_s += pause_s
        first, direct = _decide(finding, direct, now_s=now_s, limits=limits)
        second, stored = _decide(finding, stored, now_s=now_s, limits=limits)
        stored = states.validate_json(states.dump_json(stored))

        assert direct == stored
        assert first == second == decisions.validate_json(decisions.dump_json(second))


def test_limits_are_the_policys_in_seconds_and_counts() -> None:
    policy = load_policy(None).policy
    limits = ladder_limits(policy)

    assert policy.ladder.budget_window.total_seconds() == limits.budget_window_s
    for name in (
        "infrastructure_restarts_max",
        "user_code_restarts_max",
        "unclear_restarts_max",
        "no_progress_restarts_max",
        "evictions_per_window_max",
        "user_code_gives_up",
    ):
        assert getattr(policy.ladder, name) == getattr(limits, name)
