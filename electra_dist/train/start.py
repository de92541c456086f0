"""Hold what one start of a run works with, once its engine is built."""

from __future__ import annotations

from dataclasses import dataclass

from electra_dist.config import Config
from electra_dist.engine.engine import Engine
from electra_dist.run.lease import RunLease
from electra_dist.store.patience import Patience
from electra_dist.train.check_inputs import RunInputs
from electra_dist.train.guard import SkipList
from electra_dist.train.monitor import RankMonitor
from electra_dist.train.stop_request import StopRequest


@dataclass(frozen=True, kw_only=True)
class Start:
    """Objects that one start of a run creates once on this rank, and that all its rounds of training share.

    A round begins with a restored checkpoint and ends with the last step, a stop, or a return to a checkpoint, after
    which another round begins.
    """

    config: Config  # with the micro-batch that this number of ranks and this memory allow
    inputs: RunInputs
    engine: Engine
    skips: SkipList
    stop: StopRequest
    monitor: RankMonitor
    lease: RunLease | None  # on rank 0: the right to write into the run folder
    patience: Patience  # with storage that is full or away
    changed_settings: list[str]  # log lines about settings that are not those of the last start
