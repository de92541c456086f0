"""Run the step loop: one round of a run, from a restored checkpoint to the last step, a stop, or a rollback.

Guarantee: step t depends on (resolved config, corpus, seed, t) and on nothing else, so a run that was killed at any
moment and started again repeats an uninterrupted one bit for bit at the same number of ranks. The only data state in
a checkpoint is the integer t. All ranks take every decision alike: they judge the same all-reduced numbers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist

from electra_dist.checkpoint.background_writer import SaveTiming
from electra_dist.checkpoint.checkpoint_manifest import RunState
from electra_dist.collectives import gather
from electra_dist.config import Config
from electra_dist.data.loader import RowBatch, RowLoader
from electra_dist.data.row_order import RowOrder
from electra_dist.data.verified_shards import ShardCache
from electra_dist.engine.engine import Engine
from electra_dist.engine.learning_rate import learning_rate
from electra_dist.engine.stage_switch import Stages
from electra_dist.errors import EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, UserError
from electra_dist.model.row_layout import SpecialIds
from electra_dist.train.checkpointer import Checkpointer, TrainState
from electra_dist.train.evaluator import Evaluator
from electra_dist.train.health.rank_monitor import RankMonitor
from electra_dist.train.health.stop_request import StopRequest
from electra_dist.train.input_checks import OpenCorpus, RunInputs
from electra_dist.train.loss_guard import Guard, first_to_skip
from electra_dist.train.reporter import Ending, Reporter
from electra_dist.train.save_schedule import SaveSchedule
from electra_dist.train.skipped_steps import SkipList
from electra_dist.train.step import RankFlags, StepResult, TrainStep, outlier
from electra_dist.train.time_accounting import Clock

_ENDINGS: dict[int | None, Ending] = {
    EXIT_DONE: "done",
    EXIT_STOPPED: "stop",
    EXIT_UNHEALTHY: "unhealthy",
    None: "rollback",
}
_LONG_WAIT_S = 1.0  # a longer wait for the previous checkpoint is logged


class Trainer:
    """One round of a run: restores a checkpoint and trains to the last step, a stop, or a rollback.

    A round is used once: create it, then call `run`. After a rollback the caller creates a new one with the same
    engine. All ranks do so together.
    """

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
        """Restore the newest good checkpoint into the engine and, on rank 0, open the outputs. Collective.

        Args:
            config: the resolved config of the run.
            inputs: the opened corpora.
            engine: holds the model and the optimizer.
            special: ids of the special tokens.
            skips: steps to skip; the guard adds to it.
            stop: requests to stop or save that this rank receives.
            monitor: heartbeat and health of this rank.
            build_s: seconds of each part of the start so far; None after a rollback, when nothing had to be built.
            notes: lines for the log that describe how the run was built.

        Raises:
            UserError: a checkpoint target or the run folder cannot be used.
        """
        begin = time.perf_counter()
        self.config = config
        self.inputs = inputs
        self.engine = engine
        self.special = special
        self.stop = stop
        self.monitor = monitor
        corpus = inputs.corpus.manifest
        self.checkpointer = Checkpointer(config, engine, corpus.fingerprint, skips.steps)
        monitor.began(self.checkpointer.attempt)
        self.restored, set_aside = self.checkpointer.restore(pristine=build_s is not None)
        self.state = TrainState.after(self.restored, config.guard, skips)
        self.clock = Clock({**(build_s or {}), "restore": time.perf_counter() - begin})
        self._spent_at_save: dict[int, dict[str, float]] = {}  # step of a save in flight -> seconds spent until then
        self.reporter: Reporter | None = None  # rank 0 only
        if dist.get_rank() == 0:
            self.reporter = Reporter(config, engine, corpus, self.restored)
            self.reporter.began(self.checkpointer.attempt, self.restored, set_aside, self.clock.setup_s)
            for note in notes:
                self.reporter.note(note)
            self.checkpointer.writer.on_commit = self._committed
        self.schedule = SaveSchedule(config.checkpoint, config.run_dir, self.state.step)

    def run(self) -> int | None:
        """Train until this round ends, and record in the ledger how it ended. Collective.

        Returns:
            An exit code of `electra_dist/errors.py`, or None if the run goes back to a checkpoint: the caller then
            creates the next round.

        Raises:
            UserError: the run diverges, or an input cannot be read any more.
        """
        ending: Ending = "crash"  # unless the code below ends without an exception
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
        """Run the step loop from the restored step on. Collective.

        A skipped or stopped step counts as done: its evaluation and its save take place as after any other step.

        Returns:
            An exit code, or None for a rollback.
        """
        config = self.config
        state = self.state
        num_steps = config.train.num_steps
        with contextlib.ExitStack() as stack:
            loader = stack.enter_context(contextlib.closing(self._open_loader(stack)))
            evaluator = self._open_evaluator(stack)
            train_step = TrainStep(self.engine, config.objective, self.special, config.seed, config.train.micro_batch)
            stages = Stages(self.engine, config.objective)
            stack.enter_context(contextlib.closing(self.checkpointer))
            for step in range(state.step, num_steps):
                begin = time.perf_counter()
                done = step + 1
                is_last = done == num_steps
                flags = RankFlags()  # of a skipped step, which has no all-reduce: no requests
                self.monitor.beat("step", step)
                state.step = done
                state.eval_rtd_loss = None
                second_stage_begins = stages.enter(step)
                if second_stage_begins:
                    # The window holds losses of the first stage, which the new loss must not be compared with.
                    state.guard = Guard(config.guard)
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
                        if is_last or _is_due(done, config.log.every_steps):
                            self._log(result, lr, loader.wait_s, train_step.forward_s())
                if evaluator and (is_last or _is_due(done, config.log.eval_every_steps)):
                    self._evaluate(evaluator)
                self.stop.longest_step_s = max(self.stop.longest_step_s, time.perf_counter() - begin)
                if flags.sick:
                    return EXIT_UNHEALTHY  # without a save: the state of a faulty GPU is not to be trusted
                if is_last or flags.stop or flags.save or self.schedule.due(done):
                    self._save()
                if flags.stop and not is_last:
                    return self._stop()
            return EXIT_DONE

    def _log(self, result: StepResult, lr: float, waited_s: float, forward_s: float) -> None:
        """Read the GPUs, look for slow ranks, and report the step to console and metrics. Collective.

        Args:
            result: results of the step.
            lr: learning rate of the step.
            waited_s: total seconds that this rank has waited for rows.
            forward_s: seconds of this rank's first forward of the step.
        """
        look = self.monitor.look(forward_s)
        if self.reporter:
            self.reporter.step(self.state.step, result, lr, waited_s, self.state.receipt, look)

    def _evaluate(self, evaluator: Evaluator) -> None:
        """Evaluate on the held-out rows, report it, and keep the RTD loss for the next checkpoint. Collective."""
        self.monitor.beat("eval", self.state.step)
        with self.clock.evaluation():
            evaluation = evaluator.run(self.engine, self.state.step)
        self.state.eval_rtd_loss = evaluation.rtd_loss
        if self.reporter:
            self.reporter.evaluation(evaluation)

    def _flags(self, loader: RowLoader) -> RankFlags:
        """Return this rank's requests to stop or save, and its counters of repeated requests to stores."""
        store = self.inputs.corpus.store
        retry_wait_s = store.retry_wait_s + self.checkpointer.retry_wait_s
        return RankFlags(
            stop=self.stop.wants_stop(),
            save=self.stop.wants_save(),
            sick=self.monitor.sick,
            retries=store.retries + self.checkpointer.retries,
            retry_wait_ms=round(1000 * retry_wait_s),
            refetches=loader.refetches,
        )

    def _save(self) -> None:
        """Start saving the present state; wait for the previous save and for the copy to host memory. Collective."""
        self.monitor.beat("checkpoint", self.state.step)
        self._spent_at_save[self.state.step] = self.clock.spent_s()
        if self.reporter:
            self.reporter.saving()
            self.stop.saved()
        timing = self.checkpointer.save(self.state)
        self.clock.stalled(timing.wait_s + timing.stall_s)
        if self.reporter and timing.wait_s > _LONG_WAIT_S:
            self.reporter.note(
                f"waited {timing.wait_s:.1f} s for the previous checkpoint to be written; if this repeats, raise "
                f"checkpoint.every_steps or set it to auto"
            )
        has_changed = self.schedule.saved(self.state.step)
        if has_changed and self.reporter:
            self.reporter.note(f"checkpoint.every_steps auto: a checkpoint every {self.schedule.every_steps:,} steps")

    def _committed(self, state: RunState, timing: SaveTiming, seconds: float) -> None:
        """Record a committed checkpoint. Rank 0's checkpoint thread calls it.

        Args:
            state: state of the checkpoint.
            timing: seconds for which the save has held up the step loop.
            seconds: time from the start of writing to the commit.
        """
        self.stop.longest_save_s = max(self.stop.longest_save_s, seconds)
        if self.reporter:
            self.reporter.committed(state, timing, seconds, self._spent_at_save.pop(state.step))

    def _stop(self) -> int:
        """Wait until the save of this step is committed, then end the run on request. Collective.

        Returns:
            The exit code of a stop.
        """
        self.checkpointer.close()
        if self.reporter:
            self.stop.stopped()
            self.reporter.stopped(self.state.step, self.stop.reason)
        return EXIT_STOPPED

    def _stopped_step(self, train_step: TrainStep, batch: RowBatch, fault: str) -> None:
        """Add a step that the guard has stopped to the skip list, and report it with the row that stands out.

        Collective. The list is on the disk before the run goes on, so that a restart skips the step, too.

        Args:
            train_step: computes the loss of each row.
            batch: this rank's rows of the stopped step.
            fault: why the guard stopped it.
        """
        suspect = self._find_suspect(batch, train_step.row_losses(batch))
        self.state.skips.stop(batch.step)
        if self.reporter:
            self.state.skips.write()
            self.reporter.stopped_step(batch.step, fault, suspect)

    def _find_suspect(self, batch: RowBatch, losses: list[float]) -> str:
        """Find the one row of a step whose loss stands out; return its name and loss, "" if none does. Collective.

        Args:
            batch: this rank's rows of the step.
            losses: the loss of each of them.
        """
        losses_and_ids_by_rank = gather((losses, batch.row_ids.tolist()))
        all_losses = [loss for rank_losses, _ in losses_and_ids_by_rank for loss in rank_losses]
        all_row_ids = [row_id for _, rank_row_ids in losses_and_ids_by_rank for row_id in rank_row_ids]
        suspect = outlier(all_losses)
        if suspect is None:
            return ""
        name = self.inputs.corpus.manifest.row_name(all_row_ids[suspect])
        return f"{name} (loss {all_losses[suspect]:.4g}, median of the step's rows {np.nanmedian(all_losses):.4g})"

    def _roll_back(self) -> None:
        """Add the stopped steps, and some before them, to the skip list; the caller then restores again. Collective.

        Raises:
            UserError: the run has already gone back `guard.max_rollbacks` times.
        """
        self.checkpointer.close()
        guard = self.config.guard
        skips = self.state.skips
        stopped = skips.streak
        if skips.rollbacks == guard.max_rollbacks:
            raise UserError(
                f"run {self.config.run_dir} diverges: step {stopped[-1]:,} after {skips.rollbacks} rollbacks was "
                f"stopped again, and guard.max_rollbacks is {guard.max_rollbacks}; lower optimizer.lr in a new run, "
                f"check the rows that ledger.jsonl names, or raise guard.max_rollbacks"
            )
        first = first_to_skip(stopped[0], guard.skip_before, self.checkpointer.committed_steps())
        skips.roll_back(first)
        if self.reporter:
            skips.write()
            self.reporter.rolled_back(first, stopped)

    def _open_cache(self, corpus: OpenCorpus, stack: contextlib.ExitStack) -> ShardCache:
        """Return a cache of a corpus, which is closed together with `stack`."""
        cache = corpus.open_cache(self.config.data, self.config.cache_folder)
        return stack.enter_context(contextlib.closing(cache))

    def _open_loader(self, stack: contextlib.ExitStack) -> RowLoader:
        """Return the loader of this rank's rows from the restored step on; it begins to read ahead.

        Args:
            stack: closes the loader's cache; the caller closes the loader.
        """
        config = self.config
        corpus = self.inputs.corpus
        rows_per_shard = [shard.rows for shard in corpus.manifest.shards]
        order = RowOrder(rows_per_shard, config.seed, config.data.shuffle_window_shards)
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
        """Return the evaluator on the held-out corpus, whose cache `stack` closes; None if there is none."""
        if self.inputs.heldout is None:
            return None
        return Evaluator(
            cache=self._open_cache(self.inputs.heldout, stack),
            num_rows=self.config.log.eval_rows,
            micro_batch=self.config.train.micro_batch,
            seed=self.config.seed,
            special=self.special,
        )


def _is_due(done: int, every: int) -> bool:
    """Return whether something that happens every `every` steps is due after `done` steps; never for 0."""
    return every > 0 and done % every == 0
