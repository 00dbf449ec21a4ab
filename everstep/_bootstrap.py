"""Where the application's own folders are, and how a process of ours finds them.

In a checkout ``workflows``, ``activities``, ``workers``, ``config`` and ``examples`` lie beside the
package ``everstep``; in a wheel they lie under ``everstep/_app/`` (see ``hatch_build.py``), because
bare in ``site-packages`` they would take those names from everybody else. Only processes that
Everstep starts itself call ``ensure_app_path``; importing ``everstep`` changes nobody's path.

Standard library only, and nothing of ours: it runs before anything else is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def app_root() -> Path:
    """The folder that holds ``config/``, ``examples/`` and the importable application folders."""
    carried = _PACKAGE / "_app"
    return carried if carried.is_dir() else _PACKAGE.parent


def ensure_app_path() -> None:
    """Make ``import workers`` find ours, whatever else in this environment has that name.

    The folder goes to the front of ``sys.path``: a user's project that is installed beside us, or
    named in ``PYTHONPATH``, may have a ``workflows`` or ``config`` of its own. Calling it again
    changes nothing.
    """
    root = str(app_root())
    if sys.path[:1] != [root]:
        sys.path[:] = [root, *(entry for entry in sys.path if entry != root)]
