"""A rank without torch or trainer library that does what it is told, once, and then goes on.

The first argument names a folder. ``rank-N.json`` in it is an order for rank N, taken by renaming
it: ``{"print": [...], "write": PATH, "allocate": true, "exit": CODE}``, each part optional and done
in that order. The rank ends with 0 once ``done`` is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 1 << 20


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def carry_out(order: dict[str, Any]) -> None:
    for line in order.get("print", ()):
        say(line)
    if "write" in order:
        with open(order["write"], "wb") as file:  # noqa: PTH123 - the error names the call
            file.writelines(b"x" * PAGE for _ in range(64))
    if order.get("allocate"):
        held = []
        while True:
            held.append(b"x" * PAGE)
    if "exit" in order:
        os._exit(order["exit"])


def main(folder: Path, rank: str) -> None:
    order = folder / f"rank-{rank}.json"
    say("training")
    while not (folder / "done").exists():
        try:
            taken = order.rename(order.with_suffix(".taken"))
        except FileNotFoundError:
            time.sleep(0.05)
            continue
        carry_out(json.loads(taken.read_text("utf-8")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), os.environ["RANK"])
