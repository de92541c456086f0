"""Preparations in processes of their own, which cannot reach the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[3]
NO_NETWORK = Path(__file__).parent / "no_network"
_COMMAND = "from electra_launcher.cli.main import main; main()"


def start_prepare(config: dict[str, Any], folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start `corpus prepare` in a process of its own, which cannot reach the network."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pipeline.yaml").write_text(yaml.safe_dump(config))
    paths = [str(NO_NETWORK), str(REPOSITORY), str(REPOSITORY / "kernels"), str(REPOSITORY / "launcher")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NETWORK_ATTEMPTS": str(folder / "attempts")}
    command = [sys.executable, "-c", _COMMAND, "corpus", "prepare", str(folder / "pipeline.yaml"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=folder)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a preparation."""
    try:
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
