"""Convert weights to and from the names and files of Hugging Face's ELECTRA and ModernBERT models.

Guarantee: `export_towers` writes folders that AutoModel, ElectraForPreTraining, ElectraForMaskedLM and AutoTokenizer
load, with the same logits, whichever weights generator and discriminator share and whichever objective trained them.
`from_hf_discriminator` and `from_hf_generator` invert the name maps exactly. Weights are in fp32. The exported token
table has no pad rows, which round its size up in this project.

How: one table of (our name, Hugging Face's name) per tower, which is the generator or the discriminator. This project
has one fused parameter for query, key and value; it is split and joined. transformers is not imported: config.json,
model.safetensors and the tokenizer's files are written directly. The table of names for the architecture `modern` is
in `hf_modernbert.py`.

Limits: the tied output projection is not written, because Hugging Face ties it to the table while loading. The copy
gate, the baseline, Electric's two causal towers and the second head of a discriminator that was trained by joint MLM
(`objective.discriminator_mlm_weight`) have no counterpart in Hugging Face's models and are left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save
from tokenizers import BertWordPieceTokenizer

from electra_dist.config import ModelConfig, TowerConfig
from electra_dist.errors import UserError
from electra_dist.model.row_layout import SpecialIds
from electra_dist.pretrained import hf_modernbert
from electra_dist.store.atomic_files import replacing
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

State = Mapping[str, torch.Tensor]  # parameter name -> value

# Names of our modules -> names of Hugging Face's modules: in the embeddings, in a layer, and of the detection head.

_EMBEDDINGS = {
    "word": "word_embeddings",
    "position": "position_embeddings",
    "token_type": "token_type_embeddings",
    "layer_norm": "LayerNorm",
}
_LAYER = {
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "expand": "intermediate.dense",
    "contract": "output.dense",
    "output_norm": "output.LayerNorm",
}
_DISCRIMINATOR_HEAD = {
    "discriminator_head.dense": "discriminator_predictions.dense",
    "discriminator_head.out": "discriminator_predictions.dense_prediction",
}
_TABLE = "embeddings.word.weight"  # our name of the token table
_OUTPUT_BIAS = "generator_lm_head.bias"  # Hugging Face's name of a token head's output bias
_HEADS = {"discriminator": "token_head", "generator": "generator_head"}  # tower -> its head that predicts tokens
_SPECIAL_TOKENS = ("pad", "unk", "cls", "sep", "mask")
TowerName = Literal["discriminator", "generator"]


def to_hf_discriminator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the discriminator's weights under Hugging Face's names, in fp32 on the host.

    They are a state dict of ElectraForPreTraining. If the discriminator was trained to predict tokens instead of
    detecting replaced ones (objective `mlm`, for example), they are a state dict of ElectraForMaskedLM.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
    """
    return _to_hf(state, model, "discriminator")


