"""Load weights of released checkpoints or of other runs into the towers, for continued pretraining.

Guarantee: the towers are the generator and the discriminator. Every parameter of them either gets its value from the
source or is named in the notes, the lines of text that are returned for the run's log. The notes also name the
optimizer's moments, which no Hugging Face folder holds. A source of another shape, vocabulary size or function (such
as another epsilon of the LayerNorms) is refused, with the first difference in the message.

How: folders of ElectraForPreTraining, ElectraForMaskedLM or ElectraModel are read, with `model.architecture: modern`
those of ModernBertForTokenClassification, ModernBertForMaskedLM or ModernBertModel, from `model.safetensors`, from
several such files with an index, or from `pytorch_model.bin` (without unpickling objects). Position tables longer than
`max_positions` are cut. With `model.sharing: gdes` the discriminator reads the sum of the generator's table and a
trainable difference, which is set so that the sum equals the table of the source's discriminator.

Limits: the checkpoints that Google released hold no optimizer state, and some conversions of discriminators no head.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from electra_dist.config import ModelConfig
from electra_dist.errors import StoreError, UserError
from electra_dist.model.architectures.choice import new_detection_head, new_embeddings, new_encoder, new_token_head
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained import hf_modernbert
from electra_dist.pretrained.hf_conversion import (
    TOKEN_TABLE,
    State,
    TowerName,
    from_hf_discriminator,
    from_hf_generator,
    hf_backbone_names,
    tower_of,
)
from electra_dist.pretrained.hugging_face_folder import read_settings
from electra_dist.store.atomic_files import readable
from electra_dist.store.json_file import read_json_object
from electra_dist.store.regular_files import check_regular

_POSITIONS = "max_position_embeddings"  # key of a Hugging Face config.json
_INDEX_FILE = "model.safetensors.index.json"  # of weights in several files
_COPY_AGAIN = "download or export the model again"
_BACKBONES = ("electra.", "model.")  # how Hugging Face's names of embeddings and layers begin
_EMBEDDINGS = "embeddings."  # prefix of the names of embedding parameters
# Hugging Face's names of output matrices of heads that predict tokens -> of the token tables that they are tied to.
_TIED = {"generator_lm_head.weight": TOKEN_TABLE, "decoder.weight": hf_modernbert.TOKEN_TABLE}


def load_tower_folders(towers: ElectraTowers, discriminator_dir: Path | None, generator_dir: Path | None) -> list[str]:
    """Load the weights of Hugging Face folders into the towers; return log lines about parts that the folders lack.

    The towers (generator and discriminator) are initialised, on the host and not yet taken over by DeepSpeed.
    Parameters that neither folder holds keep their random initial values.
    """
    large: State = {}
    small: State = {}
    folders = []
    if discriminator_dir:
        large = read_tower(towers.model, "discriminator", discriminator_dir)
        folders.append(str(discriminator_dir))
    if generator_dir:
        small = read_tower(towers.model, "generator", generator_dir)
        folders.append(str(generator_dir))
    notes = load_towers(towers, large, small, where=" and ".join(folders))
    return [*notes, "optimizer: a Hugging Face folder holds no moments; they start at zero"]


def load_towers(towers: ElectraTowers, large: State, small: State, where: str) -> list[str]:
    """Load the weights of two state dicts into the towers; return log lines (notes) about parts that both lack.

    `large` holds the discriminator, its head and the `embeddings.` that it reads; `small` holds the same for the
    generator. Names are those of ElectraTowers, and either may be empty. `where` names the source in the notes. If
    both have embeddings but the towers share one set, `large` decides; a note tells if the two differ.
    """
    large = cut_positions(large, towers.model.max_positions)
    small = cut_positions(small, towers.model.max_positions)
    values, notes = _assign_values(towers, large, small)
    num_missing: dict[str, int] = {}  # part of the towers -> number of its elements without a value
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            if name in values:
                parameter.copy_(values[name])
            else:
                part = name.partition(".")[0]  # "generator_head" of "generator_head.dense.weight"
                num_missing[part] = num_missing.get(part, 0) + parameter.numel()
    for part, count in num_missing.items():
        notes.append(f"{part}: not in {where}; its {count:,} parameters start with random values")
    return notes


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


def shape_of(model: ModelConfig, tower: TowerName) -> dict[str, Any]:
    """Return the settings that a Hugging Face config.json must have for its weights to fit a tower.

    They decide the shapes of the weights and the function that the tower computes. The number of positions is the
    smallest that fits: weights may have more, which are cut off.
    """
    if model.architecture == "modern":
        return hf_modernbert.shape_of_modern(model, tower)
    shape, width = tower_of(model, tower)
    return {
        "model_type": "electra",
        "vocab_size": model.vocab_size,
        "embedding_size": width,
        "type_vocab_size": model.type_vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
        "layer_norm_eps": model.layer_norm_eps,
        _POSITIONS: model.max_positions,
    }


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
    is_modern = any("tok_embeddings" in name for name in theirs)
    has_prefix = any(name.startswith("electra.") for name in theirs)
    if is_modern:
        theirs = hf_modernbert.with_prefix(theirs)
    elif not has_prefix:
        theirs = {f"electra.{name}": tensor for name, tensor in theirs.items()}
    return {name: tensor.float() for name, tensor in theirs.items() if tensor.is_floating_point()}


def _read_indexed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a model that is stored in several files, which an index lists."""
    file_of = read_json_object(folder / _INDEX_FILE, _COPY_AGAIN).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise UserError(f"{folder / _INDEX_FILE}: damaged, because it has no object weight_map; {_COPY_AGAIN}")
    theirs: dict[str, torch.Tensor] = {}
    for name in sorted({str(file) for file in file_of.values()}):
        file = _file_within(folder, name)
        if not file.exists():
            raise UserError(f"{file}: {_INDEX_FILE} lists this file; copy the model's whole folder there")
        theirs |= _read_safetensors(file)
    return theirs


