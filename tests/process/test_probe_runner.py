"""The runner with probes that misbehave: each in its own thread, none in the others' way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from everstep.decide.observation import Observation
from everstep.decide.words import Verdict
from everstep.machine.probes.board import RULE_FAILED, RULE_STUCK, Change, ChangeKind
from everstep.machine.probes.runner import ProbeRunner, run_once

WAIT_MAX_S = 20.0
INTERVALS = {"host": 0.05, "gpu": 3600.0}


class Scripted:
    """A probe that does what it is told; it counts its looks and knows who is inside."""

    def __init__(self, name: str, interval: str = "host") -> None:
        self.name = name
        self.interval = interval
        self.verdict = Verdict.HEALTHY
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.looks = 0
        self.inside = 0
        self.inside_max = 0
        self.closed = 0
        self.wake: Callable[[], None] | None = None

    def on_news(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def look(self, now_s: float) -> Sequence[Observation]:
        self.looks += 1
        self.inside += 1
        self.inside_max = max(self.inside, self.inside_max)
        try:
            self.gate.wait()
            if self.error is not None:
                raise self.error
            rule = "broken" if self.verdict is Verdict.FAULTY else ""
            return [
                Observation(
                    probe=self.name, target="it", verdict=self.verdict, rule=rule, reason="seen"
                )
            ]
        finally:
            self.inside -= 1

    def close(self) -> None:
        self.closed += 1


class World:
    """A runner and what it has told."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.runner: ProbeRunner | None = None
        self.probes: list[Scripted] = []

    async def start(self, *probes: Scripted, deadline_s: float = 30.0) -> ProbeRunner:
        self.probes = list(probes)
        self.runner = ProbeRunner(
            probes, INTERVALS, self.changes.append, look_deadline_s=deadline_s
        )
        await self.runner.start()
        return self.runner

    def told(self) -> list[tuple[str, str, str]]:
        return [(c.kind.value, c.observation.probe, c.observation.rule) for c in self.changes]


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_MAX_S):
        while not done():
            await asyncio.sleep(0.005)


@pytest_asyncio.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    if made.runner is not None:
        await made.runner.stop()
    for probe in made.probes:
        probe.gate.set()
    await until(lambda: not [t for t in threading.enumerate() if t.name.startswith("probe-")])


async def test_probes_look_again_and_again_and_are_closed_at_the_end(world: World) -> None:
    one, other = Scripted("one"), Scripted("other")
    runner = await world.start(one, other)
    await until(lambda: one.looks >= 3 and other.looks >= 3)

    await runner.stop()

    assert (one.closed, other.closed) == (1, 1)
    looks = one.looks
    assert world.changes == []
    assert {o.probe for o, _ in runner.state()} == {"one", "other"}
    assert runner.looked["one"].looks in (looks, looks - 1)  # the last one came after the stop


async def test_changes_are_told_in_the_event_loop(world: World) -> None:
    probe = Scripted("one")
    threads: list[int] = []

    def follow(change: Change) -> None:
        threads.append(threading.get_ident())
        world.changes.append(change)

    world.runner = ProbeRunner([probe], INTERVALS, follow, look_deadline_s=30)
    await world.runner.start()
    probe.verdict = Verdict.FAULTY
    await until(lambda: world.told() == [("faulty", "one", "broken")])
    probe.verdict = Verdict.HEALTHY
    await until(lambda: len(world.changes) == 2)

    assert world.changes[1].kind is ChangeKind.CLEARED
    assert set(threads) == {threading.get_ident()}


async def test_a_probe_that_raises_is_unknown_with_the_error_as_reason(world: World) -> None:
    bad, good = Scripted("bad"), Scripted("good")
    bad.error = OSError("no such\nfile")
    runner = await world.start(bad, good)
    await until(lambda: runner.looked["bad"].errors >= 2 and runner.looked["good"].looks >= 2)

    assert world.told() == [("unknown", "bad", RULE_FAILED)]
    assert world.changes[0].observation.reason == "the look failed: OSError: no such file"
    bad.error = None
    await until(lambda: len(world.changes) == 2)
    assert world.told()[1] == ("cleared", "bad", RULE_FAILED)


