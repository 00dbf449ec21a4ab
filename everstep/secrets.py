"""The tokens that our processes show each other, and the directory they live in.

A directory (0700) holds four files (0600), one token each; ``EVERSTEP_SECRETS_DIR`` names it:

* ``enrol.token``: an agent shows it to a controller when it registers,
* ``controller.token``: a controller shows it to agents,
* ``peer.token``: agents show it to each other,
* ``metrics.token``: Prometheus shows it to agents and controllers.

They are files and not variables or flags because environments and command lines are public to every
process of the same user, and ranks inherit the former. Not here: TLS keys (uvicorn reads them), and
anything that would put a token into a log line, a Temporal payload or the ledger: ``Secrets`` shows
nothing of itself in ``repr``.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets as _random
import stat
from dataclasses import dataclass, field
from pathlib import Path

from everstep.errors import ConfigurationProblem

SECRETS_DIR_VARIABLE = "EVERSTEP_SECRETS_DIR"
TOKEN_CHARACTERS_MIN = 16
TOKEN_CHARACTERS_MAX = 512


@dataclass(frozen=True, slots=True)
class Secrets:
    """The four tokens of an installation."""

    directory: Path
    enrol: str = field(repr=False)
    controller: str = field(repr=False)
    peer: str = field(repr=False)
    metrics: str = field(repr=False)

    @classmethod
    def load(cls, directory: Path | str) -> Secrets:
        """Read the tokens.

        Raises:
            ConfigurationProblem: a file is missing, empty, readable by others, or not a token.
        """
        folder = Path(directory)
        closed = _closed_to_others(folder)
        tokens = {name: _read_token(folder / f"{name}.token", closed) for name in _NAMES}
        for name in _NAMES:
            for other in _NAMES[: _NAMES.index(name)]:
                if same_secret(tokens[name], tokens[other]):
                    raise ConfigurationProblem(
                        f"{folder}: {other}.token and {name}.token hold the same token; "
                        "each must be a random one of its own"
                    )
        return cls(folder, **tokens)

    @classmethod
    def create(cls, directory: Path | str) -> Secrets:
        """Make the directory and the tokens that are missing, then ``load`` them (idempotent).

        Two processes that do this at once end with the same tokens.

        Raises:
            ConfigurationProblem: it cannot be written, or what is there is not right.
        """
        folder = Path(directory)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _NAMES:
                _create_token(folder / f"{name}.token")
        except OSError as error:
            raise ConfigurationProblem(
                f"{folder}: tokens cannot be written there: {error.strerror or error}"
            ) from None
        return cls.load(folder)


_NAMES = ("enrol", "controller", "peer", "metrics")


def same_secret(given: str, expected: str) -> bool:
    """Compare in constant time; an empty ``expected`` matches nothing."""
    if not expected:
        return False
    return hmac.compare_digest(
        given.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass")
    )


def bearer_token(header: str | None) -> str | None:
    """The token in an ``Authorization`` header, or None when it does not hold one."""
    scheme, _, token = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        return None
    return token.strip()


def _closed_to_others(folder: Path) -> bool:
    try:
        found = folder.stat()
    except FileNotFoundError:
        raise ConfigurationProblem(
            f"{folder}: there is no such directory of tokens; name it with --secrets or "
            f"{SECRETS_DIR_VARIABLE}"
        ) from None
    except OSError as error:
        raise ConfigurationProblem(f"{folder}: {error.strerror or error}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigurationProblem(
            f"{folder}: is not a directory; it must be one that holds the token files"
        )
    return not stat.S_IMODE(found.st_mode) & 0o077


def _read_token(path: Path, closed: bool) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(TOKEN_CHARACTERS_MAX + 2)
    except OSError as error:
        raise ConfigurationProblem(f"{path}: {error.strerror or error}") from None
    if mode & 0o077 and not closed:
        raise ConfigurationProblem(
            f"{path}: other users can read it (mode {mode:04o}); run "
            f"`chmod 700 {path.parent} && chmod 600 {path.parent}/*.token`"
        )
    token = content.decode("ascii", "replace").strip()
    if not TOKEN_CHARACTERS_MIN <= len(token) <= TOKEN_CHARACTERS_MAX:
        raise ConfigurationProblem(
            f"{path}: holds {len(token)} characters; a token has {TOKEN_CHARACTERS_MIN} to "
            f"{TOKEN_CHARACTERS_MAX}"
        )
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationProblem(
            f"{path}: holds characters that an HTTP header cannot carry; use printable ASCII "
            "without spaces"
        )
    return token


def _create_token(path: Path) -> None:
    """Write a new token unless the file is there; it appears whole or not at all."""
    if path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{_random.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(_random.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # A link, not a rename: it fails when another process was faster, whose token then counts.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