def _file_within(folder: Path, name: str) -> Path:
    """Return the path of a file with weights; refuse a name or link that leads out of the model's folder."""
    file = folder / name
    model_folder = Path(os.path.realpath(folder))
    places = [model_folder]
    # In the cache of the Hugging Face hub, the files in snapshots/REVISION are links to files in blobs/.
    if model_folder.parent.name == "snapshots":
        places.append(model_folder.parent.parent / "blobs")
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
            raise UserError(f"{file}: damaged ({error}); {_COPY_AGAIN}") from None


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
            raise UserError(f"{file}: damaged ({type(error).__name__}: {reason}); {_COPY_AGAIN}") from None
    is_state = isinstance(theirs, dict) and all(isinstance(tensor, torch.Tensor) for tensor in theirs.values())
    if not is_state:
        raise UserError(f"{file}: damaged, because it holds other objects than tensors; {_COPY_AGAIN}")
    return theirs


def weights_sha256(state: State) -> str:
    """Return a SHA-256 in hexadecimal over the names, shapes and fp32 values of weights, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


def cut_positions(state: State, max_positions: int) -> dict[str, torch.Tensor]:
    """Return a state dict whose position table, if it has one, is cut to its first `max_positions` rows."""
    table = "embeddings.position.weight"
    result = dict(state)
    if table in result:
        result[table] = result[table][:max_positions]
    return result


def _assign_values(towers: ElectraTowers, large: State, small: State) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the weights of both state dicts by parameter name in `towers`, and a note if their embeddings differ."""
    values = {name: value for name, value in small.items() if not name.startswith(_EMBEDDINGS)}
    values |= {name: value for name, value in large.items() if not name.startswith(_EMBEDDINGS)}
    large_embeddings = {name: value for name, value in large.items() if name.startswith(_EMBEDDINGS)}
    small_embeddings = {name: value for name, value in small.items() if name.startswith(_EMBEDDINGS)}
    notes = []
    if hasattr(towers, "discriminator_embeddings"):
        values |= _assign_separate_embeddings(towers.is_difference, large_embeddings, small_embeddings)
    else:  # one set for both towers
        values |= large_embeddings or small_embeddings
        if large_embeddings and _differ(large_embeddings, small_embeddings):
            notes.append("embeddings: those of the two folders differ; the discriminator's are used for both towers")
    return values, notes


