"""Check how the supervisor of a node calls preflight, and what remains of a wait for storage afterwards."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.supervise import supervisor
from electra_launcher.supervise.rank_processes import Placement

from electra_dist.config.load import load_config
from electra_dist.run.heartbeat import Heartbeat, read_heartbeats


@pytest.fixture
def kept_signal_handlers() -> Iterator[None]:
    """Set the signal handlers of this process back after the test, because a supervisor replaces them."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("kept_signal_handlers")
def test_a_wait_of_preflight_is_recorded_for_the_nodes_first_rank_and_forgotten_when_preflight_has_ended(
    tiny_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    """A heartbeat that remained would let `electra-dist status` call a run living that was refused."""
    config_file = tiny_config("refused")
    run_dir = config_file.with_suffix("")
    options: list[str] = []

    def killed_while_it_waits(run_dir: Path, arguments: list[str], limit_s: float, **_: Any) -> int:
        """Leave behind what a preflight process leaves that is killed while it waits for storage."""
        options.extend(arguments)
        Heartbeat(run_dir, 3).beat("storage", 0, "the service cannot be reached")
        return 78

    monkeypatch.setattr(supervisor, "preflight", killed_while_it_waits)
    placement = Placement(node=1, num_nodes=2, ranks_per_node=3, address="127.0.0.1", port=29500)
    Heartbeat(run_dir, 0, attempt=1).beat("step", 5)  # of a rank on another node
    with contextlib.closing(
        supervisor.Supervisor(load_config(config_file), placement, ["--config", str(config_file)], "", [])
    ) as node:
        assert node.check() == 78
    assert options[options.index("--first-rank") + 1] == "3"
    assert [beat.rank for beat in read_heartbeats(run_dir)] == [0]
