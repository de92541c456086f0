"""Every function of the library checks its arguments: a wrong one is named in one line, with what is accepted."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.real_runs import write_corpus
from support.small_encoder import encoder, model, vocabulary

import electra_dist as ed
from electra_dist.config import ModelConfig
from electra_dist.config.load import dump_yaml
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.run.folder import open_run
from electra_dist.tokenizer import Vocabulary

__all__ = ["encoder", "model", "vocabulary"]
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo_cpu_bert.yaml"
FUNCTIONS = [name for name in ed.__all__ if inspect.isfunction(getattr(ed, name))]


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the one line with which a call is refused."""
    with pytest.raises(ed.UserError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def corpus_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a corpus of 30 rows of 32 tokens, of a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(str(folder), [20, 10])
    return folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_has_annotations_and_checks_them(name: str) -> None:
    function = getattr(ed, name)
    parameters = inspect.signature(function).parameters
    assert all(parameter.annotation is not parameter.empty for parameter in parameters.values())
    message = refusal(function, **{argument: object() for argument in parameters})
    assert message.startswith(f"{name}: the argument {next(iter(parameters))} is of type object, but must be ")
    assert message.endswith(f"see help(electra_dist.{name})")


@pytest.mark.parametrize(
    ("name", "arguments", "argument", "accepted"),
    [
        ("load", {"model": "runs/x", "tower": "disc"}, "tower is 'disc'", "'discriminator' or 'generator'"),
        ("load", {"model": "runs/x", "tower": None}, "tower is None", "'discriminator' or 'generator'"),
        ("load", {"model": 5}, "model is 5", "string or an instance of Path"),
        ("load", {"model": "runs/x", "step": "1000"}, "step is '1000'", "integer"),
        ("load", {"model": "runs/x", "step": -1}, "step is -1", "greater than or equal to 0"),
        ("load", {"model": "runs/x", "step": True}, "step is True", "integer"),
        ("load", {"model": "runs/x", "step": 1e3}, "step is 1000.0", "integer"),
        ("open_run", {"folder": 3}, "folder is 3", "string or an instance of Path"),
        ("open_run", {"folder": "runs/x", "overrides": "seed=1"}, "overrides is 'seed=1'", "list"),
        ("load_config", {"path": {"seed": 1}}, "path is of type dict", "string or an instance of Path"),
        ("load_config", {"path": CONFIG, "overrides": "seed=1"}, "overrides is 'seed=1'", "list"),
        ("load_config", {"path": CONFIG, "overrides": ["seed=1", 2]}, "overrides[1] is 2", "string"),
        ("open_corpus", {"source": None}, "source is None", "string or an instance of Path or an instance of Config"),
        ("open_corpus", {"source": {"seed": 1}}, "source is of type dict", "Config"),
        ("open_corpus", {"source": "x", "shuffle_window_shards": 0}, "shuffle_window_shards is 0", "greater than 0"),
        ("open_corpus", {"source": "x", "seed": -1}, "seed is -1", "greater than or equal to 0"),
        ("open_corpus", {"source": "x", "seed": 1.5}, "seed is 1.5", "integer"),
        ("build_towers", {"config": str(CONFIG)}, "config is '", "instance of Config"),
        ("build_objective", {"config": "x.yaml", "corpus": "corpus"}, "config is 'x.yaml'", "instance of Config"),
        (
            "load_weights",
            {"module": "x", "run_dir": "runs/x"},
            "module is 'x'",
            "Objective or an instance of ElectraT",
        ),
        ("step_input", {"objective": torch.nn.Linear(1, 1), "ids": [[1]]}, "objective is of type Linear", "Objective"),
        ("score_texts", {"model": "runs/x", "texts": ["a"]}, "model is 'runs/x'", "instance of Pretrained"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_accepted(
    name: str, arguments: dict[str, Any], argument: str, accepted: str
) -> None:
    message = refusal(getattr(ed, name), **arguments)
    assert f"the argument {argument}" in message and accepted in message.partition("but must be ")[2], message
    is_by_place = list(inspect.signature(getattr(ed, name)).parameters)[: len(arguments)] == list(arguments)
    if is_by_place and name != "open_corpus":
        assert refusal(getattr(ed, name), *arguments.values()) == message


@pytest.mark.parametrize("name", ["score_texts", "replaced_probability"])
def test_one_text_is_not_scored_as_a_list_of_letters(name: str, encoder: Pretrained) -> None:
    score = getattr(ed, name)
    assert "texts is 'the chef', but must be a list of texts, such as ['the chef']" in refusal(
        score, encoder, "the chef"
    )
    assert "texts[1] is 5, but must be a valid string" in refusal(score, encoder, ["the chef", 5])
    assert "without half of a surrogate pair" in refusal(score, encoder, ["half an emoji \ud83d here"])
    for texts in (np.array(["a"]), {"a"}, None, (text for text in "ab")):
        assert "but must be a list" in refusal(score, encoder, texts)
    assert len(score(encoder, ["the chef"])) == len(score(encoder, ("the chef",))) == 1
    assert "is 'the chef', one text; pass a list" in refusal(encoder.tokenizer.encode, "the chef")


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, float("nan"), "0.1", None])
def test_a_dropout_that_is_no_probability_is_refused(rate: Any, encoder: Pretrained) -> None:
    for name in ("hidden_dropout", "attention_dropout"):
        assert f"backbone: the argument {name} is " in refusal(encoder.backbone, **{name: rate})
    assert encoder.backbone(np.float32(0.5), attention_dropout=0).model.hidden_dropout == 0.5


def test_a_run_is_opened_by_a_string_as_by_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump_yaml(ed.load_config(CONFIG)))
    assert ed.open_run(str(tmp_path)) == ed.open_run(tmp_path) == open_run(str(tmp_path))
    assert ed.open_run(str(tmp_path), ["seed=9"]).seed == 9
    assert "no such folder" in refusal(ed.open_run, str(tmp_path / "mine"))


@pytest.mark.parametrize("method", ["batch", "row_ids", "batches"])
@pytest.mark.parametrize(
    "wrong", [{"step": -1}, {"step": "3"}, {"step": 1.0}, {"step": True}, {"global_batch": 0}, {"global_batch": "8"}]
)
def test_a_step_or_a_batch_that_is_no_number_of_rows_is_refused(
    corpus_dir: Path, method: str, wrong: dict[str, Any]
) -> None:
    arguments = {"step": 3, "global_batch": 8} | wrong
    if method == "batches":
        arguments["first_step"] = arguments.pop("step")
    with ed.open_corpus(corpus_dir) as corpus:
        message = refusal(getattr(corpus, method), **arguments)
        assert f"{method}: the argument " in message and next(iter(wrong)) in message


def test_numbers_of_numpy_are_numbers_and_steps_beyond_64_bits_are_refused(corpus_dir: Path) -> None:
    with ed.open_corpus(corpus_dir, seed=np.int64(3)) as corpus:
        assert torch.equal(corpus.batch(np.int64(2), np.uint8(4)), corpus.batch(2, 4))
        for method in (corpus.batch, corpus.row_ids):
            assert "step 9007199254740992 with global_batch 16777216" in refusal(method, 2**53, 2**24)
        assert "step 9007199254740992 with" in refusal(next, corpus.batches(2**24, 2**53))


def test_an_objective_and_its_input_must_fit_the_corpus(corpus_dir: Path) -> None:
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 1, "intermediate_size": 16}
    changes = [
        f"model.{tower}.{key}={value}" for tower in ("discriminator", "generator") for key, value in sizes.items()
    ]
    changes += ["model.embedding_size=16", "data.seq_len=32", "model.vocab_size=300"]
    config = ed.load_config(CONFIG, changes)
    with ed.open_corpus(corpus_dir) as corpus:
        assert "the argument corpus is 'corpus'" in refusal(ed.build_objective, config, "corpus")
        other = ed.load_config(CONFIG, [*changes, "model.vocab_size=299"])
        assert "vocabulary of 300 entries, but model.vocab_size is 299" in refusal(ed.build_objective, other, corpus)
        larger = ed.build_objective(ed.load_config(CONFIG, [*changes, "model.vocab_size=999"]), corpus)
        assert larger.towers.model.vocab_size == 300
        objective = ed.build_objective(config, corpus)
        ids = corpus.batch(0, 4)
        assert ed.step_input(objective, ids).ids_BS is ids
        for wrong in (ids[0], ids.int(), ids.float(), ids[:0], ids + 300, ids - 300, ids[None]):
            assert refusal(ed.step_input, objective, wrong).startswith("step_input: the argument ids ")
        assert "the argument step is -1" in refusal(ed.step_input, objective, ids, step=-1)
        assert "the argument seed is '7'" in refusal(ed.step_input, objective, ids, seed="7")


def test_a_folder_of_hugging_face_has_no_steps_and_one_tower(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    (tmp_path / "vocab.txt").write_text(vocabulary.text)
    state = build_towers(model, 3).state_dict()
    export_tower(state, model, "discriminator", Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path / "hf")
    assert ed.load(tmp_path / "hf").digest == encoder.digest
    assert "step is 10, but" in refusal(ed.load, tmp_path / "hf", step=10)
    assert "holds no generator" in refusal(ed.load, tmp_path / "hf", "generator")
    assert "step is 10, but" in refusal(ed.load, f"random:{CONFIG}", step=10)
