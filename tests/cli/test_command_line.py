"""The command line as a person meets it: answers, exit codes, one line for all that is bad."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from everstep import cli
from everstep.errors import EverstepError
from tests.cli.conftest import Shell, command

SPEC = "name: job\ncommand: 'true'\n"


@pytest.fixture
def spec(shell: Shell) -> Path:
    path = shell.home / "job.yaml"
    path.write_text(SPEC)
    return path


def test_version_answers_people_and_programs(shell: Shell) -> None:
    ran = shell.run("version", "-o", "json")
    assert ran.code == 0
    assert set(json.loads(ran.out)) == {"everstep", "python", "temporalio"}
    assert shell.run("version").out == f"everstep {json.loads(ran.out)['everstep']}\n"


def test_version_loads_nothing_heavy(shell: Shell) -> None:
    code = (
        "import sys; from everstep import cli; rc = cli.run(['version']);"
        "heavy = {'temporalio', 'rich', 'httpx', 'sqlalchemy', 'torch'} & "
        "set(sys.modules); assert not heavy, heavy; sys.exit(rc)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=shell.env(),
    )
    assert done.returncode == 0, done.stderr


def test_no_arguments_show_the_commands_and_count_as_usage(shell: Shell) -> None:
    ran = shell.run()
    assert ran.code == 2
    for name in ("up", "demo", "launch", "status", "explain", "policy", "adopt"):
        assert f"  {name} " in ran.err


def test_help_of_every_command_works() -> None:
    names = [c.name or c.callback.__name__ for c in cli.app.registered_commands if c.callback]
    assert len(names) >= 17
    for name in names:
        assert cli.run([name, "--help"]) == 0
    assert cli.run(["policy", "check", "--help"]) == 0


NOT_A_SPEC = {
    "no command": ("name: x\n", "command"),
    "unknown key": (SPEC + "machine: 3\n", "machines"),
    "bad name": ("name: Bad_Name\ncommand: x\n", "name"),
    "too many ranks": (SPEC + "ranks_per_machine: 1000\n", "ranks_per_machine"),
    "layout that does not fit": (SPEC + "machines: 2\nlayout: {tp: 3}\n", "layout"),
    "reserved variable": (SPEC + "env: {RANK: '1'}\n", "RANK"),
    "duration without unit": (SPEC + "policy: {detection: {hang_min: 5}}\n", "hang_min"),
    "unknown policy key": (SPEC + "policy: {detection: {hang_mni: 5s}}\n", "hang_min"),
    "not yaml": ("name: [\n", "job.yaml"),
    "a list": ("- name\n", "mapping"),
    "empty": ("", "empty"),
    "unknown axis": (SPEC + "layout: {zp: 2}\n", "zp"),
}


@pytest.mark.parametrize("case", sorted(NOT_A_SPEC))
def test_a_bad_spec_is_refused_before_any_server_is_asked(shell: Shell, case: str) -> None:
    text, named = NOT_A_SPEC[case]
    path = shell.home / "job.yaml"
    path.write_text(text)
    ran = shell.run("launch", str(path), "--temporal", "127.0.0.1:1")
    assert ran.code == 3
    assert named in ran.line
    assert "job.yaml" in ran.line


BAD_LINES: dict[str, tuple[list[str], int, str]] = {
    "unknown command": (["frobnicate"], 2, "frobnicate"),
    "unknown flag": (["jobs", "--colour"], 2, "--colour"),
    "missing argument": (["status"], 2, "JOB"),
    "unknown format": (["jobs", "-o", "xml"], 2, "xml"),
    "not a number": (["up", "--machines", "many"], 2, "--machines"),
    "no machine": (["up", "--machines", "0"], 2, "machines"),
    "port beyond": (["up", "--ui-port", "70000"], 2, "ui-port"),
    "spec not there": (["launch", "nowhere.yaml"], 3, "nowhere.yaml"),
    "spec a directory": (["launch", "/tmp"], 3, "directory"),
    "policy not there": (["policy", "check", "nowhere.yaml"], 3, "nowhere.yaml"),
    "policy for up not there": (["up", "--policy", "nowhere.yaml"], 3, "nowhere.yaml"),
    "no server known": (["status", "job"], 3, "everstep up"),
    "no ledger known": (["jobs"], 3, "everstep up"),
    "ledger of no kind": (["jobs", "--ledger", "mysql://x/y"], 3, "mysql"),
    "ledger not there": (["incidents", "--ledger", "sqlite:////nowhere/l.db"], 3, "/nowhere/l.db"),
    "no secrets known": (["logs", "job", "--ledger", "sqlite:////nowhere/l.db"], 3, "secrets"),
    "demo, unknown fault": (["demo", "--only", "meteor"], 2, "meteor"),
    "demo, report nowhere": (["demo", "--report", "/nowhere/at/all.json"], 3, "/nowhere"),
    "agent, no such secrets": (
        [
            *("agent", "--machine-id", "m", "--state", "s"),
            *("--secrets", "/nowhere", "--controller", "http://127.0.0.1:1"),
        ],
        3,
        "/nowhere",
    ),
    "controller, no such secrets": (
        [
            *("controller", "--ledger", "sqlite:////x/l.db"),
            *("--secrets", "/nowhere", "--checkpoint-root", "/x"),
        ],
        3,
        "/nowhere",
    ),
    "agent, a label that is none": (
        [
            *("agent", "--machine-id", "m", "--state", "s", "--secrets", "/nowhere"),
            *("--controller", "http://127.0.0.1:1", "--label", "zone"),
        ],
        2,
        "zone=a",
    ),
    "up, no such program": (["up", "--temporal-binary", "/nowhere/temporal"], 3, "/nowhere"),
}


@pytest.mark.parametrize("case", sorted(BAD_LINES))
def test_a_bad_command_line_or_environment_gives_one_line(shell: Shell, case: str) -> None:
    arguments, code, named = BAD_LINES[case]
    ran = shell.run(*arguments)
    assert (ran.code, named in ran.line) == (code, True), ran.err


def test_a_server_that_does_not_answer_is_code_5(shell: Shell, spec: Path) -> None:
    with socket.socket() as bound:  # bound and not listening: connections are refused
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        for arguments in (["status", "job"], ["launch", str(spec)], ["pause", "job"]):
            ran = shell.run(*arguments, EVERSTEP_TEMPORAL_ADDRESS=address)
            assert ran.code == 5
            assert address in ran.line
            assert "EVERSTEP_TEMPORAL_ADDRESS" in ran.line


def test_policy_check_says_no_with_code_1_and_every_problem(shell: Shell) -> None:
    path = shell.home / "policy.yaml"
    path.write_text("detection:\n  hang_min: 5\n  hang_mni: 3s\n")
    ran = shell.run("policy", "check", str(path), "-o", "json")
    assert ran.code == 1
    answer = json.loads(ran.out)
    assert answer["ok"] is False
    assert len(answer["problems"]) == 2
    assert [line for line in ran.err.splitlines() if "policy.yaml:" in line]
    path.write_text("detection: {hang_min: 90s}\n")
    assert shell.run("policy", "check", str(path)).code == 0


def test_policy_show_says_which_file_it_was(shell: Shell) -> None:
    folder = shell.home / "config"
    folder.mkdir()
    (folder / "policy.yaml").write_text("detection: {hang_min: 90s}\n")
    ran = shell.run("policy", "show", "-o", "json", EVERSTEP_CONFIG=str(folder))
    shown = json.loads(ran.out)
    assert shown["source"] == str(folder / "policy.yaml")
    assert shown["policy"]["detection"]["hang_min"] == "1m30s"


def test_output_that_nobody_reads_is_no_error(shell: Shell) -> None:
    script = f"{' '.join(command())} policy show | head -c 1"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env=shell.env()
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_no_colour_where_there_is_no_terminal(shell: Shell) -> None:
    ran = shell.run("policy", "show", FORCE_COLOR="1")
    assert "\x1b[" not in ran.out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EverstepError("x"), 1),
        (KeyboardInterrupt(), 130),
        (TimeoutError("not yet"), 1),
        (OSError(28, "No space left on device", "/x"), 3),
        (RuntimeError("bug"), 70),
        (BrokenPipeError(), 141),
    ],
)
def test_every_error_ends_as_a_line_and_a_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> None:
        raise error

    app = typer.Typer()
    app.command()(failing)
    assert cli.run([], app=app) == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 1
