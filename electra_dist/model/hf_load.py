"""Released ELECTRA checkpoints into our towers, for continued pretraining. Nothing is left out in silence.

Guarantee: every parameter of the towers either has the folder's value or is named in the notes that come back, as are
the optimizer's moments, which no Hugging Face folder holds. A folder of another shape or vocabulary is refused with
the first difference.

What the released checkpoints lack: Google's hold no optimizer state, the discriminators of some conversions no head.

How: folders of ElectraForPreTraining, ElectraForMaskedLM or ElectraModel, `model.safetensors` or `pytorch_model.bin`
(read without unpickling objects). Tables longer than `max_positions` are cut. Under `gdes` the discriminator's
difference is what makes its tables the folder's.

Shapes follow `towers.model`.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from electra_dist.errors import UserError
from electra_dist.model.hf import State, TowerName, from_hf_discriminator, from_hf_generator, tower_of
from electra_dist.model.towers import ElectraTowers


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
    found, notes = _placed(towers, large, small)
    missing: dict[str, int] = {}
    with torch.no_grad():
        for name, parameter in towers.named_parameters():
            if name in found:
                parameter.copy_(found[name])
            else:
                part = name.partition(".")[0]
                missing[part] = missing.get(part, 0) + parameter.numel()
    folders = " and ".join(str(folder) for folder in (discriminator_dir, generator_dir) if folder)
    notes += [f"{part}: not in {folders}; its {count:,} parameters start at random" for part, count in missing.items()]
    return [*notes, "optimizer: a Hugging Face folder holds no moments; they start at zero"]


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
    _check(towers, tower, folder)
    weights, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if weights.exists():
        theirs = load_file(weights)
    elif pickled.exists():
        theirs = torch.load(pickled, map_location="cpu", weights_only=True)
    else:
        raise UserError(f"{folder}: neither model.safetensors nor pytorch_model.bin; download the whole checkpoint")
    if not any(name.startswith("electra.") for name in theirs):  # ElectraModel, saved without a head
        theirs = {f"electra.{name}": tensor for name, tensor in theirs.items()}
    theirs = {name: tensor.float() for name, tensor in theirs.items() if tensor.is_floating_point()}
    positions = "electra.embeddings.position_embeddings.weight"
    theirs[positions] = theirs[positions][: towers.model.max_positions]
    return (from_hf_generator if tower == "generator" else from_hf_discriminator)(theirs, towers.model)


def _check(towers: ElectraTowers, tower: TowerName, folder: Path) -> None:
    file = folder / "config.json"
    if not file.exists():
        raise UserError(f"{folder}: no config.json; name a folder of a downloaded or exported ELECTRA model")
    given, model = json.loads(file.read_text()), towers.model
    shape, width = tower_of(model, tower)
    wanted = {
        "model_type": "electra",
        "vocab_size": model.vocab_size,
        "embedding_size": width,
        "type_vocab_size": model.type_vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "intermediate_size": shape.intermediate_size,
    }
    for key, value in wanted.items():
        if given.get(key) != value:
            raise UserError(
                f"{file}: {key} is {given.get(key)}, the config's {tower} has {value}; set the model section to the "
                f"checkpoint's shape, or name another checkpoint"
            )
    if given.get("max_position_embeddings", 512) < model.max_positions:
        raise UserError(f"{file}: fewer positions than model.max_positions {model.max_positions}; lower it")
