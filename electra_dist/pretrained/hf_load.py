"""Weights of others into our towers, for continued pretraining: released checkpoints, and states of other runs.

Guarantee: nothing is left out in silence: every parameter of the towers either has the given value or is named in the
notes that come back, as are the optimizer's moments, which no Hugging Face folder holds. Another shape or size of the
vocabulary is refused with the first difference.

What the released checkpoints lack: Google's hold no optimizer state, the discriminators of some conversions no head.

How: folders of ElectraForPreTraining, ElectraForMaskedLM or ElectraModel, `model.safetensors` or `pytorch_model.bin`
(read without unpickling objects). Tables longer than `max_positions` are cut. Under `gdes` the discriminator's
difference is what makes its tables the folder's.

Shapes follow `towers.model`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from electra_dist.config import ModelConfig
from electra_dist.errors import UserError
from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf import State, TowerName, from_hf_discriminator, from_hf_generator, tower_of

_POSITIONS = "max_position_embeddings"


def load_pretrained(towers: ElectraTowers, discriminator_dir: Path | None, generator_dir: Path | None) -> list[str]:
    """Overwrite what the folders hold; returns a line for everything that they do not.

    Args:
        towers: initialised, on the host, not yet under an engine.
        discriminator_dir: a Hugging Face folder of the large tower.
        generator_dir: one of the generator.

    Raises:
        UserError: a folder is missing, unreadable, or of another shape or vocabulary than `towers.model`.
    """
    large = _read(towers, "discriminator", discriminator_dir) if discriminator_dir else {}
    small = _read(towers, "generator", generator_dir) if generator_dir else {}
    folders = " and ".join(str(folder) for folder in (discriminator_dir, generator_dir) if folder)
    notes = load_towers(towers, large, small, folders)
    return [*notes, "optimizer: a Hugging Face folder holds no moments; they start at zero"]


def load_towers(towers: ElectraTowers, large: State, small: State, where: str) -> list[str]:
    """Overwrite what there is; returns a line for everything that there is not, and for what does not fit together.

    Args:
        towers: as of `load_pretrained`, of the same shape.
        large: the discriminator, its head and the `embeddings.` that it reads, under the names of ElectraTowers.
        small: the generator, its head and the `embeddings.` that it reads; may be empty, as may `large`.
        where: what the notes call their source.
    """
    large, small = (_cut(state, towers.model.max_positions) for state in (large, small))
    found, notes = _placed(towers, large, small)
    missing: dict[str, int] = {}
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            if name in found:
                parameter.copy_(found[name])
            else:
                part = name.partition(".")[0]
                missing[part] = missing.get(part, 0) + parameter.numel()
    return [
        *notes,
        *(f"{part}: not in {where}; its {count:,} parameters start at random" for part, count in missing.items()),
    ]


def check_shape(where: str, given: Mapping[str, Any], model: ModelConfig, tower: TowerName) -> None:
    """Refuse a tower of another shape than the config's; `given` has the names of a Hugging Face config.json.

    Raises:
        UserError: names the first difference.
    """
    for key, value in shape_of(model, tower).items():
        if key != _POSITIONS and given.get(key) != value:
            raise UserError(
                f"{where}: {key} is {given.get(key)}, the config's {tower} has {value}; set the model section to the "
                f"checkpoint's shape, or name another checkpoint"
            )
    if given.get(_POSITIONS, 512) < model.max_positions:
        raise UserError(f"{where}: fewer positions than model.max_positions {model.max_positions}; lower it")


def shape_of(model: ModelConfig, tower: TowerName) -> dict[str, Any]:
    """What must be the same for weights to fit, under the names of a Hugging Face config.json."""
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
        _POSITIONS: model.max_positions,
    }


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a Hugging Face folder, fp32, under the names of a model with a head.

    Raises:
        UserError: there are none.
    """
    if (folder / "model.safetensors").exists():
        theirs = load_file(folder / "model.safetensors")
    elif (folder / "pytorch_model.bin").exists():
        theirs = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise UserError(f"{folder}: neither model.safetensors nor pytorch_model.bin; copy the whole folder")
    if not any(name.startswith("electra.") for name in theirs):  # ElectraModel, saved without a head
        theirs = {f"electra.{name}": tensor for name, tensor in theirs.items()}
    return {name: tensor.float() for name, tensor in theirs.items() if tensor.is_floating_point()}


def _cut(state: State, max_positions: int) -> dict[str, torch.Tensor]:
    """A position table may be longer than the model's."""
    table = "embeddings.position.weight"
    return {name: value[:max_positions] if name == table else value for name, value in state.items()}


def _placed(towers: ElectraTowers, large: State, small: State) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Name of a parameter -> its value, after what the towers share."""
    is_table = "embeddings."
    found = {
        name: value for source in (small, large) for name, value in source.items() if not name.startswith(is_table)
    }
    of_large = {name: value for name, value in large.items() if name.startswith(is_table)}
    of_small = {name: value for name, value in small.items() if name.startswith(is_table)}
    notes = []
    if not hasattr(towers, "discriminator_embeddings"):
        found |= of_large or of_small
        if any(not torch.equal(value, of_large[name]) for name, value in of_small.items() if of_large):
            notes.append("embeddings: those of the two folders differ; the discriminator's are used for both towers")
    elif towers.is_difference:
        found |= of_small or of_large
        for name, value in of_large.items():
            base = 0.0 if "layer_norm" in name else found[name]
            found[f"discriminator_{name}"] = value - base
    else:
        found |= of_small | {f"discriminator_{name}": value for name, value in of_large.items()}
    return found, notes


def _read(towers: ElectraTowers, tower: TowerName, folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights under our names."""
    file = folder / "config.json"
    if not file.exists():
        raise UserError(f"{folder}: no config.json; name a folder of a downloaded or exported ELECTRA model")
    check_shape(str(file), json.loads(file.read_text()), towers.model, tower)
    theirs = read_weights(folder)
    try:
        return (from_hf_generator if tower == "generator" else from_hf_discriminator)(theirs, towers.model)
    except KeyError as error:
        raise UserError(f"{folder}: the weights lack {error}; it is no whole ELECTRA model") from None
