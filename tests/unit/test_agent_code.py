"""Code versions: the name is the content, copies are whole, links and devices are refused."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.machine.code import VERSIONS_KEPT, CodeProblem, CodeStore, hash_directory


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "pkg" / "empty").mkdir(parents=True)
    (root / "train.py").write_text("print('hello')\n")
    (root / "pkg" / "mod.py").write_text("x = 1\n")
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "latest").symlink_to("pkg/mod.py")
    return root


def store(tmp_path: Path) -> CodeStore:
    return CodeStore(tmp_path / "state" / "code", private=(tmp_path / "state",))


def nothing_in_use() -> tuple[str, ...]:
    return ()


def test_the_name_depends_on_contents_modes_names_and_links(source: Path) -> None:
    changes: list[Callable[[], object]] = [
        lambda: (source / "train.py").write_text("print('other')\n"),
        lambda: (source / "train.py").chmod(0o755),
        lambda: (source / "train.py").rename(source / "main.py"),
        (source / "pkg" / "empty").rmdir,
        lambda: (source / "latest").rename(source / "newest"),
    ]
    names = [hash_directory(source)]
    for change in changes:
        change()
        names.append(hash_directory(source))
    assert len(set(names)) == len(names)
    assert all(len(name) == 20 and name.startswith("dir-") for name in names)


def test_the_name_does_not_depend_on_place_time_or_caches(source: Path, tmp_path: Path) -> None:
    name = hash_directory(source)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(source, elsewhere, symlinks=True)
    os.utime(elsewhere / "train.py", (1, 1))
    (elsewhere / "__pycache__").mkdir()
    (elsewhere / "__pycache__" / "train.pyc").write_text("x")
    (elsewhere / ".git").mkdir()
    assert hash_directory(elsewhere) == name


async def test_a_version_is_copied_whole(source: Path, tmp_path: Path) -> None:
    version = hash_directory(source)

    path = await store(tmp_path).materialise(version, str(source), nothing_in_use)

    assert path == tmp_path / "state" / "code" / version
    assert hash_directory(path) == version
    assert (path / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (path / "latest").readlink() == Path("pkg/mod.py")


async def test_what_ranks_add_is_kept_and_what_they_change_is_replaced(
    source: Path, tmp_path: Path
) -> None:
    version = hash_directory(source)
    path = await store(tmp_path).materialise(version, str(source), nothing_in_use)
    (path / "output.txt").write_text("mine")

    again = await store(tmp_path).materialise(version, "/gone", nothing_in_use)
    assert again == path
    assert (path / "output.txt").read_text() == "mine"

    (path / "train.py").write_text("changed")
    await store(tmp_path).materialise(version, str(source), nothing_in_use)
    assert (path / "train.py").read_text() == "print('hello')\n"
    assert not (path / "output.txt").exists()


async def test_a_source_that_changed_since_is_refused_and_nothing_is_left(
    source: Path, tmp_path: Path
) -> None:
    version = hash_directory(source)
    (source / "train.py").write_text("changed")

    with pytest.raises(CodeProblem, match="changed since the version was named"):
        await store(tmp_path).materialise(version, str(source), nothing_in_use)

    assert list((tmp_path / "state" / "code").iterdir()) == []


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../outside", "pkg/../../outside", "pkg/up/../.."]
)
def test_links_that_leave_are_refused(source: Path, target: str) -> None:
    (source / "pkg" / "up").symlink_to("..")
    (source / "bad").symlink_to(target)
    with pytest.raises(CodeProblem, match="leaves the directory"):
        hash_directory(source)


def test_links_within_are_taken(source: Path) -> None:
    (source / "pkg" / "up").symlink_to("../train.py")
    (source / "dangling").symlink_to("pkg/none")
    hash_directory(source)


def test_pipes_and_sockets_are_refused(source: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(CodeProblem, match="device, socket or pipe"):
        hash_directory(source)
    (source / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(source / "s"))
        with pytest.raises(CodeProblem, match="device, socket or pipe"):
            hash_directory(source)


@pytest.mark.parametrize(
    "version",
    ["../../etc", "dir-0123", "dir-0123456789abcdeg", "dir-0123456789abcdef/..", "none", ""],
)
async def test_names_that_are_none(tmp_path: Path, source: Path, version: str) -> None:
    with pytest.raises(CodeProblem, match="16 hex digits"):
        await store(tmp_path).materialise(version, str(source), nothing_in_use)


async def test_sources_that_cannot_be(tmp_path: Path, source: Path) -> None:
    version = hash_directory(source)
    for bad in (
        "relative/path",
        "/does/not/exist",
        str(tmp_path),
        str(tmp_path / "state" / "code"),
    ):
        with pytest.raises(CodeProblem) as caught:
            await store(tmp_path).materialise(version, bad, nothing_in_use)
        assert "\n" not in str(caught.value)


async def test_old_versions_go_and_those_in_use_stay(source: Path, tmp_path: Path) -> None:
    code = store(tmp_path)
    versions: list[str] = []

    def in_use() -> tuple[str, ...]:
        return (str(tmp_path / "state" / "code" / versions[0] / "pkg"),)

    for number in range(VERSIONS_KEPT + 3):
        (source / "train.py").write_text(f"print({number})\n")
        versions.append(hash_directory(source))
        path = await code.materialise(versions[-1], str(source), in_use)
        os.utime(path.with_name(path.name + ".json"), (number, number))

    kept = {path.name for path in (tmp_path / "state" / "code").iterdir() if path.is_dir()}
    assert kept == {versions[0], *versions[-VERSIONS_KEPT:]}


async def test_nothing_goes_when_it_is_not_known_what_is_used(source: Path, tmp_path: Path) -> None:
    code = store(tmp_path)
    for number in range(VERSIONS_KEPT + 2):
        (source / "train.py").write_text(f"print({number})\n")
        await code.materialise(hash_directory(source), str(source), lambda: None)
    kept = [path for path in (tmp_path / "state" / "code").iterdir() if path.is_dir()]
    assert len(kept) == VERSIONS_KEPT + 2
