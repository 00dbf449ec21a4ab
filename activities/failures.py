"""The two kinds of failure an activity knows, and how text is cut before it enters a history.

Expected bad news (a machine that does not answer, a checkpoint that is cut off) is a value in the
result, not one of these.
"""

from __future__ import annotations

from temporalio.exceptions import ApplicationError, ApplicationErrorCategory

from activities.contracts import PERMANENT_FAILURE, TEMPORARY_FAILURE

LINE_MAX = 600
"""What ``everstep.spec.base.Line`` allows."""


def temporary(message: str) -> ApplicationError:
    """Try again: the ledger is restarting, a file system does not answer."""
    return ApplicationError(
        one_line(message), type=TEMPORARY_FAILURE, category=ApplicationErrorCategory.BENIGN
    )


def permanent(message: str) -> ApplicationError:
    """Trying again cannot help; a person has to change something."""
    return ApplicationError(one_line(message), type=PERMANENT_FAILURE, non_retryable=True)


def one_line(text: object, limit: int = LINE_MAX) -> str:
    """``text`` in one line of at most ``limit`` printable characters."""
    cut = str(text)[: 4 * limit]
    line = " ".join("".join(c if c.isprintable() else " " for c in cut).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
