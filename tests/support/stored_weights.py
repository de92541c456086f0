"""Read, damage and compare the weights that a tiny run has stored, without the code of the project."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

Weights = dict[str, torch.Tensor]  # name of a parameter, without "towers." -> its values


def checkpoint(run: Path, step: int) -> Path:
    """Return the folder of a checkpoint."""
    [folder] = (run / "checkpoints").glob(f"step-{step:08d}-a*")
    return folder


def damage(run: Path, step: int) -> None:
    """Flip a bit of the first weight in a tensor file of a checkpoint."""
    [file] = checkpoint(run, step).glob("rank-00001.*.safetensors")
    data = bytearray(file.read_bytes())
    header_bytes = int.from_bytes(data[:8], "little")
    data[8 + header_bytes] ^= 1
    file.write_bytes(data)


def stored_weights(run: Path, step: int) -> Weights:
    """Return the fp32 master weights of a checkpoint, read from the ranks' files without the project's code."""
    folder = checkpoint(run, step)
    shapes = json.loads((folder / "manifest.json").read_text())["state"]["shapes"]
    flat = {name: torch.full((torch.Size(shape).numel(),), torch.nan) for name, shape in shapes.items()}
    for file in folder.glob("rank-*.safetensors"):
        for key, values in load_file(file).items():
            kind, name, start = key.split("|")
            if kind == "master":
                flat[name][int(start) : int(start) + values.numel()] = values
    return {name.removeprefix("towers."): flat[name].view(shapes[name]) for name in shapes}


def expected_names(tower: str) -> dict[str, str]:
    """Return Hugging Face's name of every parameter of a tower of two layers -> its name in a checkpoint.

    Query, key and value are the thirds of one parameter, marked by their number, as in "...qkv.weight/1".
    """
    modules = {
        "electra.embeddings.LayerNorm": "embeddings.layer_norm",
        "electra.embeddings_project": f"{tower}.embeddings_project",
    }
    names = {
        "electra.embeddings.word_embeddings.weight": "embeddings.word.weight",
        "electra.embeddings.position_embeddings.weight": "embeddings.position.weight",
        "electra.embeddings.token_type_embeddings.weight": "embeddings.token_type.weight",
    }
    for layer in range(2):
        theirs, ours = f"electra.encoder.layer.{layer}", f"{tower}.layers.{layer}"
        for third, part in enumerate(("query", "key", "value")):
            for kind in ("weight", "bias"):
                names[f"{theirs}.attention.self.{part}.{kind}"] = f"{ours}.attention.qkv.{kind}/{third}"
        modules |= {
            f"{theirs}.attention.output.dense": f"{ours}.attention.out",
            f"{theirs}.attention.output.LayerNorm": f"{ours}.attention_norm",
            f"{theirs}.intermediate.dense": f"{ours}.expand",
            f"{theirs}.output.dense": f"{ours}.contract",
            f"{theirs}.output.LayerNorm": f"{ours}.output_norm",
        }
    if tower == "discriminator":
        modules["discriminator_predictions.dense"] = "discriminator_head.dense"
        modules["discriminator_predictions.dense_prediction"] = "discriminator_head.out"
    else:
        modules["generator_predictions.dense"] = "generator_head.dense"
        modules["generator_predictions.LayerNorm"] = "generator_head.layer_norm"
        names["generator_lm_head.bias"] = "generator_head.bias"
    for theirs, ours in modules.items():
        for kind in ("weight", "bias"):
            names[f"{theirs}.{kind}"] = f"{ours}.{kind}"
    return names


def check_weights(folder: Path, tower: str, weights: Weights) -> None:
    """Check that an exported folder holds exactly these weights of a tower, bit for bit."""
    exported = load_file(folder / tower / "model.safetensors")
    names = expected_names(tower)
    assert exported.keys() == names.keys()
    for theirs, ours in names.items():
        name, _, third = ours.partition("/")
        expected = weights[name].chunk(3)[int(third)] if third else weights[name]
        if name == "embeddings.word.weight":
            expected = expected[:300]  # the table's pad rows are not exported
        assert torch.equal(exported[theirs], expected), theirs
