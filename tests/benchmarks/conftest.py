"""The benchmarks are scripts that import each other by file name."""

import sys
import sysconfig
import venv
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

# What a GPU machine has: torch with what torch requires, triton and numpy.
TORCH_AND_ITS_NEEDS = (
    "torch", "filelock", "typing_extensions", "setuptools", "sympy", "mpmath", "networkx", "jinja2", "markupsafe",
    "fsspec", "triton", "numpy",
)  # fmt: skip


@pytest.fixture
def bare_python(tmp_path: Path) -> Callable[[Sequence[str]], Path]:
    """`bare_python(packages)`: a Python that can import torch, triton, numpy, these packages, and nothing else."""

    def make(packages: Sequence[str]) -> Path:
        folder = tmp_path / "bare"
        venv.create(folder, symlinks=True)
        site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        for package in {*TORCH_AND_ITS_NEEDS, *packages}:
            files = metadata.files(package) or []
            for name in {file.parts[0] for file in files} - {"..", "__pycache__", "distutils-precedence.pth"}:
                link = site / name
                if not link.exists():
                    link.symlink_to(Path(str(metadata.distribution(package).locate_file(name))))
        return folder / "bin" / "python"

    return make
