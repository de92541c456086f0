"""Load weights of released checkpoints or of other runs into the towers, for continued pretraining.

Guarantee: the towers are the generator and the discriminator. Every parameter of them either gets its value from the
source or is named in the notes, the lines of text that are returned for the run's log. The notes also name the
optimizer's moments, which no Hugging Face folder holds. A source of another shape, vocabulary size or function (such
as another epsilon of the LayerNorms) is refused, with the first difference in the message.

How: with `model.sharing: gdes` the discriminator reads the sum of the generator's table and a trainable difference,
which is set so that the sum equals the table of the source's discriminator.

Limits: the checkpoints that Google released hold no optimizer state, and some conversions of discriminators no head.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from electra_dist.model.towers import ElectraTowers
from electra_dist.pretrained.hf import State
from electra_dist.pretrained.hf_folders import cut_positions, read_tower

_EMBEDDINGS = "embeddings."  # prefix of the names of embedding parameters


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


def weights_sha256(state: State) -> str:
    """Return a SHA-256 in hexadecimal over the names, shapes and fp32 values of weights, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        values = state[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()


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
