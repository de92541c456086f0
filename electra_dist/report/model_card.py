"""Write the model card of an exported model: README.md in its folder, with the curves of the run beside it.

Guarantee: the card is made from the run's own records, and a figure that was not recorded is left out. It names no
path, host or user, because cards are published. Its front matter is what Hugging Face's hub reads.

Limits: the card knows no results on tasks and no languages; the user adds them. It names the sources of the text only
if the corpus has a build.json. An older README.md in the folder is replaced.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from electra_dist.config import ModelConfig
from electra_dist.data.corpora import token_shares, uses_of_phases
from electra_dist.escapes import markdown_code, markdown_text
from electra_dist.hub import UNKNOWN_LICENSE, check_license
from electra_dist.model.counts import run_flops
from electra_dist.pretrained.export import Export
from electra_dist.report.curves import write_curves_png
from electra_dist.report.report_page import shortest_endings
from electra_dist.report.run_record import run_title
from electra_dist.run.environment_record import read_environment
from electra_dist.run.metrics import EvalRecord, Metric, StepRecord, iter_evaluations, newest_metrics
from electra_dist.run.number_formats import format_count
from electra_dist.store.atomic_files import replacing

CARD_FILE = "README.md"
CURVES_FILE = "curves.png"

# Field of an evaluation record -> how the card names it.
_MEASURES = {
    "mlm_loss": "generator: loss, nats per masked token",
    "mlm_accuracy": "generator: share of masked tokens predicted right",
    "rtd_loss": "discriminator: loss, nats per token",
    "auc": "discriminator: ROC-AUC of replaced against original tokens",
    "context_auc": "discriminator: the same, where token frequency alone gives 0.5",
    "token_loss": "large tower: loss, nats per predicted token",
}
_NAMES = {"masked_lm": "discriminator with the head that predicts tokens"}  # of models whose folder says it less well


def write_model_cards(run_dir: Path, export: Export, license_id: str = UNKNOWN_LICENSE) -> list[Path]:
    """Write README.md and, if the run has recorded steps, curves.png into each folder of an export; return the paths.

    `license_id` is the hub's identifier of the weights' licence, such as apache-2.0. Raises UserError for a malformed
    identifier, a damaged metrics.jsonl, or a folder that cannot be written.
    """
    check_license(license_id)
    records = _shown_records(run_dir)
    environment = read_environment(run_dir)
    curves = _draw_curves(run_dir) if records else None
    title = run_title(run_dir)
    cards = []
    for tower, folder in export.folders.items():
        if curves is not None:
            with replacing(folder / CURVES_FILE) as file:
                file.write(curves)
        card = model_card(tower, title, export, records, environment, license_id)
        with replacing(folder / CARD_FILE) as file:
            file.write(card.encode())
        cards.append(folder / CARD_FILE)
    return cards


def _shown_records(run_dir: Path) -> list[Metric]:
    """Return the records of metrics.jsonl that a card needs: all evaluations, oldest first, then the newest step."""
    newest_step = newest_metrics(run_dir, with_evaluation=False).step
    return [*iter_evaluations(run_dir), *([] if newest_step is None else [newest_step])]


def _draw_curves(run_dir: Path) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_curves_png(run_dir, Path(folder) / CURVES_FILE).read_bytes()


def model_card(
    tower: str,
    run_name: str,
    export: Export,
    records: Sequence[Metric],
    environment: Mapping[str, Any],
    license_id: str,
) -> str:
    """Return the model card of one exported model, which is named as in `Export.folders`, in Markdown.

    `records` are from metrics.jsonl, oldest first: at least all evaluations and the newest training record.
    `environment` is the content of environment.json. Both may be empty.
    """
    corpus = environment.get("corpus", {})
    predicts_tokens = _predicts_tokens(tower, export)
    evaluation = _evaluation(export, records)
    sections = [
        _front_matter(predicts_tokens, license_id, export.config.model),
        f"# {markdown_text(run_name)}: ELECTRA {_NAMES.get(tower, tower)}\n",
        _introduction(tower, export),
        _how_to_load(predicts_tokens, export.config.model),
        _training(export, records, environment.get("versions", {}), corpus.get("phases", ())),
        _data_sources(corpus.get("sources", {})),
        evaluation,
        _curves(records),
        _limits(license_id, is_evaluated=bool(evaluation)),
        _how_to_push(),
    ]
    return "\n".join(section for section in sections if section)


def _predicts_tokens(tower: str, export: Export) -> bool:
    """Return whether an exported tower predicts masked tokens; otherwise it detects replaced tokens."""
    return tower != "discriminator" or export.config.objective.facts.predicts_tokens


def _front_matter(predicts_tokens: bool, license_id: str, model: ModelConfig) -> str:
    metadata: dict[str, object] = {"license": license_id, "library_name": "transformers", "tags": ["electra"]}
    if model.architecture == "modern":
        metadata["tags"] = ["electra", "modernbert"]
    if predicts_tokens:
        metadata["pipeline_tag"] = "fill-mask"
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n"


def _introduction(tower: str, export: Export) -> str:
    """Return the first paragraph: objective, layers, width, vocabulary, and the step (or steps) of the weights."""
    model = export.config.model
    shape = model.generator if tower == "generator" else model.discriminator
    if len(export.steps) == 1:
        weights = f"the weights after {export.steps[0]:,} of {export.config.train.num_steps:,} steps"
    else:
        steps = ", ".join(f"{step:,}" for step in export.steps)
        weights = f"the mean of the weights after {steps} of {export.config.train.num_steps:,} steps"
    remark = ""
    if tower == "masked_lm":
        remark = " In training it read tokens of the generator at the masked positions, never the token [MASK]."
    return (
        f"The {_NAMES.get(tower, tower)} of an ELECTRA model "
        f"([Clark et al., 2020](https://arxiv.org/abs/2003.10555)), pretrained with electra-dist with the objective "
        f"`{export.config.objective.name}`: {shape.num_layers} layers of width {shape.hidden_size}, a vocabulary of "
        f"{model.vocab_size:,} word-pieces, {model.max_positions} positions. "
        f"These are {weights}.{remark}\n"
    )


def _how_to_load(predicts_tokens: bool, model: ModelConfig) -> str:
    """Return the section with the Python code that loads the model, and the class to use for fine-tuning."""
    is_modern = model.architecture == "modern"
    auto_class = "AutoModelForTokenClassification" if is_modern else "AutoModelForPreTraining"
    if predicts_tokens:
        auto_class = "AutoModelForMaskedLM"
    fine_tuning = (
        "For fine-tuning load it with `AutoModel`, or with a class such as `AutoModelForSequenceClassification`"
    )
    if is_modern and not predicts_tokens:
        fine_tuning += " and `ignore_mismatched_sizes=True`, because the detection head has one label"
    return (
        "## Load it\n\n```python\n"
        f"from transformers import {auto_class}, AutoTokenizer\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")  # this folder, or the name of a repository on the hub\n'
        f'model = {auto_class}.from_pretrained(".")\n'
        f"```\n\n{fine_tuning}.\n"
    )


def _training(
    export: Export, records: Sequence[Metric], versions: Mapping[str, str], phases: Sequence[dict[str, Any]]
) -> str:
    """Return the section with a table of how the model was trained: objective, data, steps, FLOPs, versions."""
    config = export.config
    state = export.state
    rows = [
        ("objective", f"`{config.objective.name}`"),
        *_training_data(export, phases),
        ("steps", f"{state.step:,} of {config.train.num_steps:,}, {config.train.global_batch:,} rows each"),
        ("rows", f"{state.rows_seen:,} of {config.data.seq_len} tokens, padding included"),
    ]
    tokens = tokens_seen(records, state.rows_seen)
    if tokens is not None:
        rows.append(("tokens", f"{format_count(tokens)}, padding not counted"))
    flops = run_flops(config, state.step)
    _, peak = config.optimizer.peak_learning_rate(config.train.num_steps)
    rows += [
        ("training FLOPs", f"{flops:.3g}, matrix products only, forward and backward"),
        (
            "learning rate",
            f"{peak:g} at its peak ({config.optimizer.lr:g}, times the decay until there), "
            f"{config.optimizer.warmup_steps:,} steps of warm-up",
        ),
        ("precision", config.train.precision),
        ("seed", str(config.seed)),
    ]
    if versions:
        texts = [markdown_text(f"{package} {version}") for package, version in versions.items()]
        rows.append(("versions", ", ".join(texts)))
    return "## Training\n\n" + _table(("what", "value"), rows)


def _training_data(export: Export, phases: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (name, value) for each corpus that the run read before the exported step; `phases` lists several."""
    if not phases:
        return [("training data", f"corpus with fingerprint {markdown_code(export.state.corpus_fingerprint)}")]
    rows = []
    uses = uses_of_phases(phases, export.state.step, export.config.train.global_batch)
    for use, share in zip(uses, token_shares(uses), strict=True):
        if use.rows:
            corpus = f"corpus with fingerprint {markdown_code(use.fingerprint)}"
            extent = f"{share:.1%} of the tokens, {use.epochs:.2f} epochs of its {use.corpus_rows:,} rows"
            rows.append((f"training data from step {use.from_step:,} on", f"{corpus}: {extent}"))
    return rows


