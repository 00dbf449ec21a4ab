"""Several controllers at once: threads and processes that want the same thing."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import text

from everstep.decide.words import JobPhase
from everstep.ledger import Ledger, LedgerUnavailable
from everstep.ledger.database import Database
from everstep.ledger.schema import HEAD
from everstep.spec import messages as m
from everstep.spec.policy import PolicySnapshot
from tests.ledger.contender import FLEET, fleet_eviction
from tests.ledger.postgres import PostgresServer
from tests.ledger.support import Fleet, at, database, eviction, incident

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 4
KILLS_MAX = 12
KILLS_IN_THE_MIDDLE = 3
"""Enough; when it takes long to hit this often, the test still ends."""


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """The results of ``calls``, all started at the same moment."""
    barrier = threading.Barrier(len(calls))

    def one(call: Callable[[], T]) -> T:
        barrier.wait(timeout=30)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(one, c) for c in calls]]


@contextmanager
def ledgers(url: str, count: int = AT_ONCE) -> Iterator[list[Ledger]]:
    """As many controllers, each with connections of its own."""
    opened = [Ledger(url) for _ in range(count)]
    yield opened
    for ledger in opened:
        ledger.close()


@contextmanager
def contenders(url: str, *arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that use the ledger; killed at the end."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ledger.contender", url, *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for extra in arguments
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def race(url: str, *whats: dict[str, Any]) -> list[str]:
    """What each process answered, all let off together."""
    with contenders(url, *(("race", json.dumps(what)) for what in whats)) as processes:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        # The answer is the last line; before it the process may have logged that it tried again.
        return [
            process.communicate(timeout=60)[0].strip().splitlines()[-1] for process in processes
        ]


def test_two_jobs_that_want_the_same_standby_do_not_both_get_it(url: str, fleet: Fleet) -> None:
    for turn in range(6):
        jobs = (f"a{turn}", f"b{turn}")
        mine = {job: f"m-{job}" for job in jobs}
        fleet.machines(*mine.values(), f"standby-{turn}", seconds=turn * 1000)
        requests = []
        for job in jobs:
            fleet.job(job)
            requests.append(fleet.request(job, keep=(mine[job],), seconds=turn * 1000 + 1))

        with ledgers(url, 2) as (one, two):
            answers = at_once(
                [partial(one.open_run, requests[0]), partial(two.open_run, requests[1])]
            )

        assert sorted(answer.shortfall for answer in answers) == [0, 1]
        for job in jobs:
            fleet.end(job)


def test_the_same_request_at_once_opens_one_run(url: str, fleet: Fleet) -> None:
    fleet.machines("m1", "m2", "m3", "m4")
    fleet.job()
    for number in range(1, 6):
        request = fleet.request()
        with ledgers(url) as controllers:
            answers = at_once([partial(c.open_run, request) for c in controllers])

        assert len({answer.model_dump_json() for answer in answers}) == 1
        assert len(fleet.ledger.runs("train")) == number


def test_the_same_eviction_at_once_acts_once(url: str, fleet: Fleet) -> None:
    fleet.machines("m1", "m2")
    fleet.job()
    fleet.open()
    with ledgers(url) as controllers:
        answers = at_once([partial(c.evict, eviction("m1", "m2")) for c in controllers])

    assert {answer.evicted for answer in answers} == {("m1", "m2")}
    assert count(fleet.ledger, "actions") == 2
    assert count(fleet.ledger, "blocks") == 2


def test_the_same_machine_registering_at_once_is_entered_once(url: str, fleet: Fleet) -> None:
    with ledgers(url) as controllers:
        standings = at_once([partial(Fleet(c, fleet.policy).machine, "m1") for c in controllers])

    assert all(standing.accepted for standing in standings)
    assert len(fleet.ledger.machines()) == 1


def test_everything_at_once_neither_fails_nor_deadlocks(url: str, fleet: Fleet) -> None:
    """Each writer takes several locks; an order that differs between two would show here."""
    fleet.machines(*(f"m{number}" for number in range(8)))
    for job in ("a", "b"):
        fleet.job(job)
        fleet.open(job)

    def work(ledger: Ledger, seed: int) -> int:
        dice, own = random.Random(seed), Fleet(ledger, fleet.policy, origin=f"wf{seed}")
        for _ in range(12):
            job = dice.choice(("a", "b"))
            run_id = f"{job}.1"
            what = dice.randrange(7)
            if what == 0:
                own.machine(f"m{dice.randrange(8)}", jobs={job: 1})
            elif what == 1:
                ledger.record_progress(m.RecordProgress(job_id=job, phase=JobPhase.RUNNING))
            elif what == 2:
                ledger.record_incident(incident(incident_id=f"{job}-1", job_id=job, run_id=run_id))
            elif what == 3:
                own.evict(f"m{dice.randrange(8)}", job_id=job, generation=10**6, step=seed)
            elif what == 4:
                ledger.release(f"m{dice.randrange(8)}", reason="r", by="b", now=at(9))
            elif what == 5:
                own.close(run_id, release=True)
            else:
                own.job(job)
        return seed

    with ledgers(url, 6) as controllers:
        calls = [partial(work, c, n) for n, c in enumerate(controllers)]
        assert at_once(calls) == list(range(6))


def test_processes_race_for_a_machine_and_one_gets_it(url: str, fleet: Fleet) -> None:
    fleet.machines("m1")
    requests = []
    for job in ("a", "b", "c"):
        fleet.job(job)
        requests.append(fleet.request(job, machines_needed=1))

    answers = race(
        url, *({"do": "open_run", "request": r.model_dump(mode="json")} for r in requests)
    )

    opened = [m.OpenedRun.model_validate_json(answer) for answer in answers]
    assert sorted(answer.shortfall for answer in opened) == [0, 1, 1]
    assert len(fleet.holders()) == 1


def test_processes_that_migrate_at_once_do_the_work_once(empty_url: str) -> None:
    answers = race(empty_url, *({"do": "migrate"} for _ in range(AT_ONCE)))

    assert answers == [json.dumps(HEAD)] * AT_ONCE
    ledger = Ledger(empty_url)
    assert ledger.check() == HEAD
    ledger.close()


@pytest.mark.slow
def test_a_writer_killed_in_the_middle_leaves_no_half_of_an_action(url: str, fleet: Fleet) -> None:
    fleet.machines(*FLEET)
    fleet.job()
    fleet.open()
    dice, struck, first = random.Random(7), 0, 1
    for _ in range(KILLS_MAX):
        with contenders(url, ("write", str(first))) as (process,):
            lines = lines_until(process, f"begin {first + dice.randrange(3)}")
            threading.Event().wait(dice.random() * 0.01)  # anywhere in the transaction
            process.send_signal(signal.SIGKILL)
            lines += process.communicate(timeout=20)[0].splitlines()
        last = int(lines[-1].split()[1])
        struck += lines[-1].startswith("begin")

        whole = {0, len(FLEET)} if lines[-1].startswith("begin") else {len(FLEET)}
        assert actions_of(fleet.ledger, f"train-{last}") in whole, "half of an eviction was kept"
        assert_whole(fleet.ledger)
        # Whoever takes over repeats the last request, and it acts exactly once.
        assert fleet.ledger.evict(fleet_eviction(last)).evicted == FLEET
        assert actions_of(fleet.ledger, f"train-{last}") == len(FLEET)
        first = last + 1
        if struck == KILLS_IN_THE_MIDDLE:
            break
    assert struck > 0, "no kill came in the middle of an eviction"


def lines_until(process: subprocess.Popen[str], wanted: str) -> list[str]:
    """What the process says, up to the line ``wanted``."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if lines[-1] == wanted:
            return lines
    raise AssertionError(f"it ended before {wanted!r}, after {lines}")


