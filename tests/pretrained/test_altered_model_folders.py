"""Model folders with altered settings have the states that transformers computes on the same folder, or are refused.

Every case alters keys of config.json whose weights stay as they are. Its outcome is one of three: "obeyed" changes the
states, as in transformers; "without effect" does not, there either; "refused" names the key in one line.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.modern_models import SPECIAL, VOCAB_SIZE
from transformers import (
    AutoModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForTokenClassification,
)

from electra_dist.config import Config, ModelConfig
from electra_dist.errors import UserError
from electra_dist.model.attention import derive
from electra_dist.model.towers import ElectraTowers, build_towers
from electra_dist.pretrained.encoder import Backbone, load_pretrained
from electra_dist.pretrained.hf_folders import read_hugging_face_model_config
from electra_dist.pretrained.weights import load_tower_folders, read_frozen_generator

OBEYED, WITHOUT_EFFECT, REFUSED = "obeyed", "without effect", "refused"
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": SPECIAL.pad,
}
ELECTRA = {"model_type": "electra", "embedding_size": 24, "layer_norm_eps": 1e-12, "type_vocab_size": 2, **SIZES}
# As transformers 4 writes it, without `layer_types` and `rope_parameters`.
MODERN = {
    "model_type": "modernbert",
    "global_attn_every_n_layers": 3,
    "local_attention": 16,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "num_labels": 1,
    **SIZES,
}
FULL, SLIDING = "full_attention", "sliding_attention"
GONE = "taken out"

ELECTRA_CASES: list[tuple[str, dict[str, Any]]] = [
    *((REFUSED, {"hidden_act": name}) for name in ("relu", "gelu_new", "gelu_pytorch_tanh", "silu", "linear", None)),
    (REFUSED, {"hidden_act": ["gelu"]}),
    (REFUSED, {"position_embedding_type": "relative_key"}),
    (REFUSED, {"position_embedding_type": "relative_key_query"}),
    (REFUSED, {"is_decoder": True}),
    (REFUSED, {"add_cross_attention": True, "is_decoder": True}),
    (REFUSED, {"is_encoder_decoder": True}),
    (REFUSED, {"tie_word_embeddings": False}),
    (REFUSED, {"pruned_heads": {"0": [1]}}),
    (REFUSED, {"per_layer_config": {"1": {"hidden_act": "relu"}}}),
    (REFUSED, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}),
    *((REFUSED, {key: name}) for key in ("torch_dtype", "dtype") for name in ("float16", "bfloat16", "int8", 16)),
    (REFUSED, {"dtype": "float16", "torch_dtype": "float32"}),
    *((REFUSED, {"layer_norm_eps": value}) for value in (0.0, -1.0, None, "none", float("nan"))),
    (REFUSED, {"num_attention_heads": 5}),
    (OBEYED, {"layer_norm_eps": 0.5}),
    (OBEYED, {"num_attention_heads": 4}),
    (WITHOUT_EFFECT, {"hidden_act": "gelu", "position_embedding_type": "absolute", "pruned_heads": {}}),
    (WITHOUT_EFFECT, {"is_decoder": False, "tie_word_embeddings": True, "dtype": "float32"}),
    (WITHOUT_EFFECT, {"torch_dtype": "float32", "architectures": ["ElectraForSequenceClassification"]}),
    (WITHOUT_EFFECT, {"hidden_dropout_prob": 0.9, "attention_probs_dropout_prob": 0.9, "classifier_dropout": 0.9}),
    (WITHOUT_EFFECT, {"initializer_range": 5.0, "summary_type": "mean", "summary_activation": "relu"}),
    (WITHOUT_EFFECT, {"pad_token_id": 7, "use_cache": False, "output_hidden_states": True}),
    (WITHOUT_EFFECT, {"id2label": {"0": "a"}, "label2id": {"a": 0}, "gradient_checkpointing": True, "note": "mine"}),
    (WITHOUT_EFFECT, {"type_vocab_size": GONE, "layer_norm_eps": GONE}),
]
MODERN_CASES: list[tuple[str, dict[str, Any]]] = [
    (REFUSED, {"hidden_activation": "relu"}),
    (REFUSED, {"hidden_activation": "gelu_new"}),
    *((REFUSED, {key: True}) for key in ("norm_bias", "mlp_bias", "attention_bias", "classifier_bias")),
    (REFUSED, {"decoder_bias": False}),
    (REFUSED, {"classifier_activation": "relu"}),
    (REFUSED, {"is_decoder": True}),
    (REFUSED, {"tie_word_embeddings": False}),
    (REFUSED, {"quantization_config": {"quant_method": "gptq"}}),
    (REFUSED, {"per_layer_config": {"1": {"local_attention": 4}}}),
    (REFUSED, {"torch_dtype": "bfloat16"}),
    (REFUSED, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    (REFUSED, {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}}),
    (REFUSED, {"rope_parameters": {SLIDING: {"type": "linear", "factor": 2.0, "rope_theta": 1e4}}}),
    (REFUSED, {"rope_parameters": [1e4]}),
    (REFUSED, {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}),
    (REFUSED, {"rope_parameters": {FULL: 1e4}}),
    (REFUSED, {"rope_parameters": {SLIDING: {"rope_theta": 1e4}, FULL: None}}),
    (REFUSED, {"rope_parameters": {FULL: {"rope_theta": None}}, "global_rope_theta": GONE}),
    (REFUSED, {"global_rope_theta": None}),
    (REFUSED, {"head_dim": 8}),
    (REFUSED, {"sliding_window": 2}),
    (REFUSED, {"layer_types": [SLIDING, FULL, SLIDING, SLIDING]}),
    (REFUSED, {"layer_types": [FULL, SLIDING, SLIDING]}),
    (REFUSED, {"layer_types": FULL}),
    (REFUSED, {"layer_types": []}),
    (REFUSED, {"global_attn_every_n_layers": 0}),
    (REFUSED, {"local_attention": 0}),
    (REFUSED, {"norm_eps": 0.0}),
    (OBEYED, {"norm_eps": 0.5}),
    (OBEYED, {"local_attention": 4}),
    (OBEYED, {"local_attention": 5}),
    (OBEYED, {"global_attn_every_n_layers": 1}),
    (OBEYED, {"global_attn_every_n_layers": 2}),
    (OBEYED, {"layer_types": [FULL, SLIDING, FULL, SLIDING], "global_attn_every_n_layers": GONE}),
    (OBEYED, {"global_rope_theta": 10.0}),
    (OBEYED, {"local_rope_theta": 10.0}),
    (OBEYED, {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 10.0}}}),
    (OBEYED, {"rope_parameters": {SLIDING: {"rope_theta": 10.0}}, "local_rope_theta": 20.0}),
    (OBEYED, {"rope_parameters": {FULL: {"rope_type": "default"}}, "global_rope_theta": 10.0}),
    (OBEYED, {"num_attention_heads": 4}),
    (WITHOUT_EFFECT, {"rope_parameters": None, "rope_scaling": None, "layer_types": None, "rope_theta": 10.0}),
    (WITHOUT_EFFECT, {"sliding_window": 8, "head_dim": 16}),
    (WITHOUT_EFFECT, {"hidden_act": "relu", "layer_norm_eps": 0.5, "position_embedding_type": "relative_key"}),
    (WITHOUT_EFFECT, {"classifier_pooling": "mean", "classifier_dropout": 0.9, "reference_compile": True}),
    (WITHOUT_EFFECT, {"attention_dropout": 0.9, "mlp_dropout": 0.9, "embedding_dropout": 0.9, "pad_token_id": 7}),
    (WITHOUT_EFFECT, {"sparse_prediction": True, "deterministic_flash_attn": True, "initializer_cutoff_factor": 9.0}),
    (WITHOUT_EFFECT, {"norm_eps": GONE, "global_attn_every_n_layers": GONE, "global_rope_theta": GONE}),
]
CASES = [pytest.param(ELECTRA, *case, id=f"electra-{case}") for case in ELECTRA_CASES]
CASES += [pytest.param(MODERN, *case, id=f"modern-{case}") for case in MODERN_CASES]
MODEL_CLASSES = {
    "electra": (ElectraConfig, ElectraForPreTraining, ElectraForMaskedLM),
    "modernbert": (ModernBertConfig, ModernBertForTokenClassification, ModernBertForMaskedLM),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders electra and modernbert: discriminators with random biases and LayerNorms."""
    place = tmp_path_factory.mktemp("folders")
    for settings in (ELECTRA, MODERN):
        save_model(place / str(settings["model_type"]), settings, predicts_tokens=False)
    return place


