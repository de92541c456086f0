"""Read the shape and the weights of a model in a local folder of Hugging Face's format.

Guarantee: the weights and the function of the model are those that transformers loads from the folder, or the folder
is refused with the first difference in the message.

How: folders of ElectraForPreTraining, ElectraForMaskedLM or ElectraModel, and of ModernBertForTokenClassification,
ModernBertForMaskedLM or ModernBertModel, are read from `model.safetensors`, from several such files with an index, or
from `pytorch_model.bin` (without unpickling objects). Position tables longer than `max_positions` are cut.

The file pretraining.json of an exported model says how the model was pretrained. Hugging Face's config.json describes
the shape of a model. It does not say whether a model that predicts tokens has seen [MASK] in training, whether a
discriminator's output is an energy, or how long the rows were. Scores of text depend on these facts. transformers
ignores the file. Without it, a model that predicts tokens counts as a masked language model, any other as a
discriminator of replaced tokens, and rows may be as long as the model has positions.

Limits: models of type `electra` with absolute positions, and of type `modernbert`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load_file

from electra_dist.config import ModelConfig
from electra_dist.config.rules import check_model
from electra_dist.errors import StoreError, UserError
from electra_dist.model.towers import PARTS, WithoutInitialValues
from electra_dist.pretrained.hf import (
    ELECTRA,
    MODERNBERT,
    State,
    TowerName,
    family_of,
    from_hf,
    hf_backbone_names,
    tower_of,
    with_prefix,
)
from electra_dist.pretrained.hf_settings import comparable_settings, model_section, shape_of
from electra_dist.store.atomic_files import (
    NamedDigest,
    check_digest,
    check_regular,
    file_sha256,
    read_regular,
    readable,
    replacing,
)
from electra_dist.store.interface import check_key
from electra_dist.store.json_file import find_document, read_json_object

PRETRAINING_FILE = "pretraining.json"
TOKENIZER_FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
_POSITIONS = "max_position_embeddings"  # key of config.json
_INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
_LARGEST_SIZE = 1 << 24  # in a config.json; no vocabulary and no layer has as many entries
_AGAIN = "download or export the model again"  # next step in messages about a damaged file
# Keys of config.json that change what a model computes, or which weights it has -> the only value that is supported.
# Left out are keys that are read, and those without effect on the states and the pretraining heads: settings of
# training (dropout, initialisation), of a task's head (labels, pooling, summary_*) and of transformers' own program.
_FIXED_SETTINGS: dict[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
    "pruned_heads": {},
    "rope_scaling": None,
    "per_layer_config": None,
    "quantization_config": None,
}
_FAMILIES = {hf.model_type: hf for hf in (ELECTRA, MODERNBERT)}
_BACKBONES = tuple(hf.prefix for hf in _FAMILIES.values())  # how names of embeddings and layers begin
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read config.json of a Hugging Face folder; missing keys get the values that transformers assumes.

    In the result, `dtype` names the type to which transformers rounds the weights, or is None. Raises UserError if the
    model is neither an ELECTRA nor a ModernBERT, or if a setting makes it compute something that is not supported.
    """
    where = f"{folder}/config.json"
    given = read_json_object(folder / "config.json", _AGAIN)
    model_type = given.get("model_type")
    hf = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if hf is None:
        raise UserError(
            f"{where}: neither an ELECTRA model with absolute positions nor a ModernBERT, because model_type is "
            f"{model_type}; name the folder of another model"
        )
    settings = comparable_settings(where, given, hf)
    fixed = _FIXED_SETTINGS | hf.fixed
    for key, supported in fixed.items():
        value = given.get(key, supported)
        if value != supported:
            raise UserError(f"{where}: {key} is {value}, but only {supported} is supported; name another model")
    dtype_key = "torch_dtype" if given.get("dtype") is None else "dtype"
    settings["dtype"] = given.get(dtype_key)
    if settings["dtype"] not in (None, *_DTYPES):
        raise UserError(
            f"{where}: {dtype_key} is {settings['dtype']}, but only {', '.join(_DTYPES)} are supported; name another "
            f"model"
        )
    return settings


