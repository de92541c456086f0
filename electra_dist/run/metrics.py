"""Write and read the metrics of a run: metrics.jsonl and samples.jsonl for reports, and a copy for TensorBoard.

Guarantee: each logged step or evaluation is one strict-JSON record of `kind` "train" or "eval", with floats that are
read back bit for bit. After `truncate_after(t)` at a resume the file holds exactly the records of steps <= t, so the
file of a run that was interrupted any number of times has each step once; the same holds for samples.jsonl, the text
samples of evaluations. `sync` before the checkpoint of step t is committed makes the records of steps <= t survive a
crash of the machine; an evaluation of step t must therefore be written before that.

`electra-dist status` reads the end of metrics.jsonl only, however long it is, and a resume parses the end only. If a
process that had been suspended wrote beside its successor, until it noticed that it had lost the lease, the next
resume puts the file in order.

All values are over the global batch. Losses are means per token, not multiplied by their weights in the objective;
only `loss` is the weighted sum that is minimised. Fractions are in [0, 1]. `None` means not known or not applicable,
for example without a GPU. NaN means undefined, for example an accuracy on replaced tokens if the batch has none.

Limits: one writer (rank 0). TensorBoard is a copy for people (`tensorboard.py`); nothing is read back from it.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError
from typing_extensions import override

from electra_dist.errors import StoreAway
from electra_dist.escapes import markdown_text
from electra_dist.run.folder import METRICS_FILE, SAMPLES_FILE, TENSORBOARD_DIR
from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.records import Count, JsonlFile, Record, lines, parse_line, read_records
from electra_dist.run.tensorboard import TensorBoardWriter
from electra_dist.store.patience import Patience, waiting, waits

CONTINUATION = "##"  # begins a WordPiece token that continues the word of the token before it

_BEGIN_OF_RECORD = re.compile(rb'\{"kind": "(\w+)", "step": (\d+),')
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]


class StepRecord(Record):
    """Record of one logged optimizer step: losses, accuracies, speed, data and health of the GPUs."""

    kind: Literal["train"] = "train"
    step: Count  # optimizer steps done when this was written, this one included
    mlm_loss: float  # nats per masked token
    rtd_loss: float  # nats per real token
    loss: float  # what is minimised; for replaced-token detection: mlm_weight * mlm_loss + rtd_weight * rtd_loss
    mlm_accuracy: float  # fraction of masked tokens whose most likely token is the true one
    replaced_accuracy: float  # fraction of replaced tokens that the discriminator classifies as replaced
    original_accuracy: float  # fraction of original tokens that the discriminator classifies as original
    replaced_fraction: float  # replaced tokens as a fraction of all real tokens
    lr: float  # learning rate of this step
    grad_norm: float  # before clipping; NaN if `overflow` is true
    tokens_per_s: float  # row tokens of all ranks, since the last logged step
    mfu: float | None  # model FLOPs as a fraction of the GPUs' dense peak
    data_wait: float  # fraction of the time since the last logged step that rank 0 waited for rows
    memory_gb: float | None  # peak device memory of rank 0, in 1e9 bytes
    eta_s: float | None  # estimated seconds to the last step of the run
    tokens_seen: Count  # real tokens trained on since step 0, estimated from rows_seen
    step_s: float  # mean seconds per step since the last logged step
    rows_seen: Count  # rows trained on since step 0, over all restarts
    receipt: _Digest  # sum of the hashes of these rows' ids, 16 hexadecimal digits (data/receipt.py)
    store_retries: Count  # store requests that all ranks together have repeated since this start of the run
    store_wait_s: float  # seconds waited before these repeats, summed over the ranks
    refetches: Count  # shards fetched again because their bytes were wrong, since this start of the run
    gpu_temperature_c: int | None  # of the hottest GPU of rank 0's node
    gpu_power_w: float | None  # sum over all GPUs of that node
    gpu_sm_clock_mhz: int | None  # of the slowest GPU of that node
    gpu_throttle: list[str]  # reasons for reduced clocks that any GPU of that node reports
    slow_ranks: list[int]  # ranks that are slower than the others, the slowest first
    generator_lr: float | None = None  # learning rate of the generator's parameters; None if it is `lr`
    token_loss: float = 0.0  # nats per token that the discriminator predicts; 0 for objectives in which it does not
    loss_scale: float | None = None  # factor on the loss in the backward pass of this step; None unless in fp16
    overflow: bool = False  # whether the step made no update, because its gradients overflowed fp16
    # Values in this step of those config keys of the objective that follow a schedule; None for a constant key.
    temperature: float | None = None  # softmax temperature at which the generator's replacements are drawn
    mask_prob: float | None = None  # fraction of the tokens that is masked
    mlm_weight: float | None = None  # of mlm_loss in loss
    rtd_weight: float | None = None  # of rtd_loss in loss
    random_share: float | None = None  # fraction of the masked positions with a random replacement

    @property
    def losses(self) -> dict[str, float]:
        """Return the parts of the loss without their weights, by name; those that the objective lacks are 0."""
        parts = {"mlm": self.mlm_loss, "rtd": self.rtd_loss, "tokens": self.token_loss}
        return {name: value for name, value in parts.items() if value != 0}

    @override
    def fields(self) -> dict[str, Any]:
        return self.model_dump()


class EvalRecord(Record):
    """Record of one evaluation on held-out rows: losses and the discriminator's measures, over all of these rows.

    The generator's replacements are sampled at temperature 1 at every step, even if `objective.temperature` has a
    schedule.
    """

    kind: Literal["eval"] = "eval"
    step: Count  # optimizer steps done
    mlm_loss: float  # nats per masked token
    mlm_accuracy: float  # fraction of masked tokens whose most likely token is the true one
    rtd_loss: float  # nats per real token
    auc: float  # ROC-AUC of the discriminator's scores, with replaced tokens as the positive class
    accuracy: float  # of the discriminator at logit 0
    precision: float  # fraction of the tokens classified as replaced that are replaced
    recall: float  # fraction of the replaced tokens that are classified as replaced
    rows: Count  # held-out rows evaluated, without the further ones for context_auc
    token_loss: float = 0.0  # nats per token that the discriminator predicts; 0 for objectives in which it does not
    # ROC-AUC on replacements that token frequency alone cannot tell from originals; NaN without a discriminator
    context_auc: float = math.nan
    context_auc_se: float = math.nan  # standard error of context_auc over held-out rows
    context_replaced: Count = 0  # replaced tokens that context_auc compares with as many original ones
    generator_entropy: float = math.nan  # nats per masked token, at temperature 1; NaN without a trained generator
    sampled_correct: float = math.nan  # fraction of these samples that are the original token; NaN likewise

    @override
    def fields(self) -> dict[str, Any]:
        return self.model_dump()


class OtherMetric(Record):
    """Record of a kind that a newer version of this package has written."""

    kind: str
    step: Count


Metric = StepRecord | EvalRecord | OtherMetric
_ZERO_IF_LACKING = ("mlm_loss", "rtd_loss", "token_loss", "replaced_fraction")


def numbers_of(record: StepRecord | EvalRecord) -> dict[str, Any]:
    """Return the fields of a record for display: NaN in place of the 0 of a loss that the objective does not have."""
    lacking = {name: math.nan for name in _ZERO_IF_LACKING if not getattr(record, name, None)}
    return vars(record) | lacking


class TextSample(Record):
    """Beginning of a held-out row as the discriminator read it; the lists have one entry for each token."""

    original: list[str]  # tokens of the corpus
    shown: list[str]  # tokens that the discriminator read, with the generator's replacements
    replaced_probability: list[Annotated[float, Field(ge=0, le=1)]]  # by the discriminator


class Samples(Record):
    """Text samples of one evaluation, a line of samples.jsonl: always the same few rows, so that learning shows."""

    step: Count
    texts: list[TextSample]


class MetricsWriter:
    """Writer of metrics.jsonl in a run folder and, if wanted, of TensorBoard event files. Only rank 0 has one."""

    def __init__(
        self,
        run_dir: Path,
        tensorboard: Mapping[str, str | float | bool] | None = None,
        patience: Patience | None = None,
    ) -> None:
        """Open metrics.jsonl.

        `tensorboard` has what TensorBoard shows as hyperparameters, dotted config key -> value; None: no TensorBoard.
        If the disk is full or away, `sync` and `close` wait for it as long as `patience` says (None: not at all).
        `write` never waits.
        """
        self.patience = patience
        self._run_dir = Path(run_dir)
        self._file = JsonlFile(self._run_dir / METRICS_FILE)
        self._samples: JsonlFile | None = None  # samples.jsonl, opened by the first samples
        self._hyperparameters = tensorboard
        self._tensorboard: TensorBoardWriter | None = None  # opened by the first `write`
        self._lock = threading.Lock()  # the step loop writes, and the thread that saves checkpoints syncs
        self._refused: set[Path] = set()  # files whose disk has refused the newest record
        self._problems: list[str] = []
        self._purge_step: int | None = None  # TensorBoard hides older curves from this step on; None: it hides nothing

    def truncate_after(self, step: int) -> int:
        """Drop the records of steps after `step`, which the run will repeat; return the last step that was recorded.

        The result is at least `step`. Call this at every resume, before `write`.
        """
        newest_step = self._cut_after(step) if _is_in_order(self._file.path) else self._rewrite_until(step)
        if (self._run_dir / SAMPLES_FILE).exists():
            self._truncate_samples_after(step)
        self._purge_step = step + 1
        return newest_step

    def _cut_after(self, step: int) -> int:
        """Cut the records after `step` off metrics.jsonl, whose steps ascend; return the last step that it had.

        The result is at least `step`.
        """
        path = self._file.path
        newest_step = step
        end = None  # offset of the first record to drop
        for line in lines(path, reverse=True):
            recorded_step = parse_line(path, line, parse_metric).step
            newest_step = max(newest_step, recorded_step)
            if recorded_step <= step:
                break
            end = line.offset
        if end is not None:
            self._file.cut(end)
        return newest_step

    def _rewrite_until(self, step: int) -> int:
        """Sort metrics.jsonl by step, without the records after `step`; return the last step that it had."""
        records = read_metrics(self._run_dir)
        # Of equal kinds and steps, which have the same losses, the newest remains.
        kept = {(record.step, record.kind): record for record in records if record.step <= step}
        in_order = sorted(kept.values(), key=lambda record: record.step)
        self._file.replace(in_order)
        return max([step, *(record.step for record in records)])

    def _truncate_samples_after(self, step: int) -> None:
        file = self._sample_file()
        samples = list(read_records(file.path, Samples.model_validate))
        kept = [record for record in samples if record.step <= step]
        if len(kept) < len(samples):
            file.replace(kept)

    def write(self, record: StepRecord | EvalRecord) -> None:
        """Append the record of a step or an evaluation to metrics.jsonl and, if wanted, to TensorBoard.

        The record survives a crash of the machine only after `sync`. A record that a full or silent disk refuses is
        kept in memory and written later; `problems` has a line about it.
        """
        with self._refusals_reported(self._file.path):
            self._file.append(record)
        tensorboard = self._open_tensorboard()
        if tensorboard is not None:
            tensorboard.write(record.kind, record.fields())

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Append the text samples of an evaluation to samples.jsonl and, if wanted, to TensorBoard."""
        with self._refusals_reported(self._run_dir / SAMPLES_FILE):
            self._sample_file().append(Samples(step=step, texts=list(samples)))
        tensorboard = self._open_tensorboard()
        if tensorboard is not None:
            tensorboard.write_text("replaced words", replaced_words_table(samples), step)

    @waits
    def sync(self) -> None:
        """Wait until all records of metrics.jsonl are on the disk (fsync); call it before a checkpoint is committed.

        Any thread may call this while another thread calls `write`. After StoreAway, call it again later.
        """
        with self._lock:
            self._file.sync()

    def flush_tensorboard(self) -> None:
        """Write TensorBoard's buffered values to its files."""
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def problems(self) -> list[str]:
        """Return one line for each file whose disk has begun to refuse records since the last call; usually none."""
        lines = self._problems
        self._problems = []
        problem_of_tensorboard = self._tensorboard.take_problem() if self._tensorboard else ""
        return [*lines, problem_of_tensorboard] if problem_of_tensorboard else lines

    def close(self, *, waits: bool = True) -> None:
        """Write what is buffered to the disk and close all files.

        While the disk fails, this call waits as long as the run's patience allows or, if `waits` is False, not at all.
        Then it raises StoreAway, leaves metrics.jsonl open, and may be called again. Samples that a full disk refuses
        are lost.
        """
        if self._samples is not None:
            with contextlib.suppress(StoreAway):
                self._samples.sync()
            self._samples.discard()
        if self._tensorboard is not None:
            self._tensorboard.close()
        waiting(self.patience if waits else None, self._file.close)

    def discard(self) -> None:
        """Close metrics.jsonl without the records that its disk refuses. Calling it twice is fine."""
        self._file.discard()

    @contextlib.contextmanager
    def _refusals_reported(self, path: Path) -> Iterator[None]:
        """Hold the lock while the `with` block writes to `path`; turn a StoreAway into a line of `problems`.

        `JsonlFile` keeps a record that the disk refuses, and writes it later, so the error needs no other answer.
        """
        with self._lock:
            try:
                yield
                self._refused.discard(path)
            except StoreAway as error:
                if path not in self._refused:
                    self._refused.add(path)
                    self._problems.append(
                        f"waiting for storage: {error}; the records are kept in memory and written later"
                    )

    def _sample_file(self) -> JsonlFile:
        if self._samples is None:
            self._samples = JsonlFile(self._run_dir / SAMPLES_FILE)
        return self._samples

    def _open_tensorboard(self) -> TensorBoardWriter | None:
        if self._tensorboard is None and self._hyperparameters is not None:
            folder = self._run_dir / TENSORBOARD_DIR
            self._tensorboard = TensorBoardWriter(folder, self._hyperparameters, self._purge_step)
        return self._tensorboard


