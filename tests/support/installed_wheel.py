"""Build a wheel of the repository and install it into a new environment, as a user outside the repository has it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from support.real_runs import REPOSITORY

NOT_COPIED = (".git", ".venv", "build", "runs", "corpora", "site", "*.egg-info", "__pycache__", "*.so")


class Installation:
    """A virtual environment with the wheel in it, and the folder outside the repository in which commands run."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.python = folder / "venv" / "bin" / "python"
        self.cwd = folder / "elsewhere"
        self.cwd.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        # With the repository on PYTHONPATH, pip would take the wheel for installed.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run([*pip, str(wheel)], check=True, env=environment)
        # The dependencies are those of this environment. A path in a .pth file does not bring its editable packages.
        (site_packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.package = site_packages / "electra_dist"

    def run(self, *command: object, cwd: Path | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment; a name without a folder is a script of it."""
        program, *arguments = (str(part) for part in command)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{self.python.parent}:{environment['PATH']}"
        return subprocess.run(
            [str(self.python.parent / program), *arguments],
            capture_output=True,
            text=True,
            cwd=cwd or self.cwd,
            env=environment,
            timeout=timeout,
        )


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a copy of the repository in `folder`, so that the build leaves nothing behind; return it."""
    source = folder / "source"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*NOT_COPIED, "tests", "benchmarks", "docs"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(source)], check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file
