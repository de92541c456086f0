"""Rehearse training on a pretended GPU, and compare what each step did with the record.

    make gpu-rehearsal                                                # all modes, about ten minutes on one core
    python tests/pretended_gpu/drill.py --modes large,zero-2          # some of them
    python tests/pretended_gpu/drill.py --write                       # rewrites the record after a wanted change
    python tests/pretended_gpu/drill.py --modes large --kinds launch  # every kernel by name, not a sum

The CUDA build of torch, its libraries and the real `launcher/pretrain.py` run over three pretended libraries, in the
place of CUDA's runtime, its driver, and cuBLAS with NCCL. These answer every call and run no kernel, so that the side
of the host is real and no number is. A mode's row has, of one micro-batch and of one update: kernels launched, matrix
products, copies within the device and their megabytes, fills, copies from and to the host, and waits of the host; then
the megabytes that an update exchanges, the smallest alignment in bytes that torch asked of cuBLASLt, and the peaks of
the memory that tensors take and that torch's allocator reserves for them.

The mode `old driver` is a node whose driver is too old for torch, so that torch sees none of its GPUs: training and
preflight must end with exit code 78 and one line that says so, instead of computing on the CPU.

The first call installs torch's CUDA build (4.5 GB) into a folder of its own, build/pretended_gpu or --folder.

Limits: one rank. No time is measured. cuSOLVER is not pretended, so `optimizer.name: muon` does not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))
sys.path.insert(0, str(REPOSITORY / "tests"))

from support.real_runs import write_corpus  # noqa: E402

from electra_dist.errors import EXIT_USER_ERROR  # noqa: E402

SOURCES = Path(__file__).resolve().parent
RECORD = SOURCES / "recorded.json"
# "===" keeps pip from taking a build for CPUs. The last two packages have headers that the others include.
PACKAGES = ("torch===2.13.0", "nvidia-cuda-cccl==13.0.85", "nvidia-cuda-crt==13.0.88")
LIBRARIES = {"runtime.cpp": "libruntime.so", "libraries.cpp": "liblibraries.so", "driver.cpp": "libcuda.so.1"}
MANAGEMENT = "management.cpp"  # has a folder of its own, because only the mode `old driver` needs it
PACKAGES_OF_MODE = SOURCES / "packages"  # found by the mode `flash3` only
OLD_DRIVER = "old driver"
VOCAB_SIZE = 30522
LAST_STEP = 3
LIMIT_S = 1800

_TWO_LAYERS = ("model.discriminator.num_layers=2", "model.generator.num_layers=2")
_SMALL = (*_TWO_LAYERS, "train.global_batch=16", "train.micro_batch=8")


@dataclass(frozen=True)
class Mode:
    """One way to train that is rehearsed."""

    name: str
    file: str  # in configs/
    overrides: tuple[str, ...]


MODES = {
    mode.name: mode
    for mode in [
        Mode("large", "large_25pct_mask.yaml", ("train.global_batch=128", "train.micro_batch=64")),
        Mode("large 128", "large_25pct_mask.yaml", ("train.global_batch=256", "train.micro_batch=128")),
        Mode("fast", "large_fast.yaml", ("train.global_batch=128", "train.micro_batch=64")),
        Mode("fast 128", "large_fast.yaml", ("train.global_batch=256", "train.micro_batch=128")),
        # Not compiled, because `predict.py` does not know what a compiler fuses.
        Mode("large modern", "modern_400m.yaml", ("train.global_batch=16", "engine.compile=false")),
        Mode("zero-0 lamb", "small.yaml", (*_SMALL, "engine.zero_stage=0", "optimizer.name=lamb")),
        Mode("zero-1", "small.yaml", _SMALL),
        Mode("zero-2", "small.yaml", (*_SMALL, "engine.zero_stage=2")),
        Mode("zero-3", "small.yaml", (*_SMALL, "engine.zero_stage=3")),
        Mode("fp16", "small.yaml", (*_SMALL, "train.precision=fp16")),
        Mode("recompute", "small.yaml", (*_SMALL, "engine.activation_checkpointing=true")),
        Mode("auto", "small.yaml", (*_TWO_LAYERS, "train.global_batch=16", "train.micro_batch=auto")),
        Mode("offload", "small.yaml", (*_SMALL, "engine.zero_stage=2", "engine.offload_optimizer=true")),
        Mode("compile", "small.yaml", (*_SMALL, "engine.compile=true")),
        Mode("flash3", "small.yaml", (*_SMALL, "model.attention_dropout=0", "engine.attention=flash3")),
        Mode("modern", "modern_400m.yaml", _SMALL),  # compiled, as the file says
        Mode("modern eager", "modern_400m.yaml", (*_SMALL, "engine.compile=false")),
    ]
}


def install(folder: Path) -> Path:
    """Install torch's CUDA build below `folder` unless it is there; return its folder for PYTHONPATH."""
    site = folder / "site"
    is_complete = folder / "installed"
    if not is_complete.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(site), *PACKAGES]
        subprocess.run(command, check=True)
        is_complete.touch()
    return site


