"""A round: from a restored checkpoint until the target, a stop, or the decision to go back. The step loop is here.

Guarantee: step t sees what (resolved config, corpus, seed, t) say and nothing else, so a run that was killed at any
moment and started again repeats an uninterrupted one bit for bit at the same number of ranks. The only data state in
a checkpoint is the integer t. All ranks take every decision alike: they judge the same all-reduced numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.save import SaveTiming
from electra_dist.collectives import gather
from electra_dist.config import Config
from electra_dist.data.cache import ShardCache
from electra_dist.data.loader import RowBatch, RowLoader
from electra_dist.data.order import RowOrder
from electra_dist.engine.engine import Engine
from electra_dist.engine.schedule import learning_rate
from electra_dist.engine.two_stage import Stages
from electra_dist.errors import EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, UserError
from electra_dist.model.rows import SpecialIds
from electra_dist.train.checkpointer import Checkpointer, TrainState
from electra_dist.train.clock import Clock
from electra_dist.train.evaluator import Evaluator
from electra_dist.train.guard import Guard, first_to_skip
from electra_dist.train.health.rank_monitor import RankMonitor
from electra_dist.train.health.stop_request import StopRequest
from electra_dist.train.inputs import OpenCorpus, RunInputs
from electra_dist.train.reporter import Ending, Reporter
from electra_dist.train.save_schedule import SaveSchedule
from electra_dist.train.skip_list import SkipList
from electra_dist.train.step import RankFlags, StepResult, TrainStep, outlier

_ENDINGS: dict[int | None, Ending] = {
    EXIT_DONE: "done",
    EXIT_STOPPED: "stop",
    EXIT_UNHEALTHY: "unhealthy",
    None: "rollback",
}


class Trainer:
    """From a restored checkpoint until the target, a stop, or a rollback."""

    def __init__(
        self,
        config: Config,
        inputs: RunInputs,
        engine: Engine,
        special: SpecialIds,
        skips: SkipList,
        stop: StopRequest,
        monitor: RankMonitor,
        build_s: dict[str, float] | None,
        notes: Sequence[str] = (),
    ) -> None:
        """Restore. Collective.

        Args:
            build_s: seconds of the start so far; None after a rollback, when nothing had to be built.
            notes: what there is to say of how the run was built.
        """
        begin = time.perf_counter()
        self.config, self.inputs, self.engine, self.special = config, inputs, engine, special
        self.stop, self.monitor = stop, monitor
        corpus = inputs.corpus.manifest
        self.checkpointer = Checkpointer(config, engine, corpus.fingerprint, skips.steps)
        monitor.began(self.checkpointer.attempt)
        self.restored, set_aside = self.checkpointer.restore(pristine=build_s is not None)
        self.state = TrainState.after(self.restored, config.guard, skips)
        self.clock = Clock({**(build_s or {}), "restore": time.perf_counter() - begin})
        self._spent_at: dict[int, dict[str, float]] = {}  # by step of the saves in flight
        self.reporter = None
        if dist.get_rank() == 0:
            self.reporter = Reporter(config, engine, corpus, self.restored)
            self.reporter.began(self.checkpointer.attempt, self.restored, set_aside, self.clock.setup_s)
            for note in notes:
                self.reporter.note(note)
            self.checkpointer.writer.on_commit = self._committed
        self.schedule = SaveSchedule(config.checkpoint, config.run_dir, self.state.step)

    def run(self) -> int | None:
        """An exit code, or None: go back to a checkpoint."""
        ending: Ending = "crash"
        try:
            code: int | None = EXIT_DONE
            if self.state.step < self.config.train.num_steps:
                code = self._train()
            ending = _ENDINGS[code]
            return code
        finally:
            if self.reporter:
                why = self.stop.reason if ending == "stop" else ""
                self.reporter.close(ending, self.state.step, why, self.clock.spent_s())

    def _train(self) -> int | None:
        config, state, num_steps = self.config, self.state, self.config.train.num_steps
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(contextlib.closing(self._open_loader(stack)))
            evaluator = self._open_evaluator(stack)
            train_step = TrainStep(self.engine, config.objective, self.special, config.seed, config.train.micro_batch)
            stages = Stages(self.engine, config.objective)
            stack.enter_context(contextlib.closing(self.checkpointer))
            for step in range(state.step, num_steps):
                begin, flags = time.perf_counter(), RankFlags()
                done, last = step + 1, step + 1 == num_steps
                self.monitor.beat("step", step)
                state.step, state.eval_rtd_loss = done, None
                if stages.enter(step):
                    state.guard = Guard(config.guard)  # another loss: the window is of the first stage's
                if step not in state.skips.steps:
                    lr = learning_rate(step, num_steps, config.optimizer)
                    with self.clock.step():
                        batch = loader.next()
                        result = train_step(batch, lr, state.guard.fault, self._flags(loader))
                    self.clock.waited_for_data(loader.wait_s)
                    flags = result.flags
                    if result.fault:
                        self._stopped_step(train_step, batch, result.fault)
                        if len(state.skips.streak) == config.guard.max_in_a_row:
                            self._roll_back()
                            return None
                    else:
                        state.updated(result)
                        if last or _due(done, config.log.every_steps):
                            self._log(result, lr, loader.wait_s, train_step.forward_s())
                if evaluator and (last or _due(done, config.log.eval_every_steps)):
                    self._evaluate(evaluator)
                self.stop.longest_step_s = max(self.stop.longest_step_s, time.perf_counter() - begin)
                if flags.sick:
                    return EXIT_UNHEALTHY
                if last or flags.stop or flags.save or self.schedule.due(done):
                    self._save()
                if flags.stop and not last:
                    return self._stop()
            return EXIT_DONE

    def _log(self, result: StepResult, lr: float, waited_s: float, forward_s: float) -> None:
        look = self.monitor.look(forward_s)
        if self.reporter:
            self.reporter.step(self.state.step, result, lr, waited_s, self.state.receipt, look)

    def _evaluate(self, evaluator: Evaluator) -> None:
        self.monitor.beat("eval", self.state.step)
        with self.clock.evaluation():
            evaluation = evaluator.run(self.engine, self.state.step)
        self.state.eval_rtd_loss = evaluation.rtd_loss
        if self.reporter:
            self.reporter.evaluation(evaluation)

    def _flags(self, loader: RowLoader) -> RankFlags:
        store = self.inputs.corpus.store
        return RankFlags(
            stop=self.stop.wants_stop(),
            save=self.stop.wants_save(),
            sick=self.monitor.sick,
            retries=store.retries + self.checkpointer.retries,
            retry_wait_ms=round(1000 * (store.retry_wait_s + self.checkpointer.retry_wait_s)),
            refetches=loader.refetches,
        )

    def _save(self) -> None:
        self.monitor.beat("checkpoint", self.state.step)
        self._spent_at[self.state.step] = self.clock.spent_s()
        if self.reporter:
            self.reporter.saving()
            self.stop.saved()
        timing = self.checkpointer.save(self.state)
        self.clock.stalled(timing.wait_s + timing.stall_s)
        if self.reporter and timing.wait_s > 1.0:
            self.reporter.note(f"waited {timing.wait_s:.1f} s for the previous checkpoint to be written")
        if self.schedule.saved(self.state.step) and self.reporter:
            self.reporter.note(f"checkpoints every {self.schedule.every_steps:,} steps from here on")

    def _committed(self, state: RunState, timing: SaveTiming, seconds: float) -> None:
        """Rank 0's writing thread has committed a checkpoint."""
        self.stop.longest_save_s = max(self.stop.longest_save_s, seconds)
        if self.reporter:
            self.reporter.committed(state, timing, seconds, self._spent_at.pop(state.step))

    def _stop(self) -> int:
        """The emergency save is the save that was just begun, waited for."""
        self.checkpointer.close()
        if self.reporter:
            self.stop.stopped()
            self.reporter.stopped(self.state.step, self.stop.reason)
        return EXIT_STOPPED

    def _stopped_step(self, train_step: TrainStep, batch: RowBatch, fault: str) -> None:
        """The guard stopped a step: find the row, write the step down, say so."""
        suspects = self._suspects(batch, train_step.row_losses(batch))
        self.state.skips.stop(batch.step)
        if self.reporter:
            self.state.skips.write()
            self.reporter.stopped_step(batch.step, fault, suspects)

    def _suspects(self, batch: RowBatch, losses: list[float]) -> str:
        everyone = gather((losses, batch.row_ids.tolist()))
        all_losses = [loss for part, _ in everyone for loss in part]
        row_ids = [row for _, part in everyone for row in part]
        found = outlier(all_losses)
        if found is None:
            return ""
        name = self.inputs.corpus.manifest.row_name(row_ids[found])
        return f"{name} (loss {all_losses[found]:.4g}, median of the step's rows {np.nanmedian(all_losses):.4g})"

    def _roll_back(self) -> None:
        """Decide what is skipped; the next round goes back."""
        self.checkpointer.close()
        guard, skips = self.config.guard, self.state.skips
        stopped = skips.streak
        if skips.rollbacks == guard.max_rollbacks:
            raise UserError(
                f"run {self.config.run_dir} diverges: step {stopped[-1]:,} after {skips.rollbacks} rollbacks; lower "
                f"optimizer.lr, look at the rows that ledger.jsonl names, or raise guard.max_rollbacks"
            )
        first = first_to_skip(stopped[0], guard.skip_before, self.checkpointer.committed_steps())
        skips.roll_back(first)
        if self.reporter:
            skips.write()
            self.reporter.rolled_back(first, stopped)

    def _open_cache(self, corpus: OpenCorpus, stack: contextlib.ExitStack) -> ShardCache:
        cache = corpus.open_cache(self.config.data, self.config.cache_folder)
        return stack.enter_context(contextlib.closing(cache))

    def _open_loader(self, stack: contextlib.ExitStack) -> RowLoader:
        config, corpus = self.config, self.inputs.corpus
        order = RowOrder([s.rows for s in corpus.manifest.shards], config.seed, config.data.shuffle_window_shards)
        return RowLoader(
            self._open_cache(corpus, stack),
            order,
            config.train.global_batch,
            dist.get_rank(),
            dist.get_world_size(),
            self.state.step,
            self.state.skips.steps,
        )

    def _open_evaluator(self, stack: contextlib.ExitStack) -> Evaluator | None:
        if self.inputs.heldout is None:
            return None
        return Evaluator(
            cache=self._open_cache(self.inputs.heldout, stack),
            num_rows=self.config.log.eval_rows,
            micro_batch=self.config.train.micro_batch,
            seed=self.config.seed,
            special=self.special,
        )


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