def parse_metric(fields: dict[str, Any]) -> Metric:
    """Return the record of metrics.jsonl that has these fields; raise ValueError if it is damaged."""
    kind = fields.get("kind")
    try:
        if kind == "train":
            return StepRecord.model_validate(fields)
        if kind == "eval":
            return EvalRecord.model_validate(fields)
        if isinstance(kind, str):
            return OtherMetric.model_validate(fields)
    except ValidationError as error:
        missing = sorted(fault["loc"][0] for fault in error.errors() if fault["type"] == "missing")
        if missing:
            raise ValueError(f"it lacks the field `{missing[0]}`") from None
        raise
    raise ValueError("the value of `kind` is wrong: it should be one of train, eval")


def read_metrics(run_dir: Path) -> list[Metric]:
    """Return the records of a run's metrics.jsonl, oldest first; [] if there is no such file."""
    return list(read_records(run_dir / METRICS_FILE, parse_metric))


def metrics_are_lost(run_dir: Path, ledger: Sequence[LedgerEvent]) -> bool:
    """Return whether a run folder has no metrics.jsonl, which a start creates before its first event in `ledger`."""
    return bool(ledger) and not (run_dir / METRICS_FILE).exists()


def iter_steps(run_dir: Path, *, containing: bytes = b"") -> Iterator[StepRecord]:
    """Yield the logged steps of a run, oldest first; lines without the text `containing` are passed over unread."""
    for record in read_records(run_dir / METRICS_FILE, parse_metric, containing=containing):
        if isinstance(record, StepRecord):
            yield record


