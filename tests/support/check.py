"""Check what has changed since the last commit: style, types, and the tests that the change concerns most.

    python tests/support/check.py                     # (make check)
    python tests/support/check.py --list              # print which tests would run, and run nothing
    python tests/support/check.py configs/defaults.yaml   # as if these files had changed

related_tests.py selects the test files and puts the nearest first. They run beside the check of the types until the
time is up. The line at the end says how many tests were not run.

Guarantee: if no test file is selected, the files of FAST run, so something is always tested.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

from support.import_graph import ROOT
from support.related_tests import FARTHEST, Selected, select

NO_TESTS = 5  # exit code of pytest if no test of the files runs by default
MOST_SHOWN = 8
# Files of quick tests, at least one of each package.
FAST = (
    "tests/test_architecture.py",
    "tests/config/test_config.py",
    "tests/test_docs.py",
    "tests/test_tokenizer.py",
    "tests/run/test_goodput.py",
    "tests/benchmarks/test_run.py",
    "tests/checkpoint/test_checkpoint_manifest.py",
    "tests/checkpoint/test_retention.py",
    "tests/compare/test_criterion.py",
    "tests/corpus/test_row_packing.py",
    "tests/corpus/inputs/test_find_inputs.py",
    "tests/data/test_order.py",
    "tests/data/test_shard.py",
    "tests/docker/test_cluster_files.py",
    "tests/engine/test_optimizer.py",
    "tests/engine/test_learning_rate.py",
    "tests/finetune/test_task_metrics.py",
    "tests/finetune/test_squad_metrics.py",
    "tests/kernels/test_mlm_head.py",
    "tests/kernels/test_keyed_random.py",
    "tests/launcher/cli/test_console.py",
    "tests/launcher/preflight/test_gpu_checks.py",
    "tests/launcher/slurm/test_batch_script.py",
    "tests/launcher/supervise/test_start_outcome.py",
    "tests/test_public_names.py",
    "tests/model/test_attention.py",
    "tests/model/test_layer.py",
    "tests/objectives/test_masking.py",
    "tests/objectives/test_rtd.py",
    "tests/planning/test_budget.py",
    "tests/pretrained/test_load_encoder.py",
    "tests/report/test_overlay_page.py",
    "tests/run/test_ledger.py",
    "tests/scoring/test_text_scores.py",
    "tests/train/test_operator_kinds.py",
    "tests/store/test_patience.py",
    "tests/report/test_background_tracker.py",
    "tests/train/test_step.py",
)


def changed_files(root: Path) -> list[str]:
    """Return the files that differ from the last commit, deleted ones too, and new ones that git does not ignore.

    Raises:
        subprocess.CalledProcessError: `root` is in no git work tree, or has no commit.
    """
    names: set[str] = set()
    for arguments in ("diff --name-only --relative -z HEAD", "ls-files -z --others --exclude-standard"):
        done = subprocess.run(["git", *arguments.split()], cwd=root, check=True, capture_output=True, text=True)
        names.update(done.stdout.split("\0"))
    return sorted(names - {""})


def show(changed: Sequence[str], selected: Sequence[Selected]) -> None:
    """Print the changed files, and the first of the selected test files with the way from them to the change."""
    more = f" and {len(changed) - MOST_SHOWN} more" if len(changed) > MOST_SHOWN else ""
    print(f"changed: {', '.join(changed[:MOST_SHOWN]) or 'nothing'}{more}")
    if not selected:
        print(f"tests: no test file depends on a change, so the fixed fast set runs, {len(FAST)} files")
        return
    counts = [sum(one.distance == distance for one in selected) for distance in range(FARTHEST + 1)]
    numbers = ", ".join(f"{count} at distance {distance}" for distance, count in enumerate(counts) if count)
    print(f"tests: {len(selected)} files, {numbers}; in this order:")
    for one in selected[:MOST_SHOWN]:
        print(f"  {one.distance}  {' -> '.join(one.way)}")
    if len(selected) > MOST_SHOWN:
        print("  ...")


def run_tests(files: Sequence[str], seconds: float) -> int:
    """Run test files in their order, begin no test once the seconds are over, and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-rfE", "-n", "2", "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "-p", "support.until_time_is_up"]
    command += [f"--until={time.monotonic() + seconds}", *(f"--file={file}" for file in files), "tests"]
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def run_all(selected: Sequence[Selected], seconds: float) -> int:
    """Run all parts, print how long they took, and return 1 if one failed, otherwise 0."""
    codes = []
    for options in (["check"], ["format", "--check"]):
        begin = time.monotonic()
        codes.append(subprocess.run([sys.executable, "-m", "ruff", *options, "--quiet", "."], cwd=ROOT).returncode)
        _print_part(f"ruff {options[0]}", begin, codes[-1])
    if not (ROOT / ".mypy_cache").exists():
        print("types: there is no .mypy_cache yet, so they take half a minute of processor time more")
    begin = time.monotonic()
    packages = [part for name in ("electra_dist", "electra_launcher", "electra_kernels") for part in ("-p", name)]
    command = [sys.executable, "-m", "mypy", *packages]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as types:
        code = run_tests([one.file for one in selected] or FAST, seconds)
        if code == NO_TESTS:
            print("no test of the selected files runs by default, so the fixed fast set runs")
            code = run_tests(FAST, seconds)
        codes.append(code)
        _print_part("tests", begin, code)
        print((types.communicate()[0]).strip())
    codes.append(types.returncode)
    _print_part("tests and types together", begin, types.returncode)
    return 1 if any(codes) else 0


def _print_part(name: str, begin: float, code: int) -> None:
    """Print how long a part has taken and whether it is good."""
    print(f"{name}: {'good' if code == 0 else 'FAILED'}, {time.monotonic() - begin:.1f} s", flush=True)


def main() -> int:
    """Check what the command line asks for, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="take these files as changed (default: ask git)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no test later (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the selected test files, and run nothing")
    args = parser.parse_args()
    begin = time.monotonic()
    changed = args.files or changed_files(ROOT)
    selected = select(ROOT, changed)
    if args.list:
        for one in selected:
            print(f"{one.distance}  {' -> '.join(one.way)}")
        return 0
    show(changed, selected)
    _print_part("selection", begin, 0)
    code = run_all(selected, args.seconds)
    if any(file.startswith("tests/cluster/") for file in changed):
        print("tests/cluster has changed: make cluster-test runs it")
    print(f"{'good' if code == 0 else 'FAILED'}, {time.monotonic() - begin:.0f} s in all")
    return code


if __name__ == "__main__":
    sys.exit(main())
