"""Catalogues are parsed once for each text; whatever lies in the cache can only cost time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from everstep.spec import yaml_cache
from everstep.spec.errors import SpecError
from everstep.spec.yaml_text import plain_data

TEXT = "rows:\n" + "".join(f"  row{n}: [1, 2.5, yes, true, null, 'x']\n" for n in range(600))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "everstep" / "yaml"


def count(text: str = TEXT) -> tuple[Any, int]:
    """The data, and how often it was parsed for them."""
    calls = []

    def parse() -> Any:
        calls.append(1)
        return plain_data(text)

    return yaml_cache.remembered(text, parse), len(calls)


def test_a_text_is_parsed_once_and_reads_the_same(folder: Path) -> None:
    data = plain_data(TEXT, remember=True)

    assert len(list(folder.iterdir())) == 1
    assert count() == (data, 0)
    assert data == plain_data(TEXT)
    assert count(TEXT + "more: 1\n")[1] == 1


@pytest.mark.parametrize("text", ["", "{", "[1", "\udcff"])
def test_a_damaged_entry_is_parsed_again(folder: Path, text: str) -> None:
    data, _ = count()
    (entry,) = folder.iterdir()
    entry.write_text(text, errors="surrogateescape")

    assert count() == (data, 1)
    assert count() == (data, 0)


def test_an_entry_that_others_may_write_does_not_count(folder: Path) -> None:
    count()
    (entry,) = folder.iterdir()
    entry.chmod(0o666)

    assert count()[1] == 1


@pytest.mark.parametrize("base", ["/proc/nowhere", "relative"])
def test_without_a_cache_folder_it_is_parsed_each_time(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    monkeypatch.setenv("HOME", "/proc/nowhere")

    assert [count()[1] for _ in range(2)] == [1, 1]


def test_job_specs_and_small_texts_are_never_kept(folder: Path) -> None:
    plain_data(TEXT)
    plain_data("a: 1\n", remember=True)

    assert not folder.exists()


def test_what_is_refused_is_not_kept(folder: Path) -> None:
    bad = TEXT + "rows: 1\n"
    for _ in range(2):
        with pytest.raises(SpecError, match="twice"):
            plain_data(bad, remember=True)
    assert not folder.exists()


def test_old_entries_are_dropped(folder: Path) -> None:
    for number in range(yaml_cache.KEPT_MAX + 3):
        yaml_cache.remembered(f"{TEXT}n: {number}\n", lambda: [1])
        for age, entry in enumerate(sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)):
            os.utime(entry, (age, age))

    assert len(list(folder.iterdir())) == yaml_cache.KEPT_MAX