def _data_sources(sources: Mapping[str, dict[str, Any]]) -> str:
    """Return the section with the share and the licence of each source of the corpus; "" if they are not recorded."""
    if not sources:
        return ""
    all_tokens = sum(source["tokens"] for source in sources.values())
    names = shortest_endings([tuple(name.split("/")) for name in sources])
    rows = []
    for name, source in zip(names, sources.values(), strict=True):
        share = source["tokens"] / max(all_tokens, 1)
        licence = source.get("licence") or "not stated"
        rows.append((markdown_text(name), f"{100 * share:.1f} %", markdown_text(licence)))
    return "## Sources of the training data\n\n" + _table(("source", "share of the tokens", "licence"), rows)


def tokens_seen(records: Sequence[Metric], rows_seen: int) -> float | None:
    """Estimate the number of tokens, without padding, in `rows_seen` rows; None if no training step is recorded.

    Rows are taken to have as many tokens as those of the newest training record, on average.
    """
    for record in reversed(records):
        if isinstance(record, StepRecord) and record.rows_seen:
            return record.tokens_seen * rows_seen / record.rows_seen
    return None


def _evaluation(export: Export, records: Sequence[Metric]) -> str:
    """Return the section on the newest evaluation up to the exported step; "" if there is none.

    If the weights are a mean of several steps, a note says that the figures belong to one step and not to the mean.
    """
    evaluations = [record for record in records if isinstance(record, EvalRecord) and record.step <= export.state.step]
    if not evaluations:
        return ""
    record = evaluations[-1]
    rows = []
    for field, name in _MEASURES.items():
        value = getattr(record, field)
        if math.isfinite(value) and value != 0.0:  # 0 and NaN stand for what the objective does not have
            rows.append((name, f"{value:.4f}"))
    note = f"On {record.rows:,} rows of held-out text, after step {record.step:,}."
    if len(export.steps) > 1:
        note += " These are figures of that step's own weights: the mean of several steps was not evaluated."
    return f"## Evaluation\n\n{note}\n\n{_table(('measure', 'value'), rows)}"


def _curves(records: Sequence[Metric]) -> str:
    """Return the section that shows the picture of the curves; empty if the run has recorded no step."""
    if not records:
        return ""
    return f"## Curves\n\n![losses and measures of the whole run over its steps]({CURVES_FILE})\n"


def _limits(license_id: str, is_evaluated: bool) -> str:
    known = "was scored on held-out text only, not on tasks" if is_evaluated else "was not evaluated"
    license_note = ""
    if license_id == UNKNOWN_LICENSE:
        license_note = " Its licence is not stated: set `license` at the top of this file before you publish it."
    return (
        f"## Limits\n\nThe model {known}. It has learnt what is in its training text, errors and prejudices included."
        f"{license_note}\n"
    )


def _how_to_push() -> str:
    return (
        "## Publish it\n\n```bash\npip install huggingface_hub && hf auth login\n"
        "hf upload YOUR-NAME/YOUR-MODEL . .    # in this folder\n```\n"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. Cells are used as Markdown, so the caller must escape text that comes from a record."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
