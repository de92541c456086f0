"""Golden scripts: what `electra-dist submit --dry-run` writes in front of job.sh, over its options."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from electra_launcher.slurm.batch_script import JOB_FILE
from support.real_runs import write_tiny_config

from golden.comparison import Kind
from golden.doors import command, named_places

OPTIONS: dict[str, list[str]] = {
    "requeued": ["--nodes", "2"],
    "time limit": ["--nodes", "1", "--time", "24:00:00", "--partition", "gpu", "--signal-ahead", "300"],
    "chain": ["--nodes", "2", "--chain", "5", "--time", "04:00:00"],
    "spare nodes": ["--nodes", "4", "--spares", "2"],
    "no GPU": ["--nodes", "2", "--gpus-per-node", "0"],
    "container of pyxis": ["--nodes", "1", "--container", "/images/electra dist.sqsh", "--mount", "/data:/data:ro"],
    "container of apptainer": ["--nodes", "1", "--container", "electra.sif", "--container-runtime", "apptainer"],
    "options of sbatch": ["--nodes", "1", "--sbatch", "account=vision", "--sbatch", "comment=it's ours"],
    "staged environment": ["--nodes", "64", "--stage-environment"],
    "setup file": ["--nodes", "1", "--setup", "SETUP"],
    "other settings": ["--nodes", "1", "--set", "train.num_steps=50", "--accept-new-numerics"],
    "two runs": ["--nodes", "1", "--each", "seed=1,2"],
}


def names() -> list[str]:
    """Return the names of all submissions."""
    return list(OPTIONS)


def make(name: str, folder: Path) -> list[str]:
    """Return the lines that the command prints, with one line `job.sh` for the text of that file."""
    (folder / "setup.sh").write_text("module load cuda\n")
    settings = {"train.global_batch": 1024}  # which many numbers of ranks divide
    config = write_tiny_config(folder / "run.yaml", folder / "run", str(folder / "corpus"), **settings)
    options = [str(folder / "setup.sh") if option == "SETUP" else option for option in OPTIONS[name]]
    text = command(folder, "submit", "--config", str(config), *options, "--dry-run")
    job = JOB_FILE.read_text().removeprefix("#!/bin/bash\n")
    text = text.replace(named_places(job, folder), "job.sh\n")
    text = text.replace(named_places(sys.executable, folder), "PYTHON")
    text = re.sub(r"environment-[0-9a-f]{16}", "environment-DIGEST", text)  # of the installed packages
    return re.sub(r"(--job-name=.*-)[0-9a-f]{8}\b", r"\1DIGEST", text).splitlines()


KIND = Kind("scripts", __doc__.splitlines()[0], names, make)
