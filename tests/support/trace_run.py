"""Counts what of this project runs on the main thread of a rank, in each phase of a tiny run.

    python tests/support/trace_run.py [--json] [--list PHASE]

The run has one CPU rank, 4 steps of two micro-batches, two evaluations and a save. A phase is one call of a function:
`start` is everything from the entry of launcher/pretrain.py to the first step; `step`, `evaluation` and `save` are the
last call of the functions in PHASES, when everything is warm. For each phase it prints the calls, and how many
functions, files and packages they belong to; `--list PHASE` prints the calls of each function of a phase.

Limits: functions of other packages, other threads, comprehensions and lambdas are not counted, nor is what an import
runs: the code of modules, the bodies of classes, and decorators.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from support.import_graph import FOLDERS, ROOT, package_of
from support.real_runs import free_port, write_corpus, write_tiny_config

Function = tuple[str, str]  # file below ROOT, qualified name

PHASES: dict[str, Function] = {
    "step": ("electra_dist/train/trainer.py", "Trainer._run_step"),
    "evaluation": ("electra_dist/train/trainer.py", "Trainer._evaluate"),
    "save": ("electra_dist/train/trainer.py", "Trainer._save"),
}
START = "start"


class Trace:
    """The calls of this project's functions by phase; an instance is a profile function of `sys.setprofile`."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[Function]] = {START: Counter()}
        self._phases = {function: phase for phase, function in PHASES.items()}
        self._functions: dict[CodeType, Function | None] = {}
        self._open: list[str] = [START]  # the phases that have begun and not ended, the outermost first
        self._imports = 0  # modules that are being imported, each by the one before it

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            self._imports += 1 if event == "call" else -1
        function = self._function(frame.f_code)
        if function is None or self._imports:
            return
        phase = self._phases.get(function)
        if event == "return":
            if phase is not None:
                self._open.remove(phase)
            return
        if phase is not None:
            if START in self._open and phase == "step":
                self._open.remove(START)
            self._open.append(phase)
            self.calls[phase] = Counter()
        for name in self._open:
            self.calls[name][function] += 1

    def _function(self, code: CodeType) -> Function | None:
        """Return the function of a code object; None if it is not this project's, or is not counted."""
        if code not in self._functions:
            self._functions[code] = function_of(code)
        return self._functions[code]


def function_of(code: CodeType) -> Function | None:
    """Return the function of a code object; None if it is not this project's, or a comprehension, lambda or module."""
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or code.co_name.startswith("<"):
        return None
    file = path.relative_to(ROOT).as_posix()
    return (file, code.co_qualname) if file.split("/")[0] in FOLDERS else None


def figures(calls: Counter[Function]) -> dict[str, int]:
    """Return the numbers of calls, functions, files and packages."""
    files = {file for file, _ in calls}
    return {
        "calls": calls.total(),
        "functions": len(calls),
        "files": len(files),
        "packages": len({package_of(file) for file in files}),
    }


def trace() -> dict[str, Counter[Function]]:
    """Run the tiny training in this process, and return the calls of each phase.

    Raises RuntimeError if the run has failed, or a function of PHASES was not called.
    """
    with tempfile.TemporaryDirectory() as folder:
        corpus, run_dir = f"{folder}/corpus", Path(folder) / "run"
        write_corpus(corpus, [64, 64])
        write_corpus(f"{corpus}/heldout", [20], seed=1)
        settings = {
            "train.num_steps": 4,
            "log.eval_every_steps": 2,
            "checkpoint.every_steps": 4,
            "data.cache_dir": f"{folder}/cache",
        }
        config = write_tiny_config(Path(folder) / "config.yaml", run_dir, corpus, **settings)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"}
        from electra_launcher.pretrain import main as pretrain

        recorder = Trace()
        sys.setprofile(recorder)
        try:
            code = pretrain(["--config", str(config)])
        finally:
            sys.setprofile(None)
    missing = [phase for phase in PHASES if phase not in recorder.calls]
    if code != 0 or missing:
        raise RuntimeError(f"the run ended with {code}; phases without a call: {missing}; see PHASES")
    return recorder.calls


def main() -> None:
    """Print the figures of all phases, or the functions of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--list", choices=(START, *PHASES), help="print the calls of each function of a phase")
    options = parser.parse_args()
    output = os.dup(1)
    os.dup2(2, 1)  # the log of the run is not part of the result
    calls = trace()
    sys.stdout.flush()
    os.dup2(output, 1)
    if options.list:
        for (file, name), count in sorted(calls[options.list].items()):
            print(f"{count:>6}  {file}  {name}")
    elif options.json:
        print(json.dumps({phase: figures(counter) for phase, counter in calls.items()}, indent=1))
    else:
        print(f"{'phase':<12}{'calls':>8}{'functions':>11}{'files':>7}{'packages':>10}")
        for phase, counter in calls.items():
            row = figures(counter)
            print(f"{phase:<12}{row['calls']:>8,}{row['functions']:>11}{row['files']:>7}{row['packages']:>10}")


if __name__ == "__main__":
    main()