def iter_evaluations(run_dir: Path) -> Iterator[EvalRecord]:
    """Yield the evaluations of a run, oldest first, without parsing the many records of steps."""
    for record in read_records(run_dir / METRICS_FILE, parse_metric, containing=b'"eval"'):
        if isinstance(record, EvalRecord):
            yield record


class NewestMetrics(NamedTuple):
    """Newest record of each kind in metrics.jsonl, or None for a kind without records."""

    step: StepRecord | None
    evaluation: EvalRecord | None


def newest_metrics(run_dir: Path, *, with_evaluation: bool = True) -> NewestMetrics:
    """Return the newest record of a training step and, unless `with_evaluation` is False, of an evaluation.

    The file is read from its end, as far as necessary: to its beginning if a kind is missing. Raises UserError for a
    damaged line among those read.
    """
    path = run_dir / METRICS_FILE
    step: StepRecord | None = None
    evaluation: EvalRecord | None = None
    for line in lines(path, reverse=True):
        # Evaluations are few: once the newest training record is found, other training records are not parsed.
        if step is not None and b'"eval"' not in line.text:
            continue
        record = parse_line(path, line, parse_metric)
        if isinstance(record, StepRecord):
            step = step or record
        elif isinstance(record, EvalRecord):
            evaluation = evaluation or record
        if step is not None and (evaluation is not None or not with_evaluation):
            break
    return NewestMetrics(step, evaluation)


