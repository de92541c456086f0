"""Run training steps of a config on this machine and measure where their time goes.

Guarantee: the run folder of the config is not touched, and no weight is kept. The step is the one that a run makes:
the same objective, attention, kernels, DeepSpeed engine and optimizer, on one rank and with random initial weights.

How: the seconds of a step come from steps without a profiler. A further step under torch's profiler gives each part's
share: time on the GPU, or on a CPU the time of each operator without those that it calls. The shares are of the whole
step; what no operator accounts for is the host's own time (Python and DeepSpeed).

Limits: one rank, so communication is that of a single process. A step has at most `MOST_MICRO_BATCHES` micro-batches.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from torch.profiler import ProfilerActivity, profile

from electra_dist.config import Config
from electra_dist.data.loader import RowBatch, RowLoader
from electra_dist.data.receipt import Receipt
from electra_dist.data.shard_cache import open_cache
from electra_dist.engine.engine import Engine, check_precision
from electra_dist.engine.process_group import init_distributed, local_device, set_deterministic_mode, share_cores
from electra_dist.errors import StoreMissing
from electra_dist.model.fused_layer import HAS_BF16_PRODUCTS
from electra_dist.objectives.base import Schedules
from electra_dist.run.environment_record import check_deepspeed, check_gpus
from electra_dist.train.check_inputs import open_training_corpora
from electra_dist.train.run import build_module
from electra_dist.train.step import TrainStep
from electra_dist.train.step_operators import OperatorCounter, part_of, product_shapes, products_alone_s

MOST_MICRO_BATCHES = 4
HOST = "host: Python and DeepSpeed"
_WARM_UP_STEPS = 2
_ROWS_FOR_AUTO = 8
_MADE_UP_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


class MadeUpBatches:
    """Source of batches of random rows: each row is one example, `[CLS]`, ordinary tokens, `[SEP]`, without pads."""

    wait_s = 0.0  # seconds that `next` has waited in total, as in a `RowLoader`

    def __init__(self, config: Config) -> None:
        self._config = config
        self._draw = np.random.default_rng(config.seed)
        self._step = 0

    def next(self) -> RowBatch:
        """Return the batch of the next step."""
        shape = (self._config.train.global_batch, self._config.data.seq_len)
        first_ordinary_id = max(_MADE_UP_IDS) + 1
        ids = self._draw.integers(first_ordinary_id, self._config.model.vocab_size, shape, dtype=np.int32)
        ids[:, 0] = _MADE_UP_IDS.cls
        ids[:, -1] = _MADE_UP_IDS.sep
        row_ids = np.arange(shape[0], dtype=np.int64)
        batch = RowBatch(step=self._step, row0=0, ids=ids, row_ids=row_ids, receipt=Receipt())
        self._step += 1
        return batch


@dataclass(frozen=True)
class StepRows:
    """Rows with which training steps are measured: those of the run's corpus or, without one, made-up rows."""

    config: Config  # with the size of the corpus's vocabulary
    name: str  # "corpus" or "made up"
    special: SpecialIds
    batches: RowLoader | MadeUpBatches


