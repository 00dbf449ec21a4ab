"""Fixtures for the tests of the trainer library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.kit import Job
from tests.trainer.launching import ForkServer


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job of one rank."""
    return Job(tmp_path / "job")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Ranks that need not import torch again."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _torch_keeps_its_cache_to_itself(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An optimizer's first step makes torch create a cache directory, by default in TMPDIR."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
