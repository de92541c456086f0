"""Uses a corpus, run folders and a checkpoint of an earlier commit with this one and compares what must stay equal.

    git worktree add ../before REV && make -C ../before .venv/ready
    python tests/drills/compatibility.py --before ../before

The earlier commit builds a corpus from the documentation that Python carries, makes one run of 40 steps (2 ranks,
ZeRO-1, dropout on) and another that is stopped after half of them. This commit repeats the first run, resumes the
second one, exports the earlier checkpoint and verifies the rows of all three. Takes about 3 minutes on 2 cores.

If both commits have the same numerics (number of the random draws and the rounding), every loss, gradient norm,
receipt and evaluation must be bit for bit the same, and the identity of the run unchanged. If not, this commit must
refuse the stopped run in one line, and go on with --accept-new-numerics. Its steps before the stop must then be
untouched, and all its rows the same. In both cases exported files must be equal.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from drill import Verdict, options, print_verdicts
from support.real_runs import REPOSITORY, free_port

from electra_dist.config import NUMERICS
from electra_dist.pretrained.hf_folders import PRETRAINING_FILE
from electra_dist.report.model_card import CARD_FILE, CURVES_FILE
from electra_dist.run.folder import IDENTITY_FILE, RUN_VOCAB_FILE, STOP_FILE, TOKENIZER_FILE, recorded_numerics
from electra_dist.run.ledger import read_ledger
from electra_dist.run.metrics import read_metrics

NUM_STEPS = 40
ACCEPT = "--accept-new-numerics"
# What no change of the numerics may alter: the order of the rows, and what is logged without a draw.
ROWS = ("step", "lr", "receipt", "rows_seen")
COMPARED = ("step", "loss", "mlm_loss", "rtd_loss", "grad_norm", "lr", "receipt", "rows_seen", "auc", "mlm_accuracy")


class Tree:
    """A checkout with its own environment, in which commands are run."""

    def __init__(self, folder: Path, corpus: Path, config: Path) -> None:
        """Name the checkout, the corpus of its runs, and their config file, which is the same one for both commits."""
        self.folder, self.corpus, self.config = folder.resolve(), corpus, config.resolve()
        programs = self.folder / ".venv" / "bin"
        self.environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        # The checkout's own sources are imported, whatever its environment has installed.
        self.environment |= {"DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{self.folder}:{self.folder / 'kernels'}"}

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command in the checkout."""
        program = str(self.folder / ".venv" / "bin" / command[0])
        return subprocess.Popen([program, *command[1:]], cwd=self.folder, env=self.environment)

    def run(self, *command: str, codes: tuple[int, ...] = (0,)) -> None:
        """Run a command to its end and check its exit code."""
        code = self.start(*command).wait()
        assert code in codes, f"{' '.join(command)} ended with {code} in {self.folder}"

    def pretrain(self, run_dir: Path) -> list[str]:
        """Return the command of a run of 40 steps."""
        settings = {
            "run_dir": run_dir,
            "data.corpus": self.corpus,
            "data.heldout": self.corpus / "heldout",
            "data.cache_dir": run_dir.with_name("cache"),
            "train.num_steps": NUM_STEPS,
            "optimizer.warmup_steps": NUM_STEPS // 4,  # a new run must not be shorter than its warm-up
            "log.every_steps": 1,
            "log.eval_every_steps": NUM_STEPS // 2,
            "checkpoint.every_steps": NUM_STEPS // 4,
            "engine.zero_stage": 1,
            "model.hidden_dropout": 0.1,
            "model.attention_dropout": 0.1,
        }
        command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), "launcher/pretrain.py"]
        command += ["--config", str(self.config)]
        return command + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def records(run_dir: Path, names: tuple[str, ...] = COMPARED) -> list[dict[str, Any]]:
    """Return some fields of every record of a run, by default COMPARED."""
    return [{name: getattr(record, name, None) for name in names} for record in read_metrics(run_dir)]


def refusal(tree: Tree, run_dir: Path) -> str:
    """Start a run that must be refused; return its error line, or "" if it was not refused in one line with 78."""
    # A single rank without DeepSpeed's launcher, which would only pass the exit code on.
    arguments = tree.pretrain(run_dir)
    script = arguments.index("launcher/pretrain.py")
    command = [str(tree.folder / ".venv" / "bin" / "python"), *arguments[script:]]
    done = subprocess.run(command, cwd=tree.folder, env=tree.environment, capture_output=True, text=True)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return errors[0] if done.returncode == 78 and len(errors) == 1 else ""


