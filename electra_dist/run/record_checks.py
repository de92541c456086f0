"""Check the records that are read from the JSON-lines files of a run folder: fields, types and ranges.

Guarantee: a record that passes has the fields that every reader of its file uses, with values that a reader can
compute with and print: whole numbers are not negative and have at most 53 bits, and a time can be converted to
seconds. Fields that are not known pass, because a newer version of this package may have written them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Annotated, Any, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, create_model

from electra_dist.run.step_records import EvalRecord, StepRecord
from electra_dist.store.json_file import first_fault

Check = Callable[[Mapping[str, Any]], str]  # a record -> what is wrong with it, as one line; "" for a good record


def _check_time(text: str) -> str:
    """Return an ISO 8601 time unchanged; raise ValueError for another text or a time without a Unix time."""
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError:
        raise ValueError("the year is out of range") from None
    return text


Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Number = Annotated[float, Field(gt=-1e15, lt=1e15)]  # also refuses NaN and the infinities
Time = Annotated[str, AfterValidator(_check_time)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{1,16}$")]


class _Record(BaseModel):
    """Base class of all record models: a value of a wrong type is refused, and unknown fields pass."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class _UnknownMetric(_Record):
    """Record of metrics.jsonl whose kind this version does not know."""

    step: Count


class _LedgerEvent(_Record):
    """Event of ledger.jsonl, with the fields that readers compute with."""

    time: Time
    event: str
    step: Count
    attempt: Count = 0
    repeated: Count = 0
    setup_s: dict[str, Number] = {}
    spent_s: dict[str, Number] = {}
    stall_s: Number = 0
    wait_s: Number = 0
    write_s: Number = 0
    why: str = ""


class _JobSubmit(_Record):
    """Submission of jobs to Slurm, a line of slurm/jobs.jsonl."""

    time: Time
    event: str
    jobs: list[str] = []


class _JobBegin(_JobSubmit):
    """Start of a Slurm job's ranks, a line of slurm/jobs.jsonl."""

    job: str
    restart: Count
    replacements: Count = 0
    ledger_events: Count
    checkpoint_step: Count = 0
    nodes: str = ""
    submitted: Time | None = None
    started: Time | None = None


class _JobEnd(_JobSubmit):
    """End of a Slurm job's ranks, a line of slurm/jobs.jsonl."""

    job: str
    restart: Count
    replacements: Count = 0
    ledger_events: Count = 0  # 0, like checkpoint_step, in records of older versions
    checkpoint_step: Count = 0
    verdict: str
    why: str = ""


class _Cpu(_Record):
    """Entry "cpu" of environment.json."""

    model: str | None
    usable_cores: Count | None
    cores: Count | None
    memory_gb: Number


class _GpuDevice(_Record):
    """GPU in the entry "gpus" of environment.json."""

    name: str
    memory_gb: Number | None


class _Gpus(_Record):
    """Entry "gpus" of environment.json, which is empty without GPUs."""

    driver: str | None = None
    devices: list[_GpuDevice] = []


class _Commit(_Record):
    """Entry "commit" of environment.json."""

    sha: str
    has_changes: bool


class _CorpusSource(_Record):
    """Size and licence of one source of text, in the entry "corpus" / "sources" of environment.json."""

    tokens: Count
    licence: str | None = None


class _PhaseSizes(_Record):
    """Sizes of one training corpus of a run with `data.phases`, in "corpus" / "phases" of environment.json."""

    from_step: Count
    fingerprint: str
    rows: Annotated[int, Field(gt=0, lt=1 << 53)]
    tokens: Count


class _CorpusSizes(_Record):
    """Sizes of the training corpora of a run: the entry "corpus" of environment.json."""

    rows: Count
    tokens: Count
    seq_len: Count
    sources: dict[str, _CorpusSource] = {}
    phases: list[_PhaseSizes] = []


class _Environment(_Record):
    """Content of environment.json."""

    versions: dict[str, str]
    cpu: _Cpu
    gpus: _Gpus
    system: str
    world_size: Count
    commit: _Commit | None = None
    hosts: dict[str, Count] = {}
    corpus: _CorpusSizes | None = None


