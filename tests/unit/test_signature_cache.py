"""The catalogue that is kept between two starts is the one that the files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.logfiles.cache import cached_signatures
from everstep.logfiles.scan import Scanner
from everstep.spec import log_catalogue
from everstep.spec.log_catalogue import load_signatures
from everstep.spec.log_places import signature_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is kept yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "everstep" / "yaml"


def test_what_was_kept_is_what_was_read(cache: Path) -> None:
    read, again, fresh = cached_signatures(), cached_signatures(), load_signatures()

    assert read.signatures == again.signatures == fresh.signatures
    assert read.literals == again.literals == fresh.literals
    assert list(cache.iterdir())


def test_a_second_start_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cached_signatures()
    monkeypatch.delattr(log_catalogue, "load_signatures")

    assert cached_signatures().signatures


def test_an_edited_file_is_read_anew(tmp_path: Path) -> None:
    text = signature_files()[0].read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    name = cached_signatures(file).signatures[0].name
    file.write_text(text.replace(f"  {name}:", "  renamed_here:").replace(name, "renamed_here"))

    assert cached_signatures(file).signatures[0].name == "renamed_here"


@pytest.mark.parametrize("damage", ["{}", "[]", "nonsense", '{"signatures": [{}], "literals": []}'])
def test_damage_costs_only_the_reading(cache: Path, damage: str) -> None:
    whole = cached_signatures().signatures
    for file in cache.iterdir():
        file.write_text(damage)

    assert cached_signatures().signatures == whole


def test_a_scan_for_fewer_texts_finds_all() -> None:
    texts = cached_signatures().texts
    kept = Scanner(texts).texts

    assert len(kept) < len(texts)
    assert all(any(one in text for one in kept) for text in texts)
    assert not [(a, b) for a in kept for b in kept if a != b and a in b]
