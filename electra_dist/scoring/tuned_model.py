"""A fine-tuned model in Hugging Face's format, of this project or of another program: its task, labels and weights.

The folder is checked before torch or transformers is imported.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig, check_overrides, settings_for
from electra_dist.finetune.labelled_texts import LabelTargets
from electra_dist.run.folder import is_run_folder
from electra_dist.store.json_file import read_json_object

if TYPE_CHECKING:
    from electra_dist.finetune.models import TaskModel
    from electra_dist.pretrained.encoder import Pretrained

_LABELS_OF_DETECTION = {"0": "REPLACED"}  # of an untuned ModernBERT discriminator, which has a class for tags
_AGAIN = "copy or write the model again"  # next step where a file is damaged
_KINDS = ("SequenceClassification", "TokenClassification", "QuestionAnswering")


class TunedModel:
    """Fine-tuned model in a folder, with its task and its labels; its weights are loaded by `load`."""

    def __init__(self, folder: Path) -> None:
        """Read config.json and finetune.json of a model; an output folder of fine-tuning stands for its best seed.

        Raises UserError if the folder holds no model for a task that is predicted.
        """
        self.folder = folder = _folder_of_model(folder)
        self.config = read_json_object(folder / "config.json", _AGAIN)
        self.kind = _kind_of(folder, self.config)
        names = self.config.get("id2label") or {}
        self.labels = tuple(str(names[number]) for number in sorted(names, key=int)) or ("LABEL_0", "LABEL_1")
        if self.config.get("problem_type") == "regression" and len(self.labels) > 1:
            raise UserError(
                f"{folder}: a regression of {len(self.labels)} numbers for each text; only models of one number are "
                f"predicted"
            )
        record_file = folder / "finetune.json"
        record = read_json_object(record_file, _AGAIN) if record_file.exists() else {}
        self.data: Mapping[str, Any] = record.get("data") or {}
        self.columns: Mapping[str, str | None] = self.data.get("columns") or {}  # of the training data
        self._settings: Mapping[str, Any] | None = record.get("settings")

    def shown_metric(self, name: str) -> str:
        """Return the name of a metric for people, as `LabelTargets` does."""
        has_classes = self.kind == "SequenceClassification" and len(self.labels) > 1
        return LabelTargets(self.labels).shown_metric(name) if has_classes else name

    def load(self) -> tuple[Pretrained, TaskModel, FinetuneConfig]:
        """Load the encoder, of which the tokenizer is used, the model in evaluation mode, and its settings.

        The model is on the GPU if there is one. Raises UserError if transformers is not installed.
        """
        from electra_dist.errors import missing_packages

        try:
            import transformers
        except ImportError:
            raise missing_packages("predicting", "finetune") from None
        from electra_dist.finetune.models import Classifier, HuggingFaceNetwork, LinearSpanModel, Tagger
        from electra_dist.pretrained.encoder import device_of_choice, load_pretrained
        from electra_dist.pretrained.hf import family_of

        transformers.utils.logging.disable_progress_bar()
        encoder = load_pretrained(str(self.folder))
        most = encoder.model.max_positions
        if self._settings is None:
            settings = settings_for("", encoder.tower.hidden_size, most, [f"max_length={min(most, 512)}"])
        else:
            settings = check_overrides((), self._settings)
        hf_model = getattr(transformers, f"AutoModelFor{self.kind}").from_pretrained(self.folder).float()
        network = HuggingFaceNetwork(hf_model, encoder.special, family_of(encoder.model))
        model: TaskModel
        if self.kind == "QuestionAnswering":
            model = LinearSpanModel(network, encoder.special, settings.beam)
        else:
            model = (Classifier if self.kind == "SequenceClassification" else Tagger)(network, encoder.special)
        return encoder, model.to(device_of_choice()).eval(), settings


def _folder_of_model(folder: Path) -> Path:
    """Return the folder with config.json: `folder`, or its best seed; raise UserError if neither has a tuned model."""
    for candidate in (folder, folder / "best"):
        if (candidate / "config.json").exists():
            return candidate
    if finished := sorted(folder.glob("seed-*/config.json")):
        raise UserError(
            f"{folder}: its fine-tuning has not finished; run the finetune command again, or use {finished[0].parent}"
        )
    if is_run_folder(folder) or (folder / "discriminator" / "config.json").exists():
        raise _no_task(folder)
    if any((place / "finetune.json").exists() for place in (folder, folder / "best")):
        raise UserError(
            f"{folder}: holds predictions, but no model, because it was tuned with --set head=paper; tune again "
            f"without it"
        )
    if folder.is_dir():
        raise UserError(
            f"{folder}: holds no tuned model; if its fine-tuning was interrupted, run the finetune command again, "
            f"otherwise name the folder of a tuned model"
        )
    raise UserError(f"{folder / 'config.json'}: no such file; name the folder of a tuned model")


def _kind_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Return which of `_KINDS` a model with this config.json is; raise UserError if it is none of them."""
    architecture = str((config.get("architectures") or [""])[0])
    is_untuned = architecture.endswith(("ForPreTraining", "ForMaskedLM"))
    if is_untuned or config.get("id2label") == _LABELS_OF_DETECTION:
        raise _no_task(folder)
    kinds = [kind for kind in _KINDS if architecture.endswith(f"For{kind}")]
    if not kinds and (folder / "modules.json").exists():  # of sentence-transformers, as of the task `pairs`
        raise UserError(
            f"{folder}: a model of vectors of texts, which has no predictions; load it by SentenceTransformer "
            f"(docs/finetune.md)"
        )
    if not kinds or config.get("problem_type") == "multi_label_classification":
        raise UserError(
            f"{folder}: not a model for a task that is predicted ({architecture or 'no architecture'}); name a "
            f"model that `electra-dist finetune` has written, or one of transformers for {', '.join(_KINDS)}"
        )
    return kinds[0]


def _no_task(folder: Path) -> UserError:
    return UserError(
        f"{folder}: a pretrained model, which knows no task; tune it first: electra-dist finetune "
        f"--model {shlex.quote(str(folder))} --data TEXTS.csv --output tuned"
    )
