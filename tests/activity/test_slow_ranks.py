"""Rounds of stacks of a live run: who is behind, and all that may go wrong with a round."""

from __future__ import annotations

from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.diagnosis import CULPRITS_MAX, EVIDENCE_MAX, Diagnosis
from everstep.decide.stack_report import ProcessRole, StackGroup, StackReport, StackSource, Wait
from everstep.machine.client import AgentRefused, AgentUnreachable
from everstep.spec import messages as m
from everstep.spec.agent_api import ErrorCode
from tests.activity.fakes import (
    GENERATION,
    JOB,
    RUN,
    FakeAgent,
    FakeAgents,
    FakeLocations,
    policy,
    refs,
)

ROUNDS = 5
WAITING, AT_WORK = "all_reduce (train.py)", "compute (train.py)"


def looked(machine: int, *behind: int, ranks: int = 2, machines: int = 2) -> StackReport:
    """A machine's stacks: all of its ranks wait, but for those that are ``behind``."""
    own = range(machine * ranks, (machine + 1) * ranks)
    groups = tuple(
        StackGroup(
            role=ProcessRole.RANK,
            fingerprint="f" * 16 if rank in behind else "0" * 16,
            frames=(AT_WORK if rank in behind else WAITING, "main (train.py)"),
            source=StackSource.PY_SPY,
            waits_for=Wait.NOTHING if rank in behind else Wait.PEERS,
            spans=((rank, rank),),
        )
        for rank in own
    )
    return StackReport(
        machine_id=f"m{machine}",
        groups=groups,
        processes=ranks,
        axes=(("dp", machines * ranks),),
        ranks_per_machine=ranks,
    )


ENDED = StackReport(machine_id="m0")


async def find(*agents: FakeAgent, ranks: int = 2, **limits: Any) -> m.FoundSlowRanks:
    request = m.FindSlowRanks(
        job_id=JOB,
        run_id=RUN,
        generation=GENERATION,
        machines=refs(*(agent.machine_id for agent in agents)),
        ranks_per_machine=ranks,
        policy=policy(detection={"slow_rounds": ROUNDS, "slow_round_interval": "1ms"} | limits),
    )
    found: m.FoundSlowRanks = await ActivityEnvironment().run(
        Diagnosis(FakeLocations(), FakeAgents(*agents)).find_slow_ranks, request
    )
    return found


async def test_the_rank_that_is_behind_in_most_rounds_and_its_machine() -> None:
    slow, quiet = looked(1, 3), looked(1)
    found = await find(
        FakeAgent("m0", rounds=[looked(0)]),
        FakeAgent("m1", rounds=[slow, slow, quiet, slow, slow]),
    )
    assert found.finding is not None
    assert (found.finding.rule, found.finding.machines) == ("stack_slow", (1,))
    assert [c.rank for c in found.finding.culprits] == [3]
    assert found.rounds == ROUNDS
    (line,) = found.evidence
    assert line.startswith("rank 3: behind in 4 of 5 rounds")
    assert AT_WORK in line


async def test_nobody_is_named_where_nobody_is_behind() -> None:
    found = await find(
        FakeAgent("m0", rounds=[looked(0)]), FakeAgent("m1", rounds=[looked(1)]), slow_rounds=3
    )
    assert found.rounds == 3
    assert found.finding is not None
    assert (found.finding.rule, found.finding.machines) == ("stack_no_laggard", ())


@pytest.mark.parametrize(
    "answers",
    [
        [AgentRefused(ErrorCode.NOT_FOUND, "there is no such run")],
        [AgentUnreachable("connection refused")],
        [RuntimeError("garbage")],
    ],
    ids=["unknown run", "unreachable", "garbage"],
)
async def test_a_machine_that_shows_nothing_is_unknown_and_the_others_are_judged(
    answers: list[Exception],
) -> None:
    three = [looked(0, machines=3), looked(1, 2, machines=3)]
    found = await find(
        FakeAgent("m0", rounds=[three[0]]),
        FakeAgent("m1", rounds=[three[1]]),
        FakeAgent("m2", rounds=answers),
    )
    assert found.finding is not None
    assert found.finding.machines == (1,)
    assert found.finding.unknown_ranks == 2
    assert [line for line in found.evidence if line.startswith("m2: no stacks: ")]


@pytest.mark.parametrize("rounds", [0, 2])
async def test_a_run_that_ends_meanwhile_is_not_judged(rounds: int) -> None:
    begun = [looked(0, 1, machines=1)] * rounds
    agent = FakeAgent("m0", rounds=[*begun, ENDED])
    found = await find(agent)
    assert (found.finding, found.rounds) == (None, rounds)
    assert agent.asked["stacks"] == rounds + 1


async def test_what_a_machine_invents_is_not_believed_and_not_passed_on_at_length() -> None:
    wild = StackReport(machine_id="m0", groups=looked(0).groups, processes=2, axes=(("dp", -4),))
    found = await find(FakeAgent("m0", rounds=[wild]))
    assert (found.finding, found.rounds) == (None, ROUNDS)
    # Of a run of a hundred machines, its last one behind: there is no such machine to name.
    huge = looked(99, 198, machines=100)
    found = await find(FakeAgent("m0", rounds=[huge]))
    assert (found.finding, found.rounds) == (None, ROUNDS)
    many = looked(0, *range(60), ranks=128, machines=1)
    # Nor of one machine with more ranks than it has.
    found = await find(FakeAgent("m0", rounds=[many]))
    assert found.finding is None
    found = await find(FakeAgent("m0", rounds=[many]), ranks=128)
    assert found.finding is not None
    assert len(found.finding.culprits) == CULPRITS_MAX
    assert len(found.evidence) <= EVIDENCE_MAX