def newest_samples(run_dir: Path) -> Samples | None:
    """Return the text samples of the newest evaluation, or None if there are none."""
    return next(read_records(run_dir / SAMPLES_FILE, Samples.model_validate, reverse=True), None)


def replaced_words_table(samples: Sequence[TextSample]) -> str:
    """Return the samples as Markdown: each text with its replaced tokens in bold, and a table of these tokens."""
    parts = []
    for sample in samples:
        text = ""
        rows = ["| original | shown | probability of replaced |", "| --- | --- | --: |"]
        for original, shown, probability in zip(sample.original, sample.shown, sample.replaced_probability):
            piece = markdown_text(shown.removeprefix(CONTINUATION))
            if shown != original:
                piece = f"**{piece}**"
                rows.append(f"| {markdown_text(original)} | {markdown_text(shown)} | {probability:.2f} |")
            text += piece if shown.startswith(CONTINUATION) else f" {piece}"
        parts.append("\n".join([text.strip(), "", *rows]))
    return "\n\n".join(parts)


def _is_in_order(file: Path) -> bool:
    """Return whether the steps in metrics.jsonl never decrease, and no kind of record has a step twice.

    Lines are not parsed as JSON, which would take long.
    """
    last_step = -1
    kinds: set[bytes] = set()  # of the records of the last step
    for line in lines(file):
        begin = _BEGIN_OF_RECORD.match(line.text)
        if begin is None:
            return False
        kind, step = begin[1], int(begin[2])
        if step < last_step or (step == last_step and kind in kinds):
            return False
        kinds = {*kinds, kind} if step == last_step else {kind}
        last_step = step
    return True
