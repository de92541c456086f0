"""The order of rows, the number of steps, and outputs that are not finite. test_learning.py tests training itself."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from electra_dist.errors import UserError
from electra_dist.finetune import finetune_and_probe
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import Classifier, StockNetwork, labels_config
from electra_dist.finetune.task import TaskOutcome, label_weights
from electra_dist.finetune.training_loop import Diverged, Examples, count_steps, fit, predict, row_sequence
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.scoring.token_scores import score_places, sentence_log_probs


def test_every_pass_sees_each_row_once_in_a_new_order_and_incomplete_batches_give_no_step() -> None:
    """As in the reference, the number of steps is rows x epochs / batch, rounded down, and at least 1."""
    num_rows = 7
    rows = row_sequence(num_rows, seed=1)
    passes = [[next(rows) for _ in range(num_rows)] for _ in range(3)]
    settings = FinetuneConfig(batch=32, epochs=3.0)

    for rows_of_pass in passes:
        assert sorted(rows_of_pass) == list(range(num_rows))
    assert passes[0] != passes[1]
    assert count_steps(100, settings) == 9
    assert count_steps(64, settings) == 6
    assert count_steps(3, settings) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("in_tuple", [False, True])
def test_outputs_that_are_not_finite_are_no_predictions(bad: float, in_tuple: bool) -> None:
    """One such output among others is enough; minus infinity is the log-probability of what cannot be."""

    def function(ids_BS: torch.Tensor) -> Any:
        output_BS = ids_BS.float()
        output_BS[ids_BS == 6] = bad
        output_BS[ids_BS == 5] = -math.inf
        return (ids_BS, output_BS) if in_tuple else output_BS

    cpu = torch.device("cpu")
    assert len(list(predict(function, [[5], [7, 8], [9]], 0, 2, cpu))) == 2
    with pytest.raises(Diverged, match="not finite") as caught:
        list(predict(function, [[5], [7, 6], [9]], 0, 2, cpu))
    assert "\n" not in str(caught.value)


def test_scores_of_a_diverged_model_are_refused(encoder: Pretrained) -> None:
    weights = {name: value.clone() for name, value in encoder.state.items()}
    name = next(name for name in weights if "encoder" in name or "layer" in name)
    weights[name].view(-1)[0] = math.nan
    diverged = dataclasses.replace(encoder, state=weights)
    cpu = torch.device("cpu")
    ids = [[2, 7, 8, 9, 3], [2, 7, 3]]
    assert bool(torch.isfinite(sentence_log_probs(encoder, ids, cpu)).all())
    for score in (
        lambda: sentence_log_probs(diverged, ids, cpu),
        lambda: score_places(diverged, ids, [(0, 1)], cpu),
    ):
        with pytest.raises(Diverged):
            score()


@pytest.mark.parametrize("diverges_on_test_sets", [False, True])
def test_a_model_that_diverges_after_its_last_checked_loss_has_no_metrics(
    encoder: Pretrained, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, diverges_on_test_sets: bool
) -> None:
    def use_not_a_number(*_: Any) -> Any:
        list(predict(lambda ids_BS: ids_BS * math.nan, [[2, 7, 3]], 0, 1, torch.device("cpu")))
        raise AssertionError("the predictions were used")

    class Task:
        name = "made"
        metric = "accuracy"
        examples = staticmethod(lambda *_: type("Examples", (), {"ids": [[2, 7, 3]]}))
        model = staticmethod(lambda encoder, *_: encoder.backbone())

        predict_test_sets = staticmethod(use_not_a_number)

        @staticmethod
        def evaluate(*_: Any) -> TaskOutcome:
            return TaskOutcome(metrics={"accuracy": 1.0}, failures=()) if diverges_on_test_sets else use_not_a_number()

    monkeypatch.setattr(finetune_and_probe, "fit", lambda *_: 0.1)
    monkeypatch.setattr(finetune_and_probe, "identity", lambda *_: "")
    task: Any = Task()
    result = finetune_and_probe.finetune_task(
        encoder, task, FinetuneConfig(), 0, torch.device("cpu"), folder=tmp_path / "m"
    )
    assert not (tmp_path / "m").exists()
    assert (result.score, result.train_loss, result.metrics) == (None, None, {})
    assert result.failures[0].startswith("diverged: outputs of the model are not finite")


def test_early_stopping_keeps_the_weights_of_the_best_epoch(encoder: Pretrained) -> None:
    settings = FinetuneConfig(lr=1e-2, epochs=10.0, batch=2, early_stopping=2)
    network = StockNetwork(encoder, "SequenceClassification", labels_config("ab"), settings, seed=1)
    model = Classifier(network, encoder.special)
    examples = Examples(ids=[[2, 7, 3], [2, 8, 3], [2, 9, 3], [2, 6, 3]], target_NK=torch.tensor([[0], [1], [0], [1]]))
    weights: list[dict[str, torch.Tensor]] = []
    scores = iter([0.1, 0.5, 0.5, 0.3, 0.9])

    def score() -> float:
        assert not model.training
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
        return next(scores)

    told: list[tuple[str, int, int]] = []
    trained = fit(model, 2, examples, settings, 0, lambda *call: told.append(call), score)

    assert (trained.steps, count_steps(4, settings)) == (8, 20)
    activity = "train for 10 epochs of 4 examples, steps of 2"
    assert told == [(activity, step, 20) for step in range(9)]
    assert len(weights) == 4  # two epochs after the best one, of which an equal score is none that is better
    assert any(not torch.equal(weights[1][name], weights[3][name]) for name in weights[1])
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[1][name])


def test_early_stopping_scores_each_epoch_once_if_a_step_begins_in_one_and_ends_in_the_next(
    encoder: Pretrained,
) -> None:
    """Epochs of 3 examples end within the steps 2, 3, 5 and 6 of 2 examples each; step 6 is the last one."""
    settings = FinetuneConfig(epochs=4.0, batch=2, early_stopping=10)
    network = StockNetwork(encoder, "SequenceClassification", labels_config("ab"), settings, seed=1)
    examples = Examples(ids=[[2, 7, 3], [2, 8, 3], [2, 9, 3]], target_NK=torch.tensor([[0], [1], [0]]))
    steps: list[int] = []
    scored_after: list[int] = []

    def score() -> float:
        scored_after.append(len(steps))
        return 0.5

    model = Classifier(network, encoder.special)
    network.register_forward_hook(lambda *_: steps.append(1))
    trained = fit(model, 2, examples, settings, 0, score=score)

    assert trained.steps == 6
    assert scored_after == [2, 3, 5, 6]


def test_weights_of_labels_are_factors_of_their_losses(encoder: Pretrained) -> None:
    """The balanced weight of a label is N / (labels * N of the label), as in scikit-learn."""
    assert label_weights({"a": 6, "b": 2}, "ab", "balanced") == pytest.approx([8 / 12, 8 / 4])
    assert label_weights({"a": 6, "b": 2}, "ab", {"b": 3.0}) == [1.0, 3.0]
    assert label_weights({"a": 6, "b": 2}, "ab", "none") is None
    with pytest.raises(UserError, match="unknown labels: `c`, `d`; the labels are a, b"):
        label_weights({"a": 6, "b": 2}, "ab", {"c": 3.0, "b": 1.0, "d": 2.0})
    settings = FinetuneConfig(hidden_dropout=0.0, attention_dropout=0.0, head_dropout=0.0)
    network = StockNetwork(encoder, "SequenceClassification", labels_config("ab"), settings, seed=1).eval()
    ids, target = torch.tensor([[2, 7, 3], [2, 8, 3]]), torch.tensor([[0], [1]])
    keys: Any = None  # a class of transformers takes none
    losses = [Classifier(network, encoder.special)(ids[row : row + 1], target[row : row + 1], keys) for row in (0, 1)]

    weighted = Classifier(network, encoder.special, weights=[1.0, 3.0])(ids, target, keys)

    torch.testing.assert_close(weighted, (losses[0] + 3 * losses[1]) / 4)