def open_rows(config: Config, stack: contextlib.ExitStack) -> StepRows:
    """Open the rows of the config's corpus in the order of a run, or make rows up if there is no corpus.

    `stack` closes what is opened. Raises UserError if the corpus exists and cannot be used.
    """
    try:
        config, corpora, _ = open_training_corpora(config)
    except StoreMissing:
        return StepRows(config, "made up", _MADE_UP_IDS, MadeUpBatches(config))
    cache = stack.enter_context(contextlib.closing(open_cache(corpora, config.data, config.cache_folder)))
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, config.train.global_batch)
    loader = RowLoader(
        cache=cache, order=order, global_batch=config.train.global_batch, rank=0, world_size=1, start_step=0
    )
    stack.enter_context(contextlib.closing(loader))
    return StepRows(config, "corpus", SpecialIds.from_tokens(corpora.tokenizer.special), loader)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Time that one part of a training step takes, such as attention, and its share of the step."""

    name: str  # one of `step_operators.PARTS`, or HOST
    ms: float
    share: float  # of the step
    ceiling_ms: float | None = None  # for matrix products: their time with nothing between them; None for other parts


@dataclass(frozen=True, kw_only=True)
class AttentionInUse:
    """Backend of attention in the timed steps, with the reason for it, and the dropout of attention probabilities."""

    backend: str
    dropout: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Time that each part of a training step takes on this machine; `step_ms` is a median over the timed steps.

    `electra-dist speed --json` prints these fields by their names.
    """

    device: str
    rows: str  # "corpus", or "made up" if there is no corpus
    micro_batch: int
    micro_batches: int  # of the timed step
    step_ms: float  # with the wait for rows
    tokens_per_s: float  # positions of rows, pads included
    wait_share: float  # mean wait for rows over the timed steps, as a fraction of `step_ms`
    padding_share: float  # pads as a fraction of the positions
    operators_per_micro_batch: int  # operators of a whole step, the update included, divided by its micro-batches
    host_reads: int  # per step, reads of values on the device; on a CPU also those in CPU code of the model
    device_ms: float | None  # sum of the times of all operators on the GPU; None on a CPU
    attention: AttentionInUse
    optimizer: str
    parts: tuple[Part, ...]  # the longest first


def profile_step(config: Config, num_steps: int = 5, ranks_on_node: int = 1) -> StepProfile:
    """Run training steps of a config on this machine and return where their time goes.

    After two steps to warm up, `num_steps` steps are timed. One more step counts the operators, and a last one runs
    under the profiler. On a CPU, the rank has the threads that it would have as one of `ranks_on_node`. Raises
    UserError if the config cannot run on this machine.
    """
    check_deepspeed()
    check_gpus()
    check_precision(config.train.precision)
    set_deterministic_mode(config.engine.deterministic)
    init_distributed()
    device = local_device()
    if device.type == "cpu":
        share_cores(ranks_on_node)
    with contextlib.ExitStack() as stack:
        rows = open_rows(_shortened(config), stack)
        config = rows.config
        even_counts = np.ones(config.model.vocab_size, np.int64)  # the frequencies do not change the time
        module, attention = build_module(config, rows.special, even_counts)
        engine = Engine(module, config.train, config.engine, config.optimizer)
        stack.callback(engine.close)
        schedules = Schedules(config.objective, config.train.num_steps)
        train_step = TrainStep(engine, config.seed, config.train.micro_batch, schedules)
        runner = _StepRunner(config, train_step, rows.batches, rows.special.pad)
        for _ in range(_WARM_UP_STEPS):
            runner.run_step()
        step_s, wait_s = runner.time_steps(num_steps)
        counter = runner.count_operators()
        profiled = runner.profile_step(device)
    num_rows = config.train.global_batch
    return StepProfile(
        device=_device_name(device),
        rows=rows.name,
        micro_batch=config.train.micro_batch,
        micro_batches=config.train.micro_batches(1),
        step_ms=1e3 * step_s,
        tokens_per_s=num_rows * config.data.seq_len / step_s,
        wait_share=wait_s / step_s,
        padding_share=runner.padding_share(),
        operators_per_micro_batch=counter.num_operators // config.train.micro_batches(1),
        host_reads=counter.num_host_reads,
        device_ms=1e3 * profiled.device_s if device.type == "cuda" else None,
        attention=AttentionInUse(
            backend=attention.name, dropout=config.model.attention_dropout, reason=attention.reason
        ),
        optimizer=engine.optimizer_name,
        parts=_parts(profiled, step_s),
    )


