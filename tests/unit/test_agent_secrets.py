"""Token files: made once, closed to others, never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.errors import ConfigurationProblem
from everstep.secrets import Secrets, bearer_token, same_secret


def test_create_is_idempotent_and_private(tmp_path: Path) -> None:
    first = Secrets.create(tmp_path / "secrets")
    assert Secrets.create(tmp_path / "secrets") == first == Secrets.load(tmp_path / "secrets")
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    files = sorted(path.name for path in (tmp_path / "secrets").iterdir())
    assert files == ["controller.token", "enrol.token", "metrics.token", "peer.token"]
    assert {(tmp_path / "secrets" / name).stat().st_mode & 0o777 for name in files} == {0o600}
    tokens = {first.enrol, first.controller, first.peer, first.metrics}
    assert len(tokens) == 4


def test_nothing_is_shown(tmp_path: Path) -> None:
    tokens = Secrets.create(tmp_path / "secrets")
    for text in (repr(tokens), str(tokens), f"{tokens}"):
        assert tokens.controller not in text
        assert tokens.enrol not in text


@pytest.mark.parametrize(
    "content, mode, expected",
    [
        ("", 0o600, "holds 0 characters"),
        ("zqzqz", 0o600, "holds 5 characters"),
        ("x" * 600, 0o600, "characters"),
        ("with a space in it, really", 0o600, "characters that an HTTP header"),
        ("ümlaut-ümlaut-ümlaut-ümlaut", 0o600, "characters that an HTTP header"),
        (None, 0o600, "No such file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str | None, mode: int, expected: str) -> None:
    folder = tmp_path / "secrets"
    Secrets.create(folder)
    path = folder / "controller.token"
    path.unlink()
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigurationProblem) as caught:
        Secrets.load(folder)
    assert expected in str(caught.value)
    assert "controller.token" in str(caught.value)
    assert "\n" not in str(caught.value)
    said = str(caught.value).replace(str(path), "")
    assert not content or content not in said


def test_files_that_others_can_read_are_refused_unless_the_directory_is_closed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "secrets"
    Secrets.create(folder)
    (folder / "peer.token").chmod(0o644)
    Secrets.load(folder)
    folder.chmod(0o755)
    with pytest.raises(ConfigurationProblem, match=r"peer\.token: other users can read it"):
        Secrets.load(folder)


def test_the_same_token_twice_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    Secrets.create(folder)
    (folder / "metrics.token").write_bytes((folder / "controller.token").read_bytes())
    with pytest.raises(ConfigurationProblem, match="the same token"):
        Secrets.load(folder)


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationProblem, match="is not a directory"):
        Secrets.load(tmp_path / "file")
    with pytest.raises(ConfigurationProblem, match="EVERSTEP_SECRETS_DIR"):
        Secrets.load(tmp_path / "none")
    with pytest.raises(ConfigurationProblem, match="cannot be written"):
        Secrets.create(tmp_path / "file" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_comparing() -> None:
    assert same_secret("abc", "abc")
    assert not same_secret("abc", "abd")
    assert not same_secret("", "")
    assert not same_secret("\udcff", "abc")


@pytest.mark.parametrize(
    "header, token",
    [
        ("Bearer abc", "abc"),
        ("bearer abc", "abc"),
        ("Basic abc", None),
        ("abc", None),
        ("Bearer ", None),
        ("", None),
        (None, None),
    ],
)
def test_bearer(header: str | None, token: str | None) -> None:
    assert bearer_token(header) == token