async def test_a_stuck_probe_is_unknown_and_nobody_waits_for_it(world: World) -> None:
    stuck, good = Scripted("stuck"), Scripted("good")
    runner = await world.start(stuck, good, deadline_s=0.2)
    await until(lambda: runner.looked["stuck"].looks >= 1)
    stuck.gate.clear()
    await until(lambda: bool(world.changes))

    assert world.told() == [("unknown", "stuck", RULE_STUCK)]
    assert "has not come back for" in world.changes[0].observation.reason
    looks = good.looks
    await until(lambda: good.looks >= looks + 10)
    assert stuck.inside_max == 1  # no second thread, however long it takes
    assert runner.looked["stuck"].stuck == 1
    held = {o.verdict for o, _ in runner.state() if o.probe == "stuck"}
    assert held == {Verdict.HEALTHY, Verdict.UNKNOWN}  # what was seen before only grows older

    stuck.gate.set()
    await until(lambda: len(world.changes) == 2)
    assert world.told()[1] == ("cleared", "stuck", RULE_STUCK)


async def test_a_stop_does_not_wait_for_a_stuck_probe(world: World) -> None:
    stuck = Scripted("stuck")
    runner = await world.start(stuck)
    await until(lambda: runner.looked["stuck"].looks >= 1)
    stuck.gate.clear()
    await until(lambda: stuck.inside == 1)
    began = time.monotonic()

    await runner.stop()

    assert time.monotonic() - began < 5  # a second, on a machine that does nothing else
    assert stuck.closed == 0
    stuck.gate.set()
    await until(lambda: stuck.closed == 1)  # by itself, when it is back


async def test_a_probe_with_news_need_not_wait_for_its_interval(world: World) -> None:
    slow = Scripted("slow", "gpu")
    await world.start(slow)
    await until(lambda: slow.looks == 1)
    assert slow.wake is not None
    slow.verdict = Verdict.FAULTY

    slow.wake()

    await until(lambda: world.told() == [("faulty", "slow", "broken")])
    assert slow.looks == 2


async def test_all_probes_can_be_asked_at_once(world: World) -> None:
    probes = [Scripted("a", "gpu"), Scripted("b", "gpu")]
    runner = await world.start(*probes)
    await until(lambda: all(count.looks == 1 for count in runner.looked.values()))
    for probe in probes:
        probe.verdict = Verdict.FAULTY

    assert await runner.look_all(WAIT_MAX_S)
    assert sorted(world.told()) == [("faulty", "a", "broken"), ("faulty", "b", "broken")]

    probes[0].gate.clear()
    assert not await runner.look_all(0.1)


async def test_what_the_follower_does_wrong_stops_no_probe(world: World) -> None:
    probe = Scripted("one")
    probe.verdict = Verdict.FAULTY

    def follow(change: Change) -> None:
        world.changes.append(change)
        raise RuntimeError("the follower is broken")

    world.runner = ProbeRunner([probe], INTERVALS, follow, look_deadline_s=30)
    await world.runner.start()

    await until(lambda: probe.looks >= 3)
    assert len(world.changes) == 1


def test_two_probes_of_one_name_and_missing_intervals_are_refused() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        ProbeRunner([Scripted("a"), Scripted("a")], INTERVALS, print, look_deadline_s=1)
    with pytest.raises(ValueError, match="no interval for network"):
        ProbeRunner([Scripted("a", "network")], INTERVALS, print, look_deadline_s=1)


def test_one_look_of_every_probe_side_by_side() -> None:
    good, bad, stuck = Scripted("good"), Scripted("bad"), Scripted("stuck")
    bad.error = ValueError("odd")
    stuck.gate.clear()

    looks = run_once([good, bad, stuck], 0.5)

    stuck.gate.set()
    assert [look.probe for look in looks] == ["good", "bad", "stuck"]
    seen = [look.observations[0] for look in looks]
    assert [o.verdict for o in seen] == [Verdict.HEALTHY, Verdict.UNKNOWN, Verdict.UNKNOWN]
    assert [o.rule for o in seen] == ["", RULE_FAILED, RULE_STUCK]
    assert (good.closed, bad.closed) == (1, 1)
    deadline = time.monotonic() + WAIT_MAX_S
    while not stuck.closed:
        assert time.monotonic() < deadline
        time.sleep(0.005)
