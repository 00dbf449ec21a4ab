"""From files and folders to one verdict: what ``everstep diagnose`` does, as a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.flight import FlightDump, FlightFinding, missing_ranks
from everstep.decide.diagnosis.types import Diagnosis, LogSource, RankEnd
from everstep.decide.diagnosis.verdict import diagnose
from everstep.logfiles.error_files import looks_like_error_file, read_error_file
from everstep.logfiles.find import LogFile, find_logs
from everstep.logfiles.flight_files import NotADump, looks_like_dump, read_dump
from everstep.logfiles.reading import read_log
from everstep.logfiles.scan import Scanner


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """The verdict, and how much it rests on."""

    verdict: Diagnosis
    files: int
    """How many files were read."""
    bytes_read: int
    problems: tuple[str, ...]
    """One line for each file that could not be read to its end."""


def diagnose_files(
    paths: Sequence[Path],
    catalogue: Catalogue,
    ends: Sequence[RankEnd] = (),
    *,
    progress: Callable[[int], None] = lambda _bytes: None,
) -> Diagnosed:
    """Read all logs of these files and folders and judge the job that wrote them.

    Args:
        paths: files and folders.
        catalogue: the signatures.
        ends: how the job or its ranks ended, where it is known.
        progress: is told how many bytes were read, after each file.

    Raises:
        NoSuchPath: a path does not exist.
    """
    scanner = Scanner(catalogue.texts)
    sources: list[LogSource] = []
    dumps: list[FlightDump] = []
    problems: list[str] = []
    total = 0
    for file in find_logs(paths):
        if looks_like_dump(file.path):
            dump = _dump(file, problems)
            if dump is not None:
                dumps.append(dump)
                continue
        error = read_error_file(file) if looks_like_error_file(file.path) else None
        if error is not None:
            sources.append(error)
            continue
        read = read_log(file, catalogue, scanner)
        total += read.bytes_read
        progress(total)
        if read.problem is not None:
            problems.append(read.problem)
        if read.source is not None:
            sources.append(read.source)
    flight: FlightFinding | None = missing_ranks(dumps) if dumps else None
    return Diagnosed(
        verdict=diagnose(catalogue, sources, ends, flight),
        files=len(sources) + len(dumps),
        bytes_read=total,
        problems=tuple(problems),
    )


def _dump(file: LogFile, problems: list[str]) -> FlightDump | None:
    try:
        return read_dump(file.path)
    except NotADump as error:
        if file.named:
            problems.append(f"{file.shown}: no flight-recorder dump: {error}")
        return None
