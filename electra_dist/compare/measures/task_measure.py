"""Score encoders on tasks on texts, by a probe of frozen states or by fine-tuning."""

from __future__ import annotations

from typing_extensions import override

from electra_dist.compare.comparison_config import TaskEntry
from electra_dist.compare.measures.measure import Measure, Measured, digest_of, layer_details
from electra_dist.finetune.finetune_and_probe import PROBED_LAYERS, finetune_task, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.seed_results import summarize
from electra_dist.finetune.texts.text_task import TextTask
from electra_dist.finetune.training_loop import Progress
from electra_dist.pretrained.load_encoder import Pretrained, device_of_choice


class TaskMeasure(Measure):
    """Measure of how well an encoder solves a task on texts: with a linear probe of frozen states, or fine-tuned."""

    def __init__(self, name: str, task: TextTask, entry: TaskEntry, settings: FinetuneConfig) -> None:
        """Store the task and how to score it; a linear probe uses only the settings that turn texts into examples."""
        self.name = name
        self.metric = task.metric
        self.at = entry.at
        self._task = task
        self._entry = entry
        self._settings = settings
        identity = {"task": task.digest, "how": entry.how, "seeds": entry.seeds, "settings": settings.identity()}
        if entry.how == "probe":
            identity["layers"] = PROBED_LAYERS
        self.digest = digest_of(identity)

    @override
    def score(self, encoder: Pretrained, progress: Progress) -> Measured:
        """Return the score of the probe at the chosen layer, or the median over the seeds of fine-tuning.
        The score is None if all seeds diverged. A seed counts as a failure if it diverged, or predicts the same for
        all examples.
        """
        device = device_of_choice()
        if self._entry.how == "probe":
            result = probe_task(encoder, self._task, self._settings, device, progress)
            return Measured(
                value=result.score,
                failures=(result.failure,) if result.failure else (),
                standard_error=result.standard_error,
                layer=result.layer,
                details=layer_details(result.layer_scores),
            )
        results = [
            finetune_task(encoder, self._task, self._settings, seed, device, progress)
            for seed in range(self._entry.seeds)
        ]
        summary = summarize(results)
        return Measured(value=summary.median, failures=tuple(summary.failed.values()))
