"""A process that uses the ledger beside others: started by tests, to race or to be killed.

``contender.py URL race JSON``: waits for a line on stdin, does one thing, prints its answer.
``contender.py URL write FIRST``: evicts a whole fleet again and again, in requests numbered from
FIRST; says "begin N" before an eviction and "evicted N" after it.
"""

from __future__ import annotations

import itertools
import json
import sys

from everstep.ledger import Ledger, LedgerError
from everstep.spec import messages as m
from tests.ledger.support import at, eviction

FLEET = tuple(f"m{number:02}" for number in range(20))


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def fleet_eviction(number: int) -> m.EvictMachines:
    """The writer's request number ``number``."""
    return eviction(*FLEET, incident_id=f"train-{number}", generation=10**6)


def race(ledger: Ledger, what: dict[str, object]) -> None:
    say("ready")
    sys.stdin.readline()
    try:
        if what["do"] == "open_run":
            say(ledger.open_run(m.OpenRun.model_validate(what["request"])).model_dump_json())
        elif what["do"] == "evict":
            say(ledger.evict(m.EvictMachines.model_validate(what["request"])).model_dump_json())
        else:
            say(json.dumps(ledger.migrate()))
    except LedgerError as error:
        say(f"{type(error).__name__}: {error}")


def write(ledger: Ledger, first: int) -> None:
    for number in itertools.count(first):
        for machine_id in FLEET:
            ledger.release(machine_id, reason="again", by="writer", now=at(number))
        say(f"begin {number}")
        ledger.evict(fleet_eviction(number))
        say(f"evicted {number}")


if __name__ == "__main__":
    opened = Ledger(sys.argv[1])
    if sys.argv[2] == "race":
        race(opened, json.loads(sys.argv[3]))
    else:
        write(opened, int(sys.argv[3]))
