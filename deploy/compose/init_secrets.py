"""Makes the secrets of the compose file, once: tokens of our own, and PostgreSQL's password.

Nothing secret stands in the compose file, in an environment or on a command line: the secrets are
files in volumes, made at the first start and left alone at every later one. Three directories,
because three parties may read them:

* agents: the tokens, readable by the agent (root) and not by the ranks it starts,
* controllers: the same tokens, and the ledger's password in a file for libpq (``PGPASSFILE``),
* postgres: the password, for the database server and Temporal.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
from pathlib import Path

from everstep.secrets import Secrets


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--agents", type=Path, required=True, metavar="DIR")
    parser.add_argument("--controllers", type=Path, required=True, metavar="DIR")
    parser.add_argument("--postgres", type=Path, required=True, metavar="DIR")
    parser.add_argument("--pgpass", required=True, metavar="HOST:PORT:DATABASE:USER")
    parser.add_argument("--owner", required=True, metavar="USER", help="whom controllers run as")
    options = parser.parse_args()

    Secrets.create(options.agents)
    options.agents.chmod(0o700)

    # In a volume of its own, which only the two services that need it mount: their images run them
    # as users that this one does not know.
    password = options.postgres / "password"
    options.postgres.mkdir(parents=True, exist_ok=True)
    if not password.exists():
        write(password, secrets.token_urlsafe(32), 0o444)

    options.controllers.mkdir(parents=True, exist_ok=True)
    options.controllers.chmod(0o700)
    for token in options.agents.glob("*.token"):
        write(options.controllers / token.name, token.read_text(), 0o600)
    line = f"{options.pgpass}:{password.read_text().strip()}\n"
    write(options.controllers / "pgpass", line, 0o600)
    for path in (options.controllers, *options.controllers.iterdir()):
        shutil.chown(path, options.owner)
    Secrets.load(options.agents)


def write(path: Path, text: str, mode: int) -> None:
    """Write a file that appears whole, and never with a wider mode than ``mode``."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
    scratch.replace(path)


if __name__ == "__main__":
    main()
