"""The shipped kernel catalogue: whole, in step with what vendors document, each row distinct."""

from __future__ import annotations

import pytest

from everstep.decide.kernel import judge
from everstep.decide.kernel_match import Matcher
from everstep.decide.kernel_rules import KernelClass, LineRule, NumberRule
from everstep.decide.words import Action
from everstep.spec.kernel_catalogue import load_kernel_catalogue

RULES = load_kernel_catalogue(environ={})
XIDS = sorted(RULES.xids)
SXIDS = sorted(RULES.sxids)
LINES = {line.name: line for line in RULES.lines}

DOCUMENTED = {
    "IGNORE": {Action.WARN_ONLY},
    "RESTART_APP": {Action.WARN_ONLY},
    "RESET_GPU": {Action.EVICT_MACHINE},
    "RESTART_BM": {Action.EVICT_MACHINE},
    "RESTART_HOST": {Action.EVICT_MACHINE},
    "WORKFLOW_XID_45": {Action.WARN_ONLY},
    "WORKFLOW_XID_48": {Action.EVICT_MACHINE},
}
"""What a documented action comes to; the others depend on what the line prints."""


def xid(number: int, rest: str = "x") -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): {number}, {rest}"


def sxid(number: int, rest: str) -> str:
    return f"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): {number:05d}, {rest}"


def test_every_xid_that_the_driver_knows_has_a_row() -> None:
    assert list(range(1, 177)) == XIDS


def test_every_sxid_has_a_row() -> None:
    assert len(SXIDS) > 390
    assert {11004, 12028, 19084, 20034, 22003, 22013, 24007, 25010, 30006} <= set(SXIDS)


@pytest.mark.parametrize("rule", [*RULES.xids.values(), *RULES.sxids.values()], ids=str)
def test_a_documented_action_comes_to_our_action(rule: NumberRule) -> None:
    if rule.documented in DOCUMENTED:
        assert rule.action in DOCUMENTED[rule.documented]
    if rule.documented in {"WORKFLOW_NVLINK_ERR", "WORKFLOW_NVLINK5_ERR"}:
        assert (rule.fatal, rule.nonfatal) == (Action.EVICT_MACHINE, Action.WARN_ONLY)
    if rule.kind is KernelClass.APPLICATION:
        assert rule.action is not Action.EVICT_MACHINE
    assert rule.meaning
    assert rule.source


@pytest.mark.parametrize("number", XIDS)
def test_an_xid_by_itself_is_judged_by_its_row(number: int) -> None:
    rule = RULES.xids[number]

    verdict = judge([xid(number)], RULES)

    assert verdict.action is rule.action
    assert verdict.rule == f"xid_{number}"
    assert verdict.symptom is rule.symptom


@pytest.mark.parametrize("number", SXIDS)
def test_an_sxid_by_itself_is_judged_by_its_row(number: int) -> None:
    rule = RULES.sxids[number]

    assert judge([sxid(number, "Link 30 x")], RULES).action is rule.action
    assert judge([sxid(number, "Fatal, Link 30 x")], RULES).action is (rule.fatal or rule.action)
    assert judge([sxid(number, "Non-fatal, Link 30 x")], RULES).action is (
        rule.nonfatal or rule.action
    )


@pytest.mark.parametrize("name", LINES)
def test_the_example_of_a_row_is_of_that_row(name: str) -> None:
    line = LINES[name]
    matcher = Matcher(RULES, {})

    hits = [matcher.match(example) for example in line.examples]

    found = [hit.name for hit in hits if hit is not None]
    assert [n for n in found if n not in line.follows] == ([] if line.benign else [name])
    if line.benign:
        assert line.pattern.match(line.examples[0])


@pytest.mark.parametrize("name", LINES)
def test_the_example_is_judged_as_the_row_says(name: str) -> None:
    line = LINES[name]

    verdict = judge(line.examples, RULES)

    assert verdict.action is (Action.WARN_ONLY if line.benign or line.clears else line.action)
    assert verdict.side is line.side or line.benign or line.clears


@pytest.mark.parametrize("name", [n for n, row in LINES.items() if row.benign])
def test_no_look_alike_hides_another_row(name: str) -> None:
    """What comes first must not swallow what the others are there for."""
    for other in LINES.values():
        if not other.benign:
            hidden = [text for text in other.examples if LINES[name].pattern.match(text)]
            assert hidden == [], other.name


@pytest.mark.parametrize("name", LINES)
def test_a_pattern_is_quick_on_a_long_line(name: str, benchmark_line: str) -> None:
    line: LineRule = LINES[name]

    line.pattern.match(benchmark_line)
    line.pattern.match(line.examples[0][:40] + benchmark_line)


@pytest.fixture
def benchmark_line() -> str:
    """As long as lines get; a pattern that goes wild on it fails by the test's own limit."""
    return "a b.c: " * 150 + "[x] 0x1 " * 120
