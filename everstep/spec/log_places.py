"""Where the catalogue of log signatures and the site's own one are. Loads nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from everstep.spec.places import find_config

SIGNATURES_FILE = "log_signatures.yaml"
SITE_FILE = "log_signatures.site.yaml"


def signature_files(
    flag: Path | None = None, *, environ: Mapping[str, str] = os.environ
) -> tuple[Path, Path | None]:
    """The catalogue's file, and the site's own if there is one.

    Raises:
        SpecError: ``EVERSTEP_CONFIG`` names no directory.
    """
    main = find_config(SIGNATURES_FILE, flag=flag, environ=environ)
    beside = main.parent / SITE_FILE
    site = beside if flag is not None else find_config(SITE_FILE, environ=environ)
    return main, site if site.is_file() else None