def contents(folder: Path, names: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Return the bytes of some files of a folder, or of all files below it."""
    paths = [folder / name for name in names] or [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stop_after_half(tree: Tree, run_dir: Path) -> None:
    """Start a run and stop it by its stop file once half of its steps are recorded."""
    process = tree.start(*tree.pretrain(run_dir))
    while process.poll() is None and len(records(run_dir)) < NUM_STEPS // 2:
        time.sleep(0.1)
    (run_dir / STOP_FILE).touch()
    assert process.wait() == 75, "the earlier commit did not stop and save"


def main() -> int:
    """Make the runs of both commits, print the comparison and return the exit code."""
    parser = options(__doc__)
    parser.add_argument("--before", type=Path, required=True, help="checkout of the earlier commit, with its .venv")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="compatibility-"))
    corpus = folder / "corpus"
    config = (
        arguments.before / "configs" / "demo_cpu.yaml"
    )  # of the earlier commit: later ones may train another model
    before, now = Tree(arguments.before, corpus, config), Tree(REPOSITORY, corpus, config)
    text = str(folder / "text")
    before.run("python", str(REPOSITORY / "examples" / "python_docs.py"), "--output", text)
    build = ["--input", text, "--output", str(corpus), "--config", str(before.config)]
    before.run("electra-dist", "corpus", "build", *build)
    before.run(*before.pretrain(folder / "whole-before"))
    stop_after_half(before, folder / "half")
    before.run("electra-dist", "export", str(folder / "whole-before"), "--output", str(folder / "export-before"))

    same_numerics = recorded_numerics(folder / "half") == NUMERICS
    refused = "" if same_numerics else refusal(now, folder / "half")
    accept = [] if same_numerics else [ACCEPT]
    steps_before = records(folder / "half")
    now.run(*now.pretrain(folder / "whole-now"))
    now.run(*now.pretrain(folder / "half"), *accept)
    now.run("electra-dist", "export", str(folder / "whole-before"), "--output", str(folder / "export-now"))
    for name in ("whole-before", "half", "whole-now"):
        now.run("electra-dist", "verify", str(folder / name))
    export_before, export_now = contents(folder / "export-before"), contents(folder / "export-now")
    # An earlier commit may have written fewer files, and cards and records name the version.
    descriptions = (CARD_FILE, CURVES_FILE, PRETRAINING_FILE)
    files_of_model = [name for name in export_before if Path(name).name not in descriptions]
    is_same_model = bool(files_of_model)
    is_same_model &= all(export_before[name] == export_now.get(name) for name in files_of_model)
    verdicts = [Verdict("export of the earlier checkpoint", is_same_model, f"{len(files_of_model)} files")]
    if same_numerics:
        verdicts += same_losses(folder)
    else:
        verdicts.append(Verdict("the older run is refused", ACCEPT in refused, refused))
        verdicts += same_rows(folder, steps_before)
    code = print_verdicts(f"compatibility with {arguments.before}", verdicts)
    if code == 0:
        shutil.rmtree(folder)
    return code


def same_losses(folder: Path) -> list[Verdict]:
    """Return the verdicts on runs of equal numerics: everything is the same, and so is the identity."""
    expected = records(folder / "whole-before")
    assert expected, "the run of the earlier commit has no records, so there is nothing to compare"
    files = (IDENTITY_FILE, TOKENIZER_FILE, RUN_VOCAB_FILE)
    same_files = contents(folder / "whole-before", files) == contents(folder / "whole-now", files)
    return [
        Verdict("the same run", records(folder / "whole-now") == expected, f"{len(expected)} records"),
        Verdict("a stopped run resumed", records(folder / "half") == expected, f"{len(expected)} records"),
        Verdict("identity, tokenizer, vocabulary", same_files, ", ".join(files)),
    ]


def same_rows(folder: Path, steps_before: list[dict[str, Any]]) -> list[Verdict]:
    """Return the verdicts on runs of other numerics: rows, learning rates and `steps_before` the stop are the same."""
    expected = records(folder / "whole-before", ROWS)
    assert expected, "the run of the earlier commit has no records, so there is nothing to compare"
    events = [event for event in read_ledger(folder / "half") if event.event == "new_numerics"]
    kept = records(folder / "half")[: len(steps_before)] == steps_before
    files = (TOKENIZER_FILE, RUN_VOCAB_FILE)
    same_files = contents(folder / "whole-before", files) == contents(folder / "whole-now", files)
    return [
        Verdict("rows of the same run", records(folder / "whole-now", ROWS) == expected, f"{len(expected)} records"),
        Verdict("rows of a stopped run resumed", records(folder / "half", ROWS) == expected, "receipts"),
        Verdict("its earlier steps are untouched", kept, f"{len(steps_before)} records"),
        Verdict("the ledger records the acceptance", len(events) == 1, str(events)),
        Verdict("tokenizer, vocabulary", same_files, ", ".join(files)),
    ]


if __name__ == "__main__":
    sys.exit(main())
