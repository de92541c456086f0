"""Compare fine-tuning and scores of the architecture `modern` with Hugging Face's ModernBERT classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.small_encoder import head_parameters
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    ModernBertForMaskedLM,
    ModernBertForMultipleChoice,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
    ModernBertModel,
    pipeline,
)

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import finetune_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.labelled_texts import TextSpec
from electra_dist.finetune.models import TaskModel
from electra_dist.finetune.seed_folder import write_seed_folder
from electra_dist.finetune.squad_task import SquadTask
from electra_dist.finetune.stored_scores import Measured
from electra_dist.finetune.tagging_task import TaggingTask
from electra_dist.finetune.task import Task
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.training_loop import peak_lr
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained, load_pretrained
from electra_dist.pretrained.export import export_towers
from electra_dist.scoring.token_scores import build_token_scorer
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
FAST = FinetuneConfig(lr=3e-3, layer_decay=1.0, epochs=4, batch=16, max_length=24)
WITHOUT_DROPOUT = FAST.model_copy(update={"head_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout": 0.0})
RESULT = Measured(
    task="t", seed=0, mode="finetune", identity="i", metric="f1", score=0.5, metrics={}, failures=(),
    train_loss=0.1, steps=1, examples=1, seconds=1.0,
)  # fmt: skip
SENTENCES = ["the dog saw a bird", "many old trees", "the king knew the girl near a house"]


@pytest.fixture
def exports(modern_model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path) -> Path:
    """A folder with the exports of both towers, in `generator` and `discriminator`; their weights are random."""
    towers = build_towers(modern_model, 3)
    generator = torch.Generator().manual_seed(6)
    for head in (towers.generator_head, towers.discriminator_head):
        for parameter in head.parameters():
            parameter.data.normal_(0.2, 0.5, generator=generator)
    (tmp_path / "vocab.txt").write_text(vocabulary.text)
    export_towers(
        towers.state_dict(), modern_model, Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path / "export"
    )
    return tmp_path / "export"


def text_task(folder: Path, labels: list[str], kind: Any = "classification") -> TextTask:
    """Write a small task of single texts into a folder, and return the task.

    Args:
        folder: folder of the task's files, which is created if it is missing.
        labels: the labels; each sentence of SENTENCES has the label at the same place.
        kind: "classification" or "regression".
    """
    folder.mkdir(exist_ok=True)
    for stem in ("train", "dev"):
        lines = [f"{SENTENCES[number % len(labels)]}\t{label}" for number, label in enumerate(labels * 8)]
        (folder / f"{stem}.tsv").write_text("text\tlabel\n" + "\n".join(lines) + "\n")
    return TextTask(TextSpec(name="custom", text_a="text", text_b=None, label="label", kind=kind), folder)


def with_trained_head(model: TaskModel) -> Any:
    """Return a task's model in eval mode, after setting all parameters of its head to large random values.

    An untrained head has biases of zero, with which a missing bias in an export would not be noticed.
    """
    generator = torch.Generator().manual_seed(5)
    for parameter in head_parameters(model):
        parameter.data.normal_(0.0, 0.7, generator=generator)
    return model.eval()


def save(folder: Path, task: Task, model: TaskModel, encoder: Pretrained) -> None:
    """Write a tuned model into a folder, in the form that Hugging Face's classes read."""
    write_seed_folder(folder, encoder, model, FAST, RESULT, ())


def our_ids(encoder: Pretrained, text: str) -> torch.Tensor:
    """Return the token ids of a text with [CLS] before and [SEP] after it, as one row, int64 [1, S]."""
    return torch.tensor([[encoder.special.cls, *encoder.tokenizer.encode([text])[0], encoder.special.sep]])


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_hugging_faces_classes_give_the_logits_of_the_trained_classifier_and_regression(
    modern_encoder: Pretrained, tmp_path: Path, pooling: str
) -> None:
    settings = FAST.model_copy(update={"pooling": pooling})
    for name, labels, kind in (("c", ["a", "b", "c"], "classification"), ("r", ["-2", "6"], "regression")):
        task = text_task(tmp_path / name, labels, kind)
        model = with_trained_head(task.model(modern_encoder, settings, seed=0))
        save(tmp_path / "m", task, model, modern_encoder)
        assert json.loads((tmp_path / "m" / "config.json").read_text())["classifier_pooling"] == pooling

        theirs, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m", output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        actual = theirs.eval()(**tokenizer(SENTENCES, padding=True, return_tensors="pt")).logits
        expected = torch.cat([model.predict(our_ids(modern_encoder, sentence)) for sentence in SENTENCES])
        if kind == "regression":
            expected = -2 + 8 * expected
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-5)
        # The head of a task is not taken for one that detects replaced tokens.
        assert load_pretrained(str(tmp_path / "m")).head_state() == {}


