"""What is new in what probes see, and alerts that count by window: in invented time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.decide.observation import Observation
from everstep.decide.words import Action, Confidence, Symptom, Verdict
from everstep.machine.probes.alerts import KEYS_MAX, AlertWindow
from everstep.machine.probes.board import RULE_FAILED, RULE_STUCK, Change, ChangeKind, ProbeBoard


def well(target: str = "eth0") -> Observation:
    return Observation(probe="link", target=target, verdict=Verdict.HEALTHY, reason="up")


def faulty(rule: str, target: str = "eth0", action: Action = Action.WARN_ONLY) -> Observation:
    return Observation(
        probe="link",
        target=target,
        verdict=Verdict.FAULTY,
        rule=rule,
        reason="down",
        symptom=Symptom.NETWORK_HOST,
        action=action,
    )


def blind(target: str = "eth0") -> Observation:
    return Observation(probe="link", target=target, verdict=Verdict.UNKNOWN, reason="no answer")


def said(changes: list[Change]) -> list[tuple[str, str, str]]:
    return [(c.kind.value, c.observation.target, c.observation.rule) for c in changes]


def test_what_is_well_from_the_start_is_no_news() -> None:
    board = ProbeBoard()

    assert board.landed("link", [well(), well("eth1")], 0.0) == []
    assert [(o.target, age) for o, age in board.state(3.0)] == [("eth0", 3.0), ("eth1", 3.0)]


def test_a_fault_is_news_once_and_so_is_its_end() -> None:
    board = ProbeBoard()

    assert said(board.landed("link", [faulty("down")], 0.0)) == [("faulty", "eth0", "down")]
    assert board.landed("link", [faulty("down")], 10.0) == []
    assert [age for _, age in board.state(12.0)] == [2.0]
    (change,) = board.landed("link", [well()], 20.0)
    assert said([change]) == [("cleared", "eth0", "down")]
    assert change.observation.verdict is Verdict.HEALTHY
    assert change.before == faulty("down")
    assert board.landed("link", [well()], 30.0) == []


def test_a_fault_that_is_judged_otherwise_is_news() -> None:
    board = ProbeBoard()
    board.landed("link", [faulty("down")], 0.0)

    (change,) = board.landed("link", [faulty("down", action=Action.EVICT_MACHINE)], 1.0)

    assert change.kind is ChangeKind.CHANGED
    assert change.before == faulty("down")


def test_several_faults_of_one_target_come_and_go_by_themselves() -> None:
    board = ProbeBoard()
    board.landed("link", [faulty("down"), faulty("errors")], 0.0)

    assert said(board.landed("link", [faulty("errors")], 1.0)) == [("cleared", "eth0", "down")]
    assert said(board.landed("link", [well()], 2.0)) == [("cleared", "eth0", "errors")]


def test_not_being_able_to_look_clears_nothing_and_makes_nothing_faulty() -> None:
    board = ProbeBoard()
    board.landed("link", [faulty("down"), well("eth1")], 0.0)

    assert said(board.landed("link", [blind(), blind("eth1")], 5.0)) == [
        ("unknown", "eth0", ""),
        ("unknown", "eth1", ""),
    ]
    assert board.landed("link", [blind(), blind("eth1")], 10.0) == []
    ages = {(o.target, o.verdict): age for o, age in board.state(10.0)}
    assert ages == {
        ("eth0", Verdict.FAULTY): 10.0,
        ("eth0", Verdict.UNKNOWN): 0.0,
        ("eth1", Verdict.UNKNOWN): 0.0,
    }
    assert said(board.landed("link", [faulty("down"), well("eth1")], 15.0)) == [
        ("cleared", "eth0", ""),
        ("cleared", "eth1", ""),
    ]
    assert {o.verdict for o, _ in board.state(15.0)} == {Verdict.FAULTY, Verdict.HEALTHY}


def test_a_look_that_fails_or_is_stuck_is_unknown_until_one_comes_back() -> None:
    board = ProbeBoard()
    board.landed("link", [faulty("down")], 0.0)

    assert said(board.failed("link", "the look failed: OSError", 1.0)) == [
        ("unknown", "", RULE_FAILED)
    ]
    assert board.failed("link", "the look failed: OSError", 2.0) == []
    assert said(board.stuck("link", "the look has not come back", 3.0)) == [
        ("unknown", "", RULE_STUCK)
    ]
    assert {o.verdict for o, _ in board.state(3.0)} == {Verdict.FAULTY, Verdict.UNKNOWN}
    assert said(board.landed("link", [faulty("down")], 4.0)) == [("cleared", "", RULE_STUCK)]


def test_what_is_not_named_any_more_is_not_there_any_more() -> None:
    board = ProbeBoard()
    board.landed("link", [faulty("down"), well("eth1")], 0.0)
    board.landed("gpu", [faulty("lost", "gpu 0")], 0.0)

    (change,) = board.landed("link", [well("eth1")], 1.0)

    assert said([change]) == [("cleared", "eth0", "down")]
    assert "not there any more" in change.observation.reason
    assert {o.target for o, _ in board.state(1.0)} == {"eth1", "gpu 0"}


SEEN = st.lists(
    st.builds(
        lambda verdict, target, rule, sure: Observation(
            probe="p",
            target=target,
            verdict=verdict,
            rule=rule if verdict is Verdict.FAULTY else "",
            reason="r",
            confidence=Confidence.HIGH if sure else Confidence.LOW,
        ),
        st.sampled_from(Verdict),
        st.sampled_from(["a", "b"]),
        st.sampled_from(["x", "y"]),
        st.booleans(),
    ),
    max_size=5,
)


@given(st.lists(SEEN, max_size=8))
def test_the_news_alone_say_which_faults_there_are(looks: list[list[Observation]]) -> None:
    """Whoever follows the changes knows what the state knows."""
    board = ProbeBoard()
    followed: set[tuple[str, str]] = set()
    for now_s, seen in enumerate(looks):
        faults = [o for o, _ in board.state(0.0) if o.verdict is Verdict.FAULTY]
        for change in board.landed("p", seen, float(now_s)):
            key = (change.observation.target, change.observation.rule)
            if change.kind is ChangeKind.FAULTY:
                assert key not in followed
                followed.add(key)
            elif change.kind is ChangeKind.CLEARED and change.before in faults:
                followed.remove(key)
        held = {(o.target, o.rule) for o, _ in board.state(0.0) if o.verdict is Verdict.FAULTY}
        assert followed == held


def test_two_alerts_within_five_minutes() -> None:
    window = AlertWindow(2, 300.0)

    assert not window.add("eth0", 0.0)
    assert not window.add("eth1", 10.0)
    assert not window.add("eth0", 301.0)  # the first one is too old
    assert window.add("eth0", 600.0)
    assert window.reached("eth0", 601.0)
    assert not window.reached("eth0", 602.0)
    assert window.count("eth0", 602.0) == 1
    window.forget("eth0")
    assert window.count("eth0", 602.0) == 0


def test_alerts_take_no_more_room_than_there_are_keys() -> None:
    window = AlertWindow(2, 300.0)
    for number in range(KEYS_MAX + 10):
        window.add(number, 0.0)

    assert window.count(0, 0.0) == 0
    assert window.count(KEYS_MAX + 9, 0.0) == 1