def _shortened(config: Config) -> Config:
    """Return the config with fewer rows in a step, so that one rank has at most four micro-batches.

    `train.micro_batch: auto` becomes 8 rows, because only a run measures how many fit.
    """
    if config.train.largest_micro_batch:
        rows = min(_ROWS_FOR_AUTO, config.train.global_batch)
        train = config.train.model_copy(update={"micro_batch": rows, "largest_micro_batch": False})
        config = config.model_copy(update={"train": train})
    num_micro_batches = min(MOST_MICRO_BATCHES, max(1, config.train.global_batch // config.train.micro_batch))
    train = config.train.model_copy(update={"global_batch": num_micro_batches * config.train.micro_batch})
    return config.model_copy(update={"train": train})


@dataclass(frozen=True)
class _Profiled:
    """Result of one step under the profiler, in seconds."""

    part_s: dict[str, float]  # time of each part, and of HOST
    products_alone_s: float  # the step's matrix products with nothing between them
    device_s: float  # sum over all operators: time on the GPU, or on a CPU the time of the operators


class _StepRunner:
    """Runs training steps on the next batches of a source, and times, counts or profiles them."""

    def __init__(self, config: Config, train_step: TrainStep, batches: RowLoader | MadeUpBatches, pad_id: int) -> None:
        self._config = config
        self._train_step = train_step
        self._batches = batches
        self._pad_id = pad_id
        self._num_steps = 0
        self._num_pads = 0
        self._num_positions = 0

    def run_step(self) -> None:
        batch = self._batches.next()
        self._num_pads += int((batch.ids == self._pad_id).sum())
        self._num_positions += batch.ids.size
        num_steps = self._config.train.num_steps
        lr = self._config.optimizer.learning_rate(self._num_steps, num_steps)
        generator_lr = self._config.optimizer.generator_learning_rate(self._num_steps, num_steps)
        self._train_step(batch, lr, generator_learning_rate=generator_lr)
        self._num_steps += 1

    def padding_share(self) -> float:
        return self._num_pads / self._num_positions

    def time_steps(self, num_steps: int) -> tuple[float, float]:
        """Run steps; return (median seconds of a step, mean seconds of a step spent waiting for rows)."""
        waited_before_s = self._batches.wait_s
        times = []
        for _ in range(num_steps):
            begin = time.perf_counter()
            self.run_step()
            times.append(time.perf_counter() - begin)
        wait_s = (self._batches.wait_s - waited_before_s) / num_steps
        return statistics.median(times), wait_s

    def count_operators(self) -> OperatorCounter:
        with OperatorCounter() as counter:
            self.run_step()
        return counter

    def profile_step(self, device: torch.device) -> _Profiled:
        """Run one step under torch's profiler, and sum the time of its operators for each part of the step."""
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True) as profiler:
            begin = time.perf_counter()
            self.run_step()
            step_s = time.perf_counter() - begin
        part_s: dict[str, float] = defaultdict(float)
        for event in profiler.key_averages():
            microseconds = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
            part_s[part_of(event.key)] += microseconds / 1e6
        device_s = sum(part_s.values())
        part_s[HOST] = max(0.0, step_s - device_s)
        shapes = product_shapes(profiler.events() or ())
        dtype = self._product_dtype(device)
        return _Profiled(part_s, products_alone_s(shapes, device, dtype), device_s)

    def _product_dtype(self, device: torch.device) -> torch.dtype:
        emulates_bf16 = device.type == "cpu" and not HAS_BF16_PRODUCTS
        if self._config.train.precision == "bf16" and not emulates_bf16:
            return torch.bfloat16
        return torch.float16 if self._config.train.precision == "fp16" else torch.float32


def _parts(profiled: _Profiled, step_s: float) -> tuple[Part, ...]:
    """Return the parts of a step, the longest first, with times scaled to `step_s`, a step without the profiler.

    The matrix products also get `ceiling_ms`, which is not scaled, because it was measured without the profiler.
    """
    profiled_s = sum(profiled.part_s.values())
    parts = []
    longest_first = sorted(profiled.part_s.items(), key=lambda name_and_seconds: name_and_seconds[1], reverse=True)
    for name, seconds in longest_first:
        if seconds == 0:
            continue
        share = seconds / profiled_s
        ceiling_ms = 1e3 * profiled.products_alone_s if name == "matrix products" else None
        parts.append(Part(name=name, ms=1e3 * share * step_s, share=share, ceiling_ms=ceiling_ms))
    return tuple(parts)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
