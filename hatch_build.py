"""Build hook: carries the application's generically named folders into wheels.

``workflows``, ``activities``, ``workers`` and ``config`` are names that other projects have too, so
they must never stand bare in ``site-packages``. A wheel has them, and the demo's jobs, under
``everstep/_app/``; ``everstep._bootstrap`` puts that folder on the path of our own processes. An
editable install needs none of it: its path file names the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

APPLICATION = ("workflows", "activities", "workers", "config", "examples")


class ApplicationBuildHook(BuildHookInterface[Any]):
    """Maps the application's folders to ``everstep/_app`` for standard builds."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders to what the builder includes."""
        if version != "standard":
            return
        root = Path(self.root)
        for name in APPLICATION:
            build_data["force_include"][str(root / name)] = f"everstep/_app/{name}"
