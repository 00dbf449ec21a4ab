"""Record the histories that ``tests/replay`` replays.

    scripts/record_histories.py [SITUATION ...]

Run it after a change of a workflow that is meant to be seen by running jobs, together with a
``workflow.patched`` id (CONTRIBUTING.md). Without names it records only situations that have none
yet: a recorded history is a promise to jobs that are running now, so it is replaced on purpose.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from temporalio.contrib.pydantic import pydantic_data_converter  # noqa: E402
from temporalio.testing import WorkflowEnvironment  # noqa: E402
from temporalio.worker import Worker  # noqa: E402

from everstep.spec import messages as m  # noqa: E402
from everstep.spec.load import load_policy  # noqa: E402
from tests.workflow.scenarios import SCENARIOS, play  # noqa: E402
from tests.workflow.world import World  # noqa: E402
from workers.embedded import SERVER_FLAGS, find_temporal  # noqa: E402
from workers.runtime import WORKFLOWS, workflow_runner  # noqa: E402

HISTORIES = ROOT / "tests" / "replay" / "histories"


async def record(names: list[str]) -> None:
    """Play every situation on a real server and store the histories of all workflows in it."""
    policy = load_policy(None).policy
    async with await WorkflowEnvironment.start_local(
        dev_server_existing_path=find_temporal(),
        dev_server_extra_args=SERVER_FLAGS,
        data_converter=pydantic_data_converter,
    ) as env:
        for name in names:
            world = World(policy)
            async with AsyncExitStack() as stack:
                for queue in (m.TASK_QUEUE, m.WATCH_QUEUE):
                    await stack.enter_async_context(
                        Worker(
                            env.client,
                            task_queue=queue,
                            workflows=WORKFLOWS if queue == m.TASK_QUEUE else (),
                            activities=world.activities(),
                            workflow_runner=workflow_runner(),
                        )
                    )
                await play(env.client, world, SCENARIOS[name], name)
            await _store(env, name)


async def _store(env: WorkflowEnvironment, name: str) -> None:
    for old in HISTORIES.glob(f"*/{name}*.json"):
        old.unlink()
    for _ in range(100):
        executions = [e async for e in env.client.list_workflows()]
        mine = [
            e for e in executions if e.id == f"job-{name}" or e.id.startswith(f"incident-{name}-")
        ]
        if mine and all(e.status is not None and e.status.name != "RUNNING" for e in mine):
            break
        await asyncio.sleep(0.1)
    for number, execution in enumerate(sorted(mine, key=lambda e: e.start_time), 1):
        handle = env.client.get_workflow_handle(execution.id, run_id=execution.run_id)
        history = await handle.fetch_history()
        folder = HISTORIES / execution.workflow_type
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.{number}.json"
        path.write_text(_without_paths(history.to_json()) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(history.events)} events")


def _without_paths(text: str) -> str:
    """Stack traces name files of the machine that recorded them."""
    return text.replace(str(ROOT), "/opt/everstep")


def main() -> None:
    """Names on the command line, or all situations without a recording."""
    missing = [n for n in SCENARIOS if not list(HISTORIES.glob(f"*/{n}.*.json"))]
    unknown = [n for n in sys.argv[1:] if n not in SCENARIOS]
    if unknown:
        raise SystemExit(
            f"no such situation: {', '.join(unknown)}; there are {', '.join(SCENARIOS)}"
        )
    if shutil.which("temporal", path=str(Path(sys.executable).parent)) is None:
        raise SystemExit("the temporal program is missing: run scripts/bootstrap")
    asyncio.run(record(sys.argv[1:] or missing))


if __name__ == "__main__":
    main()