def to_hf_generator(state: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the generator's weights under Hugging Face's names: a state dict of ElectraForMaskedLM, in fp32.

    The tied `generator_lm_head.weight` is left out.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
    """
    return _to_hf(state, model, "generator")


def from_hf_discriminator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return Hugging Face weights of a discriminator under the names of ElectraTowers: embeddings, tower, head.

    The token table gets rows of zeros up to the padded vocabulary size of `model`.

    Args:
        theirs: state dict of ElectraForPreTraining or ElectraForMaskedLM; the head may be missing.
        model: section `model` of a config that gives the discriminator the same shape.

    Raises:
        KeyError: the token table, or a query, key or value parameter, is missing.
    """
    return _from_hf(theirs, model, "discriminator")


def from_hf_generator(theirs: State, model: ModelConfig) -> dict[str, torch.Tensor]:
    """Return Hugging Face weights of a generator under the names of ElectraTowers: embeddings, generator, its head.

    The token table gets rows of zeros up to the padded vocabulary size of `model`.

    Args:
        theirs: state dict of ElectraForMaskedLM.
        model: section `model` of a config that gives the generator the same shape.

    Raises:
        KeyError: the token table, or a query, key or value parameter, is missing.
    """
    return _from_hf(theirs, model, "generator")


def standalone(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return a model's weights in a form in which one tower can be read by itself, in fp32 on the host.

    Generator and discriminator may share all weights, only the embeddings, or nothing. In the result, `embeddings.`
    are those that this tower reads, and `discriminator.` or `generator.` are its layers, whatever is shared. Other
    parameters, such as heads, keep their names; a prefix `towers.` is removed from all names.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
        tower: the tower to read, "generator" or "discriminator".
    """
    weights = {name.removeprefix("towers."): tensor.detach().float().cpu() for name, tensor in state.items()}
    if tower == "generator" and model.sharing == "all":
        # The layers are stored once, as the discriminator's.
        shared = {name: tensor for name, tensor in weights.items() if name.startswith("discriminator.")}
        for name, tensor in shared.items():
            weights["generator." + name.removeprefix("discriminator.")] = tensor
    if tower == "discriminator":
        # There are such parameters only if the discriminator does not read the generator's embeddings as they are.
        own_names = [name for name in weights if name.startswith("discriminator_embeddings.")]
        for own_name in own_names:
            name = own_name.removeprefix("discriminator_")
            if model.sharing == "gdes" and "layer_norm" not in own_name:
                weights[name] = weights[name] + weights[own_name]  # stored as a difference to the generator's table
            else:
                weights[name] = weights[own_name]
    return weights


def export_towers(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> dict[str, Path]:
    """Write the towers as Hugging Face folders OUT_DIR/discriminator and, if possible, OUT_DIR/generator.

    The generator's folder is not written if the state has no generator, or if Hugging Face has no class for it. There
    is none for the pair of causal towers of the objective `electric`, nor for a generator of the architecture `modern`
    whose layers have another width than its token table.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
        special: ids of the special tokens.
        vocab_file: the corpus's vocab.txt.
        lowercase: whether the corpus was lower-cased.
        out_dir: created if missing; files of the same names are replaced.

    Returns:
        The folders written, by the names "discriminator" and "generator".
    """
    folders = {"discriminator": out_dir / "discriminator"}
    export_discriminator(state, model, special, vocab_file, lowercase, folders["discriminator"])
    # "towers.generator_head.bias" is in the module "generator_head".
    modules = {name.removeprefix("towers.").partition(".")[0] for name in state}
    has_generator = "generator_head" in modules
    is_causal_pair = "generator_reverse" in modules
    has_class = model.architecture == "bert" or not hf_modernbert.find_obstacle(model)
    if has_generator and has_class and not is_causal_pair:
        folders["generator"] = out_dir / "generator"
        export_generator(state, model, special, vocab_file, lowercase, folders["generator"])
    return folders


def export_discriminator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the discriminator with its tokenizer as a Hugging Face folder.

    The model class is ElectraForPreTraining. It is ElectraForMaskedLM if the discriminator was trained to predict
    tokens instead of detecting replaced ones (objective `mlm`, for example). With `model.architecture: modern` the
    corresponding classes are ModernBertForTokenClassification and ModernBertForMaskedLM.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
        special: ids of the special tokens.
        vocab_file: the corpus's vocab.txt.
        lowercase: whether the corpus was lower-cased.
        out_dir: created if missing; files of the same names are replaced.
    """
    tensors = to_hf_discriminator(state, model)
    if model.architecture == "modern":
        predicts_tokens = hf_modernbert.OUTPUT_BIAS in tensors
        architecture = "ModernBertForMaskedLM" if predicts_tokens else "ModernBertForTokenClassification"
        config = hf_modernbert.hf_config(model, "discriminator", special, architecture)
        if not predicts_tokens:
            config |= hf_modernbert.DETECTION_LABELS
    else:
        predicts_tokens = _OUTPUT_BIAS in tensors
        architecture = "ElectraForMaskedLM" if predicts_tokens else "ElectraForPreTraining"
        config = _hf_config(model, "discriminator", special, architecture)
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def export_generator(
    state: State, model: ModelConfig, special: SpecialIds, vocab_file: Path, lowercase: bool, out_dir: Path
) -> None:
    """Write the generator with its tokenizer as a Hugging Face folder.

    The model class is ElectraForMaskedLM; with `model.architecture: modern` it is ModernBertForMaskedLM.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
        special: ids of the special tokens.
        vocab_file: the corpus's vocab.txt.
        lowercase: whether the corpus was lower-cased.
        out_dir: created if missing; files of the same names are replaced.
    """
    tensors = to_hf_generator(state, model)
    if model.architecture == "modern":
        config = hf_modernbert.hf_config(model, "generator", special, "ModernBertForMaskedLM")
    else:
        config = _hf_config(model, "generator", special, "ElectraForMaskedLM")
    _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


class TaskHead(NamedTuple):
    """Head of a fine-tuned model under Hugging Face's names: model class, weights, and entries of config.json."""

    architecture: str  # Hugging Face's model class, such as "ElectraForSequenceClassification"
    weights: dict[str, torch.Tensor]  # parameter name -> fp32 value on the host
    config: dict[str, Any]  # entries that config.json has besides those of the encoder, such as "id2label"


def export_task_model(
    encoder: State,
    head: TaskHead,
    model: ModelConfig,
    special: SpecialIds,
    vocabulary_text: str,
    lowercase: bool,
    out_dir: Path,
) -> None:
    """Write an encoder with the head of a task, and its tokenizer, as a Hugging Face folder.

    Args:
        encoder: weights of the encoder: `embeddings.` and, for its layers, `discriminator.`.
        head: the head under Hugging Face's names.
        model: section `model` of a config whose discriminator has the encoder's shape.
        special: ids of the special tokens.
        vocabulary_text: content of vocab.txt.
        lowercase: whether the tokenizer lower-cases.
        out_dir: created if missing; files of the same names are replaced.
    """
    tensors = to_hf_discriminator(encoder, model) | head.weights
    make_config = hf_modernbert.hf_config if model.architecture == "modern" else _hf_config
    config = make_config(model, "discriminator", special, head.architecture) | head.config
    with tempfile.TemporaryDirectory() as folder:
        vocab_file = Path(folder) / VOCAB_FILE
        vocab_file.write_text(vocabulary_text, "utf-8")
        _write(tensors, config, vocab_file, lowercase, model.max_positions, out_dir)


def tower_of(model: ModelConfig, tower: TowerName) -> tuple[TowerConfig, int]:
    """Return the shape of a tower (generator or discriminator), and the width of the embedding tables that it reads.

    If the width is not the tower's hidden size, a linear layer (`embeddings_project`) lies between tables and tower.
    """
    if tower == "generator":
        return model.generator, model.generator_embedding_width
    return model.discriminator, model.embedding_size


def _module_names(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, str]]:
    """Yield (name in this project, Hugging Face's name) of every module of a tower except query, key and value.

    This project has one fused module for these three; see `_qkv_names`.
    """
    shape, width = tower_of(model, tower)
    for ours, theirs in _EMBEDDINGS.items():
        yield f"embeddings.{ours}", f"electra.embeddings.{theirs}"
    if width != shape.hidden_size:
        yield f"{tower}.embeddings_project", "electra.embeddings_project"
    for layer in range(shape.num_layers):
        for ours, theirs in _LAYER.items():
            yield f"{tower}.layers.{layer}.{ours}", f"electra.encoder.layer.{layer}.{theirs}"
    yield f"{_HEADS[tower]}.dense", "generator_predictions.dense"
    yield f"{_HEADS[tower]}.layer_norm", "generator_predictions.LayerNorm"
    if tower == "discriminator":
        yield from _DISCRIMINATOR_HEAD.items()


def _parameter_names(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, str]]:
    """Yield (name in this project, Hugging Face's name) of every parameter of a tower except query, key and value.

    These are all names that can occur; a state dict holds only some of them. Embeddings have no bias, for example, and
    a tower has one kind of head.
    """
    for ours, theirs in _module_names(model, tower):
        for kind in ("weight", "bias"):
            yield f"{ours}.{kind}", f"{theirs}.{kind}"
    yield f"{_HEADS[tower]}.bias", _OUTPUT_BIAS