def build(folder: Path, site: Path) -> Path:
    """Compile the pretended libraries; return their folder."""
    libraries = folder / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    (libraries / "management").mkdir(exist_ok=True)
    includes = [f"-I{site}/nvidia/{part}/include" for part in ("cu13", "nccl")]
    for source, name in {**LIBRARIES, MANAGEMENT: "management/libnvidia-ml.so.1"}.items():
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-deprecated-declarations", *includes]
        subprocess.run([*command, str(SOURCES / source), "-o", str(libraries / name), "-ldl"], check=True)
    return libraries


def run(mode: Mode, folder: Path, site: Path, libraries: Path) -> dict[str, Any]:
    """Train in a mode on the pretended GPU and return what `rank.py` has counted; raise RuntimeError if it failed."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        counts = scratch / "counts.json"
        command = [sys.executable, str(SOURCES / "rank.py"), str(counts), str(LAST_STEP), *_options(mode, scratch)]
        environment = _environment(folder, site, libraries)
        # A folder of its own: while Inductor tries kernels, memory peaks higher than where it has compiled before.
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(scratch / "inductor")
        if mode.name == "flash3":
            environment["PYTHONPATH"] += os.pathsep + str(PACKAGES_OF_MODE)
        done = subprocess.run(
            command, env=environment, cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        if not counts.exists():
            raise RuntimeError(f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        counted: dict[str, Any] = json.loads(counts.read_text(encoding="utf-8"))
        return counted


def _options(mode: Mode, scratch: Path) -> list[str]:
    """Write a corpus into `scratch`; return the options of a training in a mode that reads it and writes there."""
    seq_len = 1024 if mode.file.startswith("modern") else 512 if mode.file.startswith("large") else 128
    write_corpus(str(scratch / "corpus"), [1024], seq_len=seq_len, vocab_size=VOCAB_SIZE)
    settings = [
        *(f"run_dir={scratch / 'run'}", f"data.corpus={scratch / 'corpus'}", "data.heldout=null"),
        *("train.num_steps=100", "optimizer.warmup_steps=10", "log.tensorboard=false"),
        *("optimizer.implementation=foreach", *mode.overrides),  # the others need nvcc
    ]
    options = ["--config", str(REPOSITORY / "configs" / mode.file)]
    for setting in settings:
        options += ["--set", setting]
    return options


def _environment(folder: Path, site: Path, libraries: Path) -> dict[str, str]:
    """Return the environment in which the pretended libraries stand before CUDA's."""
    search_path = [site, REPOSITORY, REPOSITORY / "kernels", REPOSITORY / "launcher"]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, search_path)),
        "LD_PRELOAD": f"{libraries / 'libruntime.so'} {libraries / 'liblibraries.so'}",
        "LD_LIBRARY_PATH": str(libraries),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "DS_ACCELERATOR": "cuda",
    }


def check_old_driver(folder: Path, site: Path, libraries: Path) -> list[str]:
    """Start training and preflight on a node whose driver is too old; return what is wrong with how they end."""
    faults = []
    for program in ("electra_launcher.pretrain", "electra_launcher.preflight"):
        with tempfile.TemporaryDirectory() as name:
            scratch = Path(name)
            environment = _environment(folder, site, libraries) | {"PRETENDED_DRIVER": "12040"}
            environment["LD_LIBRARY_PATH"] += os.pathsep + str(libraries / "management")
            command = [sys.executable, "-m", program, *_options(MODES["zero-1"], scratch)]
            done = subprocess.run(
                command, env=environment, cwd=scratch, capture_output=True, text=True, check=False, timeout=LIMIT_S
            )
            output = done.stdout + done.stderr
            named = [line for line in output.splitlines() if "this node has 1 GPU, but torch sees none" in line]
            print(f"{OLD_DRIVER}: {program} ends with {done.returncode}: {' '.join(named)}", flush=True)
            is_refused = done.returncode == EXIT_USER_ERROR and len(named) == 1 and "550.54.15" in named[0]
            if not is_refused or (scratch / "run" / "ledger.jsonl").exists():
                faults.append(f"{OLD_DRIVER}: {program} ends with {done.returncode} and\n{output[-3000:]}")
    return faults