def save_model(folder: Path, settings: dict[str, Any], predicts_tokens: bool) -> None:
    """Write a model of transformers with random weights, none at its default, and a vocabulary."""
    config_class, discriminator_class, generator_class = MODEL_CLASSES[settings["model_type"]]
    torch.manual_seed(0)
    model = (generator_class if predicts_tokens else discriminator_class)(config_class(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm_weight = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(torch.randn(parameter.shape) * 0.3 + (1.0 if is_norm_weight else 0.0))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(settings))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(VOCAB_SIZE - 5))]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")


def alter(settings: dict[str, Any], folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """Copy a model's folder to `target` with changed settings, and return `target`."""
    shutil.copytree(folder, target)
    changed = {key: value for key, value in (settings | changes).items() if value is not GONE}
    (target / "config.json").write_text(json.dumps(changed))
    return target


def example_ids() -> torch.Tensor:
    """Return one row of two segments, longer than two windows, [1, 50]."""
    ids = torch.randint(5, VOCAB_SIZE, (1, 50), generator=torch.Generator().manual_seed(2))
    ids[0, 0] = SPECIAL.cls
    ids[0, [20, 49]] = SPECIAL.sep
    return ids


@torch.no_grad()
def states_of_transformers(folder: Path) -> torch.Tensor:
    """Return the last states that transformers computes, with the weights as it reads them, in fp32."""
    inputs = {"input_ids": example_ids()}
    model = AutoModel.from_pretrained(folder).float().eval()
    if model.config.model_type == "electra":
        inputs["token_type_ids"] = derive(example_ids(), SPECIAL).token_type_BS
    return model(**inputs).last_hidden_state


@torch.no_grad()
def states_of_towers(towers: ElectraTowers) -> torch.Tensor:
    """Return the last states of the discriminator of two towers that share embeddings."""
    backbone = Backbone(towers.model, towers.model.discriminator, SPECIAL).eval()
    backbone.embeddings.load_state_dict(towers.embeddings.state_dict())
    backbone.encoder.load_state_dict(towers.discriminator.state_dict())
    return backbone(example_ids())


def check_refusal(error: UserError, changes: dict[str, Any]) -> None:
    """Check that the message is one line that names config.json and a changed key."""
    message = str(error)
    assert "config.json" in message and "\n" not in message, message
    ours = {"global_attn_every_n_layers": "global_every", "local_attention": "local_window"}
    ours |= {"norm_eps": "layer_norm_eps", "num_attention_heads": "num_heads"}
    assert any(key in message or ours.get(key, key) in message for key in changes), message


@pytest.fixture(scope="module")
def original_states(folders: Path) -> dict[str, torch.Tensor]:
    """The states of the models that are altered, by model_type."""
    return {folder.name: states_of_transformers(folder) for folder in folders.iterdir()}


@pytest.mark.parametrize(("settings", "outcome", "changes"), CASES)
def test_a_folder_with_other_settings_has_the_states_of_transformers_or_is_refused(
    folders: Path,
    original_states: dict[str, torch.Tensor],
    tmp_path: Path,
    settings: dict[str, Any],
    outcome: str,
    changes: dict[str, Any],
) -> None:
    """A run whose config describes the original model must not begin with a folder of another function, either."""
    model_type = str(settings["model_type"])
    altered = alter(settings, folders / model_type, tmp_path / "altered", changes)
    towers = build_towers(read_hugging_face_model_config(folders / model_type), seed=1).eval()
    if outcome == REFUSED:
        with pytest.raises(UserError) as caught:
            load_pretrained(str(altered))
        check_refusal(caught.value, changes)
        with pytest.raises(UserError) as caught:
            load_tower_folders(towers, altered, None)
        check_refusal(caught.value, changes)
        return
    expected = states_of_transformers(altered)
    with torch.no_grad():
        found = load_pretrained(str(altered)).backbone().eval()(example_ids())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    change = (expected - original_states[model_type]).abs().max()
    if outcome == WITHOUT_EFFECT:
        assert change == 0
        load_tower_folders(towers, altered, None)
        torch.testing.assert_close(states_of_towers(towers), expected, rtol=0, atol=1e-5)
        return
    assert change > 1e-2
    with pytest.raises(UserError) as caught:
        load_tower_folders(towers, altered, None)
    repeated = {"layer_types": "global_attn_every_n_layers", "rope_parameters": "rope_theta"}
    check_refusal(caught.value, dict.fromkeys(repeated.get(key, key) for key in changes))


@pytest.mark.parametrize("settings", [ELECTRA, MODERN], ids=["electra", "modern"])
def test_weights_in_half_precision_are_read_as_they_are_stored(
    folders: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    original = folders / str(settings["model_type"])
    altered = alter(settings, original, tmp_path / "altered", {"torch_dtype": "bfloat16"})
    weights = {name: tensor.bfloat16() for name, tensor in load_file(original / "model.safetensors").items()}
    save_file(weights, altered / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        found = load_pretrained(str(altered)).backbone().eval()(example_ids())
    torch.testing.assert_close(found, states_of_transformers(altered), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "output", "table"),
    [
        (ELECTRA, "generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),
        (MODERN, "decoder.weight", "model.embeddings.tok_embeddings.weight"),
    ],
    ids=["electra", "modern"],
)
def test_an_output_matrix_that_is_not_the_token_table_is_refused(
    tmp_path: Path, settings: dict[str, Any], output: str, table: str
) -> None:
    """transformers does not tie two tensors that differ, whatever tie_word_embeddings says."""
    folder = tmp_path / "generator"
    save_model(folder, settings, predicts_tokens=True)
    weights = load_file(folder / "model.safetensors")
    weights[output] = weights[table].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_pretrained(str(folder)).head_state()
    weights[output][7, 3] += 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{output} is another matrix than {table}"):
        load_pretrained(str(folder))
    with pytest.raises(UserError, match=output):
        load_tower_folders(build_towers(read_hugging_face_model_config(folder), seed=1), None, folder)


def test_a_generator_with_other_settings_is_refused_to_begin_with_and_as_a_frozen_one(tmp_path: Path) -> None:
    save_model(tmp_path / "generator", ELECTRA, predicts_tokens=True)
    model = read_hugging_face_model_config(tmp_path / "generator")
    tree: dict[str, Any] = {
        "run_dir": str(tmp_path),
        "data": {"corpus": "x", "seq_len": 64},
        "model": model.model_dump(),
        "objective": {"generator": "frozen"},
    }
    for changes in ({"hidden_act": "relu"}, {"layer_norm_eps": 0.5}, {"is_decoder": True}):
        altered = alter(ELECTRA, tmp_path / "generator", tmp_path / next(iter(changes)), changes)
        with pytest.raises(UserError) as caught:
            load_tower_folders(build_towers(model, seed=1), None, altered)
        check_refusal(caught.value, changes)
        tree["train"] = {"num_steps": 2, "global_batch": 2, "micro_batch": 2, "init_generator_from": str(altered)}
        with pytest.raises(UserError) as caught:
            read_frozen_generator(Config.model_validate(tree))
        check_refusal(caught.value, changes)


def test_only_for_longer_rows_may_the_base_of_global_rotary_positions_differ(folders: Path) -> None:
    model = read_hugging_face_model_config(folders / "modernbert")

    def start(**changes: Any) -> None:
        towers = build_towers(ModelConfig.model_validate(model.model_dump() | changes), seed=1)
        load_tower_folders(towers, folders / "modernbert", None)

    start(max_positions=128, global_rope_theta=1e6)
    with pytest.raises(UserError, match=r"global_rope_theta is 160000\.0, but the config's discriminator has 1000000"):
        start(global_rope_theta=1e6)
    with pytest.raises(UserError, match="local_rope_theta is"):
        start(max_positions=128, local_rope_theta=1e6)