def _assign_separate_embeddings(is_difference: bool, large: State, small: State) -> dict[str, torch.Tensor]:
    """Return both towers' embeddings; with `is_difference`, the discriminator stores its tables minus the others."""
    if not is_difference:
        return {**small, **{f"discriminator_{name}": value for name, value in large.items()}}
    values = dict(small or large)
    for name, value in large.items():
        if "layer_norm" in name:  # not part of the sum of tables that the discriminator reads
            values[f"discriminator_{name}"] = value
        else:
            values[f"discriminator_{name}"] = value - values[name]
    return values


def _differ(large_embeddings: State, small_embeddings: State) -> bool:
    return any(not torch.equal(value, large_embeddings[name]) for name, value in small_embeddings.items())


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
            f"{folder}: the weights have {min(unknown)}, which is no part of the model in config.json; {_COPY_AGAIN}"
        )
    token_table = weights.get(hf_modernbert.TOKEN_TABLE if model.architecture == "modern" else TOKEN_TABLE)
    if token_table is not None and token_table.shape[:1] != (model.vocab_size,):
        raise UserError(
            f"{folder}: the token table has the shape {tuple(token_table.shape)}, but vocab_size in config.json is "
            f"{model.vocab_size}; {_COPY_AGAIN}"
        )
    convert = from_hf_generator if tower == "generator" else from_hf_discriminator
    try:
        state = cut_positions(convert(weights, model), model.max_positions)
    except KeyError as error:
        raise UserError(
            f"{folder}: the weights lack {error}, so this is not a complete model; {_COPY_AGAIN}"
        ) from None
    except RuntimeError:  # query, key and value cannot be joined, or the token table cannot be padded
        raise UserError(f"{folder}: the weights have shapes that do not fit together; {_COPY_AGAIN}") from None
    shape, width = tower_of(model, tower)
    with torch.device("meta"):
        modules = {
            "embeddings": new_embeddings(model, width),
            tower: new_encoder(model, shape, width),
            "generator_head" if tower == "generator" else "token_head": new_token_head(
                model, shape.hidden_size, width
            ),
        }
        if tower == "discriminator":
            modules["discriminator_head"] = new_detection_head(model)
    for prefix, module in modules.items():
        for own_name, parameter in module.state_dict().items():
            name = f"{prefix}.{own_name}"
            if name not in state and prefix in ("embeddings", tower):
                raise UserError(f"{folder}: the weights lack {name}, so this is not a complete model; {_COPY_AGAIN}")
            if name in state and state[name].shape != parameter.shape:
                raise UserError(
                    f"{folder}: {name} has the shape {tuple(state[name].shape)}, but config.json gives it "
                    f"{tuple(parameter.shape)}; {_COPY_AGAIN}"
                )
    return state


def _check_read_alike(folder: Path, theirs: State) -> None:
    """Raise UserError if transformers would load other weights: rounded ones, or an untied output matrix."""
    dtype = read_settings(folder)["dtype"]
    for name, tensor in theirs.items():
        if dtype in ("float16", "bfloat16") and not torch.equal(tensor.to(getattr(torch, dtype)).float(), tensor):
            raise UserError(
                f"{folder}/config.json: dtype or torch_dtype is {dtype}, but {name} is stored in a finer one, and "
                f"transformers rounds it; set the key to the dtype of the weights, or save the model in {dtype}"
            )
    for output, table in _TIED.items():
        if output in theirs and table in theirs and not torch.equal(theirs[output], theirs[table]):
            raise UserError(
                f"{folder}: {output} is another matrix than {table}, but only tied ones are supported; name another "
                f"model"
            )