class _StatedCriterion(_Record):
    """Criterion by which a comparison of runs decides, with the time of its statement; a line of criterion.jsonl."""

    time: str
    scores: Count
    criterion: dict[str, Any]


class _Text(_Record):
    """Text sample of an evaluation: tokens, what the discriminator read, and its probabilities."""

    original: list[str]
    shown: list[str]
    replaced_probability: list[Annotated[float, Field(ge=0, le=1)]]


class _Samples(_Record):
    """Text samples of one evaluation, a line of samples.jsonl."""

    step: Count
    texts: list[_Text]


def _model_of(kind: type) -> type[_Record]:
    """Return a pydantic model for records of the dataclass `kind`; all fields except `step` may be missing."""
    types = get_type_hints(kind)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        field_type = _Digest if field.name == "receipt" else types[field.name]
        if field_type is int:
            field_type = Count
        fields[field.name] = (field_type, ... if field.name == "step" else None)  # defaults are not checked
    return create_model(f"_{kind.__name__}", __base__=_Record, **fields)


def _names_without_default(kind: type) -> frozenset[str]:
    """Return the fields of a dataclass that have no default; every version of this package has written these."""
    return frozenset(field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING)


_MODEL_OF_METRIC: dict[str, type[_Record]] = {"train": _model_of(StepRecord), "eval": _model_of(EvalRecord)}
_NAMES_OF_METRIC = {"train": _names_without_default(StepRecord), "eval": _names_without_default(EvalRecord)}
_MODEL_OF_JOB: dict[str, type[_Record]] = {"submit": _JobSubmit, "begin": _JobBegin, "end": _JobEnd}


def metrics_fault(record: Mapping[str, Any]) -> str:
    """Return what is wrong with a record of metrics.jsonl, else ""; all fields except `step` may be missing."""
    if isinstance(record.get("kind"), str) and record["kind"] not in _MODEL_OF_METRIC:
        return _fault(record, _UnknownMetric)  # a newer version may have written it
    if "context_auc" in record and "context_auc_se" not in record:  # both are written together
        return "it lacks the field `context_auc_se`"
    return _fault_by_kind(record, "kind", _MODEL_OF_METRIC)


def whole_metrics_fault(record: Mapping[str, Any]) -> str:
    """Return what `metrics_fault` finds, else which field without a default is missing; "" for a good record."""
    fault = metrics_fault(record)
    if fault:
        return fault
    missing = _NAMES_OF_METRIC.get(record["kind"], frozenset()) - set(record)
    return f"it lacks the field `{min(missing)}`" if missing else ""


def ledger_fault(record: Mapping[str, Any]) -> str:
    """Return what is wrong with an event of ledger.jsonl as one line; "" for a good event."""
    return _fault(record, _LedgerEvent)


def job_fault(record: Mapping[str, Any]) -> str:
    """Return what is wrong with a record of slurm/jobs.jsonl as one line; "" for a good record."""
    return _fault_by_kind(record, "event", _MODEL_OF_JOB)


def samples_fault(record: Mapping[str, Any]) -> str:
    """Return what is wrong with a record of samples.jsonl as one line; "" for a good record."""
    return _fault(record, _Samples)


def environment_fault(tree: Mapping[str, Any]) -> str:
    """Return what is wrong with the content of environment.json as one line; "" if nothing is."""
    return _fault(tree, _Environment)


def criterion_fault(record: Mapping[str, Any]) -> str:
    """Return what is wrong with a record of a comparison's criterion.jsonl as one line; "" for a good record."""
    return _fault(record, _StatedCriterion)


def _fault_by_kind(record: Mapping[str, Any], key: str, models: Mapping[str, type[_Record]]) -> str:
    """Check a record with the model for its kind (the value of field `key`); return what is wrong, else ""."""
    kind = record.get(key)
    model = models.get(kind) if isinstance(kind, str) else None
    if model is None:
        return f"the value of `{key}` is wrong: it should be one of {', '.join(models)}"
    return _fault(record, model)


def _fault(record: Mapping[str, Any], model: type[_Record]) -> str:
    """Return what is wrong with a record as one line; "" for a good record."""
    try:
        model.model_validate(record)
    except ValidationError as error:
        return first_fault(error)
    return ""
