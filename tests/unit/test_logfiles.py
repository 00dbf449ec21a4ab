"""Reading logs: what is kept of a file, whose it is, and that nothing in a file can break it."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.decide.diagnosis.catalogue import Catalogue
from everstep.decide.diagnosis.flight import dump_of, missing_ranks
from everstep.decide.diagnosis.prefix import parse
from everstep.decide.diagnosis.tail import diagnose_tail
from everstep.decide.diagnosis.types import LogLine, LogSource, RankEnd
from everstep.decide.diagnosis.verdict import diagnose
from everstep.logfiles.error_files import read_error_file
from everstep.logfiles.find import LogFile, NoSuchPath, find_logs, owner
from everstep.logfiles.flight_files import NotADump, plain, read_dump
from everstep.logfiles.reading import HEAD_LINES, TAIL_LINES, read_log
from everstep.logfiles.scan import Scanner
from everstep.logfiles.whole import diagnose_files
from everstep.spec.log_catalogue import load_signatures, signatures_from_text
from everstep.spec.log_places import signature_files

CASES = Path(__file__).resolve().parents[1] / "cases"
CATALOGUE = load_signatures(environ={})
SCANNER = Scanner(CATALOGUE.texts)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
STEP = "iteration 5/ 100 | elapsed time per iteration (ms): 4000.0 | loss: 2.0\n"


def lines_of_cases() -> list[str]:
    out = []
    for name in ("log_cases.jsonl", "more_log_cases.jsonl"):
        for line in (CASES / name).read_text(encoding="utf-8").splitlines():
            out += json.loads(line)["log"].splitlines()
    main, _ = signature_files(environ={})
    rows = signatures_from_text(main.read_text(encoding="utf-8"), str(main))
    return [*out, *(example for row in rows.values() for example in row.examples)]


def log_file(path: Path, *, named: bool = True) -> LogFile:
    return LogFile(path, path.name, None, None, named)


def test_the_scan_loses_no_line_that_a_signature_matches() -> None:
    patterns = [re.compile(s.pattern, re.IGNORECASE) for s in CATALOGUE.signatures]
    matched = 0
    for line in lines_of_cases():
        found = {SCANNER.texts[index] for _, index in SCANNER.places(line.encode())}
        for pattern, texts in zip(patterns, CATALOGUE.literals, strict=True):
            if pattern.search(line):
                matched += 1
                assert any(short in text for short in found for text in texts), (line, texts)
    assert matched > 200


def test_every_signature_is_found_by_its_examples_in_the_whole_catalogue() -> None:
    main, _ = signature_files(environ={})
    rows = signatures_from_text(main.read_text(encoding="utf-8"), str(main))
    for name, row in rows.items():
        found = CATALOGUE.match(parse(row.examples[0]).text)
        assert found is not None
        assert (found.symptom, found.action) == (row.symptom, row.action), (name, found.name)


def test_a_failure_in_the_middle_of_a_long_file_is_kept_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(STEP * 40_000 + ECC + "\n" + STEP * 40_000)
    read = read_log(log_file(path), CATALOGUE, SCANNER)
    assert read.source is not None
    kept = {line.number: line.text for line in read.source.lines}
    assert kept[40_001] == ECC
    assert read.source.lines_total == 80_001
    assert {1, HEAD_LINES, 80_001} <= set(kept)
    assert len(kept) < HEAD_LINES + 3 * TAIL_LINES + 20


def test_a_file_of_nothing_but_errors_stays_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text((ECC + "\n") * 200_000)
    tracemalloc.start()
    read = read_log(log_file(path), CATALOGUE, SCANNER)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read.source is not None
    assert peak < 40 * 2**20
    assert read.source.lines[-1].number == 200_000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 5_000,
        b"x" * 3_000_000 + ECC.encode() + b"y" * 3_000_000,
        ECC.encode() + b"\n\xff\xfe\x80 not utf-8\n",
        b"\r".join([b"10%"] * 10_000) + b"\r" + ECC.encode() + b"\n",
    ],
    ids=["empty", "zeros", "endless line", "not UTF-8", "progress bars"],
)
def test_strange_files_are_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(content)
    found = diagnose_files([path], CATALOGUE)
    wanted = "ecc_uncorrectable" if ECC.encode() in content else "nothing_found"
    assert found.verdict.rule == wanted
    warned = [f"{path}: it begins with bytes that are no text"] if b"\x00" in content else []
    assert list(found.problems) == warned


def test_gzip_is_read_and_a_cut_one_says_so(tmp_path: Path) -> None:
    whole = gzip.compress((STEP * 5_000 + ECC + "\n" + STEP).encode())
    (tmp_path / "a.log.gz").write_bytes(whole)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.log.gz").write_bytes(whole[:-20])
    assert diagnose_files([tmp_path / "a.log.gz"], CATALOGUE).verdict.rule == "ecc_uncorrectable"
    cut = diagnose_files([tmp_path / "b"], CATALOGUE)
    assert len(cut.problems) == 1
    assert "a.log.gz" in cut.problems[0]


def test_folders_with_loops_links_and_binaries(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "back").symlink_to(tmp_path)
    (tmp_path / "gone.log").symlink_to(tmp_path / "nowhere")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "core").write_bytes(bytes(range(256)) * 100)
    (tmp_path / "slurm-99.out").write_text(ECC + "\n")
    found = diagnose_files([tmp_path], CATALOGUE)
    assert found.verdict.rule == "ecc_uncorrectable"
    assert found.files == 1


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuchPath, match=r"nowhere\.log: No such file"):
        find_logs([tmp_path / "nowhere.log"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_text(ECC)
    path.chmod(0)
    assert "Permission denied" in diagnose_files([path], CATALOGUE).problems[0]


@pytest.mark.parametrize(
    ("name", "rank", "machine"),
    [
        ("logs/rank_17.log", 17, None),
        ("logs/node-3/rank5.log", 5, "node-3"),
        ("t/run_x/attempt_0/3/stderr.log", 3, None),
        ("slurm-4711.out", None, None),
        ("global_rank-8.txt.gz", 8, None),
        ("gpu-node-41/rank_2.log", 2, "gpu-node-41"),
        ("GPU-NODE-3/a.log", None, "GPU-NODE-3"),
        ("a_host_6/a.log", None, "a_host_6"),
        ("ip-10-9-8-7/a.log", None, "ip-10-9-8-7"),
        ("dgx-h100-2/a.log", None, "dgx-h100-2"),
        ("c044-017/a.log", None, "c044-017"),
        ("node8.cluster.local/a.log", None, "node8.cluster.local"),
        ("host-3-rank5.log", 5, "host-3"),
        ("epoch_3/v2.log", None, None),
    ],
)
def test_names_of_files_tell_whose_they_are(
    name: str, rank: int | None, machine: str | None
) -> None:
    assert owner(name) == (rank, machine)


def test_first_failure_over_many_files(tmp_path: Path) -> None:
    for rank in range(4):
        text = f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9\n"
        if rank == 2:
            text = "Traceback (most recent call last):\n  File 'a', line 1\nKeyError: 'x'\n"
        (tmp_path / f"rank_{rank}.log").write_text(STEP * 100 + text)
    verdict = diagnose_files([tmp_path], CATALOGUE).verdict
    assert (verdict.symptom, verdict.first_failed_rank) == ("user_code", 2)
    assert verdict.witnesses == (0, 1, 3)


def test_an_error_file_of_torchrun_is_read(tmp_path: Path) -> None:
    path = tmp_path / "attempt_0" / "1" / "error.json"
    path.parent.mkdir(parents=True)
    stack = f"Traceback (most recent call last):\n  File 'a', line 1, in f\n    g()\n{ECC}\n"
    message = {"message": ECC, "extraInfo": {"py_callstack": stack, "timestamp": "1"}}
    path.write_text(json.dumps({"message": message}))
    source = read_error_file(find_logs([path])[0])
    assert source is not None
    assert source.rank == 1
    assert diagnose_files([tmp_path], CATALOGUE).verdict.rule == "ecc_uncorrectable"


# --- flight recorder


def dump(last: int, *, state: str = "scheduled") -> dict[str, object]:
    done = [
        {"collective_seq_id": n, "process_group": ["0", "default_pg"], "state": "completed"}
        for n in range(1, last)
    ]
    waits = {"collective_seq_id": last, "process_group": ["0", "default_pg"], "state": state}
    return {"entries": [*done, waits], "pg_config": {"0": {"ranks": "[0, 1, 2]"}}}


def test_the_flight_recorder_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    for rank, last in enumerate((9, 8, 9)):
        data = dump(last, state="completed" if rank == 1 else "started")
        raw = pickle.dumps(data) if rank else json.dumps(data).encode()
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(raw)
    found = missing_ranks([read_dump(tmp_path / f"nccl_trace_rank_{r}") for r in range(3)])
    assert found is not None
    assert (found.ranks, found.collective) == ((1,), 9)
    (tmp_path / "rank_0.log").write_text(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=X\n"
    )
    assert diagnose_files([tmp_path], CATALOGUE).verdict.first_failed_rank == 1


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.system, ("touch /tmp/everstep-was-here",))


def test_a_dump_that_names_a_function_is_refused() -> None:
    with pytest.raises(NotADump, match="names nothing"):
        plain(pickle.dumps(Evil()))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_dump_or_not(raw: bytes) -> None:
    try:
        data = plain(raw)
    except NotADump:
        return
    read = dump_of(0, data)
    assert read is None or missing_ranks([read]) is None or read.last_enqueued


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "collective_seq_id": plain_values,
                "process_group": plain_values,
                "state": st.sampled_from(["scheduled", "started", "completed", 3]),
                "is_p2p": st.booleans(),
            },
        ),
        max_size=6,
    ),
    plain_values,
)
def test_any_dump_is_judged_without_a_crash(entries: list[object], config: object) -> None:
    dumps = [dump_of(rank, {"entries": entries, "pg_config": config}) for rank in range(3)]
    missing_ranks([one for one in dumps if one is not None])


fragments = st.sampled_from(lines_of_cases()) | st.text(max_size=60)


@settings(max_examples=150, deadline=None)
@given(st.lists(fragments, max_size=25))
def test_any_lines_are_judged_without_a_crash(lines: list[str]) -> None:
    source = LogSource(
        file="a",
        lines=tuple(LogLine(number, line) for number, line in enumerate(lines, 1)),
        lines_total=len(lines),
    )
    verdict = diagnose(CATALOGUE, [source])
    assert verdict.why
    assert all(1 <= line.line <= len(lines) for line in verdict.evidence)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=80) | fragments.map(str.encode), max_size=30))
def test_any_bytes_in_a_file_are_read(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("any") / "job.log"
    path.write_bytes(b"\n".join(parts))
    assert diagnose_files([path], CATALOGUE).verdict.why


def test_the_end_of_one_ranks_log_says_what_it_suffered() -> None:
    own = diagnose_tail(CATALOGUE, [STEP.strip(), ECC], rank=3, exit_code=1)
    assert own is not None
    assert (own.symptom, own.role, own.machine_specific) == ("gpu_memory_ecc", "root", True)
    assert own.evidence == (ECC,)
    peer = diagnose_tail(CATALOGUE, ["RuntimeError: Connection closed by peer [10.0.0.1]:4"])
    assert peer is not None
    assert peer.role == "witness"
    assert diagnose_tail(CATALOGUE, [STEP.strip()], exit_code=0) is None
    assert diagnose_tail(CATALOGUE, [], signal=15, stopped_by_us=True) is None
    killed = diagnose_tail(CATALOGUE, [STEP.strip()], signal=9)
    assert killed is not None
    assert (killed.symptom, killed.rule) == ("unknown", "killed")


def test_catalogue_problems_name_file_line_and_key() -> None:
    text = "version: 1\nsignatures:\n  a_row:\n    pattern: '('\n    symptom: nope\n"
    with pytest.raises(Exception, match=r"x\.yaml:4: signatures\.a_row\.pattern") as caught:
        signatures_from_text(text, "x.yaml")
    assert "x.yaml:5: signatures.a_row.symptom: got 'nope'; accepted: " in str(caught.value)


def test_a_site_file_is_laid_over(tmp_path: Path) -> None:
    main, _ = signature_files(environ={})
    (tmp_path / "log_signatures.yaml").write_bytes(main.read_bytes())
    (tmp_path / "log_signatures.site.yaml").write_text(
        "version: 1\nsignatures:\n  our_store:\n    pattern: 'ourstore: gone'\n"
        "    symptom: filesystem_io\n    side: external\n    action: wait_external\n"
        "    why: our store is away\n    source: us\n    examples: ['ourstore: gone']\n"
    )
    catalogue: Catalogue = load_signatures(environ={"EVERSTEP_CONFIG": str(tmp_path)})
    found = catalogue.match("OSError: [Errno 5] ourstore: gone")
    assert found is not None
    assert found.name == "our_store"


@pytest.mark.parametrize(
    "line",
    [
        "[default1]:[rank9]: KeyError: 'a'",
        "2025-03-01T08:00:00.125Z host-7 [rank9]: KeyError: 'a'",
        "i.fit/0 [default1]:[rank9]: KeyError: 'a'",
        '{"time": "08:00", "rank": 9, "level": "error", "message": "KeyError: 1"}',
        "rank9: KeyError: 'a'",
        "(rank 9) KeyError: 'a'",
        "|rank 9| KeyError: 'a'",
        "Rank[9]: KeyError: 'a'",
        "[9] KeyError: 'a'",
    ],
)
def test_prefixes_tell_the_rank_over_all_machines(line: str) -> None:
    parsed = parse(line)
    assert parsed.rank == 9
    assert parsed.text.startswith("KeyError")


def test_utf_16_and_text_with_the_name_of_an_archive_are_read(tmp_path: Path) -> None:
    wide, plain_text = tmp_path / "wide.log", tmp_path / "a.log.gz"
    wide.write_bytes(f"first\n{ECC}\n".encode("utf-16"))
    plain_text.write_text(f"first\n{ECC}\n", encoding="utf-8")
    for path in (wide, plain_text):
        found = diagnose_files([path], CATALOGUE)
        assert found.problems == ()
        assert [line.line for line in found.verdict.evidence] == [2]


def test_a_line_without_end_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(b"x" * 3_000_000 + b" " + ECC.encode() + b" " + b"y" * 400_000)
    found = diagnose_files([path], CATALOGUE)
    assert [line.line for line in found.verdict.evidence] == [1]


def test_an_attempt_that_was_followed_by_another_is_over(tmp_path: Path) -> None:
    for attempt, text in ((0, ECC), (1, "iteration 4/ 9 | loss: 2.0\nNameError: name 'q'")):
        folder = tmp_path / f"attempt_{attempt}" / "3"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"{text}\n", encoding="utf-8")
    found = diagnose_files([tmp_path], CATALOGUE, [RankEnd(exit_code=1)]).verdict
    assert (found.symptom.value, found.first_failed_rank) == ("user_code", 3)
    well = diagnose_files([tmp_path], CATALOGUE, [RankEnd(exit_code=0)]).verdict
    assert (well.action.value, well.confidence.value) == ("warn_only", "low")
