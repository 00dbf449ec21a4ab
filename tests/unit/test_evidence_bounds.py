"""Reports within a number of bytes: what goes first, and that every machine is still there."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from everstep.decide.attribution import MachineReport, RankReport, attribute
from everstep.decide.words import LogClass, RankState
from everstep.spec.evidence import ROUND_BYTES_MAX, SHARD_BYTES_MAX, size, within

REPORTS = TypeAdapter(tuple[MachineReport, ...])
LINES = ("y" * 300,) * 8


def fleet(machines: int, ranks: int, *, log_class: LogClass | None = None) -> list[MachineReport]:
    """Machines whose ranks were stopped by us, or all ended badly and said so."""
    return [
        MachineReport(
            machine_id=f"m{machine}",
            reachable=True,
            ranks=tuple(
                RankReport(
                    rank=machine * ranks + local,
                    machine_id=f"m{machine}",
                    state=RankState.EXITED,
                    exit_code=None if log_class is None else 1,
                    signal=15 if log_class is None else None,
                    stopped_by_us=log_class is None,
                    step=40,
                    log_class=log_class or LogClass.SILENT,
                    log_lines=LINES,
                )
                for local in range(ranks)
            ),
        )
        for machine in range(machines)
    ]


def test_what_fits_is_left_alone() -> None:
    reports = fleet(4, 8)
    assert within(reports, SHARD_BYTES_MAX) == (tuple(reports), ())


def test_size_is_that_of_the_json() -> None:
    reports = tuple(fleet(3, 2))
    assert size(reports) == pytest.approx(len(REPORTS.dump_json(reports)), abs=2)


def test_every_rank_of_a_whole_shard_stays_without_its_lines() -> None:
    kept, left_out = within(fleet(256, 8), SHARD_BYTES_MAX)
    assert sum(len(report.ranks) for report in kept) == 256 * 8
    assert left_out == ("log lines of stopped ranks",)
    assert size(kept) <= SHARD_BYTES_MAX


@pytest.mark.parametrize("log_class", [None, LogClass.PEER_LOST, LogClass.PYTHON_EXCEPTION])
def test_the_largest_machines_fit_and_none_is_forgotten(log_class: LogClass | None) -> None:
    kept, left_out = within(fleet(256, 128, log_class=log_class), SHARD_BYTES_MAX)
    assert len(kept) == 256
    assert all(report.ranks for report in kept)
    assert left_out
    assert size(kept) <= SHARD_BYTES_MAX


@pytest.mark.parametrize("log_class", [None, LogClass.PEER_LOST])
def test_a_round_of_thousands_of_machines_fits(log_class: LogClass | None) -> None:
    kept, _ = within(fleet(2400, 8, log_class=log_class), ROUND_BYTES_MAX)
    assert [len(report.ranks) for report in kept] == [1] * 2400
    assert size(kept) <= ROUND_BYTES_MAX


def test_the_culprit_among_many_witnesses_is_still_found() -> None:
    reports = fleet(600, 8, log_class=LogClass.PEER_LOST)
    ranks = list(reports[300].ranks)
    ranks[3] = RankReport(
        rank=2403, machine_id="m300", state=RankState.EXITED, signal=9, log_lines=LINES, step=40
    )
    reports[300] = MachineReport(machine_id="m300", reachable=True, ranks=tuple(ranks))
    kept, _ = within(reports, ROUND_BYTES_MAX)
    assert attribute(kept).first_failed_rank == attribute(reports).first_failed_rank == 2403
