"""The ``everstep`` command: parses arguments, runs a command, turns every error into one line.

Exit codes (``docs/cli.md``): 0 done · 1 the job failed or the answer is no · 2 the command line
makes no sense · 3 configuration or environment · 4 not found · 5 a server does not answer · 130
interrupted. Commands are in ``everstep.commands``; this module loads nothing heavy, so that
``everstep version`` and shell completion are quick.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from everstep import _bootstrap
from everstep.commands import diagnose, doctor, fleet, incidents, jobs, policy, processes
from everstep.errors import EverstepError

EXIT_REFUSED = 1
EXIT_USAGE = 2
EXIT_CONFIGURATION = 3
EXIT_UNREACHABLE = 5
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
DEBUG_ENV = "EVERSTEP_DEBUG"

# The library carries its own copy of click; its base class is reached through a public name.
_COMMAND_LINE_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="everstep",
    help="Keeps distributed training jobs running.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
processes.add_to(app)
jobs.add_to(app)
incidents.add_to(app)
fleet.add_to(app)
policy.add_to(app)
diagnose.add_to(app)
doctor.add_to(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script; does not return."""
    from everstep.short_lived import leave

    leave(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str], *, app: typer.Typer = app) -> int:
    """Run one command line and answer its exit code; never raises, never shows a traceback."""
    _bootstrap.ensure_app_path()
    try:
        answer = app(args=list(arguments), standalone_mode=False)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_PIPE
    except BaseException as error:  # noqa: BLE001 - the one place where every error becomes a line
        return _report(error)
    return answer if isinstance(answer, int) else 0


def _report(error: BaseException) -> int:
    """Say what went wrong on stderr; answers the exit code."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_REFUSED
    if isinstance(error, typer.Abort):
        return EXIT_INTERRUPTED
    if isinstance(error, _COMMAND_LINE_ERROR):
        return _report_usage(error)
    lines, code = _known(error)
    if lines is None:
        name = type(error).__name__
        lines = [
            f"a bug in Everstep: {name}: {error} (set {DEBUG_ENV}=1 to see where, and report it)"
        ]
    if os.environ.get(DEBUG_ENV):
        traceback.print_exception(error)
    _say(lines)
    return code


def _report_usage(error: Exception) -> int:
    message = " ".join(str(getattr(error, "message", error)).split())
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        sys.stderr.write(f"{context.get_help()}\n")
        return EXIT_USAGE
    path = context.command_path if context is not None else "everstep"
    formatted = getattr(error, "format_message", None)
    text = " ".join(formatted().split()) if callable(formatted) else message
    _say([f"{text} (see `{path} --help`)"])
    return EXIT_USAGE


def _known(error: BaseException) -> tuple[list[str] | None, int]:
    """Lines and exit code of an error that a person can act on; None: it is a bug."""
    if isinstance(error, EverstepError):
        return str(error).splitlines(), error.exit_code
    if isinstance(error, TimeoutError):
        return [str(error) or "no answer in time"], EXIT_REFUSED
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return [f"{where}{error.strerror or error}"], EXIT_CONFIGURATION
    if type(error).__name__ == "ValidationError" and callable(getattr(error, "errors", None)):
        return _invalid_values(error), EXIT_USAGE
    # Told by name: these modules are only loaded by the commands that need them.
    name = type(error).__name__
    codes = {
        "SpecError": EXIT_CONFIGURATION,
        "LedgerUnavailable": EXIT_UNREACHABLE,
        "LedgerConflict": EXIT_REFUSED,
        "LedgerError": EXIT_CONFIGURATION,
        "AgentUnreachable": EXIT_UNREACHABLE,
        "AgentRefused": EXIT_REFUSED,
    }
    if type(error).__module__.startswith("everstep.") and name in codes:
        return str(error).splitlines(), codes[name]
    return None, EXIT_BUG


def _invalid_values(error: Any) -> list[str]:
    """Lines for values that a process's own configuration refuses (pydantic)."""
    lines = []
    for detail in error.errors(include_url=False):
        flag = "--" + ".".join(str(part) for part in detail["loc"]).replace("_", "-")
        lines.append(f"{flag}: {detail['msg'].removeprefix('Value error, ')}")
    return lines


def _say(lines: Sequence[str]) -> None:
    try:
        for line in lines or ["failed without a reason"]:
            sys.stderr.write(f"error: {line}\n")
        sys.stderr.flush()
    except OSError:
        # Nobody reads it; the exit code still tells.
        return


if __name__ == "__main__":
    main()
