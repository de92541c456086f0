"""Plan a run: what it would take in parameters, rows, tokens, FLOPs, memory and time.

Guarantee: the plan is a function of the config, and of the corpus manifest if it is passed. Nothing is written, and
nothing is read except the config of the run that a frozen generator comes from. No GPU is needed and torch is not
imported. `electra-dist plan --json` prints the record itself, `plan_page.py` prints it as tables.

Limits: the docstrings of budget.py and activation_memory.py name what the numbers leave out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from electra_dist.config import Config
from electra_dist.config.rules import keys_without_effect
from electra_dist.data.corpora import steps_of_phases
from electra_dist.data.manifest import CorpusManifest
from electra_dist.engine.learning_rate import peak_learning_rate
from electra_dist.engine.state_layout import PARTS, StateLayout, state_layout
from electra_dist.planning.activation_memory import GPU_MEMORY_GB, micro_batch_limit
from electra_dist.planning.budget import Budget, make_budget
from electra_dist.planning.multi_node_scaling import Cluster, Scaled, scale


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    """Steps of the run that read one training corpus."""

    corpus: str  # its URL
    from_step: int
    steps: int
    tokens: int  # with padding


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a run, with numbers that are not rounded."""

    config: Config
    corpus: CorpusManifest | None  # None: it was not read, and no epochs are known
    budget: Budget
    phases: tuple[PlannedPhase, ...]
    layouts: tuple[StateLayout, ...]  # of the training state, at each ZeRO stage from 0 on
    keys_without_effect: dict[str, str]  # key -> reason
    cluster: Cluster | None
    scaling: tuple[Scaled, ...]  # predictions for 1, 2, 4, ... nodes of the cluster; empty without one

    def state_bytes(self, stage: int) -> dict[str, float]:
        """Return the bytes per GPU at a ZeRO stage for weights, gradients, fp32 master copy and moments."""
        num_parameters = self.budget.parameters.total
        num_gpus = self.config.plan.num_gpus
        return {part: self.layouts[stage].bytes_per_gpu(part, num_parameters, num_gpus) for part in PARTS}

    def as_json(self) -> dict[str, Any]:
        """Return the plan as a JSON value: memory in bytes, a step in seconds, the run in days and GPU-hours.

        `compute` is null in fp32, for which no peak of a GPU is known.
        """
        config, parameters = self.config, self.budget.parameters
        peak_step, peak = peak_learning_rate(config.train.num_steps, config.optimizer)
        tree = {
            "run_dir": config.run_dir,
            "objective": config.objective.name,
            "steps": config.train.num_steps,
            "learning_rate": {"lr": config.optimizer.lr, "peak": peak, "peak_step": peak_step},
            **asdict(self.budget),
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


def make_plan(config: Config, corpus: CorpusManifest | None = None, cluster: Cluster | None = None) -> Plan:
    """Plan a run; `cluster` adds how it scales over its nodes.

    Raises UserError if the GPU is not known, or if the nodes cannot share the global batch.
    """
    budget = make_budget(config, corpus)
    precision, offload = config.train.precision, config.engine.offload_optimizer
    return Plan(
        config=config,
        corpus=corpus,
        budget=budget,
        phases=_phases(config, budget.tokens_per_step),
        layouts=tuple(state_layout(precision, stage, offload) for stage in range(4)),
        keys_without_effect=keys_without_effect(config),
        cluster=cluster,
        scaling=tuple(scale(config, cluster)) if cluster else (),
    )


def _phases(config: Config, tokens_per_step: int) -> tuple[PlannedPhase, ...]:
    corpora = config.data.training_corpora()
    steps = steps_of_phases([corpus.from_step for corpus in corpora], config.train.num_steps)
    return tuple(
        PlannedPhase(corpus=corpus.url, from_step=corpus.from_step, steps=count, tokens=count * tokens_per_step)
        for corpus, count in zip(corpora, steps, strict=True)
    )