def test_a_generator_narrower_than_its_tables_is_refused_because_transformers_has_no_class_for_it(
    modern_model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    narrow = modern_model.generator.model_copy(update={"hidden_size": 16})
    model = modern_model.model_copy(update={"generator": narrow})
    state = build_towers(model, 3).state_dict()
    generator = Pretrained.from_state("narrow", state, model, vocabulary, lowercase=True, tower="generator")
    task = text_task(tmp_path / "task", ["a", "b"])

    with pytest.raises(
        UserError, match=r"narrow: the layers are 16 wide and the token table is 32 wide, .* head=paper"
    ):
        task.model(generator, FAST, seed=0)
    task.model(generator, FAST.model_copy(update={"head": "paper"}), seed=0)


def test_the_head_of_a_choice_among_answers_is_not_taken_for_one_that_detects_replaced_tokens(
    modern_encoder: Pretrained, exports: Path, tmp_path: Path
) -> None:
    """It has one output, and its parameters have the names and shapes of a discriminator's head."""
    choice = ModernBertForMultipleChoice.from_pretrained(exports / "discriminator")
    choice.save_pretrained(tmp_path / "choice")
    shutil.copytree(exports / "discriminator", tmp_path / "choice", ignore=_not_of_a_tokenizer, dirs_exist_ok=True)

    assert load_pretrained(str(exports / "discriminator")).head_state()
    assert load_pretrained(str(tmp_path / "choice")).head_state() == {}


def _not_of_a_tokenizer(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name not in ("vocab.txt", "tokenizer.json", "tokenizer_config.json")]


@torch.no_grad()
def test_hugging_faces_classes_give_the_logits_of_spans_and_of_tags(
    modern_encoder: Pretrained, tmp_path: Path
) -> None:
    paragraph = {"context": "the dog saw a bird", "qas": [{"id": "q", "question": "who?", "answers": [
        {"text": "dog", "answer_start": 4}]}]}  # fmt: skip
    for stem in ("train", "dev"):
        (tmp_path / f"{stem}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
        (tmp_path / f"{stem}.txt").write_text("the O\nking B-PER\n\nold O\n")
    squad, ner = SquadTask(1, tmp_path), TaggingTask("ner", tmp_path)
    spans = with_trained_head(squad.model(modern_encoder, FAST, seed=0))
    tags = with_trained_head(ner.model(modern_encoder, FAST, seed=0))
    save(tmp_path / "spans", squad, spans, modern_encoder)
    save(tmp_path / "tags", ner, tags, modern_encoder)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tags")
    their_spans = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "spans").eval()
    their_tags = AutoModelForTokenClassification.from_pretrained(tmp_path / "tags").eval()
    for sentence in SENTENCES:
        inputs = tokenizer(sentence, return_tensors="pt")
        start, end = spans.predict(our_ids(modern_encoder, sentence)).unbind(-1)
        output = their_spans(**inputs)
        torch.testing.assert_close(output.start_logits, start, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(output.end_logits, end, atol=2e-5, rtol=1e-5)
        expected = tags.predict(our_ids(modern_encoder, sentence))
        torch.testing.assert_close(their_tags(**inputs).logits, expected, atol=2e-5, rtol=1e-5)


def test_a_stock_script_starts_with_the_loss_and_the_gradients_of_fine_tuning(exports: Path, tmp_path: Path) -> None:
    """Hugging Face's class reads the export of a discriminator with all its layers except the output layer."""
    encoder = load_pretrained(str(exports / "discriminator"))
    task = text_task(tmp_path / "data", ["a", "b", "c"])
    model = task.model(encoder, WITHOUT_DROPOUT, seed=0)
    ours: Any = model.network.model
    theirs = ModernBertForSequenceClassification.from_pretrained(
        exports / "discriminator", num_labels=3, ignore_mismatched_sizes=True, classifier_pooling="cls"
    )
    with torch.no_grad():
        theirs.classifier.weight.copy_(ours.classifier.weight)
        theirs.classifier.bias.copy_(ours.classifier.bias)
    ids = our_ids(encoder, SENTENCES[2])

    loss = model.train()(ids, torch.tensor([[2]]), DropoutKeys.off(ids))
    loss.backward()
    their_loss = theirs.train()(input_ids=ids, labels=torch.tensor([2])).loss
    their_loss.backward()

    torch.testing.assert_close(loss, their_loss, atol=1e-6, rtol=1e-5)
    for our_layer, their_layer in (
        (ours.model.layers[1].attn.Wqkv, theirs.model.layers[1].attn.Wqkv),
        (ours.head.dense, theirs.head.dense),
    ):
        torch.testing.assert_close(our_layer.weight.grad, their_layer.weight.grad, atol=1e-6, rtol=1e-4)


def test_a_small_classification_is_learnt_and_predicted_by_a_pipeline(
    modern_encoder: Pretrained, tmp_path: Path
) -> None:
    task = text_task(tmp_path / "data", ["a", "b", "c"])

    result = finetune_task(modern_encoder, task, FAST, 1, CPU, folder=tmp_path / "m")

    classifier = pipeline("text-classification", model=str(tmp_path / "m"), device="cpu")
    assert [answer["label"] for answer in classifier(SENTENCES)] == ["a", "b", "c"]
    assert result.score == 1.0
    # The tuned model is a starting point for another task.
    assert load_pretrained(str(tmp_path / "m")).model.architecture == "modern"


@torch.no_grad()
def test_layer_states_are_hugging_faces_hidden_states(exports: Path) -> None:
    encoder = load_pretrained(str(exports / "discriminator"))
    ids = our_ids(encoder, SENTENCES[2])

    states = encoder.backbone().eval().layer_states(ids)

    theirs = ModernBertModel.from_pretrained(exports / "discriminator").eval()
    expected = theirs(input_ids=ids, output_hidden_states=True)
    assert len(states) == len(expected.hidden_states) == 5
    for state, hidden_state in zip(states[:-1], expected.hidden_states):
        torch.testing.assert_close(state, hidden_state, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[-1], expected.last_hidden_state, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_scores_of_tokens_are_those_of_hugging_faces_logits(exports: Path) -> None:
    discriminator = load_pretrained(str(exports / "discriminator"))
    ids = our_ids(discriminator, SENTENCES[0])
    logits = ModernBertForTokenClassification.from_pretrained(exports / "discriminator").eval()(input_ids=ids).logits
    scores = build_token_scorer(discriminator, CPU)(ids.tolist(), lambda *_: None)
    torch.testing.assert_close(scores[0], F.logsigmoid(-logits[0, 1:-1, 0]), atol=1e-5, rtol=1e-5)

    generator = load_pretrained(str(exports / "generator"))
    theirs = ModernBertForMaskedLM.from_pretrained(exports / "generator").eval()
    scores = build_token_scorer(generator, CPU)(ids.tolist(), lambda *_: None)
    for position in range(1, ids.shape[1] - 1):
        masked = ids.clone()
        masked[0, position] = generator.special.mask
        log_probs = theirs(input_ids=masked).logits[0, position].log_softmax(-1)
        torch.testing.assert_close(scores[0][position - 1], log_probs[ids[0, position]], atol=1e-5, rtol=1e-5)


def test_the_last_layer_norm_has_the_learning_rate_of_the_top_layer() -> None:
    settings = FinetuneConfig(lr=1.0, layer_decay=0.5)
    for prefix, embeddings in (
        ("network.model.model.", "embeddings.tok_embeddings"),
        ("network.backbone.", "embeddings.word"),
    ):
        layers = "layers" if "model" in prefix else "encoder.layers"
        norm = "final_norm" if "model" in prefix else "encoder.final_norm"
        assert peak_lr(f"{prefix}{norm}.weight", prefix, 4, settings) == 0.25
        assert peak_lr(f"{prefix}{layers}.3.contract.weight", prefix, 4, settings) == 0.25
        assert peak_lr(f"{prefix}{embeddings}.weight", prefix, 4, settings) == 0.5**6
    assert peak_lr("network.model.head.dense.weight", "network.model.model.", 4, settings) == 1.0
