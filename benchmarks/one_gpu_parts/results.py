"""Writes what a leg returns: weights in bf16, metrics and records, in files of at most 15 MB.

    discriminator/model-00001-of-00002.safetensors ...   weights in bf16, for Hugging Face and for this project
    discriminator/{model.safetensors.index.json, config.json, vocab.txt}
    metrics.jsonl                                        the run's own file
    records.tar.gz                                       the run's report, log, ledger, config and vocabulary
    leg.json                                             how the leg ended, the run's speed, all scores

Guarantee: no file of weights is larger than 15 MB. With the configuration's model these are 8 files in all.

Limits: the weights are for use and for scores, not to resume. A resume needs the run folder with its checkpoints.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from electra_dist.pretrained.export_run import export_run

MOST_FILE_BYTES = 15_000_000
_HEADER_BYTES = 100_000  # of a safetensors file with some hundred tensors, generously
_RECORDS = (
    "config.yaml", "identity.json", "environment.json", "tokenizer.json", "vocab.txt", "ledger.jsonl", "metrics.jsonl",
    "log.txt", "skipped_steps.json", "report.html", "scores.json",
)  # fmt: skip
Json = dict[str, Any]


def cut_into_files(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[dict[str, torch.Tensor]]:
    """Divide tensors among files, in their order, so that no file has more than `max_bytes` bytes of tensors.

    Raises:
        ValueError: a single tensor is larger.
    """
    files: list[dict[str, torch.Tensor]] = []
    free_bytes = 0
    for name, tensor in tensors.items():
        if tensor.nbytes > max_bytes:
            raise ValueError(f"{name} has {tensor.nbytes:,} bytes, more than a file's {max_bytes:,}")
        if not files or tensor.nbytes > free_bytes:
            files.append({})
            free_bytes = max_bytes
        files[-1][name] = tensor
        free_bytes -= tensor.nbytes
    return files


def write_bf16_weights(model: Path, folder: Path, most_file_bytes: int = MOST_FILE_BYTES) -> None:
    """Write a Hugging Face folder's weights in bf16, cut into files with an index, with its config and vocabulary.

    transformers reads such a folder as it reads one with a single file of weights.

    Args:
        model: folder with model.safetensors, config.json and vocab.txt.
        folder: folder to write; it must not exist.
        most_file_bytes: size of the largest file of weights.
    """
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(model / "model.safetensors").items()}
    files = cut_into_files(tensors, most_file_bytes - _HEADER_BYTES)
    folder.mkdir(parents=True)
    file_of: dict[str, str] = {}  # name of a weight -> its file
    for number, part in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors writes files that only their owner can read
        file_of |= dict.fromkeys(part, name)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    for name in ("config.json", "vocab.txt"):
        shutil.copyfile(model / name, folder / name)


def write_results(run_dir: Path, output: Path, leg: Json) -> None:
    """Write the files of this module's list; those of an earlier leg are replaced.

    Args:
        run_dir: folder of the run, with a checkpoint.
        output: folder to write; it is made if it is missing.
        leg: content of leg.json.

    Raises:
        UserError: the run has no good checkpoint; then leg.json, metrics.jsonl and records.tar.gz are there.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "leg.json").write_text(json.dumps(leg, indent=1) + "\n")
    if (run_dir / "metrics.jsonl").exists():
        shutil.copyfile(run_dir / "metrics.jsonl", output / "metrics.jsonl")
    with tarfile.open(output / "records.tar.gz", "w:gz") as tar:
        for name in _RECORDS:
            if (run_dir / name).exists():
                tar.add(run_dir / name, f"{run_dir.name}/{name}")
    with tempfile.TemporaryDirectory() as exported:
        folders = export_run(run_dir, Path(exported)).folders
        shutil.rmtree(output / "discriminator", ignore_errors=True)
        write_bf16_weights(folders["discriminator"], output / "discriminator")
