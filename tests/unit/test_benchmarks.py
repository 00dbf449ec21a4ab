"""Results of benchmarks: their form, their place in the document, and the committed ones."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.step_eye import NotInTime, StepEye, recovery

ROW = {"system", "metric", "unit", "median", "min", "max", "n"}
NOTES = common.Notes(title="A title", text="What was measured.", remarks=("Mind this.",))
BENCHES = sorted(
    path.stem.removeprefix("bench_") for path in (common.CHECKOUT / "benchmarks").glob("bench_*.py")
)


def some_rows() -> list[common.Row]:
    samples = common.Samples()
    for value in (3.0, 1.0, 2.0):
        samples.add("ours", "back_s", value, unit="s")
    samples.add("ours", "detect_s", None, unit="s")
    samples.add("ours", "detect_s", 0.123456, unit="s")
    samples.add("peer", "back_s", None, unit="s")
    return samples.rows()


def test_a_row_is_median_smallest_largest_and_how_many() -> None:
    back, detect, never = some_rows()
    assert (back.median, back.min, back.max, back.n) == (2.0, 1.0, 3.0, 3)
    # What did not come to it is not counted, and four digits are enough.
    assert (detect.median, detect.n) == (0.1235, 1)
    assert (never.median, never.min, never.max, never.n) == (None, None, None, 1)


def test_the_result_file_has_exactly_the_agreed_form(tmp_path: Path) -> None:
    common.publish(
        "some",
        some_rows(),
        NOTES,
        load_before=0.5,
        results=tmp_path,
        document=tmp_path / "benchmarks.md",
    )
    content = json.loads((tmp_path / "some.json").read_text())
    assert list(content) == ["bench", "host", "commit", "rows"]
    assert [set(row) for row in content["rows"]] == [ROW] * 3
    told = (tmp_path / "some.json").read_text() + (tmp_path / "benchmarks.md").read_text()
    assert socket.gethostname() not in re.findall(r"[\w.-]+", told)
    assert str(common.CHECKOUT) not in told


def test_the_table_says_never_where_there_is_no_number(tmp_path: Path) -> None:
    content = {
        "bench": "some",
        "host": common.host(1.0),
        "commit": "abc-dirty",
        "rows": [row.as_json() for row in some_rows()],
    }
    lines = common.render(content, NOTES).splitlines()
    assert "| ours | back_s | 2 s | 1 to 3 | 3 |" in lines
    assert "| peer | back_s | never | – | 1 |" in lines
    assert "- Mind this." in lines
    assert "commit `abc` and uncommitted changes" in lines[-1]


def test_the_table_says_what_was_not_tried() -> None:
    row = common.row_of("ours", "back_s", "s", [])
    content = {"bench": "some", "host": common.host(1.0), "commit": "a", "rows": [row.as_json()]}
    lines = common.render(content, NOTES).splitlines()
    assert "| ours | back_s | not run here | – | 0 |" in lines


def test_a_section_is_replaced_and_the_rest_is_left_alone() -> None:
    first = common.with_section("# Benchmarks\n", "a", "one\n")
    both = common.with_section(first, "b", "two\n")
    again = common.with_section(both, "a", "three\n")
    assert again == both.replace("one", "three")
    assert common.with_section(again, "a", "three\n") == again
    assert again.startswith("# Benchmarks\n")


def test_a_section_without_an_end_is_refused() -> None:
    with pytest.raises(ValueError, match="has no <!-- end of bench a -->"):
        common.with_section("<!-- bench a -->\n", "a", "one")


@pytest.mark.parametrize("bench", BENCHES)
def test_the_committed_result_of_every_benchmark_is_whole_and_in_the_document(bench: str) -> None:
    content = json.loads((common.RESULTS / f"{bench}.json").read_text(encoding="utf-8"))
    assert content["bench"] == bench
    assert content["rows"]
    document = common.DOCUMENT.read_text(encoding="utf-8")
    section = document.partition(f"<!-- bench {bench} -->")[2].partition("<!-- end of bench")[0]
    for row in content["rows"]:
        assert set(row) == ROW
        assert row["n"] >= 1 or row["median"] is None
        assert row["median"] is None or row["min"] <= row["median"] <= row["max"]
        assert f"| {row['system']} | {row['metric']} |" in section


# --- reading steps from logs


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


async def test_recovery_is_read_from_what_ranks_print(tmp_path: Path) -> None:
    old, new = tmp_path / "1.log", tmp_path / "2.log"
    append(old, "step 4 loss 1.0\nresumed after step 3\nstep 5 loss 1.0\nstep 6 los")
    eye = StepEye(lambda: {path: int(path.stem) for path in tmp_path.glob("*.log")})
    eye.look()
    # A line counts once it is whole.
    assert eye.newest() == (1, 5)
    append(old, "s 1.0\n")
    append(new, "step 5 loss 1.0\n")
    eye.look()
    assert eye.newest() == (2, 5)
    assert eye.first_step(after=1) is not None
    assert eye.reached(6, after=1) is None
    append(new, "step 6 loss 1.0\n")
    eye.look()
    back = await recovery(eye, at=0.0, run=1, last_step=6, limit_s=5)
    assert back.steps_lost == 2
    assert 0 < back.first_step_s <= back.back_s


async def test_a_job_that_does_not_come_back_is_told(tmp_path: Path) -> None:
    append(tmp_path / "1.log", "step 6 loss 1.0\n")
    eye = StepEye(lambda: {tmp_path / "1.log": 1, tmp_path / "gone.log": 2})
    eye.look()
    with pytest.raises(NotInTime, match="step 6 again after run 1"):
        await recovery(eye, at=0.0, run=1, last_step=6, limit_s=0.05)


def test_benchmarks_are_programs_that_say_what_they_measure() -> None:
    for bench in BENCHES:
        path = common.CHECKOUT / "benchmarks" / f"bench_{bench}.py"
        assert f"python benchmarks/bench_{bench}.py" in path.read_text(encoding="utf-8")
