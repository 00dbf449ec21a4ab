"""Where configuration files are: one order of lookup for all of them.

The flag, the directory in ``EVERSTEP_CONFIG``, the ``config/`` of Everstep's own checkout (never of
the working directory), ``/etc/everstep``, the packaged default. Loads nothing heavy, so that the
commands that work on their own start quickly.

Not here: reading the files (``everstep.spec.load`` and the catalogues).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

CONFIG_ENV = "EVERSTEP_CONFIG"
SYSTEM_CONFIG = Path("/etc/everstep")

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout_config() -> Path | None:
    """``config/`` of the checkout this package runs from; None when it was installed."""
    root = _PACKAGE.parent
    ours = (root / "pyproject.toml").is_file() and (root / "workflows").is_dir()
    return root / "config" if ours else None


def packaged_config() -> Path:
    """The directory of the defaults: inside of the wheel, or the checkout's own."""
    inside = _PACKAGE / "_app" / "config"
    return inside if inside.is_dir() else (checkout_config() or inside)


def find_config(
    name: str, *, flag: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Path:
    """The configuration file ``name``, by the order of lookup.

    Raises:
        SpecError: ``EVERSTEP_CONFIG`` names no directory.
    """
    if flag is not None:
        return flag
    places = [checkout_config(), SYSTEM_CONFIG, packaged_config()]
    chosen = environ.get(CONFIG_ENV)
    if chosen:
        if not Path(chosen).is_dir():
            from everstep.spec.errors import Problem, SpecError, quote

            accepted = f"the directory that holds {name} is needed"
            raise SpecError([Problem(CONFIG_ENV, quote(chosen), accepted)])
        places.insert(0, Path(chosen))
    for place in places:
        if place is not None and (place / name).is_file():
            return place / name
    return packaged_config() / name
