"""Loading the kernel catalogue: layers, a site's own rows, and one clear line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.decide.kernel import judge
from everstep.decide.words import Action
from everstep.spec.errors import SpecError
from everstep.spec.kernel_catalogue import SITE_FILE, catalogue_files, load_kernel_catalogue

XID_31 = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python, MMU Fault"
XID_79 = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."


def site(folder: Path, text: str) -> dict[str, str]:
    (folder / SITE_FILE).write_text(text, encoding="utf-8")
    return {"EVERSTEP_CONFIG": str(folder)}


def test_the_shipped_catalogue_loads() -> None:
    rules = load_kernel_catalogue(environ={})

    assert rules.source.endswith("xid.yaml")
    assert judge([XID_79], rules).action is Action.EVICT_MACHINE


def test_a_site_changes_one_row_and_nothing_else(tmp_path: Path) -> None:
    environ = site(tmp_path, 'xids:\n  "31":\n    action: stop_time_check\n')

    rules = load_kernel_catalogue(environ=environ)

    assert judge([XID_31], rules).action is Action.STOP_TIME_CHECK
    assert judge([XID_79], rules).action is Action.EVICT_MACHINE
    assert rules.xids[31].meaning == load_kernel_catalogue(environ={}).xids[31].meaning
    assert SITE_FILE in rules.source


def test_a_site_changes_what_a_documented_word_comes_to(tmp_path: Path) -> None:
    environ = site(tmp_path, "documented:\n  RESTART_BM:\n    action: stop_time_check\n")

    assert judge([XID_79], load_kernel_catalogue(environ=environ)).action is Action.STOP_TIME_CHECK


def test_a_site_changes_one_sxid_of_a_group(tmp_path: Path) -> None:
    line = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    environ = site(tmp_path, 'sxids:\n  "20034": {fatal: stop_time_check}\n')

    rules = load_kernel_catalogue(environ=environ)

    assert judge([line], rules).action is Action.STOP_TIME_CHECK
    assert rules.sxids[20034].meaning == load_kernel_catalogue(environ={}).sxids[20034].meaning


def test_a_site_adds_a_row_and_silences_another(tmp_path: Path) -> None:
    environ = site(
        tmp_path,
        "kernel_lines:\n"
        "  weka_down:\n"
        "    pattern: 'wekafs: .* lost'\n"
        "    meaning: the storage is away\n"
        "    kind: remote_storage\n"
        "    action: wait_external\n"
        "    example: 'wekafs: connection lost'\n"
        "  known_noise:\n"
        "    pattern: 'NVRM: Going over RM unhandled interrupt threshold for irq 7$'\n"
        "    meaning: a board of ours does that\n"
        "    kind: info\n"
        "    benign: true\n"
        "    example: 'NVRM: Going over RM unhandled interrupt threshold for irq 7'\n",
    )

    rules = load_kernel_catalogue(environ=environ)

    assert judge(["wekafs: connection lost"], rules).action is Action.WAIT_EXTERNAL
    noise = "NVRM: Going over RM unhandled interrupt threshold for irq "
    assert judge([noise + "7"], rules).observations == ()
    assert judge([noise + "8"], rules).action is Action.STOP_TIME_CHECK


def test_a_named_file_is_laid_over_the_packaged_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('xids:\n  "79":\n    action: warn_only\n', encoding="utf-8")

    assert judge([XID_79], load_kernel_catalogue(path, environ={})).action is Action.WARN_ONLY
    assert [place.name for place in catalogue_files(path, environ={})] == ["xid.yaml", "mine.yaml"]


@pytest.mark.parametrize(
    "text, line, words",
    [
        ('xids:\n  "31":\n    acton: evict\n', 3, ["xids.31.acton", "did you mean action?"]),
        (
            'xids:\n  "31":\n    action: evict\n',
            3,
            ["xids.31.action", "'evict'", "evict_machine", "warn_only"],
        ),
        ('xids:\n  "31": {kind: user}\n', 2, ["xids.31.kind", "'user'", "application"]),
        ('xids:\n  "9000":\n    kind: link\n', 2, ["xids.9000.meaning", "required"]),
        (
            'xids:\n  "9000": {meaning: new, kind: link}\n',
            2,
            ["xids.9000.action", "nothing", "stop_time_check"],
        ),
        (
            'xids:\n  "9000": {meaning: new, kind: link, documented: RESET_GPUS}\n',
            2,
            ["xids.9000.documented", "'RESET_GPUS'", "did you mean RESET_GPU?"],
        ),
        ('xids:\n  "x9": {meaning: new, kind: link}\n', 2, ["xids.x9", "[1-9]"]),
        ('xids:\n  "31": {side: user_code}\n  "31": {side: unclear}\n', 3, ["31", "twice"]),
        ("xids:\n  31: {side: unclear}\n", 2, ["31", "quote it"]),
        (
            (
                "kernel_lines:\n  mine:\n    pattern: 'a(b'\n    meaning: m\n    kind: info\n"
                "    example: ab\n"
            ),
            3,
            ["kernel_lines.mine.pattern", "'a(b'", "regular expression", "unterminated"],
        ),
        *(
            (
                f"kernel_lines:\n  link_up:\n    {key}: '{pattern}'\n",
                3,
                [f"kernel_lines.link_up.{key}", "a regular expression is needed", why],
            )
            for key in ("pattern", "begins")
            for pattern, why in (
                ("up{99999999999999}", "too large"),
                ("(" * 490 + "up" + ")" * 490, "recursion"),
            )
        ),
        (
            "kernel_lines:\n  link_up:\n    clears: [link_dwn]\n",
            3,
            ["kernel_lines.link_up.clears", "'link_dwn'", "did you mean link_down?"],
        ),
        (
            "kernel_lines:\n  link_down:\n    repeat: {count: 1}\n",
            3,
            ["kernel_lines.link_down.repeat.count", "got 1", "2 or more"],
        ),
        (
            "kernel_lines:\n  link_down:\n    repeat: {within: 5}\n",
            3,
            ["kernel_lines.link_down.repeat.within", "5s, 5m or 5h"],
        ),
        (
            'sxid_groups:\n  fatal:\n    rows:\n      "22013": minion\n',
            4,
            ["22013", "SXid 22013", "give each number once"],
        ),
        ('sxids:\n  "5": {meaning: five}\n', 2, ["sxids.5", "meaning, kind and action"]),
        ("xid:\n", 1, ["xid", "did you mean xids?"]),
        ("- 1\n", 1, ["a mapping is needed"]),
    ],
)
def test_a_mistake_is_one_line_with_its_place(
    text: str, line: int, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as caught:
        load_kernel_catalogue(environ=site(tmp_path, text))

    (shown,) = caught.value.lines
    assert shown.startswith(f"{tmp_path / SITE_FILE}:{line}: "), shown
    for word in words:
        assert word in shown


def test_an_empty_site_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_kernel_catalogue(environ=site(tmp_path, "# nothing\n"))

    assert SITE_FILE in str(caught.value)
