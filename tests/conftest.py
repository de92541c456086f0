"""Fixtures for tests that start real runs: a tiny corpus, a tiny config, `deepspeed` as a user would type it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before support.forked_popen is imported, which keeps the environment to compare those of started programs with it.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.forked_popen import ForkedPopen, RealPopen, address_of_server
from support.installed_wheel import Installation, build_wheel
from support.real_runs import quick_command, read_losses, write_corpus, write_tiny_config

from electra_dist.store.patience import Pace

pytest_plugins = ("support.nothing_tested",)

# A busy machine must not fail a test: how long an example takes is not what is tested.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


# Folders whose files take minutes, longest first: begun last, one would keep a worker alone at the end. Those that
# start real runs or several processes come before those that only compute.
LONG = (
    "train",
    "kernels",
    "launcher",
    "compare",
    "benchmarks",
    "pretrained",
    "engine",
    "planning",
    "checkpoint",
    "data",
    "finetune",
    "fuzz",
)


# Damage in a store is found within 0.04 s: the default pauses before wrong bytes are read again take 20 s together.
assert Pace.__init__.__kwdefaults__ is not None
Pace.__init__.__kwdefaults__["reread_pauses_s"] = (0.01,) * 4


def pytest_configure(config: pytest.Config) -> None:
    """Let one server fork the workers of this call, and the Python programs that their tests start."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
    if hasattr(config, "workerinput"):
        ForkedPopen.names = None  # this fork asks the server for other forks, because it does not stay as it is
        return
    forks = contextlib.ExitStack()
    forks.enter_context(address_of_server())
    config.add_cleanup(forks.close)


@pytest.fixture(autouse=True)
def real_starts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Python programs by exec in the tests of a start itself, which have the marker `real_start`."""
    if request.node.get_closest_marker("real_start") is not None:
        monkeypatch.setattr(subprocess, "Popen", RealPopen)


@pytest.fixture(autouse=True)
def torch_as_before() -> Iterator[None]:
    """Restore what a test changes of torch for the whole process: the number of threads, and ZeRO 3's product.

    DeepSpeed replaces `torch.nn.functional.linear` when it makes an engine at stage 3; its own one rounds otherwise.
    """
    if "torch" not in sys.modules:
        yield
        return
    import torch

    before = torch.get_num_threads(), torch.nn.functional.linear
    yield
    torch.set_num_threads(before[0])
    torch.nn.functional.linear = before[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of the long folders first, each folder's and file's own order kept."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local corpus of 5 uneven shards, with a held-out one beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(str(folder), [70, 33, 48, 90, 15])
    write_corpus(str(folder / "heldout"), [24], seed=9)
    return folder


@pytest.fixture
def tiny_config(tiny_corpus: Path, tmp_path: Path) -> Callable[..., Path]:
    """`tiny_config(run_name, **{"train.num_steps": 20})` writes a YAML file of a tiny run and returns its path."""

    def make(run_name: str = "run", **settings: object) -> Path:
        run_dir = tmp_path / run_name
        return write_tiny_config(tmp_path / f"{run_name}.yaml", run_dir, str(tiny_corpus), **settings)

    return make


@pytest.fixture
def pretrain() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`pretrain(config, ranks, *overrides)` runs to the end and returns the finished process."""

    def run(
        config: Path, ranks: int, *overrides: str, check: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            quick_command(config, ranks, *overrides),
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **(env or {})},
        )
        assert not check or done.returncode == 0, (
            f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
        )
        return done

    return run


@pytest.fixture
def losses() -> Callable[[Path], list[tuple]]:
    """`losses(run_dir)`: the numbers of every step record of metrics.jsonl that must repeat bit for bit."""
    return read_losses


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A process group of one rank in this process, in which engines can be built one after another."""
    import torch.distributed as dist

    from electra_dist.engine.process_group import init_distributed

    init_distributed()
    yield  # left in place for the session, because DeepSpeed remembers the group globally
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this repository."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path) -> Installation:
    """An environment with the wheel, and a folder outside the repository in which its commands run."""
    return Installation(wheel.parent, wheel)
