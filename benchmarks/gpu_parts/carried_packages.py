"""Lists the packages that a GPU machine without network needs beside torch, triton and numpy, and fetches wheels.

Guarantee: the lists are complete; tests/benchmarks/test_gpu.py runs `gpu.py --smoke`, and test_one_gpu.py the real
training, in a process that can import nothing else. Versions are those of this environment.

    python benchmarks/gpu_parts/carried_packages.py measure wheels            # for gpu.py
    python benchmarks/gpu_parts/carried_packages.py train wheels --python 3.12   # for gpu_train.sh

Limits: wheels for Linux on x86-64. DeepSpeed has no wheel on PyPI; its own is built here, and compiles operations on
the target.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# What torch itself requires is taken for granted: filelock, typing-extensions, setuptools, sympy, networkx, jinja2,
# fsspec. pydantic needs a newer typing-extensions than torch, so that is carried, too.
TO_MEASURE = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "pyyaml",
)  # fmt: skip
TO_TRAIN_WITHOUT_PLOTS = (
    *TO_MEASURE, "deepspeed", "einops", "hjson", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "tqdm",
    "nvidia-ml-py", "rich", "markdown-it-py", "mdurl", "pygments", "safetensors", "tokenizers",
)  # fmt: skip
# matplotlib draws the curves of report.html.
TO_TRAIN = (
    *TO_TRAIN_WITHOUT_PLOTS, "matplotlib", "contourpy", "cycler", "fonttools", "kiwisolver", "pillow", "pyparsing",
    "python-dateutil", "six",
)  # fmt: skip
_WITHOUT_WHEEL = ("deepspeed",)
_GLIBC = (28, 27, 24, 17)  # versions of glibc 2 in names of wheels; pip matches each one exactly


def requirement_lines(packages: Sequence[str]) -> list[str]:
    """Return NAME==VERSION of each package as installed here; the name alone of one that is not installed."""
    lines = []
    for package in packages:
        try:
            lines.append(f"{package}=={importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(package)
    return lines


def collect_wheels(packages: Sequence[str], folder: Path, python_version: str) -> list[Path]:
    """Download the wheels of the packages for Linux on x86-64 into a folder, with pip.

    Args:
        packages: Names, of `TO_MEASURE` or `TO_TRAIN`.
        folder: Where to write; it is made if it is missing.
        python_version: Python of the target, such as "3.12".

    Returns:
        The wheels in the folder.

    Raises:
        subprocess.CalledProcessError: pip failed; its message was printed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in _GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    ready = requirement_lines([package for package in packages if package not in _WITHOUT_WHEEL])
    target = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", "--quiet", "--no-deps", "-d", str(folder), *target, *ready], check=True)
    for requirement in requirement_lines([package for package in packages if package in _WITHOUT_WHEEL]):
        build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder), requirement]
        subprocess.run([*pip, *build], check=True)
    return sorted(folder.glob("*.whl"))


def main() -> None:
    """Collect the wheels that the command line names, and print their size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("purpose", choices=("measure", "train"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="Python version of the target (default: %(default)s)")
    arguments = parser.parse_args()
    packages = TO_MEASURE if arguments.purpose == "measure" else TO_TRAIN
    wheels = collect_wheels(packages, arguments.folder, arguments.python)
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{arguments.folder}: {len(wheels)} wheels, {num_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