def read_hugging_face_model_config(folder: Path) -> ModelConfig:
    """Return the config section `model` that describes the Hugging Face model in a folder.

    The folder holds one tower, but the section describes two: generator and discriminator get the same shape. Raises
    UserError if config.json is missing, impossible or not supported.
    """
    settings = read_settings(folder)
    sizes = [value for value in settings.values() if isinstance(value, int)]
    if max(sizes, default=0) > _LARGEST_SIZE:
        raise UserError(f"{folder}/config.json: the size {max(sizes)} is impossible; {_AGAIN}")
    try:
        fields = model_section(settings, _FAMILIES[settings["model_type"]])
        model = ModelConfig.model_validate(fields)
        check_model(model)
        return model
    except (KeyError, ValueError) as error:
        reason = str(error).replace("\n", " ")
        raise UserError(
            f"{folder}/config.json: the shape of the model is incomplete or impossible: {reason}; "
            f"copy the model's own config.json there"
        ) from None


def check_shape(where: str, given: Mapping[str, Any], model: ModelConfig, tower: TowerName) -> None:
    """Raise UserError if weights have another shape than the config's generator or discriminator, or fewer positions.

    `given` describes the weights, as `shape_of` or `read_settings` returns it; it may have more positions than the
    tower. The message names the first difference and `where`, the file or folder of the weights.
    """
    num_positions = given.get(_POSITIONS)
    has_longer_rows = isinstance(num_positions, int) and num_positions < model.max_positions
    for key, wanted in shape_of(model, tower).items():
        if key == _POSITIONS:
            continue  # more positions than wanted are accepted, so they are compared below
        if key == "global_rope_theta" and has_longer_rows:
            continue  # Rows that become longer need a larger base, which the config names.
        if given.get(key) != wanted:
            raise UserError(
                f"{where}: {key} is {given.get(key)}, but the config's {tower} has {wanted}; set the model section "
                f"to the checkpoint's shape, or name another checkpoint"
            )
    if model.architecture == "modern":
        return  # Rotary positions have no table, whose length could be too small.
    if not isinstance(num_positions, int) or has_longer_rows:
        raise UserError(
            f"{where}: {_POSITIONS} is {num_positions}, fewer positions than model.max_positions "
            f"{model.max_positions}; lower model.max_positions, or name another checkpoint"
        )


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a Hugging Face folder in fp32 on the host, under the names of a model with a head.

    In a model with a head, the names of the encoder's weights begin with `electra.`, or with `model.` for ModernBERT.
    The weights of a model without a head get this prefix, too. Tensors that are not of floating point are left out.
    """
    if (folder / "model.safetensors").exists():
        theirs = _read_safetensors(_file_within(folder, "model.safetensors"))
    elif (folder / _INDEX_FILE).exists():
        theirs = _read_indexed(folder)
    elif (folder / "pytorch_model.bin").exists():
        theirs = _read_pytorch_file(_file_within(folder, "pytorch_model.bin"))
    else:
        raise UserError(
            f"{folder}: holds neither model.safetensors nor pytorch_model.bin; copy the model's whole folder there"
        )
    return {name: tensor.float() for name, tensor in with_prefix(theirs).items() if tensor.is_floating_point()}


def _read_indexed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model that is stored in several files, which an index lists."""
    file_of = read_json_object(folder / _INDEX_FILE, _AGAIN).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise UserError(f"{folder / _INDEX_FILE}: damaged, because it has no object weight_map; {_AGAIN}")
    theirs: dict[str, torch.Tensor] = {}
    for name in sorted({str(file) for file in file_of.values()}):
        file = _file_within(folder, name)
        if not file.exists():
            raise UserError(f"{file}: {_INDEX_FILE} lists this file; copy the model's whole folder there")
        theirs |= _read_safetensors(file)
    return theirs


