"""Real kernel logs and look-alikes: the decision for the machine, scored.

``kernel_cases.jsonl`` are public reports; ``kernel_more.jsonl`` are ours, of other numbers, drivers
and prefixes. Which are wrong, and why, stands in ``known_wrong.md``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from everstep.decide.kernel import judge
from everstep.decide.kernel_rules import KernelRules
from everstep.decide.words import Action
from everstep.spec.kernel_catalogue import load_kernel_catalogue

CASES = Path(__file__).parent.parent / "cases"
SHARE_MIN = 0.95


@pytest.fixture(scope="module")
def rules() -> KernelRules:
    return load_kernel_catalogue(environ={})


def cases(name: str) -> list[dict[str, Any]]:
    text = (CASES / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name, least", [("kernel_cases", 36), ("kernel_more", 90)])
def test_the_score(
    name: str, least: int, rules: KernelRules, capsys: pytest.CaptureFixture[str]
) -> None:
    known = set(re.findall(r"^- `([\w-]+)`", (CASES / "known_wrong.md").read_text(), re.MULTILINE))
    wrong: dict[str, str] = {}
    right = exact = 0
    found = cases(name)
    for case in found:
        action = judge(case["lines"], rules).action
        exact += action == case["right_action"]
        if action in (case["right_action"], *case["also_acceptable"]):
            right += 1
        else:
            wrong[case["id"]] = action
    with capsys.disabled():
        print(  # noqa: T201 - the score is what this test is read for
            f"\n{name}: {right} of {len(found)} right or acceptable, {exact} exactly"
        )

    assert len(found) >= least
    assert right >= SHARE_MIN * len(found), wrong
    assert set(wrong) <= known, f"name them with the reason in {CASES / 'known_wrong.md'}"


@pytest.mark.parametrize("name", ["kernel_cases", "kernel_more"])
def test_no_benign_case_is_an_eviction(name: str, rules: KernelRules) -> None:
    evicted = [
        case["id"]
        for case in cases(name)
        if case["benign"] and judge(case["lines"], rules).action is Action.EVICT_MACHINE
    ]

    assert evicted == []


def test_the_symptom_is_named_where_we_know_it(rules: KernelRules) -> None:
    wrong = {
        case["id"]: str(judge(case["lines"], rules).symptom)
        for case in cases("kernel_more")
        if case["symptom"] and judge(case["lines"], rules).symptom != case["symptom"]
    }

    assert wrong == {}


@pytest.mark.parametrize(
    "prefix",
    [
        "kernel: ",
        "[  812.125000] ",
        "[  +0.000000] ",
        "n1: [  812.125000 <    0.000000>] ",
        "Mar  3 11:02:17 n1 kernel: ",
        "<4>1 2025-03-03T11:02:17Z n1 kernel - - - ",
        "10.0.0.7: kern: warning: [2025-03-03T11:02:17.5Z]: ",
        "6,1,812125000,-;",
    ],
)
def test_the_prefix_does_not_change_the_decision(prefix: str, rules: KernelRules) -> None:
    bare = [case for case in cases("kernel_more") if not _has_prefix(case["lines"])]
    changed = [
        case["id"]
        for case in bare
        if judge([prefix + line for line in case["lines"]], rules).action
        != judge(case["lines"], rules).action
    ]

    assert len(bare) > 30
    assert changed == []


def _has_prefix(lines: list[str]) -> bool:
    return any(re.match(r"\s|\[ *\d|\w{3} +\d|\d|kern|$", line) for line in lines)