def summary(counted: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a mode as the record has them."""
    result: dict[str, Any] = {"attention": counted["attention"]}
    for part in ("micro_batch", "update"):
        counts = counted[part]
        sums = {kind: _sum(counts, "events", kind) for kind in ("launch", "product", "fill", "wait")}
        sums["copies"] = _sum(counts, "events", "copy", "within the device")
        sums["copied_mb"] = round(_sum(counts, "bytes", "copy", "within the device") / 1e6, 1)
        sums["host_copies"] = _sum(counts, "events", "copy") - sums["copies"]
        sums["exchanged_mb"] = round(_sum(counts, "bytes", "collective") / 1e6, 1)
        result[part] = sums
    names = [count["name"] for count in counted["micro_batch"] if " align" in count["name"]]
    result["alignment"] = min((int(name.rpartition(" align")[2]) for name in names), default=None)
    result["peak_gb"] = round(counted["peak_bytes"] / 1e9, 2)
    result["reserved_gb"] = round(counted["reserved_bytes"] / 1e9, 2)
    products = [count for count in counted["micro_batch"] if count["kind"] == "product"]
    result["products"] = {count["name"]: count["events"] for count in products}
    return result


def _sum(counts: Sequence[dict[str, Any]], key: str, kind: str, name: str = "") -> int:
    return sum(count[key] for count in counts if count["kind"] == kind and count["name"].startswith(name))


_COLUMNS = ("launch", "product", "copies", "copied_mb", "fill", "host_copies", "wait")


def row(name: str, numbers: dict[str, Any]) -> str:
    """Return a mode's row of the table."""
    cells = [name, numbers["attention"]]
    for part in ("micro_batch", "update"):
        cells += [str(numbers[part][column]) for column in _COLUMNS]
    cells += [str(numbers["update"]["exchanged_mb"]), str(numbers["alignment"])]
    cells += [str(numbers["peak_gb"]), str(numbers["reserved_gb"])]
    return "| " + " | ".join(cells) + " |"


def header() -> str:
    """Return the head of the table."""
    titles = ["mode", "attention", *_COLUMNS, *(f"{column}, update" for column in _COLUMNS)]
    titles += ["exchanged_mb, update", "alignment", "peak_gb", "reserved_gb"]
    return "| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the modes, print their table and compare it with the record; return 1 if a number differs."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--folder", type=Path, default=REPOSITORY / "build" / "pretended_gpu")
    options.add_argument("--modes", default=",".join([*MODES, OLD_DRIVER]), help="names of modes, separated by commas")
    options.add_argument("--write", action="store_true", help="rewrite the record of these modes")
    options.add_argument("--kinds", default="", help="also print the counts of these kinds by name, such as launch")
    arguments = options.parse_args(argv)
    folder = arguments.folder.resolve()
    site = install(folder)
    libraries = build(folder, site)
    recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    faults = []
    print(header())
    for name in arguments.modes.split(","):
        if name == OLD_DRIVER:
            faults += check_old_driver(folder, site, libraries)
            continue
        try:
            counted = run(MODES[name], folder, site, libraries)
        except RuntimeError as error:
            faults.append(f"{name}: {error}")
            continue
        numbers = summary(counted)
        print(row(name, numbers), flush=True)
        for part in ("micro_batch", "update"):
            for count in counted[part]:
                if count["kind"] in arguments.kinds.split(","):
                    print(f"  {part} {count['kind']} {count['events']} {count['bytes']} {count['name']}")
        if arguments.write:
            recorded[name] = numbers
            lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in MODES if name in recorded]
            RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="ascii")
        elif recorded.get(name) != numbers:
            faults.append(f"{name}: recorded are {recorded.get(name)}, and found are {numbers}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