def _qkv_names(model: ModelConfig, tower: TowerName) -> Iterator[tuple[str, list[str]]]:
    """Yield (fused parameter in this project, Hugging Face's three parameters) of every layer of a tower.

    The three are query, key and value, in the order in which they are concatenated. There is one pair for the weights
    and one for the biases.
    """
    shape, _ = tower_of(model, tower)
    for layer in range(shape.num_layers):
        attention = f"electra.encoder.layer.{layer}.attention.self"
        for kind in ("weight", "bias"):
            parts = [f"{attention}.{part}.{kind}" for part in ("query", "key", "value")]
            yield f"{tower}.layers.{layer}.attention.qkv.{kind}", parts


def _to_hf(state: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return a tower's weights under Hugging Face's names, without the rows that pad the token table.

    No two tensors share memory, so that safetensors can write them.

    Args:
        state: whole (not partitioned) parameters by name, with or without the objective's prefix `towers.`.
        model: section `model` of the config that they were trained with.
        tower: the tower to convert, with its embeddings and its head.

    Raises:
        UserError: Hugging Face has no class for this generator (with `model.architecture: modern` only).
    """
    ours = standalone(state, model, tower)
    if "discriminator_head.dense.weight" in ours:
        # Joint MLM: Hugging Face's ElectraForPreTraining has no place for a second head.
        ours = {name: value for name, value in ours.items() if not name.startswith("token_head.")}
    if model.architecture == "modern":
        obstacle = hf_modernbert.find_obstacle(model) if tower == "generator" else ""
        if obstacle:
            raise UserError(f"the generator cannot be exported: {obstacle}")
        return hf_modernbert.to_hf(ours, model, tower, _HEADS[tower])
    theirs = {}
    # The table of names covers every kind of head, and a state has only some of them.
    for our_name, their_name in _parameter_names(model, tower):
        if our_name in ours:
            theirs[their_name] = ours[our_name].clone()
    for fused_name, part_names in _qkv_names(model, tower):
        query, key, value = ours[fused_name].chunk(3)
        for part_name, part in zip(part_names, (query, key, value), strict=True):
            theirs[part_name] = part.clone()
    token_table = f"electra.embeddings.{_EMBEDDINGS['word']}.weight"
    theirs[token_table] = theirs[token_table][: model.vocab_size].clone()
    return theirs


def _from_hf(theirs: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Return Hugging Face weights under this project's names; rows of zeros pad the token table.

    Args:
        theirs: state dict of a Hugging Face ELECTRA model with one tower.
        model: section `model` of a config with the same shape; the table is padded to its padded vocabulary size.
        tower: the tower that the weights are for.

    Raises:
        KeyError: the token table, or a query, key or value parameter, is missing.
    """
    if model.architecture == "modern":
        return hf_modernbert.from_hf(theirs, model, tower, _HEADS[tower])
    ours = {}
    for our_name, their_name in _parameter_names(model, tower):
        if their_name in theirs:
            ours[our_name] = theirs[their_name].clone()
    for fused_name, part_names in _qkv_names(model, tower):
        ours[fused_name] = torch.cat([theirs[part_name] for part_name in part_names])
    token_table = ours[_TABLE]
    num_pad_rows = model.padded_vocab_size - token_table.shape[0]
    no_columns = (0, 0)
    rows_at_end = (0, num_pad_rows)
    ours[_TABLE] = torch.nn.functional.pad(token_table, no_columns + rows_at_end)
    return ours


def _hf_config(model: ModelConfig, tower: TowerName, special: SpecialIds, architecture: str) -> dict[str, Any]:
    """Return the content of a Hugging Face config.json for one tower.

    Args:
        model: gives widths, dropout and the size of the vocabulary.
        tower: the tower that the config describes.
        special: ids of the special tokens.
        architecture: Hugging Face's model class, such as "ElectraForPreTraining".
    """
    shape, width = tower_of(model, tower)
    return {
        "architectures": [architecture],
        "model_type": "electra",
        "vocab_size": model.vocab_size,
        "embedding_size": width,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": model.type_vocab_size,
        "initializer_range": model.initializer_range,
        "layer_norm_eps": model.layer_norm_eps,
        "pad_token_id": special.pad,
        "torch_dtype": "float32",
    }


def _write(
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    vocab_file: Path,
    lowercase: bool,
    max_positions: int,
    out_dir: Path,
) -> None:
    """Write a Hugging Face folder: model.safetensors, config.json and the files of the tokenizer.

    The files of the tokenizer are tokenizer.json, tokenizer_config.json and, only for WordPiece, vocab.txt.

    Args:
        tensors: weights under Hugging Face's names.
        config: content of config.json.
        vocab_file: the corpus's vocab.txt, whose content may be a tokenizer.json.
        lowercase: whether the tokenizer lower-cases.
        max_positions: longest row in tokens, for the tokenizer's settings.
        out_dir: created if missing; each file is replaced atomically.

    Raises:
        StoreError: a file cannot be written.
        UserError: `vocab_file` is damaged.
    """
    vocabulary = Vocabulary.read(vocab_file)
    _write_json(out_dir / "config.json", config)
    if vocabulary.tokenizer_json is None:
        _write_file(out_dir / "vocab.txt", vocab_file.read_bytes())
        tokenizer_text = BertWordPieceTokenizer(vocabulary.ids, lowercase=lowercase).to_str(pretty=False)
    else:
        tokenizer_text = vocabulary.tokenizer_json.for_hugging_face()
    _write_file(out_dir / "tokenizer.json", tokenizer_text.encode())
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
    }
    if vocabulary.tokenizer_json is None:
        tokenizer_config |= {"tokenizer_class": "BertTokenizer", "do_lower_case": lowercase}
    if config["model_type"] == hf_modernbert.MODEL_TYPE:
        # ModernBERT has no token types, and its models refuse them as inputs.
        tokenizer_config |= {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
    for role in _SPECIAL_TOKENS:
        token_id = vocabulary.special[f"[{role.upper()}]"]
        tokenizer_config[f"{role}_token"] = vocabulary.tokens[token_id]  # for WordPiece "mask_token": "[MASK]"
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    # Last, so that a folder with weights is complete.
    _write_file(out_dir / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as Hugging Face does: indented by two spaces, keys sorted, a line feed at the end."""
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    _write_file(path, text.encode())


def _write_file(path: Path, content: bytes) -> None:
    """Write or replace a file atomically; other users may read it unless the process's umask forbids it.

    Raises:
        StoreError: the file cannot be written.
    """
    with replacing(path) as file:
        file.write(content)
