"""Plan a run: what it would take in parameters, rows, tokens, FLOPs, memory and time.

Guarantee: the plan is a function of the config, and of corpus.json of each training corpus that is a folder and
exists. Such a corpus is refused if its rows or its vocabulary do not fit the config, as training does. Nothing is
written. No GPU is needed and torch is not imported. `electra-dist plan --json` prints the record itself,
`plan_page.py` prints it as tables.

Limits: a corpus on S3 is not read, so its epochs are not known. The docstrings of training_days.py and
activation_memory.py name what the numbers leave out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from electra_dist.config import Config
from electra_dist.config.rules import keys_without_effect
from electra_dist.config.sections.training import NamedCorpus
from electra_dist.data.corpora import check_corpus_fits, steps_of_phases, with_corpus_vocabulary
from electra_dist.data.manifest import MANIFEST_KEY, CorpusManifest, read_manifest
from electra_dist.engine.state_layout import PARTS, StateLayout, state_layout
from electra_dist.gpu_models import GPU_MEMORY_GB
from electra_dist.planning.activation_memory import micro_batch_limit
from electra_dist.planning.multi_node_scaling import Cluster, Scaled, scale
from electra_dist.planning.training_days import Budget, make_budget
from electra_dist.store.open_store import REMOTE_SCHEMES, open_store


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    """Part of a run that reads one training corpus: its steps, tokens and epochs."""

    corpus: str  # its URL
    from_step: int
    steps: int
    tokens: int  # with padding
    epochs: float | None  # None: the corpus was not read
    corpus_rows: int | None
    corpus_tokens: int | None  # without padding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would take: its budget, corpora and memory and, on a cluster, its speed; no number is rounded."""

    config: Config  # with a `plan.num_gpus` that can share the global batch
    asked_gpus: int  # `plan.num_gpus` as it was asked for
    budget: Budget
    phases: tuple[PlannedPhase, ...]
    layouts: tuple[StateLayout, ...]  # of the training state, at each ZeRO stage from 0 on
    keys_without_effect: dict[str, str]  # key -> reason
    cluster: Cluster | None
    scaling: tuple[Scaled, ...]  # predictions for 1, 2, 4, ... nodes of the cluster; empty without one

    def state_bytes(self, stage: int) -> dict[str, float]:
        """Return the bytes per GPU at a ZeRO stage of each part of the training state, such as "moments" -> bytes."""
        num_parameters = self.budget.parameters.total
        num_gpus = self.config.plan.num_gpus
        return {part: self.layouts[stage].bytes_per_gpu(part, num_parameters, num_gpus) for part in PARTS}

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value: memory in bytes, a step in seconds, the run in days and GPU-hours.

        `compute` is null in fp32, for which no peak of a GPU is known.
        """
        config, parameters = self.config, self.budget.parameters
        peak_step, peak = config.optimizer.peak_learning_rate(config.train.num_steps)
        tree = {
            "run_dir": config.run_dir,
            "objective": config.objective.name,
            "steps": config.train.num_steps,
            "learning_rate": {"lr": config.optimizer.lr, "peak": peak, "peak_step": peak_step},
            **asdict(self.budget),
            "epochs": self.phases[0].epochs if len(self.phases) == 1 else None,
            "parameters": parameters._asdict() | {"total": parameters.total},
            "state_bytes_per_gpu": {f"zero_{stage}": self.state_bytes(stage) for stage in range(len(self.layouts))},
            "largest_micro_batch": {
                gpu: micro_batch_limit(config, memory_gb).fitting_rows for gpu, memory_gb in GPU_MEMORY_GB.items()
            },
            "phases": [asdict(phase) for phase in self.phases],
            "keys_without_effect": self.keys_without_effect,
        }
        if self.cluster is not None:
            tree["scaling"] = [
                asdict(prediction) | {"step_s": prediction.step_s, "efficiency": prediction.efficiency}
                for prediction in self.scaling
            ]
        return tree


def make_plan(config: Config, cluster: Cluster | None = None) -> Plan:
    """Compute what a run would take; with `cluster`, also its speed on 1, 2, 4, ... nodes.

    If `plan.num_gpus` GPUs cannot share the global batch, the plan is for the largest smaller number that can. Raises
    UserError if the GPU is not known, if the nodes cannot share the global batch, or if a corpus does not fit.
    """
    first_manifest = _existing_corpus(config.data.training_corpora()[0])
    if first_manifest is not None:
        config, _ = with_corpus_vocabulary(config, first_manifest)
    planned = _with_possible_gpus(config)
    precision, offload = planned.train.precision, planned.engine.offload_optimizer
    return Plan(
        config=planned,
        asked_gpus=config.plan.num_gpus,
        budget=make_budget(planned),
        phases=_phases(planned),
        layouts=tuple(state_layout(precision, stage, offload) for stage in range(4)),
        keys_without_effect=keys_without_effect(planned),
        cluster=cluster,
        scaling=tuple(scale(planned, cluster)) if cluster else (),
    )


def _with_possible_gpus(config: Config) -> Config:
    """Return the config with the largest number of GPUs, up to `plan.num_gpus`, that can share the global batch."""
    num_gpus = max(ranks for ranks in config.train.possible_ranks() if ranks <= config.plan.num_gpus)
    return config.model_copy(update={"plan": config.plan.model_copy(update={"num_gpus": num_gpus})})


def _phases(config: Config) -> tuple[PlannedPhase, ...]:
    """Plan for each training corpus which steps read it; its size is None if it does not exist or is not local."""
    corpora = config.data.training_corpora()
    all_steps = steps_of_phases([corpus.from_step for corpus in corpora], config.train.num_steps)
    phases = []
    for named, steps in zip(corpora, all_steps, strict=True):
        manifest = _existing_corpus(named)
        if manifest is not None:
            check_corpus_fits(named.key, named.url, manifest, config.data, config.model.vocab_size)
        rows = steps * config.train.global_batch
        phases.append(
            PlannedPhase(
                corpus=named.url,
                from_step=named.from_step,
                steps=steps,
                tokens=rows * config.data.seq_len,
                epochs=rows / manifest.num_rows if manifest else None,
                corpus_rows=manifest.num_rows if manifest else None,
                corpus_tokens=manifest.num_tokens if manifest else None,
            )
        )
    return tuple(phases)


def _existing_corpus(named: NamedCorpus) -> CorpusManifest | None:
    """Return corpus.json of a training corpus; None for a corpus that does not exist or is not local."""
    if named.url.startswith(REMOTE_SCHEMES):
        return None
    store = open_store(named.url)
    path = store.local_path(MANIFEST_KEY)
    return read_manifest(store, named.key) if path is not None and path.exists() else None