def _file_within(folder: Path, name: str) -> Path:
    """Return FOLDER/NAME, a file with weights; raise UserError if the name or a link leads out of the folder."""
    file = folder / name
    model_folder = Path(os.path.realpath(folder))
    places = [model_folder]
    # In the cache of the Hugging Face hub, the files in snapshots/REVISION are links to files in blobs/.
    for revision in (model_folder, model_folder.parent):  # A tower of an export is in a folder of its revision.
        if revision.parent.name == "snapshots":
            places.append(revision.parent.parent / "blobs")
    is_plain_name = name not in ("", ".", "..") and name == os.path.basename(name) and "\0" not in name
    if not is_plain_name or Path(os.path.realpath(file)).parent not in places:
        raise UserError(
            f"{file}: leads out of the model's folder, and no other place is read; copy the model's files into it"
        )
    return file


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    with readable(file):
        try:
            check_regular(file)
            return load_file(file)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}: damaged ({error}); {_AGAIN}") from None


def _read_pytorch_file(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of torch.save, on the host; no code in it is executed."""
    with readable(file):
        try:
            check_regular(file)
            theirs = torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001  (a damaged pickle raises errors of any kind)
            reason = str(error).split("\n")[0]
            raise UserError(f"{file}: damaged ({type(error).__name__}: {reason}); {_AGAIN}") from None
    is_state = isinstance(theirs, dict) and all(isinstance(tensor, torch.Tensor) for tensor in theirs.values())
    if not is_state:
        raise UserError(f"{file}: damaged, because it holds other objects than tensors; {_AGAIN}")
    return theirs


def read_tower(model: ModelConfig, tower: TowerName, folder: Path) -> dict[str, torch.Tensor]:
    """Read a generator or discriminator from a Hugging Face folder; return its weights by names of ElectraTowers.

    Raises UserError if config.json or a weight is missing, or if config.json describes another tower than `model`.
    """
    file = folder / "config.json"
    if not file.exists():
        raise UserError(f"{folder}: no config.json; name the folder of a downloaded or exported ELECTRA model")
    check_shape(str(file), read_settings(folder), model, tower)
    return convert_weights(folder, read_weights(folder), model, tower)


def convert_weights(folder: Path, weights: State, model: ModelConfig, tower: TowerName) -> dict[str, torch.Tensor]:
    """Convert the weights that `read_weights` found in a folder to the parameter names of ElectraTowers.

    `model` must describe the shape that the folder's config.json has. Raises UserError if a parameter of embeddings or
    layers is missing, unknown or of another shape, or if transformers would load other values from the folder.
    """
    _check_read_alike(folder, weights)
    unknown = {name for name in weights if name.startswith(_BACKBONES)} - hf_backbone_names(model, tower)
    if unknown:
        raise UserError(
            f"{folder}: the weights have {min(unknown)}, which is no part of the model in config.json; {_AGAIN}"
        )
    token_table = weights.get(family_of(model).token_table)
    if token_table is not None and token_table.shape[:1] != (model.vocab_size,):
        raise UserError(
            f"{folder}: the token table has the shape {tuple(token_table.shape)}, but vocab_size in config.json is "
            f"{model.vocab_size}; {_AGAIN}"
        )
    try:
        state = cut_positions(from_hf(weights, model, tower), model.max_positions)
    except KeyError as error:
        raise UserError(f"{folder}: the weights lack {error}, so this is not a complete model; {_AGAIN}") from None
    except RuntimeError:  # query, key and value cannot be joined, or the token table cannot be padded
        raise UserError(f"{folder}: the weights have shapes that do not fit together; {_AGAIN}") from None
    _check_shapes(folder, state, model, tower)
    return state


def _check_shapes(folder: Path, state: State, model: ModelConfig, tower: TowerName) -> None:
    """Raise UserError if a parameter of embeddings or layers is missing, or any parameter has another shape."""
    shape, width = tower_of(model, tower)
    token_head = "generator_head" if tower == "generator" else "token_head"
    parts = PARTS[model.architecture]
    with torch.device("meta"), WithoutInitialValues():
        modules = {
            "embeddings": parts.embeddings(model, width),
            tower: parts.encoder(model, shape, width),
            token_head: parts.token_head(model, shape.hidden_size, width),
        }
        if tower == "discriminator":
            modules["discriminator_head"] = parts.detection_head(model)
    for prefix, module in modules.items():
        for own_name, parameter in module.state_dict().items():
            name = f"{prefix}.{own_name}"
            if name not in state and prefix in ("embeddings", tower):
                raise UserError(f"{folder}: the weights lack {name}, so this is not a complete model; {_AGAIN}")
            if name in state and state[name].shape != parameter.shape:
                raise UserError(
                    f"{folder}: {name} has the shape {tuple(state[name].shape)}, but config.json gives it "
                    f"{tuple(parameter.shape)}; {_AGAIN}"
                )


def _check_read_alike(folder: Path, theirs: State) -> None:
    """Raise UserError if transformers would load other weights than `theirs`, rounded ones or an untied output."""
    dtype = read_settings(folder)["dtype"]
    for name, tensor in theirs.items():
        if dtype in ("float16", "bfloat16") and not torch.equal(tensor.to(getattr(torch, dtype)).float(), tensor):
            raise UserError(
                f"{folder}/config.json: dtype or torch_dtype is {dtype}, but {name} is stored in a finer one, and "
                f"transformers rounds it; set the key to the dtype of the weights, or save the model in {dtype}"
            )
    for hf in _FAMILIES.values():
        output, table = hf.tied_output, hf.token_table
        if output in theirs and table in theirs and not torch.equal(theirs[output], theirs[table]):
            raise UserError(
                f"{folder}: {output} is another matrix than {table}, but only tied ones are supported; name another "
                f"model"
            )


def cut_positions(state: State, max_positions: int) -> dict[str, torch.Tensor]:
    """Return a copy of a state dict whose position table, if it has one, is cut to `max_positions` rows."""
    table = "embeddings.position.weight"
    result = dict(state)
    if table in result:
        result[table] = result[table][:max_positions]
    return result


class PretrainingRecord(BaseModel):
    """Facts about the pretraining of an exported generator or discriminator for which config.json has no place."""

    model_config = ConfigDict(frozen=True, extra="ignore")  # a later version may record more

    objective: str  # `objective.name` of the run
    tower: Literal["discriminator", "generator"]
    seq_len: Annotated[int, Field(gt=0)]  # tokens of a row in training; later positions were never trained
    steps: tuple[int, ...]  # steps of the averaged checkpoints; a single step if there is no mean
    rows: Annotated[int, Field(ge=0)]  # rows trained on up to the last of these steps
    corpus_fingerprint: str  # of the training corpus
    electra_dist: str  # version of this package that wrote the file
    tokenizer_sha256: dict[str, str] = {}  # file of the tokenizer -> its SHA-256; empty in an older export


def write_pretraining_record(folder: Path, record: PretrainingRecord) -> None:
    """Write or replace FOLDER/pretraining.json atomically.

    Digests of the tokenizer's files in the folder are added to the record, so write these files first.
    """
    names = [name for name in TOKENIZER_FILES if (folder / name).exists()]  # vocab.txt exists for WordPiece only
    digests = {name: file_sha256(folder / name) for name in names}
    record = record.model_copy(update={"tokenizer_sha256": digests})
    text = json.dumps(record.model_dump(mode="json"), indent=2) + "\n"
    with replacing(folder / PRETRAINING_FILE) as file:
        file.write(text.encode())


def read_pretraining_record(folder: Path) -> PretrainingRecord | None:
    """Return the content of FOLDER/pretraining.json; None if there is no such file, as in models of other programs."""
    file = folder / PRETRAINING_FILE
    return find_document(file, PretrainingRecord, "export the model again, or delete the file")


def check_tokenizer_files(folder: Path) -> None:
    """Verify the tokenizer's files of an export against the digests in its pretraining.json.

    Nothing is checked in the folder of another program's model or of an older export, which name no digests. Raises
    ManifestMismatch if a file has another digest.
    """
    record = read_pretraining_record(folder)
    if record is None:
        return
    for name, sha256 in record.tokenizer_sha256.items():
        file = folder / check_key(name)
        next_step = "restore the file, or export the model again"
        with readable(file, next_step):
            data = read_regular(file)
        check_digest(data, str(file), NamedDigest(sha256, str(folder / PRETRAINING_FILE), next_step))
