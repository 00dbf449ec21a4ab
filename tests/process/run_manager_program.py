"""An agent's core as a program of its own, so that a test can kill it at any instant.

``python run_manager_program.py STATE_DIR EVENTS_FILE [PLAN_FILE]``: adopts, starts the plan if one
is given, appends each event to the file as it is emitted (the ring of a real agent), then stays.
With ``stop GRACE_S`` on standard input it stops the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from everstep.machine.runs import RunManager
from everstep.spec.agent_api import EventKind, RunPlan


async def main(state_dir: Path, events: Path, plan_file: Path | None) -> None:
    def emit(kind: EventKind, **fields: Any) -> None:
        with events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")

    manager = RunManager(state_dir=state_dir, machine_id="m1", emit=emit)
    await manager.adopt()
    if plan_file is not None:
        text = await asyncio.to_thread(plan_file.read_text)
        plan = RunPlan.model_validate_json(text)
        await manager.start("job", 1, plan)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, grace_s = line.split()
        assert command == "stop"
        await manager.stop(
            "job", 1, reason="asked", grace_s=float(grace_s), kill_wait_s=5.0, planned=False
        )


if __name__ == "__main__":
    asyncio.run(
        main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
    )
