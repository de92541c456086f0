"""An encoder loaded from a Hugging Face folder or a run computes what the trained network computes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from support.fake_nvml import pynvml as fake_nvml
from transformers import AutoTokenizer, ElectraForPreTraining

from electra_dist import nvml
from electra_dist.config import ModelConfig, ObjectiveConfig
from electra_dist.config.load import load_config
from electra_dist.errors import NodeError, UserError
from electra_dist.model.attention import SdpaMask, attention_bias, derive
from electra_dist.model.encoder import DropoutKeys
from electra_dist.model.towers import build_towers
from electra_dist.pretrained.encoder import Pretrained, device_of_choice, load_pretrained
from electra_dist.pretrained.export import export_tower
from electra_dist.pretrained.weights import RunWeights, load_tower_folders
from electra_dist.scoring.token_scores import replaced_logits, sentence_log_probs
from electra_dist.tokenizer import Vocabulary

CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[2] / "configs"
# Rows of two texts and of one text: 2 is [CLS], 3 is [SEP].
PAIR_ROW = [2, 60, 61, 3, 70, 71, 72, 3]
SINGLE_ROW = [2, 62, 74, 75, 3]
PAD = 0


def vocabulary_file(vocabulary: Vocabulary, folder: Path) -> Path:
    """Write a vocab.txt to `folder` and return its path."""
    file = folder / "vocab.txt"
    file.write_text(vocabulary.text)
    return file


def test_an_exported_discriminator_has_the_logits_that_transformers_computes(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    state = build_towers(model, 3).state_dict()  # the weights of `encoder`
    vocab = vocabulary_file(vocabulary, tmp_path)
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf")

    loaded = load_pretrained(str(tmp_path / "hf"))

    assert loaded.digest == encoder.digest
    hf_model = ElectraForPreTraining.from_pretrained(tmp_path / "hf").eval()
    ids = torch.tensor([PAIR_ROW])
    token_types = derive(ids, loaded.special).token_type_BS
    with torch.no_grad():
        hf_logits = hf_model(ids, token_type_ids=token_types).logits[0]
    for position in (0, 3, 6):
        logit = replaced_logits(loaded, [PAIR_ROW], [position], CPU)
        assert logit.item() == pytest.approx(hf_logits[position].item(), abs=1e-5)


@pytest.mark.parametrize("sharing", ["embeddings", "none", "gdes", "all"])
def test_both_encoders_of_a_run_have_the_states_of_its_towers_whatever_the_towers_share(
    model: ModelConfig, vocabulary: Vocabulary, sharing: str
) -> None:
    changes: dict[str, object] = {"sharing": sharing, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    if sharing == "all":  # needs towers of one shape
        changes["generator"] = model.discriminator
    if sharing == "none":  # allows embeddings of two widths
        changes["generator_embedding_size"] = 20
    run_model = model.model_copy(update=changes)
    towers = build_towers(run_model, 5, ObjectiveConfig())
    with torch.no_grad():
        # With gdes the difference of the two tables starts at zero; random values show that it is added.
        for parameter in towers.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    state = towers.state_dict()

    discriminator = Pretrained.from_state("run", state, run_model, vocabulary, True)
    generator = Pretrained.from_state("run", state, run_model, vocabulary, True, "generator")

    ids = torch.tensor([PAIR_ROW])
    layout = derive(ids, discriminator.special)
    embedded = getattr(towers, "discriminator_embeddings", towers.embeddings)(ids, layout)
    expected = towers.discriminator(embedded, SdpaMask(attention_bias(layout, embedded.dtype)), DropoutKeys.off(ids))
    torch.testing.assert_close(discriminator.backbone()(ids), expected)
    embedded = towers.embeddings(ids, layout)
    expected = towers.generator(embedded, SdpaMask(attention_bias(layout, embedded.dtype)), DropoutKeys.off(ids))
    torch.testing.assert_close(generator.backbone()(ids), expected)


def test_a_run_trained_with_mlm_keeps_its_token_head_and_has_no_generator(
    model: ModelConfig, vocabulary: Vocabulary
) -> None:
    state = build_towers(model, 5, ObjectiveConfig(name="mlm")).state_dict()

    loaded = Pretrained.from_state("run", state, model, vocabulary, True)

    assert "layer_norm.weight" in loaded.head_state()
    assert sentence_log_probs(loaded, [PAIR_ROW, SINGLE_ROW], CPU).max() < 0
    with pytest.raises(UserError, match="no bidirectional generator"):
        Pretrained.from_state("run", state, model, vocabulary, True, "generator")


def test_the_states_of_a_row_do_not_depend_on_padding_or_on_other_rows(encoder: Pretrained) -> None:
    backbone = encoder.backbone(hidden_dropout=0.3).eval()
    num_pads = len(PAIR_ROW) - len(SINGLE_ROW)

    states_alone = backbone(torch.tensor([SINGLE_ROW]))
    states_in_batch = backbone(torch.tensor([PAIR_ROW, [*SINGLE_ROW, *[PAD] * num_pads]]))

    torch.testing.assert_close(states_in_batch[1, : len(SINGLE_ROW)], states_alone[0])


def test_an_export_with_a_tokenizer_that_keeps_accents_is_read_as_transformers_reads_it(
    model: ModelConfig, vocabulary: Vocabulary, encoder: Pretrained, tmp_path: Path
) -> None:
    words = [*vocabulary.tokens[:-2], "b\u00e4r", "the\u4e2d"]
    ids = {token: number for number, token in enumerate(words)}
    file = tokenizers.BertWordPieceTokenizer(ids, strip_accents=False, handle_chinese_chars=False).to_str()
    (tmp_path / "vocab.txt").write_text(file)
    state = build_towers(model, 3).state_dict()
    export_tower(state, model, "discriminator", Vocabulary.read(tmp_path / "vocab.txt"), True, tmp_path / "hf")

    loaded = load_pretrained(str(tmp_path / "hf"))

    text = "The B\u00c4R the\u4e2d ba\u0308r"
    (row,) = loaded.tokenizer.encode([text])
    assert [loaded.vocabulary.tokens[number] for number in row][:3] == ["the", "b\u00e4r", "the\u4e2d"]
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == [2, *row, 3]
    again = Pretrained.from_state("run", state, model, Vocabulary(file, "tokenizer.json"), lowercase=True)
    assert again.tokenizer.encode([text]) == [row]


def test_a_vocabulary_with_fewer_lines_than_the_embeddings_have_rows_is_read(
    model: ModelConfig, vocabulary: Vocabulary, encoder: Pretrained, tmp_path: Path
) -> None:
    state = build_towers(model, 3).state_dict()
    vocab = vocabulary_file(vocabulary, tmp_path)
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    lines = vocabulary.text.splitlines()[:-5]
    (tmp_path / "hf" / "vocab.txt").write_text("\n".join([*lines, "", "the", ""]) + "\n")

    loaded = load_pretrained(str(tmp_path / "hf"))

    assert loaded.model.vocab_size == vocabulary.size
    (row,) = loaded.tokenizer.encode(["the"])
    assert row == [len(lines) + 1]
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")("the")["input_ids"] == [2, *row, 3]
    assert loaded.backbone()(torch.tensor([[2, *row, 3]])).isfinite().all()


def test_folders_without_an_electra_model_and_too_small_vocabularies_are_refused(
    tmp_path: Path, encoder: Pretrained, model: ModelConfig
) -> None:
    with pytest.raises(UserError, match="neither a run"):
        load_pretrained(str(tmp_path))  # an empty folder
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(UserError, match="neither an ELECTRA model"):
        load_pretrained(str(tmp_path))

    small_vocabulary = Vocabulary("\n".join(encoder.vocabulary.tokens[:50]), "small")
    state = build_towers(model, 3).state_dict()
    with pytest.raises(UserError, match="the vocabulary has 50 entries"):
        Pretrained.from_state("x", state, model, small_vocabulary, True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"model": '),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"vocab": ["a"]}, "normalizer": {}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0}}, "normalizer": null}'),
        ("config.json", "\x00"),
    ],
)
def test_a_damaged_file_of_a_model_is_refused_in_one_line(
    encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path, name: str, text: str
) -> None:
    state = build_towers(model, 3).state_dict()
    vocab = vocabulary_file(vocabulary, tmp_path)
    export_tower(state, model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf")
    (tmp_path / "hf" / name).write_text(text)
    with pytest.raises(UserError, match=f"{name}: .*again") as caught:
        load_pretrained(str(tmp_path / "hf"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [b'{"sha256": ', b"[]", b"\xff\xfe", None])
def test_a_damaged_tokenizer_file_of_a_run_is_refused_in_one_line(tmp_path: Path, damage: bytes | None) -> None:
    if damage is not None:
        (tmp_path / "tokenizer.json").write_bytes(damage)
    config = load_config(CONFIGS / "demo_cpu_bert.yaml", [f"run_dir={tmp_path}"])
    run = RunWeights(config=config, state=None, weights={}, damaged=[], steps=(1,))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"tokenizer\.json: .* start the run once more") as caught:
        run.tokenizer  # noqa: B018
    assert "\n" not in str(caught.value)


def test_a_model_is_not_tuned_or_scored_on_the_cpu_of_a_node_whose_gpus_torch_does_not_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "pynvml", fake_nvml)
    fake_nvml.configure([{}])
    assert device_of_choice() == torch.device("cpu")  # the tests ask for it by DS_ACCELERATOR
    monkeypatch.delenv("DS_ACCELERATOR")
    with pytest.raises(NodeError, match="has 1 GPU, but torch sees none"):
        device_of_choice()


@pytest.fixture
def exported(encoder: Pretrained, model: ModelConfig, vocabulary: Vocabulary, tmp_path: Path) -> Path:
    """The folder of an exported discriminator."""
    vocab = vocabulary_file(vocabulary, tmp_path)
    export_tower(
        build_towers(model, 3).state_dict(), model, "discriminator", Vocabulary.read(vocab), True, tmp_path / "hf"
    )
    return tmp_path / "hf"


def refusal(folder: Path) -> str:
    """Return the one line with which a folder is refused."""
    with pytest.raises(UserError) as caught:
        load_pretrained(str(folder))
    message = str(caught.value)
    assert message.startswith(str(folder)) and "again" in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "size", "words"),
    [
        ("num_hidden_layers", 1, "have electra.encoder.layer.1."),
        ("num_hidden_layers", 3, "lack layers"),
        ("num_hidden_layers", 10_000, "lack layers"),
        ("intermediate_size", 63, "has the shape"),
        ("hidden_size", 34, "has the shape"),
        ("embedding_size", 32, "embeddings_project"),
        ("embedding_size", 20, "has the shape"),
        ("max_position_embeddings", 65, "has the shape"),
        ("type_vocab_size", 3, "has the shape"),
    ],
)
def test_a_folder_whose_config_describes_another_model_than_its_weights_is_refused(
    exported: Path, key: str, size: int, words: str
) -> None:
    file = exported / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: size}))
    assert words in refusal(exported)


Weights = dict[str, torch.Tensor]


def cut(name: str) -> Callable[[Weights], None]:
    """Return a function that takes the last row from a parameter."""

    def change(weights: Weights) -> None:
        weights[name] = weights[name][:-1].clone()

    return change


def without(name: str) -> Callable[[Weights], None]:
    """Return a function that takes a parameter away."""

    def change(weights: Weights) -> None:
        del weights[name]

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("electra.embeddings.LayerNorm.bias"), "lack embeddings.layer_norm.bias"),
        (without("electra.encoder.layer.1.output.dense.bias"), "lack discriminator.layers.1"),
        (without("electra.embeddings.word_embeddings.weight"), "lack 'embeddings.word.weight'"),
        (cut("electra.embeddings.word_embeddings.weight"), "the token table has the shape"),
        (cut("electra.encoder.layer.0.attention.self.key.weight"), "has the shape"),
        (cut("discriminator_predictions.dense.bias"), "has the shape"),
        (lambda weights: weights.update({"electra.encoder.more": torch.ones(1)}), "have electra.encoder.more"),
        (lambda weights: weights.update({"electra.embeddings.LayerNorm.bias": torch.tensor(0.5)}), "has the shape ()"),
    ],
    ids=["norm", "bias", "table", "rows", "key", "head", "more", "scalar"],
)
def test_a_folder_with_a_parameter_less_or_more_or_of_another_shape_is_refused(
    exported: Path, model: ModelConfig, change: Callable[[Weights], None], words: str
) -> None:
    """`train.init_from` refuses it, too, and leaves no parameter at a random value."""
    weights = load_file(exported / "model.safetensors")
    change(weights)
    save_file(weights, exported / "model.safetensors")
    assert words in refusal(exported)
    with pytest.raises(UserError, match=re.escape(words)):
        load_tower_folders(build_towers(model, 1), exported, None)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "link.safetensors"]
)
def test_weights_outside_the_folder_are_not_read(exported: Path, tmp_path: Path, name: str) -> None:
    """The file that the index names is there, and has the right weights."""
    weights = exported / "model.safetensors"
    (exported / "sub").mkdir()
    (exported / "sub" / "x.safetensors").write_bytes(weights.read_bytes())
    (exported / "link.safetensors").symlink_to("../x.safetensors")
    weights.rename(tmp_path / "x.safetensors")
    (exported / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="leads out of the model's folder"):
        load_pretrained(str(exported))


def test_links_within_the_folder_and_in_the_cache_of_the_hub_are_followed(
    exported: Path, tmp_path: Path, encoder: Pretrained
) -> None:
    weights = exported / "model.safetensors"
    weights.rename(exported / "real.safetensors")
    weights.symlink_to("real.safetensors")
    assert load_pretrained(str(exported)).digest == encoder.digest
    hub = tmp_path / "models--x"
    snapshot = hub / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    (hub / "blobs").mkdir()
    (exported / "real.safetensors").rename(hub / "blobs" / "abc")
    exported.rename(snapshot)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert load_pretrained(str(snapshot)).digest == encoder.digest
    (hub / "blobs" / "abc").rename(tmp_path / "abc")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../abc")
    with pytest.raises(UserError, match="leads out of the model's folder"):
        load_pretrained(str(snapshot))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "pytorch_model.bin", "vocab.txt", "tokenizer.json"]
)
def test_a_named_pipe_in_a_model_folder_is_refused(exported: Path, name: str) -> None:
    if name == "pytorch_model.bin":
        (exported / "model.safetensors").unlink()
    (exported / name).unlink(missing_ok=True)
    os.mkfifo(exported / name)
    with pytest.raises(UserError, match=f"{name}: is a named pipe"):
        load_pretrained(str(exported))
