"""Clusters for tests: a fresh one each (0.3 s), so that no test sees what another broke."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "drills"))

from slurm import SlurmCluster, slurm_missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that every machine sees, with a short path that munge and all users may walk."""
    folder = Path(tempfile.mkdtemp(prefix="electra-cluster-", dir="/run"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def network() -> int:
    """A third octet that other clusters on this machine are unlikely to have."""
    return 20 + os.getpid() % 200


@pytest.fixture
def cluster(shared_folder: Path, network: int) -> Iterator[Callable[..., SlurmCluster]]:
    """`cluster(3)`: a Slurm cluster of machines n1, n2, n3."""
    if reason := slurm_missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda count, **options: stack.enter_context(
            SlurmCluster(shared_folder / "cluster", count, network=network, **options)
        )