@pytest.mark.postgres
def test_a_server_that_crashes_and_comes_back_costs_a_wait(
    postgres: PostgresServer, policy: PolicySnapshot
) -> None:
    with (
        postgres.database() as url,
        closing(Ledger(url, patience_s=20)) as ledger,
        closing(Ledger(url, patience_s=0.2)) as impatient,
    ):
        ledger.migrate()
        fleet = Fleet(ledger, policy)
        fleet.machines("m1", "m2")
        fleet.job()
        first = fleet.open()
        postgres.stop(signal.SIGQUIT)
        try:
            with pytest.raises(LedgerUnavailable) as caught:
                impatient.machines()
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(fleet.evict, "m1")
                postgres.start()
                assert waiting.result(timeout=60).evicted == ("m1",)
        finally:
            if not postgres.is_running():
                postgres.start()
        assert "\n" not in str(caught.value)
        assert fleet.ledger.runs("train")[0].run_id == first.run_id


def test_a_locked_file_is_waited_for_and_then_reported(
    tmp_path: Path, migrated_file: Path, policy: PolicySnapshot
) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(migrated_file.read_bytes())
    holder, waiter = Ledger(f"sqlite:///{path}"), Ledger(f"sqlite:///{path}", patience_s=0.1)
    with database(holder)._engine.execution_options(everstep_begin="BEGIN IMMEDIATE").begin():
        assert waiter.machines() == [], "readers do not wait for writers"
        with pytest.raises(LedgerUnavailable, match="database is locked"):
            Fleet(waiter, policy).machine("m1")
    assert Fleet(waiter, policy).machine("m1").accepted
    holder.close()
    waiter.close()


def count(ledger: Ledger, table: str) -> int:
    """Rows of a table."""
    query = text(f"SELECT count(*) FROM {table}")
    with database(ledger)._engine.connect() as connection:
        found: int = connection.execute(query).scalar_one()
    return found


def actions_of(ledger: Ledger, incident_id: str) -> int:
    """Actions written for an incident."""
    query = text("SELECT count(*) FROM actions WHERE incident_id = :id")

    with database(ledger)._engine.connect() as connection:
        found: int = connection.execute(query, {"id": incident_id}).scalar_one()
    return found


def assert_whole(ledger: Ledger) -> None:
    """The file is undamaged and every reference leads somewhere."""
    opened: Database = database(ledger)
    if opened.path is None:
        return
    with opened._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalars().all() == ["ok"]
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []
