"""Run the step loop: one round of a run, from a restored checkpoint to the last step, a stop, or a rollback.

A rollback is a return to an earlier checkpoint after several steps in a row that the guard (`guard.py`) has stopped.

Guarantee: step t depends on (resolved config, corpus, seed, t) and on nothing else, so a run that was killed at any
moment and started again repeats an uninterrupted one bit for bit at the same number of ranks. Which rows come next
follows from the integer t, so a checkpoint holds no other state of the data loader. All ranks take every decision
alike, because they judge the same all-reduced numbers.

Goodput, the useful part of the time, is computed from the fields `setup_s` and `spent_s` of ledger.jsonl
(run/goodput.py), in seconds:

    setup_s   import: process start to the first line of the run; build: inputs, process group, model, engine;
              restore: checkpoint
    spent_s   since the first step began: first (the first step: compilation, warm-up), step (all other steps),
              data (waiting for rows, within them), stall (checkpoint copies and waits), eval

All times are elapsed times on rank 0's host, by clocks that do not jump; no measurement waits for the device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch.distributed as dist

from electra_dist.checkpoint.commit import Fenced
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.reader import Loaded
from electra_dist.checkpoint.writer import SaveTiming
from electra_dist.collectives import from_rank_0, gather, reported_exit_code
from electra_dist.data.loader import RowBatch, RowLoader
from electra_dist.engine.bit_settings import changes
from electra_dist.engine.stage_switch import Stages
from electra_dist.errors import EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, StorageLost, UserError
from electra_dist.objectives.base import Schedules
from electra_dist.run.lease import LeaseLost
from electra_dist.run.number_formats import format_duration
from electra_dist.run.this_node import node_name
from electra_dist.train.checkpointer import Checkpointer, SaveSchedule, TrainState
from electra_dist.train.evaluator import Evaluator, evaluation_scores, open_evaluator
from electra_dist.train.guard import Guard
from electra_dist.train.open_cache import open_shared_cache
from electra_dist.train.reporter import Ending, Reporter
from electra_dist.train.start import Start
from electra_dist.train.step import RankFlags, StepResult, TrainStep, find_suspect

# Exit code of a round -> the event with which the ledger records its end. None: the run goes back to a checkpoint.
_ENDINGS: dict[int | None, Ending] = {
    EXIT_DONE: "done",
    EXIT_STOPPED: "stop",
    EXIT_UNHEALTHY: "unhealthy",
    None: "rollback",
}
_SILENT_READ_S = 10.0  # a longer wait for rows is reported as a wait for storage
_SILENT_SAVE_S = 60.0  # a save without progress for longer is reported as a wait for storage
_SPACE_EVERY_S = 60.0  # seconds between two checks of the disk space for the next checkpoint
_LONG_WAIT_S = 1.0  # a longer wait for the previous checkpoint is logged


class Clock:
    """Stopwatch of one round of a run: seconds of its setup, and seconds since then by activity.

    A round lasts from the restore of a checkpoint to the end of the process or to a rollback. Only the thread of the
    step loop may use the clock.
    """

    def __init__(self, setup_s: dict[str, float]) -> None:
        self.setup_s = setup_s
        # Seconds by activity; the step loop sets "data", its total wait for rows.
        self.spent = {"first": 0.0, "step": 0.0, "data": 0.0, "stall": 0.0, "eval": 0.0}

    @contextlib.contextmanager
    def measured(self, activity: Literal["step", "eval"]) -> Iterator[None]:
        """Measure a `with` block as a step, its wait for data included, or as an evaluation on held-out rows.

        A block that raises is not counted.
        """
        begin = time.perf_counter()
        yield
        # The first step is counted apart from the others, because compilation and warm-up make it longer.
        is_first_step = activity == "step" and self.spent["first"] == 0
        self.spent["first" if is_first_step else activity] += time.perf_counter() - begin

    def stalled(self, seconds: float) -> None:
        """Add the seconds that a save has blocked the step loop: its wait for the last save, and the copying."""
        self.spent["stall"] += seconds

    def spent_s(self) -> dict[str, float]:
        """Return the seconds spent so far on each activity, rounded to milliseconds.

        The time of "data" is also contained in "first" and "step"; the other activities do not overlap.
        """
        return {name: round(seconds, 3) for name, seconds in self.spent.items()}


class Trainer:
    """One round of a run: from the newest good checkpoint to the last step, a stop, or a return to a checkpoint.

    The constructor restores the checkpoint into the engine, and all ranks then call `run` once. After a return to a
    checkpoint the caller creates a new Trainer for the same start.
    """

    def __init__(self, start: Start, build_s: dict[str, float] | None, notes: Sequence[str] = ()) -> None:
        """Restore the newest good checkpoint and, on rank 0, open log and metrics. Collective.

        `build_s` has the seconds of "import" and "build" in the first round of a start; None in later ones. `notes`
        are lines for the log on how steps are computed, which a run that has none left does not get.
        """
        begin = time.perf_counter()
        config = start.config
        skips = start.skips
        monitor = start.monitor
        self.start = start
        self.config = config
        self.engine = start.engine
        self.stop = start.stop
        self.monitor = monitor
        self.patience = start.patience
        self._objective_facts = config.objective.facts
        # An earlier start may have been killed between the last of several stopped steps and the rollback.
        missed_rollback = skips.roll_back(config) if skips.reaches(config.guard.max_in_a_row) else None
        self.checkpointer = Checkpointer(start)
        self.checkpointer.writer.on_wait = lambda silent_s: monitor.waits_for_thread(
            silent_s, "the previous checkpoint", _SILENT_SAVE_S
        )
        monitor.began(self.checkpointer.record.attempt)
        is_first_round = build_s is not None
        self.schedules = Schedules(config.objective, config.train.num_steps)
        loaded = self.checkpointer.restore(pristine=is_first_round)
        self.restored = loaded.state
        self.state = TrainState.after(self.restored, config.guard, skips)
        setup_s = dict(build_s) if build_s is not None else {}
        setup_s["restore"] = time.perf_counter() - begin
        self.clock = Clock(setup_s)
        # Step of a save -> seconds spent until it began, by activity. Rank 0 removes a save when it is committed.
        self._spent_at_save: dict[int, dict[str, float]] = {}
        hosts = gather(node_name())
        self.reporter: Reporter | None = None  # rank 0 only
        if dist.get_rank() == 0:
            self.reporter = self._open_reporter(hosts, loaded)
            changed_settings = start.changed_settings if is_first_round else []
            has_steps_left = self.state.step < config.train.num_steps
            for note in (*changed_settings, *(notes if has_steps_left else ()), *loaded.notes):
                self.reporter.note(note)
            if missed_rollback is not None:
                self.reporter.rolled_back(*missed_rollback)
                skips.write()
        self._stop_reason = ""  # why the round stopped on request
        self._next_look_at_space = time.monotonic()
        self._warned_of_save = 0  # step of the newest checkpoint for which a lack of space was logged
        self.schedule = SaveSchedule(config.checkpoint, config.run_dir, self.state.step)

    def _open_reporter(self, hosts: Sequence[str], loaded: Loaded) -> Reporter:
        """Return a reporter that has recorded the beginning of this round, and that hears of committed checkpoints."""
        reporter = Reporter(self.start, loaded.state, hosts)
        record = self.checkpointer.record
        changed = changes(loaded.state.bit_settings, record.bit_settings) if loaded.state else {}
        reporter.began(record.attempt, loaded.state, loaded.set_aside, self.clock.setup_s, changed)
        self.checkpointer.writer.before_commit = reporter.before_commit
        self.checkpointer.writer.on_commit = self._committed
        return reporter

    def run(self) -> int | None:
        """Train until this round ends, and record in the ledger how it ended. Collective.

        Returns an exit code of `electra_dist/errors.py`, or None if the run goes back to a checkpoint; the caller then
        begins the next round. Raises UserError if the loss is bad again after `guard.max_rollbacks` rollbacks, or if
        an input cannot be read any more. Raises StorageLost if storage stayed away too long.
        """
        ending: Ending = "crash"  # stays if an exception that is not handled below ends the round
        why = ""
        code: int | None = EXIT_DONE
        try:
            if self.state.step < self.config.train.num_steps:
                code = self._train()
            elif self.restored is not None and self.reporter:
                self.checkpointer.finish(self.restored)
            ending = _ENDINGS[code]
            why = self._stop_reason
        except (LeaseLost, Fenced):
            ending = "replaced"
            raise
        except StorageLost as lost:
            ending = "storage"
            why = str(lost)
            raise
        except RuntimeError:
            if reported_exit_code() == EXIT_STOPPED:
                ending = "storage"
                why = "storage of another rank stayed away; see the error line in the output of the run"
            raise
        finally:
            if self.reporter:
                self.reporter.close(ending, self.state.step, why, self.clock.spent_s())
        return code

    def _train(self) -> int | None:
        """Open the loader and the evaluator, run the remaining steps, and close everything. Collective."""
        with contextlib.ExitStack() as stack:
            loader = self._open_loader(stack)
            stack.enter_context(contextlib.closing(loader))
            evaluator = open_evaluator(self.start, stack)
            train_step = TrainStep(
                engine=self.engine,
                seed=self.config.seed,
                micro_batch=self.config.train.micro_batch,
                schedules=self.schedules,
            )
            only_generator = self.config.objective.generator_only_steps
            stages = Stages(self.engine, only_generator) if only_generator else None
            stack.enter_context(contextlib.closing(self.checkpointer.writer))
            try:
                return self._run_steps(loader, evaluator, train_step, stages)
            except BaseException:
                # The run ends, so waits for storage give up. An error of `close` must not replace the first error.
                self.patience.abandon()
                with contextlib.suppress(Exception):
                    self.checkpointer.writer.close()
                raise

    def _open_loader(self, stack: contextlib.ExitStack) -> RowLoader:
        """Return a loader of this rank's training rows that begins at the restored step and omits skipped steps.

        `stack` closes the cache of shards; the caller must close the loader itself, before the cache. Collective.
        """
        config = self.config
        corpora = self.start.inputs.corpora
        return RowLoader(
            cache=open_shared_cache(config, corpora, stack),
            order=corpora.row_order(config.seed, config.data.shuffle_window_shards, config.train.global_batch),
            global_batch=config.train.global_batch,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            start_step=self.state.step,
            skip_steps=self.state.skips.steps,
            on_wait=lambda waited_s: self.monitor.waits_for_thread(waited_s, f"rows of {corpora.url}", _SILENT_READ_S),
        )

    def _run_steps(
        self, loader: RowLoader, evaluator: Evaluator | None, train_step: TrainStep, stages: Stages | None
    ) -> int | None:
        """Run the remaining steps; return an exit code, or None for a rollback. Collective."""
        guard = self.config.guard
        state = self.state
        num_steps = self.config.train.num_steps
        for step in range(state.step, num_steps):
            begin = time.perf_counter()
            is_last = step + 1 == num_steps
            self.monitor.beat("step", step)
            self.checkpointer.writer.raise_failure()
            state.step = step + 1  # steps done, this one included
            state.eval_scores = {}
            second_stage_begins = stages is not None and stages.enter(step)
            phase = self.start.inputs.corpora.phase_that_begins_at(step)
            if phase is not None and self.reporter:
                self.reporter.note(f"phase of the data: from step {step:,} on, rows come from {phase.url}")
            if second_stage_begins or self.schedules.jumps_at(step) or phase is not None:
                # The guard must not compare new losses with those in its window, which are of the first stage, of the
                # value before the jump, or of another corpus.
                state.guard = Guard(guard)
            # A skipped step has no all-reduce, so requests of the ranks wait for the next step that is computed.
            flags = RankFlags()
            if step not in state.skips.steps:  # one that is on the list counts as done, like one without an update
                try:
                    result = self._run_step(step, loader, train_step)
                except BaseException:
                    state.step = step  # the ledger gets the number of steps that are done
                    raise
                flags = result.flags
                if flags.stop:
                    from_rank_0(self._check_lease)  # raises LeaseLost on all ranks if that is why
                if result.fault and state.skips.reaches(guard.max_in_a_row):
                    self.monitor.beat("checkpoint", step)
                    self.checkpointer.writer.close()
                    first, stopped = state.skips.roll_back(self.config)
                    if self.reporter:
                        self.reporter.rolled_back(first, stopped)
                        state.skips.write()
                    return None
            if evaluator and (is_last or _is_due(state.step, self.config.log.eval_every_steps)):
                self._evaluate(evaluator)
            self.stop.longest_step_s = max(self.stop.longest_step_s, time.perf_counter() - begin)
            if flags.sick:
                return EXIT_UNHEALTHY  # without a save: the state of a faulty GPU is not to be trusted
            if is_last or flags.stop or flags.save or self.schedule.due(state.step):
                self._save()
            if flags.stop and not is_last:
                return self._stop()
        return EXIT_DONE

    def _run_step(self, step: int, loader: RowLoader, train_step: TrainStep) -> StepResult:
        """Train on the next batch; log the step if a log line is due or the gradients overflowed fp16. Collective."""
        num_steps = self.config.train.num_steps
        lr = self.config.optimizer.learning_rate(step, num_steps)
        generator_lr = self.config.optimizer.generator_learning_rate(step, num_steps)
        lease = self.start.lease
        with self.clock.measured("step"):
            batch = loader.next()
            self.monitor.waits_for_storage("")  # ends a wait for rows that was reported
            flags = RankFlags(
                stop=self.stop.wants_stop() or (lease is not None and lease.is_lost),
                save=self.stop.wants_save(),
                sick=self.monitor.sick,
                retries=self.patience.retries,
                retry_wait_ms=round(1000 * self.patience.retry_wait_s),
                refetches=loader.refetches,
            )
            result = train_step(batch, lr, self.state.guard.fault, flags, generator_lr)
        self.clock.spent["data"] = loader.wait_s
        if result.fault:
            self._skip_stopped_step(train_step, batch, result.fault)
            return result
        if result.overflow:
            self.state.overflowed.append(step)
        else:
            self.state.receipt += result.receipt
            self.state.guard.accept(result.judged_loss)
        is_last = self.state.step == num_steps
        if is_last or result.overflow or _is_due(self.state.step, self.config.log.every_steps):
            observation = self.monitor.look(train_step.stopwatch.seconds())
            if self.reporter:
                self.reporter.step(self.state.step, result, loader.wait_s, self.state.receipt, observation)
                self._look_at_space(self.reporter)
        return result

    def _look_at_space(self, reporter: Reporter) -> None:
        """Log a warning, once per checkpoint, if the next checkpoint will not fit on its disk. Rank 0 only."""
        now = time.monotonic()
        if now < self._next_look_at_space:
            return
        self._next_look_at_space = now + _SPACE_EVERY_S
        next_save = min(self.schedule.next_due(self.state.step), self.config.train.num_steps)
        problem = self.checkpointer.writer.space_shortage(dist.get_world_size())
        if not problem or next_save == self._warned_of_save:
            return
        self._warned_of_save = next_save
        step_s = self.monitor.step_s
        when = "" if step_s is None else f", in about {format_duration((next_save - self.state.step) * step_s)},"
        reporter.note(
            f"the checkpoint at step {next_save:,}{when} will not fit: {problem}; free space there, otherwise the run "
            f"waits for it at most {self.config.cluster.storage_patience_s:g} s and then ends with exit code 75"
        )

    def _evaluate(self, evaluator: Evaluator) -> None:
        """Evaluate on the held-out rows; raise UserError if a result is not finite. Collective."""
        self.monitor.beat("eval", self.state.step)
        with self.clock.measured("eval"):
            evaluation = evaluator.run(self.engine, self.state.step)
        # A checkpoint of this step records the scores, by which `checkpoint.keep_best` chooses.
        self.state.eval_scores = evaluation_scores(evaluation.record, self._objective_facts)
        if self.reporter:
            self.reporter.evaluation(evaluation.record, evaluation.samples)
        if evaluation.fault:
            raise UserError(
                f"run {self.config.run_dir} has diverged: in the evaluation after step {self.state.step:,}, "
                f"{evaluation.fault}; lower optimizer.lr in a new run, which train.init_from may begin with an "
                f"earlier checkpoint"
            )

    def _check_lease(self) -> None:
        """Raise LeaseLost if another start of the run has taken the run folder, or the folder is gone. Rank 0 only."""
        assert self.start.lease is not None
        self.start.lease.check()

    def _save(self) -> None:
        """Start saving a checkpoint of the present state, and schedule the next save. Collective."""
        self.monitor.beat("checkpoint", self.state.step)
        if self.reporter:
            self._spent_at_save[self.state.step] = self.clock.spent_s()  # for the ledger, when it is committed
            self.reporter.flush_tensorboard()
            self.stop.remove_save_file()
        timing = self.checkpointer.save(self.state)
        self.monitor.waits_for_storage("")  # ends a wait for the previous save, if one was reported
        self.clock.stalled(timing.wait_s + timing.stall_s)
        if self.reporter and timing.wait_s > _LONG_WAIT_S:
            self.reporter.note(
                f"step {self.state.step:,}: training waited {timing.wait_s:.1f} s until the previous checkpoint was "
                f"written; if this repeats, raise checkpoint.every_steps or set it to auto"
            )
        has_interval_changed = self.schedule.saved(self.state.step)
        if has_interval_changed and self.reporter:
            self.reporter.note(
                f"checkpoint.every_steps auto: a checkpoint is saved every {self.schedule.every_steps:,} steps"
            )

    def _committed(self, state: RunState, timing: SaveTiming, seconds: float) -> None:
        """Record a checkpoint whose files are all written, after `seconds`. Rank 0's checkpoint thread calls it."""
        # The longest save decides how long before the end of a Slurm job the run stops by itself.
        self.stop.longest_save_s = max(self.stop.longest_save_s, seconds)
        if self.reporter:
            spent_s = self._spent_at_save.pop(state.step)
            self.reporter.committed(state, timing, seconds, spent_s)

    def _stop(self) -> int:
        """Wait until the save of this step is committed, then log that the run stops on request. Collective."""
        # A signal may reach the ranks on either side of a step's sum, so this rank may not have received it yet. Asked
        # before the wait for the save, during which a rank may be killed.
        reasons = gather(self.stop.reason)
        self._stop_reason = self.stop.reason or next(filter(None, reasons))
        self.checkpointer.writer.close()
        if self.reporter:
            self.stop.remove_stop_file()
            self.reporter.stopped(self.state.step, self._stop_reason)
        return EXIT_STOPPED

    def _skip_stopped_step(self, train_step: TrainStep, batch: RowBatch, fault: str) -> None:
        """Skip from now on a step that `fault` has stopped, and report the row whose loss stands out. Collective."""
        suspect = find_suspect(self.start.inputs.corpora, batch, train_step.row_losses(batch))
        self.state.skips.stop(batch.step)
        if self.reporter:
            self.reporter.stopped_step(batch.step, fault, suspect)
            self.state.skips.write()  # before the run goes on, so that a restart skips the step, too


def _is_due(done: int, every: int) -> bool:
    """Return whether an action that comes every `every` steps (0: never) is due after `done` steps."""
    return every > 0 and done % every == 0
