"""Record the environment of a run in environment.json at every start: software, hardware, commit, command and hosts.

Before that, check that DeepSpeed has the tested version, and that a run on a node with GPUs would use them.

Guarantee: the file holds no user name and no environment variable. It does name the hosts and, without its secrets,
the command line of rank 0, so that a run can be traced; a report, which may be passed on, shows neither. Only the
owner of the run may read the file.

Limits: hardware is that of rank 0's node; the other nodes are assumed to be like it.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from electra_dist.config.secrets import without_secret_arguments
from electra_dist.errors import NodeError
from electra_dist.gpu_affinity import VISIBLE_DEVICES, hides_all_gpus, num_gpus
from electra_dist.run.folder import ENVIRONMENT_FILE
from electra_dist.run.records import Count, Number, Record
from electra_dist.store.atomic_files import PRIVATE, replacing
from electra_dist.store.json_file import find_document
from electra_dist.version import DEEPSPEED, VERSION

PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "triton", "numpy", "webdataset", "boto3")


class _Cpu(Record):
    """Processor, cores and memory of a node: the entry "cpu" of environment.json."""

    model: str | None
    usable_cores: Count | None
    cores: Count | None
    memory_gb: Number


class _GpuDevice(Record):
    """One GPU of a node, in the entry "gpus" of environment.json."""

    name: str
    memory_gb: Number | None


class _Gpus(Record):
    """GPUs of a node and their driver: the entry "gpus" of environment.json, which is empty without a GPU."""

    driver: str | None = None
    devices: list[_GpuDevice] = []


class _Commit(Record):
    """Commit of the running source code: the entry "commit" of environment.json."""

    sha: str
    has_changes: bool


class _CorpusSource(Record):
    """Size and licence of one source of text, in the entry "corpus" / "sources" of environment.json."""

    tokens: Count
    licence: str | None = None


class _PhaseSizes(Record):
    """Sizes of one training corpus of a run with `data.phases`, in "corpus" / "phases" of environment.json."""

    from_step: Count
    fingerprint: str
    rows: Annotated[int, Field(gt=0, lt=1 << 53)]
    tokens: Count


class _CorpusSizes(Record):
    """Sizes of the training corpora of a run: the entry "corpus" of environment.json."""

    rows: Count
    tokens: Count
    seq_len: Count
    sources: dict[str, _CorpusSource] = {}
    phases: list[_PhaseSizes] = []


class _Environment(Record):
    """Content of environment.json."""

    versions: dict[str, str]
    cpu: _Cpu
    gpus: _Gpus
    system: str
    world_size: Count
    commit: _Commit | None = None
    hosts: dict[str, Count] = {}
    corpus: _CorpusSizes | None = None


def check_deepspeed() -> None:
    """Raise NodeError unless the tested version of DeepSpeed is installed, without importing it."""
    try:
        installed = metadata.version("deepspeed")
        found = f"deepspeed {installed} is installed"
    except metadata.PackageNotFoundError:
        installed = ""
        found = "deepspeed is not installed"
    if installed.partition("+")[0] != DEEPSPEED:
        raise NodeError(
            f"{platform.node()}: {found}, but runs are right with {DEEPSPEED} only; pip install deepspeed=={DEEPSPEED}"
        )


def check_gpus(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> None:
    """Raise NodeError if this node has GPUs and torch sees none, so that the run would compute on the CPU.

    There is no error if the user asks for the CPU by DS_ACCELERATOR=cpu, or by a CUDA_VISIBLE_DEVICES that is empty or
    "-1". `root` contains proc/ and dev/. Imports torch.
    """
    if environment.get("DS_ACCELERATOR", "cuda") != "cuda" or hides_all_gpus(environment):
        return
    import torch  # takes seconds, unless training has imported it already

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns with the reason that the error below names
        if torch.cuda.is_available():
            return
        reason = _why_torch_sees_no_gpu()
    readings = gpus()
    num_found = len(readings.get("devices", [])) or num_gpus(root)
    if num_found == 0:
        return
    shown = f", CUDA_VISIBLE_DEVICES={environment[VISIBLE_DEVICES]}" if VISIBLE_DEVICES in environment else ""
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    driver = readings.get("driver") or _driver(root)
    raise NodeError(
        f"{platform.node()}: this node has {num_found} GPU{'s' if num_found > 1 else ''}, but torch sees none: "
        f"{reason} (torch {torch.__version__} for {built_for}, driver {driver}{shown}); install a torch that fits the "
        f"driver, or set DS_ACCELERATOR=cpu to compute on the CPU"
    )


def _why_torch_sees_no_gpu() -> str:
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
    return "it gives no reason"


def _driver(root: Path) -> str:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return match[0] if match is not None else "unknown"


@functools.cache  # for a start, which records them in every checkpoint, too
def versions() -> dict[str, str]:
    """Return the versions of Python, of this package, of installed `PACKAGES` and, with a GPU, of CUDA and NCCL."""
    import torch  # takes seconds, unless training has imported it already

    version_by_name = {"electra-dist": VERSION, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            version_by_name[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        version_by_name["cuda"] = str(torch.version.cuda)
        version_by_name["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # such as (2, 21, 5)
    return version_by_name


@functools.cache
def cpu() -> dict[str, Any]:
    """Return the processor's model, the cores that this process may use, all cores, and the memory in 1e9 bytes.

    If Slurm or a container limits the process, it may use fewer cores than there are.
    """
    import psutil  # here, because `electra-dist status` reads this record and asks for no hardware

    num_cores = os.cpu_count()
    can_ask_affinity = hasattr(os, "sched_getaffinity")  # Linux only
    return {
        "model": _cpu_model(),
        "usable_cores": len(os.sched_getaffinity(0)) if can_ask_affinity else num_cores,
        "cores": num_cores,
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name from /proc/cpuinfo, or what Python's `platform` says if the file has none."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def gpus() -> dict[str, Any]:
    """Return driver version, and name and memory (1e9 bytes) of each GPU of this node; {} if NVML is missing."""
    from electra_dist.nvml import GpuProbe  # as in `cpu`: its import takes longer than that of this module

    probe = GpuProbe.open()
    if probe is None:
        return {}
    samples = probe.sample()
    driver = probe.driver_version()
    probe.close()
    devices = [{"name": gpu.name, "memory_gb": _rounded(gpu.memory_total_gb)} for gpu in samples]
    return {"driver": driver, "devices": devices}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def commit(folder: Path = Path(__file__).parent) -> dict[str, Any] | None:
    """Return the commit ("sha") of the running source code, and whether tracked files differ ("has_changes").

    None if the code is an installed package, or if git is missing or does not answer within seconds.
    """
    # A package that is installed in a virtual environment inside some work tree is not a part of that tree.
    if not _git(folder, "ls-files", "--error-unmatch", Path(__file__).name):
        return None
    sha = _git(folder, "rev-parse", "HEAD")
    if not sha:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"sha": sha, "has_changes": bool(changes)}


def _git(folder: Path, *arguments: str) -> str:
    """Return what a git command prints, without white space at the ends; "" if it fails or takes more than 5 s."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def write_environment(
    run_dir: Path, world_size: int, hosts: Sequence[str] = (), corpus: dict[str, Any] | None = None
) -> Path:
    """Write environment.json to the run folder, replacing that of the previous start; return its path.

    `hosts` has the host name of each rank. `corpus` is the result of `Corpora.sizes` with an entry "sources" added:
    the size and licence of each source of text in the first corpus.
    """
    content = {
        "versions": versions(),
        "cpu": cpu(),
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.machine()}",
        "world_size": world_size,
        "commit": commit(),
        "command": without_secret_arguments(sys.argv),
        "hosts": dict(Counter(hosts)),
    }
    if corpus is not None:
        content["corpus"] = corpus
    path = Path(run_dir) / ENVIRONMENT_FILE
    with replacing(path, permissions=PRIVATE) as file:
        file.write(json.dumps(content, indent=1).encode() + b"\n")
    return path


def read_environment(run_dir: Path) -> dict[str, Any]:
    """Return the content of the run folder's environment.json, or {} if there is no such file."""
    next_step = "move it away; the next start of the run writes it again"
    content = find_document(Path(run_dir) / ENVIRONMENT_FILE, _Environment, next_step)
    return {} if content is None else content.fields()
